# SPDX-License-Identifier: Apache-2.0
"""No alert takes a gap in the scrapes for news, and none misses what happened in one: by promtool, for each alert.

The variants are made from the alerts' own tests (``tests/fakes/scrape_gaps.py``), so a new alert has them with its
first test.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.asked_rules import read
from tests.fakes.scrape_gaps import GAPS, Kinds, long_story, needed, together, variants, windows_s
from tests.matrix import wide

pytestmark = pytest.mark.processes

RULES = Path(__file__).parents[2] / "dashboards" / "rules"


RECORDING = read(RULES / "recording.yml")
ALERTS = {rule["alert"]: rule for group in read(RULES / "alerts.yml")["groups"] for rule in group["rules"]}
OWN = [test for path in sorted((RULES / "tests").glob("*.yml")) for test in read(path)["tests"]]

# An alert that misses some gaps and sees through others.
BETWEEN = [test for test in OWN if test["name"] == "JobNoProgress fires when a restart never comes to an end"]
EVERY_SAMPLE = {
    **ALERTS["JobNoProgress"],
    "expr": "2700 * min_over_time(job:megascale_job_between:max[45m]) > 0"
    " and count_over_time(job:megascale_job_between:max[45m]) > 85",
}


def said(folder: Path, groups: list[dict[str, Any]], tests: list[dict[str, Any]]) -> str:
    """Run tests of rules by promtool, each at the pace of its scrapes; return what failed, "" when nothing did."""
    if shutil.which("promtool") is None:
        pytest.skip("no promtool on this machine: apt-get install prometheus")
    (folder / "rules.yml").write_text(yaml.safe_dump({"groups": groups}), encoding="utf-8")
    files = []
    for interval in sorted({test["interval"] for test in tests}):
        made = {
            "rule_files": ["rules.yml"],
            "evaluation_interval": interval,
            "group_eval_order": [group["name"] for group in groups],
            "tests": [test for test in tests if test["interval"] == interval],
        }
        files.append(folder / f"{interval}.yml")
        files[-1].write_text(yaml.safe_dump(made), encoding="utf-8")
    # A third of its CPU time goes into garbage, unless that is collected when there is five times as much as lives; a
    # tenth into threads that wait for each other: eight tests run on two cores.
    env = {**os.environ, "GOGC": "400", "GOMAXPROCS": "1"}
    command = ["promtool", "test", "rules", *map(str, files)]
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=500.0)
    return done.stdout + done.stderr if done.returncode else ""


def tried(folder: Path, rule: dict[str, Any], own: list[dict[str, Any]], *gaps: str) -> str:
    """Try an alert in its own tests with gaps, with all kinds and without any where none is named."""
    return said(folder, *together(*gapped(rule, own, *gaps)))


def gapped(
    rule: dict[str, Any], own: list[dict[str, Any]], *gaps: str, is_beside: bool | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rules that an alert needs, and its own tests with gaps, all of them or those beside the event."""
    recorded = needed(rule, RECORDING)["groups"]
    back_s = windows_s(rule["expr"], *(one["expr"] for group in recorded for one in group["rules"]))
    made = [variant for test in own for variant in variants(test, rule, back_s)]
    wanted = [
        variant.test
        for variant in made
        if (not gaps or variant.gap in gaps) and (is_beside is None or variant.is_beside == is_beside)
    ]
    # A gap where a target gives nothing takes nothing away: that is tried once.
    asked = {str((one["interval"], one["input_series"], one["promql_expr_test"])): one for one in wanted}
    return [*recorded, {"name": "alerts", "rules": [rule]}], list(asked.values())


@pytest.mark.parametrize("is_beside", wide([False, True], keep=[False]), ids=["at the event", "beside it"])
@pytest.mark.parametrize("name", ALERTS)
def test_a_gap_is_no_news_and_hides_none(name: str, tmp_path: Path, *, is_beside: bool) -> None:
    """A lost scrape, a restarted exporter, a restarted Prometheus: silent where it was, and told after the gap.

    Into which the event falls, or the moment that is compared with; or which begins beside it.
    """
    groups, tests = gapped(ALERTS[name], OWN, is_beside=is_beside)

    assert tests
    assert said(tmp_path, *together(groups, tests)) == ""


def test_an_alert_that_compares_with_one_moment_is_seen(tmp_path: Path) -> None:
    """The control: a counter that is compared with a quarter of an hour ago takes a lost scrape for a new event."""
    found = 'megascale_gpu_xid_events_total{action="reset_gpu"}'
    news = f"max by (node) ({found} > 0 unless {found} offset 15m) and on () (vector(time()) > 1800)"
    series = 'megascale_gpu_xid_events_total{node="n2", gpu="0", xid="95", action="reset_gpu"}'
    own = {
        "name": "of long ago",
        "interval": "30s",
        "input_series": [{"series": series, "values": "1x160"}],
        "alert_rule_test": [{"alertname": "GpuFatalXid", "eval_time": "80m", "exp_alerts": []}],
    }
    rule = {**ALERTS["GpuFatalXid"], "expr": news}

    assert tried(tmp_path, rule, [own], "") == ""
    assert "GpuFatalXid" in tried(tmp_path, rule, [own], "lost scrape")


def test_an_alert_that_asks_for_every_sample_is_seen(tmp_path: Path) -> None:
    """The control of the other side: who wants 85 of 90 samples misses what goes on behind a gap of five minutes."""
    assert tried(tmp_path, EVERY_SAMPLE, BETWEEN, "") == ""
    assert "JobNoProgress" in tried(tmp_path, EVERY_SAMPLE, BETWEEN, "restarted Prometheus")


def test_variants_of_one_run_are_judged_as_one_by_one(tmp_path: Path) -> None:
    """Where an alert misses some variants and sees others, the same are named in one run of all as in one of each."""
    groups, tests = gapped(EVERY_SAMPLE, BETWEEN)
    (tmp_path / "alone").mkdir()

    alone = [one["name"] for one in tests if said(tmp_path / "alone", groups, [one])]
    shared = said(tmp_path, *together(groups, tests))

    assert 0 < len(alone) < len(tests)
    assert sorted(re.findall(r'ALERTS{variant=\\"\d+, (.+?)\\", alert', shared)) == sorted(alone)


@pytest.mark.parametrize("kind", GAPS, ids=lambda kind: kind.name.replace(" ", "-"))
def test_a_sound_job_behind_a_bad_network_wakes_nobody(kind: Kinds, tmp_path: Path) -> None:
    """The long story of one job, a gap every 20 minutes (five for a lost scrape): not one of all alerts fires."""
    (story,) = read(RULES / "tests" / "negative_controls.yml")["tests"]
    groups = [*RECORDING["groups"], *read(RULES / "alerts.yml")["groups"]]

    assert said(tmp_path, groups, [long_story(story, kind, 300 if not kind.length_s else 1200)]) == ""
