# SPDX-License-Identifier: Apache-2.0
"""Tables: rows of labels with one or more values, and a way on from each rank and node that stands in one."""

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.builders import common, table
from grafana_foundation_sdk.models import common as look
from grafana_foundation_sdk.models import dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from megascale_dashboards.asking import GPU_HEALTH, STRAGGLERS, Ask
from megascale_dashboards.panels import PLAIN, SOURCE, Card, Limits, query, thresholds

# Labels that add nothing: the job stands above the page.
FOREIGN = ("__name__", "instance", "job")
# Where a click on a cell leads: the same time, the same job, and what was clicked at.
_CARRIED = "${__url_time_range}&var-datasource=${datasource}"
LINKS = {
    "rank": ("Look at this rank", f"/d/{STRAGGLERS}?{_CARRIED}&var-job=${{job}}&var-rank=${{__data.fields.rank}}"),
    "node": ("Look at this node", f"/d/{GPU_HEALTH}?{_CARRIED}&var-job=${{job}}&var-node=${{__data.fields.node}}"),
}


def table_card(
    title: str,
    text: str,
    asks: Sequence[Ask],
    columns: Sequence[str],
    *,
    width: int = 12,
    height: int = 8,
    units: Mapping[str, str] | None = None,
    colours: Limits = PLAIN,
    words: Mapping[str, str] | None = None,
    empty: str = "none",
    rising: bool = False,
) -> Card:
    """Return a table.

    Args:
        title: of the panel.
        text: what it shows, and what to do.
        asks: each is a column of values by its name; several are joined by their labels, which must be the same.
        columns: labels, from left to right; values come last.
        width: of 24.
        height: in units of 30 pixels.
        units: of values, by their names.
        colours: of all values.
        words: shown for numbers, in all values.
        empty: shown where there are no rows.
        rising: the smallest first value stands on top, else the largest.
    """
    builder = table.Panel().show_header(show_header=True)
    values = [ask.name for ask in asks if ask.name]
    if values:
        builder.sort_by([common.TableSortByFieldState().display_name(values[0]).desc(desc=not rising)])
    panel = builder.build()
    panel.title, panel.description, panel.datasource = title, text, SOURCE
    panel.targets = [query(ask, place, PromQueryFormat.TABLE, instant=True) for place, ask in enumerate(asks)]
    panel.transformations = _transformations(asks, columns)
    defaults = dashboard.FieldConfig(no_value=empty, thresholds=thresholds(PLAIN))
    defaults.custom = look.TableFieldOptions(
        align=look.FieldTextAlignment.AUTO, cell_options=look.TableAutoCellOptions(), inspect=False
    )
    overrides = [_links(column) for column in columns if column in LINKS]
    overrides += [_value(name, (units or {}).get(name, "short"), colours, words or {}) for name in values]
    panel.field_config = dashboard.FieldConfigSource(defaults=defaults, overrides=overrides)
    return Card(panel, width, height)


def _transformations(asks: Sequence[Ask], columns: Sequence[str]) -> list[dashboard.DataTransformerConfig]:
    several = len(asks) > 1
    fields = [f"Value #{chr(ord('A') + place)}" if several else "Value" for place in range(len(asks))]
    hidden = {name: True for name in ("Time", *FOREIGN) if name not in columns}
    hidden |= {field: True for field, ask in zip(fields, asks, strict=True) if not ask.name}
    order = {name: place for place, name in enumerate([*columns, *fields])}
    renamed = {field: ask.name for field, ask in zip(fields, asks, strict=True) if ask.name}
    organize: dict[str, object] = {"excludeByName": hidden, "indexByName": order, "renameByName": renamed}
    steps = [dashboard.DataTransformerConfig(id_val="organize", options=organize)]
    return [dashboard.DataTransformerConfig(id_val="merge", options={}), *steps] if several else steps


def _links(column: str) -> dashboard.DashboardFieldConfigSourceOverrides:
    title, url = LINKS[column]
    link = {"title": title, "url": url, "targetBlank": False}
    return _override(column, {"links": [link]})


def _value(
    name: str, unit: str, colours: Limits, words: Mapping[str, str]
) -> dashboard.DashboardFieldConfigSourceOverrides:
    properties: dict[str, object] = {"unit": unit}
    if words:
        shown = {value: dashboard.ValueMappingResult(text=text) for value, text in words.items()}
        properties["mappings"] = [dashboard.ValueMap(options=shown)]
    if colours != PLAIN:
        properties["thresholds"] = thresholds(colours)
        properties["custom.cellOptions"] = look.TableColoredBackgroundCellOptions(
            mode=look.TableCellBackgroundDisplayMode.BASIC
        )
    return _override(name, properties)


def _override(name: str, properties: Mapping[str, object]) -> dashboard.DashboardFieldConfigSourceOverrides:
    return dashboard.DashboardFieldConfigSourceOverrides(
        matcher=dashboard.MatcherConfig(id_val="byName", options=name),
        properties=[dashboard.DynamicConfigValue(id_val=key, value=value) for key, value in properties.items()],
    )
