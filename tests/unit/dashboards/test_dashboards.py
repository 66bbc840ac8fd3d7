# SPDX-License-Identifier: Apache-2.0
"""What every committed dashboard promises, without a Grafana: names that exist, ids of its own, links that lead."""

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from megascale_ops.cli.main import program
from megascale_ops.schema.metrics import METRICS, Kind
from tests.fakes import read_dashboards
from tests.fakes.read_dashboards import ROOM, Query

DASHBOARDS = read_dashboards.dashboards()
QUERIES = [*read_dashboards.queries(), *read_dashboards.annotations(), *read_dashboards.variable_queries()]
UIDS = {
    "megascale-oncall",
    "megascale-stragglers",
    "megascale-collectives",
    "megascale-kernels",
    "megascale-gpu-health",
    "megascale-fabric",
    "megascale-goodput",
    "megascale-self",
}
# What Prometheus and its client library bring: alerts that fire, and two standard metrics of every process.
FOREIGN = {
    "ALERTS": {"alertname", "alertstate", "severity", "job", "node", "rank"},
    "process_cpu_seconds_total": {"instance"},
    "process_resident_memory_bytes": {"instance"},
}
EVERYWHERE = {"instance", "job", "le"}


def labels_of(name: str) -> set[str] | None:
    """Return the labels of a series by its name, None where no program exposes it."""
    if name in FOREIGN:
        return FOREIGN[name]
    parent = re.sub(r"_(bucket|sum|count)$", "", name)
    if parent in METRICS and METRICS[parent].kind is Kind.HISTOGRAM:
        return {*METRICS[parent].labels, "le"} if parent != name else None
    return set(METRICS[name].labels) if name in METRICS else None


@functools.cache
def recorded() -> set[str]:
    """Return the names that recording rules make."""
    found: set[str] = set()
    for path in (ROOM / "rules").glob("*.yml"):
        groups = yaml.safe_load(path.read_text(encoding="utf-8")).get("groups", [])
        found |= {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}
    return found


def generate(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the generator as a user would."""
    command = [sys.executable, str(ROOM / "generate.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_files_are_what_the_generator_writes() -> None:
    """The JSON is never edited by hand, and always up to date."""
    checked = generate("--check")

    assert (checked.returncode, checked.stderr) == (0, "")


def test_a_file_that_differs_is_named(tmp_path: Path) -> None:
    """Changed, missing, or of no dashboard any more: exit 1, and each is named with what to do."""
    assert generate(f"--folder={tmp_path}").returncode == 0
    changed = tmp_path / "megascale-oncall.json"
    changed.write_text(changed.read_text(encoding="utf-8").replace("Verdict", "verdict"), encoding="utf-8")
    (tmp_path / "megascale-self.json").unlink()
    (tmp_path / "megascale-old.json").write_text("{}", encoding="utf-8")

    checked = generate("--check", f"--folder={tmp_path}")

    assert checked.returncode == 1
    named = re.findall(r"^(megascale-\w+\.json)", checked.stderr, re.MULTILINE)
    assert named == ["megascale-old.json", "megascale-oncall.json", "megascale-self.json"]
    assert "run: python dashboards/generate.py" in checked.stderr
    assert not (tmp_path / "megascale-self.json").exists()


def test_a_folder_that_is_not_there_gets_one_sentence(tmp_path: Path) -> None:
    """No traceback for a user's mistake."""
    done = generate("--check", f"--folder={tmp_path / 'nowhere'}")

    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"generate.py: --folder {tmp_path / 'nowhere'}: there is no such folder"]


def test_every_dashboard_is_there() -> None:
    """Under the uids that alerts and runbooks point to, each file named after its own."""
    assert DASHBOARDS.keys() == UIDS
    assert {path.stem for path in ROOM.glob("*.json")} == UIDS


def problems(query: Query) -> list[str]:
    """Return the parts of a query that no series has."""
    known: set[str] = set(EVERYWHERE)
    found = []
    for name, matched in read_dashboards.metrics_and_matchers(query.expr):
        labels = labels_of(name)
        if labels is None:
            found.append(f"{name} is exposed by nobody")
            continue
        known |= labels
        found += [f"{name} has no label {label}" for label in sorted({*matched} - labels - EVERYWHERE)]
    if not list(read_dashboards.metrics_and_matchers(query.expr)):
        found.append("it names no metric")
    known |= read_dashboards.made_labels(query.expr) | {"$axis"}
    asked = read_dashboards.grouping_labels(query.expr) | read_dashboards.legend_labels(query.legend)
    found += [f"none of its metrics has the label {label}" for label in sorted(asked - known)]
    rules = set(re.findall(r"\b\w+:\w+:\w+\b", query.expr))
    return found + [f"no rule records {rule}" for rule in sorted(rules - recorded())]


@pytest.mark.parametrize("uid", sorted(UIDS))
def test_queries_ask_for_what_exists(uid: str) -> None:
    """Every metric and every label of a query stands in the table of metrics (or is Prometheus' own)."""
    asked = [query for query in QUERIES if query.dashboard == uid]

    found = [f"{query.place}: {problem}" for query in asked for problem in problems(query)]

    assert len(asked) > 10
    assert found == []


