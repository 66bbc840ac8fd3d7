# SPDX-License-Identifier: Apache-2.0
"""Whether a file is a dashboard that Grafana can show, and whether its queries ask for series that we have.

Pure: a text in, problems as sentences out. The model is Grafana's classic JSON, which all its versions read and 13
migrates by itself: https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import msgspec

from megascale_ops.grafana import promql
from megascale_ops.schema.metrics import METRICS, Kind
from megascale_ops.suggest import nearest

Model = dict[str, Any]  # a dashboard, or a part of one, as its JSON

# Longer ones are refused: https://grafana.com/docs/grafana/latest/developers/http_api/dashboard/
_MOST_UID = 40
# 27 brought data sources by uid (Grafana 8); older models need migrations that newer servers drop.
_OLDEST_SCHEMA = 27
_GRID_WIDTH = 24
# Panels of Angular, which Grafana 12 no longer has.
_GONE_TYPES = {"graph": "timeseries", "singlestat": "stat", "table-old": "table"}
_HISTOGRAM_ENDS = ("_bucket", "_sum", "_count")
# What Prometheus adds to every series, and service discovery's labels of an agent.
_ADDED_LABELS = frozenset({"instance", "job", "node"})
# level:metric:operations, where the metric is one of this product.
_OF_OURS = re.compile(r"(^|:)megascale_")
_RECORD = re.compile(r"^\s*-?\s*record:\s*['\"]?([A-Za-z_:][\w:]*)", re.MULTILINE)


class Query(NamedTuple):
    """One expression of a dashboard; ``place`` is where it stands: "panel 'Steps'", "variable job"."""

    place: str
    ref: str
    expression: str


class Checked(NamedTuple):
    """What was found: problems as sentences, and what there is to ask Prometheus."""

    title: str
    panels: int
    queries: tuple[Query, ...]
    problems: tuple[str, ...]


class NotADashboardError(ValueError):
    """The text is no dashboard at all; the message gives the reason."""


def read(text: bytes) -> Model:
    """Return the dashboard that a text holds.

    Raises:
        NotADashboardError: it is no JSON, or the JSON of something else.
    """
    try:
        model = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise NotADashboardError(f"is no JSON: {error}") from error
    if isinstance(model, dict) and isinstance(model.get("dashboard"), dict):
        raise NotADashboardError("wraps its dashboard as Grafana's HTTP API does: keep what stands in `dashboard` only")
    if isinstance(model, dict) and "apiVersion" in model and "spec" in model:
        raise NotADashboardError("is a dashboard of the new resource schema: export the classic model")
    if not isinstance(model, dict) or not isinstance(model.get("panels"), list):
        raise NotADashboardError("is no dashboard: it has no list of panels")
    return model


def recorded(rules: str) -> set[str]:
    """Return the names that a file of recording rules makes."""
    return set(_RECORD.findall(rules))


def check(model: Model, recording_rules: Collection[str]) -> Checked:
    """Check a dashboard.

    Args:
        model: its JSON.
        recording_rules: names of series that rules make.
    """
    panels = list(panels_of(model))
    asked = tuple(queries_of(model))
    problems = [*head(model), *_grid(panels), *_targets(panels, model)]
    for query in asked:
        for one in promql.selectors(query.expression):
            wrong = unknown_series(one, recording_rules)
            if wrong:
                problems.append(f"{query.place}: {wrong}")
    return Checked(str(model.get("title", "")), len(panels), asked, tuple(dict.fromkeys(problems)))


def panels_of(model: Model) -> Iterator[Model]:
    """Yield the panels, also those inside collapsed rows."""
    for panel in model["panels"]:
        if isinstance(panel, dict):
            yield panel
            if isinstance(panel.get("panels"), list):
                yield from (inner for inner in panel["panels"] if isinstance(inner, dict))


def queries_of(model: Model) -> Iterator[Query]:
    """Yield every expression: of panels, of annotations, and of variables that list label values."""
    for panel in panels_of(model):
        for target in _dicts(panel.get("targets")):
            if isinstance(target.get("expr"), str):
                yield Query(f"panel {panel.get('title', '')!r}", str(target.get("refId", "")), target["expr"])
    for annotation in _dicts(_dict(model.get("annotations")).get("list")):
        if isinstance(annotation.get("expr"), str) and annotation["expr"]:
            yield Query(f"annotation {annotation.get('name', '')}", "", annotation["expr"])
    for variable in _dicts(_dict(model.get("templating")).get("list")):
        selector = _label_values(variable)
        if selector:
            yield Query(f"variable {variable.get('name', '')}", "", selector)


def _label_values(variable: Model) -> str:
    """Return the series of ``label_values(SERIES, label)``; "" for other variables."""
    query = variable.get("query")
    text = query.get("query", "") if isinstance(query, dict) else query
    if variable.get("type") != "query" or not isinstance(text, str):
        return ""
    match = re.fullmatch(r"\s*label_values\((.+),\s*\w+\s*\)\s*", text, re.DOTALL)
    return match[1].strip() if match else ""


def unknown_series(one: promql.Selector, recording_rules: Collection[str]) -> str:
    """Return what is wrong with a selector of our series, "" when nothing is or the series are not ours."""
    if one.name in recording_rules or not _OF_OURS.search(one.name):
        return ""
    if ":" in one.name:
        return f"no rule records {one.name}"
    stem = next((one.name.removesuffix(end) for end in _HISTOGRAM_ENDS if one.name.endswith(end)), one.name)
    histogram = METRICS.get(stem)
    metric = histogram if histogram is not None and histogram.kind is Kind.HISTOGRAM else METRICS.get(one.name)
    if metric is None:
        return f"there is no metric {one.name}{_guess(one.name)}"
    if metric.kind is Kind.HISTOGRAM and one.name == stem:
        return f"{one.name} is a histogram: its series end with {', '.join(_HISTOGRAM_ENDS)}"
    known = {*metric.labels, *_ADDED_LABELS, *(["le"] if metric.kind is Kind.HISTOGRAM else [])}
    wrong = [label for label in one.labels if label not in known]
    return f"{one.name} has no label {wrong[0]}, only {', '.join(sorted(known))}" if wrong else ""


def _guess(name: str) -> str:
    # 0.8: all metrics of the product begin alike.
    guess = nearest(name, METRICS, alike=0.8)
    return f": did you mean {guess}?" if guess else ""


def head(model: Model) -> list[str]:
    """Return what is wrong with title, uid and version: a server refuses such a dashboard."""
    problems = []
    if not isinstance(model.get("title"), str) or not model["title"].strip():
        problems.append("has no title")
    uid = model.get("uid")
    if not isinstance(uid, str) or not re.fullmatch(rf"[A-Za-z0-9_-]{{1,{_MOST_UID}}}", uid):
        problems.append(f"has no uid that Grafana takes: 1 to {_MOST_UID} letters, digits, - or _")
    schema = model.get("schemaVersion")
    if not isinstance(schema, int) or schema < _OLDEST_SCHEMA:
        problems.append(f"has schemaVersion {schema!r}: {_OLDEST_SCHEMA} or newer is expected")
    return problems


def _grid(panels: list[Model]) -> Iterator[str]:
    ids = Counter(panel.get("id") for panel in panels)
    yield from (f"panel id {one!r} is given {times} times" for one, times in ids.items() if times > 1)
    for panel in panels:
        name = f"panel {panel.get('title', '')!r}"
        kind = panel.get("type")
        if not isinstance(kind, str) or not kind:
            yield f"{name} has no type"
        elif kind in _GONE_TYPES:
            yield f"{name} is of type {kind!r}, which Grafana 12 no longer has: use {_GONE_TYPES[kind]!r}"
        place = _dict(panel.get("gridPos"))
        numbers = [place.get(key) for key in ("x", "y", "w", "h")]
        if any(not isinstance(number, int) or number < 0 for number in numbers):
            yield f"{name} has no place in the grid: gridPos needs x, y, w and h"
        elif place["x"] + place["w"] > _GRID_WIDTH:
            yield f"{name} reaches over the grid's right edge: x + w is {place['x'] + place['w']}, not {_GRID_WIDTH}"


def _targets(panels: list[Model], model: Model) -> Iterator[str]:
    known = {variable.get("name") for variable in _dicts(_dict(model.get("templating")).get("list"))}
    for panel in panels:
        name = f"panel {panel.get('title', '')!r}"
        refs = Counter(target.get("refId") for target in _dicts(panel.get("targets")))
        yield from (f"{name}: refId {ref!r} is given {times} times" for ref, times in refs.items() if times > 1)
        for part in (panel, *_dicts(panel.get("targets"))):
            if isinstance(part.get("expr"), str) and not part["expr"].strip():
                yield f"{name}: query {part.get('refId', '')} is empty"
            uid = _dict(part.get("datasource")).get("uid")
            missing = promql.variables(uid) - known if isinstance(uid, str) else set()
            if missing:
                yield f"{name} takes its data source from the variable {min(missing)}, which there is not"


def _dict(value: object) -> Model:
    return value if isinstance(value, dict) else {}


def _dicts(value: object) -> list[Model]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
