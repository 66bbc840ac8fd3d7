# SPDX-License-Identifier: Apache-2.0
"""What the alerts promise: metrics that exist, a page and a dashboard for each, commands that can be typed, tests."""

import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from megascale_agents.collectors.xid_table import BAD_ACTIONS, XIDS

from megascale_ops.grafana.promql import selectors
from megascale_ops.grafana.shape import unknown_series
from megascale_ops.schema.metrics import metrics_of
from tests.fakes.scrape_gaps import GAPS, variants, windows_s
from tests.fakes.typed_commands import parse

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
RUNBOOKS = DASHBOARDS / "runbooks"
SEVERITIES = {"critical", "warning", "info"}
DURATION = r"\d+(s|m|h)"
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SECTIONS = ["Symptom", "Meaning", "First three commands", "Then", "Undo", "When it is a false alarm"]
PROGRAM = "megascale-ops "


def read(path: str) -> dict[str, Any]:
    """Return a YAML file of the dashboards' folder."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, where it was built so: each worker reads them all
    found: dict[str, Any] = yaml.load((DASHBOARDS / path).read_text(encoding="utf-8"), Loader=loader)  # noqa: S506  both are safe
    return found


def rules(path: str) -> list[dict[str, Any]]:
    """Return the rules of a file, all groups in one."""
    return [rule for group in read(path)["groups"] for rule in group["rules"]]


RECORDED = {rule["record"] for rule in rules("rules/recording.yml")}
ALERTS = {rule["alert"]: rule for rule in rules("rules/alerts.yml")}
PROMISES = {path.name: read(f"rules/tests/{path.name}") for path in sorted((DASHBOARDS / "rules/tests").glob("*.yml"))}
PAGES = sorted(RUNBOOKS.glob("*.md"))
EXPECTED = [
    (case["alertname"], case["exp_alerts"])
    for promises in PROMISES.values()
    for test in promises["tests"]
    for case in test.get("alert_rule_test", ())
]


def labels_of(alert: str) -> set[str]:
    """Return every label that an alert is seen to carry in its tests."""
    return {label for name, alerts in EXPECTED if name == alert for one in alerts for label in one["exp_labels"]}


def commands(text: str) -> list[str]:
    """Return our commands in a page: those of its blocks, and those within a sentence."""
    block = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
    lines = [line for lines in block.findall(text) for line in lines.splitlines()]
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", block.sub("", text))]
    return [line for line in lines + inline if line.startswith(PROGRAM) and "..." not in line]


def test_a_command_that_does_not_exist_is_seen() -> None:
    """The check below can fail: a wrong verb, option, argument or setting is refused."""
    for wrong in ("explain", "why --rank 3", "skew A B", "policy set JOB silence_flor_s=1", "policy shew"):
        with pytest.raises((click.UsageError, ValueError)):
            parse(PROGRAM + wrong)


@pytest.mark.parametrize(
    "rule", [*rules("rules/recording.yml"), *ALERTS.values()], ids=lambda rule: next(iter(rule.values()))
)
def test_rules_ask_for_what_exists(rule: dict[str, Any]) -> None:
    """Every series is a metric of the table or a recorded one, and is selected by labels that it has."""
    asked = selectors(rule["expr"])

    assert asked
    assert not [wrong for one in asked if (wrong := unknown_series(one, RECORDED))]


@pytest.mark.parametrize(
    "rule", [*rules("rules/recording.yml"), *ALERTS.values()], ids=lambda rule: next(iter(rule.values()))
)
def test_rules_bear_nodes_that_are_scraped_once_a_minute(rule: dict[str, Any]) -> None:
    """A range over series of the part `node` holds at least four samples that lie 60 s apart."""
    of_nodes = {metric.name for metric in metrics_of("agent") if "job" not in metric.labels}

    ranges = re.findall(r"(megascale_\w+)(?:\{[^}]*\})?\[(\d+)([smhd])", rule["expr"])

    short = {name for name, count, unit in ranges if name in of_nodes and int(count) * SECONDS[unit] < 4 * 60}
    assert short == set()


def test_every_recorded_series_is_named_by_convention() -> None:
    """``level:metric:operations``, and none is recorded twice."""
    names = [rule["record"] for rule in rules("rules/recording.yml")]

    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"(job|job_node|node|gpu):megascale_[a-z0-9_]+:[a-z0-9_]+", name) for name in names)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_how_bad_and_what_next(name: str) -> None:
    """Severity, summary, description, next command, page and dashboard; the command can be typed."""
    rule = ALERTS[name]
    said = rule["annotations"]
    uids = {path.stem for path in DASHBOARDS.glob("megascale-*.json")}

    assert rule["labels"]["severity"] in SEVERITIES
    assert set(said) == {"summary", "description", "next", "runbook_url", "dashboard"}
    assert said["runbook_url"] == f"dashboards/runbooks/{name}.md"
    assert re.fullmatch(r"/d/([a-z-]+)(\?.*)?", said["dashboard"]).group(1) in uids  # type: ignore[union-attr]
    typed = re.sub(r"\{\{.*?\}\}", "it", said["next"])
    if typed.startswith(PROGRAM):
        parse(typed)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_how_long_it_waits_and_holds(name: str) -> None:
    """``for`` and ``keep_firing_for`` are written out; who waits for nothing says 0s and why, who holds holds."""
    rule = ALERTS[name]
    text = (DASHBOARDS / "rules" / "alerts.yml").read_text(encoding="utf-8")
    written = text.partition(f"- alert: {name}\n")[2].partition("- alert: ")[0]

    assert re.fullmatch(DURATION, rule["for"])
    assert re.fullmatch(DURATION, rule["keep_firing_for"])
    assert not rule["keep_firing_for"].startswith("0")
    assert rule["for"] != "0s" or re.search(r"^ +# .+\n +for: 0s$", written, re.MULTILINE)


def test_every_alert_has_its_page_and_every_page_its_alert() -> None:
    """``runbooks/NAME.md`` for each alert, and no other page."""
    assert [path.stem for path in PAGES] == sorted(ALERTS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_leads_from_symptom_to_undo(page: Path) -> None:
    """All sections in their order, three commands first, links that lead somewhere, and commands that can be typed."""
    text = page.read_text(encoding="utf-8")
    first = re.search(r"## First three commands\n\n```sh\n(.*?)```\n\n(.*?)\n\n## ", text, re.DOTALL)
    links = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]

    assert text.startswith(f"# {page.stem}\n\n**{ALERTS[page.stem]['labels']['severity']}**: ")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    assert first
    assert len(first[1].splitlines()) == 3
    assert len(re.findall(r"^\d\. ", first[2], re.MULTILINE)) == 3
    assert not [target for target in links if not (page.parent / target).exists()]
    for command in commands(text):
        parse(command)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_is_seen_to_fire_and_to_stay_silent(name: str) -> None:
    """Tests for promtool expect it at one moment and expect it not at another one."""
    cases = [alerts for alert, alerts in EXPECTED if alert == name]

    assert [alerts for alerts in cases if alerts]
    assert [alerts for alerts in cases if not alerts]


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_is_tried_with_every_kind_of_gap(name: str) -> None:
    """Its own tests give variants with each gap, both of one that fires and of one that stays silent."""
    back_s = windows_s(ALERTS[name]["expr"])
    own = [test for promises in PROMISES.values() for test in promises["tests"]]

    made = {(one.gap, one.fires) for test in own for one in variants(test, ALERTS[name], back_s)}

    assert made >= {(kind.name, fires) for kind in GAPS for fires in (True, False)}


def test_tests_expect_only_alerts_that_exist() -> None:
    """An alert that was renamed is not expected to stay silent by its old name."""
    assert {name for name, _ in EXPECTED} == set(ALERTS)


def test_inhibitions_name_alerts_and_labels_that_exist() -> None:
    """Both sides of each rule are alerts, and carry the labels in which they have to be equal."""
    inhibitions = read("alertmanager/alertmanager.yml")["inhibit_rules"]

    assert inhibitions
    for rule in inhibitions:
        for side in ("source_matchers", "target_matchers"):
            pattern = re.fullmatch(r'alertname=~?"([^"]+)"', rule[side][0].strip())
            assert pattern
            for name in pattern[1].split("|"):
                assert name in ALERTS
                assert set(rule.get("equal", ())) <= labels_of(name), (rule, name)


def test_xids_of_the_script_are_never_fatal() -> None:
    """GpuFatalXid takes every action that speaks against a GPU, and no application-class Xid has one of them."""
    (pattern,) = re.findall(r'megascale_gpu_xid_age_seconds\{action=~"([^"]+)"\}', ALERTS["GpuFatalXid"]["expr"])

    assert all(re.fullmatch(pattern, action) for action in BAD_ACTIONS)
    for row in XIDS.values():
        assert row.group != "application" or not re.fullmatch(pattern, row.action), row
    # What the line of an NVLink 5 error or of the driver's advice may require without a page.
    for action in ("none", "restart_app", "follow_driver"):
        assert not re.fullmatch(pattern, action)


def test_the_design_note_tells_of_every_alert() -> None:
    """``rules/README.md`` has a row for each alert with its page, and for each recorded series."""
    text = (DASHBOARDS / "rules" / "README.md").read_text(encoding="utf-8")

    assert re.findall(r"^\| \[(\w+)\]\(\.\./runbooks/\1\.md\)", text, re.MULTILINE) == list(ALERTS)
    assert set(re.findall(r"`((?:job|job_node|node|gpu):[a-z0-9_:]+)`", text)) == RECORDED