@pytest.mark.parametrize(
    ("expr", "legend", "problem"),
    [
        ("megascale_job_steps", "", "megascale_job_steps is exposed by nobody"),
        ('megascale_job_step{rank="1"}', "", "megascale_job_step has no label rank"),
        ("sum by (rank) (megascale_job_step)", "", "none of its metrics has the label rank"),
        ("megascale_job_step", "{{rank}}", "none of its metrics has the label rank"),
        ("megascale_controller_tick_seconds", "", "megascale_controller_tick_seconds is exposed by nobody"),
        ("vector(1)", "", "it names no metric"),
        ("job:megascale_nothing:sum + megascale_job_step", "", "no rule records job:megascale_nothing:sum"),
    ],
)
def test_a_wrong_query_is_found(expr: str, legend: str, problem: str) -> None:
    """The check above can fail, for each of its reasons."""
    assert problem in problems(Query("d", "p", "stat", "A", expr, legend, instant=False))


def test_the_same_lines_all_through_a_picture() -> None:
    """A picture over time chooses its lines once, for the whole window; what shows now is asked for now."""
    for query in read_dashboards.queries():
        chooses = re.search(r"\b(top|bottom)k\(", query.expr)
        assert not chooses or query.instant or "@ end()" in query.expr, query.place
        assert query.instant == (query.kind in {"stat", "bargauge", "table"}), query.place


@pytest.mark.parametrize("uid", sorted(UIDS))
def test_panels_have_ids_and_places_of_their_own(uid: str) -> None:
    """Ids are unique, no two panels overlap, none stands out of the 24 columns, and no line has a gap."""
    found = DASHBOARDS[uid]["panels"]

    ids = [panel["id"] for panel in found]
    cells = [
        (x, y)
        for panel in found
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]

    assert len(ids) == len(set(ids))
    assert len(cells) == len(set(cells)), "panels overlap"
    assert {x for x, _ in cells} == set(range(24))
    assert len(cells) == 24 * (max(y for _, y in cells) + 1), "there is a gap"


@pytest.mark.parametrize("uid", sorted(UIDS))
def test_a_panel_says_what_to_do(uid: str) -> None:
    """Each has its own title, a description, a data source by variable, and queries with their own references."""
    found = read_dashboards.panels(DASHBOARDS[uid])

    titles = [panel["title"] for panel in found]
    assert len(titles) == len(set(titles))
    for panel in found:
        assert len(panel["description"]) >= 20, panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(refs) == len(set(refs))
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])


@pytest.mark.parametrize("uid", sorted(UIDS))
def test_variables_that_are_used_exist(uid: str) -> None:
    """Every ``$name`` of a query is a variable of that dashboard or Grafana's own; the data source comes first."""
    dashboard = DASHBOARDS[uid]
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    own = {*names, *read_dashboards.BUILT_IN}

    used = {
        name
        for query in QUERIES
        if query.dashboard == uid
        for name in re.findall(r"\$\{?([a-z_]\w*)", query.expr + query.legend)
    }

    assert names[0] == "datasource"
    assert used <= own


def _links(value: Any) -> list[str]:  # noqa: ANN401  a JSON value is anything
    if isinstance(value, dict):
        own = [value["url"]] if value.get("url") else []
        return own + [link for inner in value.values() for link in _links(inner)]
    return [link for inner in value for link in _links(inner)] if isinstance(value, list) else []


@pytest.mark.parametrize("uid", sorted(UIDS))
def test_links_lead_to_dashboards_that_exist(uid: str) -> None:
    """Each link names a uid of ours and only variables that the dashboard there has; all carry the tag of the menu."""
    for link in _links(DASHBOARDS[uid]):
        target = re.match(r"/d/([\w-]+)\?", link)
        assert target, link
        there = {variable["name"] for variable in DASHBOARDS[target[1]]["templating"]["list"]}
        assert set(re.findall(r"&var-(\w+)=", link)) <= there, link

    assert DASHBOARDS[uid]["tags"] == ["megascale"]
    (menu,) = DASHBOARDS[uid]["links"]
    assert (menu["type"], menu["tags"], menu["includeVars"], menu["keepTime"]) == (
        "dashboards",
        ["megascale"],
        True,
        True,
    )


def test_ranks_and_nodes_in_tables_can_be_followed() -> None:
    """From a rank in a table one click leads to its history, from a node to its hardware."""
    for dashboard in DASHBOARDS.values():
        for panel in read_dashboards.panels(dashboard):
            if panel["type"] != "table":
                continue
            columns = panel["transformations"][-1]["options"]["indexByName"]
            linked = {
                override["matcher"]["options"]
                for override in panel["fieldConfig"]["overrides"]
                if any(one["id"] == "links" for one in override["properties"])
            }
            assert {"rank", "node"} & columns.keys() == linked, panel["title"]


def test_commands_that_panels_advise_exist() -> None:
    """Every ``megascale-ops VERB`` of a description is one that can be typed."""
    texts = [panel["description"] for board in DASHBOARDS.values() for panel in read_dashboards.panels(board)]
    advised = {command for text in texts for command in re.findall(r"`megascale-ops ([^`]+)`", text)}

    assert len(advised) > 5
    for command in sorted(advised):
        found: click.Command = program
        for word in command.split():
            assert isinstance(found, click.Group), command
            with click.Context(found) as context:
                inner = found.get_command(context, word)
            assert inner is not None, command
            found = inner
