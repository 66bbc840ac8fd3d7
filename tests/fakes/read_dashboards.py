# SPDX-License-Identifier: Apache-2.0
"""The committed dashboards as a test sees them: panels, and queries with their variables filled in."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOM = Path(__file__).parents[2] / "dashboards"
# What Grafana puts in for its own variables, at a scrape interval of one second and a window of one minute.
BUILT_IN = {"__rate_interval": "10s", "__interval": "1s", "__range": "60s"}
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


class Query(NamedTuple):
    """One query, and where it stands."""

    dashboard: str
    panel: str
    kind: str
    ref: str
    expr: str
    legend: str
    instant: bool

    @property
    def place(self) -> str:
        """Name it as a person finds it."""
        return f"{self.dashboard} / {self.panel} / {self.ref}"


def dashboards() -> dict[str, dict[str, Any]]:
    """Return the committed dashboards by uid."""
    files = sorted(ROOM.glob("megascale-*.json"))
    found: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    return {dashboard["uid"]: dashboard for dashboard in found}


def panels(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a dashboard's panels, without the headings between them."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries() -> Iterator[Query]:
    """Yield every query of every panel."""
    for uid, dashboard in dashboards().items():
        for panel in panels(dashboard):
            for target in panel["targets"]:
                legend = target.get("legendFormat", "")
                instant = target.get("instant", False)
                yield Query(uid, panel["title"], panel["type"], target["refId"], target["expr"], legend, instant)


def annotations() -> Iterator[Query]:
    """Yield every query of every annotation."""
    for uid, dashboard in dashboards().items():
        for note in dashboard.get("annotations", {}).get("list", []):
            yield Query(uid, f"annotation {note['name']}", "annotation", "", note["expr"], note["titleFormat"], False)  # noqa: FBT003  the last field


def variable_queries() -> Iterator[Query]:
    """Yield what the choices of variables are filled from, as a query for the series behind them."""
    for uid, dashboard in dashboards().items():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                series, label = variable["query"]["query"].removeprefix("label_values(")[:-1].rsplit(", ", 1)
                name = f"variable {variable['name']}"
                yield Query(uid, name, "variable", "", f"count by ({label}) ({series})", f"{{{{{label}}}}}", True)  # noqa: FBT003  the last field


def filled(expr: str, values: Mapping[str, str]) -> str:
    """Return a query as Grafana sends it; an unknown variable stays as it is, as in Grafana."""
    known = {**BUILT_IN, **values}
    return _VARIABLE.sub(lambda match: known.get(match.group(1) or match.group(2), match.group()), expr)


def metrics_and_matchers(expr: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each metric that a query names, with the labels that it is chosen by."""
    for name, braces in re.findall(r"\b((?:megascale|process)_\w+|ALERTS)\b(?:\{([^}]*)\})?", _outside(expr)):
        yield name, tuple(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", braces))


def grouping_labels(expr: str) -> set[str]:
    """Return the labels that a query aggregates or joins by."""
    lists = re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", _outside(expr))
    return {label.strip() for one in lists for label in one.split(",") if label.strip()}


def made_labels(expr: str) -> set[str]:
    """Return the labels that a query makes itself."""
    return set(re.findall(r'label_replace\((?:.*?), "(\w+)", ', expr))


def legend_labels(legend: str) -> set[str]:
    """Return the labels that a legend shows."""
    return set(re.findall(r"\{\{\s*(\$?\w+)\s*\}\}", legend))


def _outside(expr: str) -> str:
    """Return a query without the texts in it, whose words are no names."""
    return _STRING.sub('""', expr)
