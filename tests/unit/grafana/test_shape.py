# SPDX-License-Identifier: Apache-2.0
"""Which dashboards are fine, and the sentence for each way in which one is not."""

import copy
import json
from typing import Any

import pytest

from megascale_ops.grafana import shape

PROM = {"type": "prometheus", "uid": "${datasource}"}
GOOD: dict[str, Any] = {
    "uid": "megascale-a",
    "title": "A",
    "schemaVersion": 42,
    "templating": {
        "list": [
            {"name": "datasource", "type": "datasource", "query": "prometheus"},
            {"name": "job", "type": "query", "query": {"query": "label_values(megascale_job_step, job)"}},
        ]
    },
    "annotations": {"list": [{"name": "restarts", "expr": "changes(megascale_restarts_total[1m])"}]},
    "panels": [
        {
            "id": 1,
            "type": "timeseries",
            "title": "Steps",
            "gridPos": {"x": 0, "y": 0, "w": 12, "h": 8},
            "datasource": PROM,
            "targets": [
                {"refId": "A", "expr": 'megascale_job_step{job="$job"}', "datasource": PROM},
                {"refId": "B", "expr": "rate(megascale_controller_tick_seconds_bucket[5m])", "datasource": PROM},
            ],
        },
        {
            "id": 2,
            "type": "row",
            "title": "More",
            "gridPos": {"x": 0, "y": 8, "w": 24, "h": 1},
            "panels": [
                {
                    "id": 3,
                    "type": "stat",
                    "title": "Inner",
                    "gridPos": {"x": 0, "y": 9, "w": 4, "h": 4},
                    "targets": [{"refId": "A", "expr": "job:megascale_x:sum + up"}],
                }
            ],
        },
    ],
}


def checked(change: str, value: object) -> list[str]:
    """Return the problems of the good dashboard with one thing changed: ``change`` is a path such as panels.0.id."""
    model = copy.deepcopy(GOOD)
    *path, last = [int(word) if word.isdigit() else word for word in change.split(".")]
    at: Any = model
    for word in path:
        at = at[word]
    at[last] = value
    return list(shape.check(shape.read(json.dumps(model).encode()), {"job:megascale_x:sum"}).problems)


def test_a_good_dashboard_has_no_problems() -> None:
    """Panels in rows, variables and annotations are looked at as well."""
    found = shape.check(GOOD, {"job:megascale_x:sum"})

    assert found.problems == ()
    assert found.panels == 3
    assert [query.place for query in found.queries] == [
        *("panel 'Steps'", "panel 'Steps'", "panel 'Inner'"),
        *("annotation restarts", "variable job"),
    ]


@pytest.mark.parametrize(
    ("change", "value", "words"),
    [
        ("title", " ", "no title"),
        ("uid", "has space", "no uid that Grafana takes"),
        ("uid", "x" * 41, "no uid that Grafana takes"),
        ("schemaVersion", 16, "schemaVersion 16"),
        ("panels.0.id", 2, "panel id 2 is given 2 times"),
        ("panels.1.panels.0.id", 1, "panel id 1 is given 2 times"),
        ("panels.0.type", "graph", "use 'timeseries'"),
        ("panels.0.type", None, "'Steps' has no type"),
        ("panels.0.gridPos", None, "no place in the grid"),
        ("panels.0.gridPos.w", 25, "right edge"),
        ("panels.0.targets.1.refId", "A", "refId 'A' is given 2 times"),
        ("panels.0.targets.0.expr", " ", "query A is empty"),
        ("panels.0.targets.0.datasource", {"uid": "${ds}"}, "variable ds, which there is not"),
        ("panels.0.targets.0.expr", "megascale_job_stepp", "did you mean megascale_job_step?"),
        ("panels.0.targets.0.expr", "megascale_controller_tick_seconds", "is a histogram"),
        ("panels.0.targets.0.expr", 'megascale_job_step{gpu="1"}', "has no label gpu"),
        ("panels.0.targets.0.expr", "job:megascale_y:sum", "no rule records"),
        ("annotations.list.0.expr", "megascale_nothing_total", "annotation restarts"),
        ("templating.list.1.query", "label_values(megascale_nix, job)", "variable job"),
    ],
)
def test_each_mistake_gets_a_sentence(change: str, value: object, words: str) -> None:
    """It names the panel and what is wrong with it."""
    problems = checked(change, value)

    assert len(problems) == 1, problems
    assert words in problems[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "no dashboard"),
        (b'{"panels": {}}', "no dashboard"),
        (b'{"dashboard": {"panels": []}}', "HTTP API"),
        (b'{"apiVersion": "dashboard.grafana.app/v2", "spec": {}}', "new resource schema"),
    ],
)
def test_what_is_no_dashboard_is_refused(text: bytes, words: str) -> None:
    """Other JSON, and no JSON, never reach the checks."""
    with pytest.raises(shape.NotADashboardError, match=words):
        shape.read(text)


@pytest.mark.parametrize("value", [None, 5, "x", [5], [None], {"a": 1}])
@pytest.mark.parametrize(
    "change", ["panels.0.targets", "templating", "annotations", "panels.1.panels", "panels.0.title"]
)
def test_whatever_stands_in_a_file_nothing_breaks(change: str, value: object) -> None:
    """A file that no program wrote gets sentences, not a traceback."""
    assert isinstance(checked(change, value), list)


def test_series_of_others_are_not_ours_to_judge() -> None:
    """A user's own dashboard may ask for node_exporter's series as well."""
    assert not checked("panels.0.targets.0.expr", "node_load1 * on (instance) DCGM_FI_DEV_GPU_TEMP")


def test_names_that_rules_record_are_found() -> None:
    """As Prometheus writes them, in any order of keys."""
    text = "groups:\n- name: x\n  rules:\n  - record: job:a:sum\n    expr: a\n  - expr: b\n    record: 'job:b:sum'\n"

    assert shape.recorded(text) == {"job:a:sum", "job:b:sum"}
