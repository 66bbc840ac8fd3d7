# SPDX-License-Identifier: Apache-2.0
"""Panels that show many series over time at once: heat maps, bands of states, and a matrix of states."""

from collections.abc import Sequence

from grafana_foundation_sdk.builders import common, heatmap, statetimeline, statushistory
from grafana_foundation_sdk.models import common as look
from grafana_foundation_sdk.models import dashboard
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from megascale_dashboards.asking import Ask
from megascale_dashboards.panels import CALM, Card, Limits, card_of, defaults_of


def heat_card(
    title: str,
    text: str,
    ask: Ask,
    *,
    width: int = 24,
    height: int = 10,
    unit: str = "s",
    buckets: bool = False,
    most: float | None = None,
) -> Card:
    """Return a heat map over time: one row for each series, or for each bucket of a histogram.

    Rows whose names are numbers stand in their order: Grafana sorts them so.
    """
    colour = (
        heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Turbo").steps(64).reverse(reverse=False)
    )
    colour.exponent(0.5).fill("dark-orange").min(0.0)
    if most is not None:
        colour.max(most)
    builder = (
        heatmap.Panel()
        .calculate(calculate=False)
        .color(colour)
        .cell_gap(0)
        .show_value(look.VisibilityMode.NEVER)
        .cell_values(heatmap.CellValues().unit("short" if buckets else unit))
        .rows_frame(
            heatmap.RowsHeatmapOptions()
            .layout(look.HeatmapCellLayout.AUTO if buckets else look.HeatmapCellLayout.UNKNOWN)
            .value("collectives" if buckets else "value")
        )
        .y_axis(heatmap.YAxisConfig().axis_placement(look.AxisPlacement.LEFT).unit(unit if buckets else "none"))
        .tooltip(heatmap.HeatmapTooltip().mode(look.TooltipDisplayMode.SINGLE).y_histogram(y_histogram=False))
    )
    # 200 columns: a cell of five pixels can still be pointed at.
    builder.max_data_points(200.0)
    shape = PromQueryFormat.HEATMAP if buckets else PromQueryFormat.TIME_SERIES
    return card_of(builder.build(), title, text, (ask,), (width, height), unit, CALM, shape=shape)


def timeline_card(
    title: str,
    text: str,
    asks: Sequence[Ask],
    *,
    width: int = 24,
    height: int = 7,
    unit: str = "short",
    colours: Limits = CALM,
    words: Sequence[tuple[float, str, str]] = (),
    empty: str = "none",
) -> Card:
    """Return one band for each series; ``words`` are (value, text, colour) where a number stands for a word."""
    builder = (
        statetimeline.Panel()
        .merge_values(merge_values=True)
        .show_value(look.VisibilityMode.NEVER)
        .fill_opacity(80)
        .line_width(0)
        .tooltip(common.VizTooltipOptions().mode(look.TooltipDisplayMode.SINGLE).sort(look.SortOrder.NONE))
    )
    card = card_of(builder.build(), title, text, asks, (width, height), unit, colours, empty=empty)
    defaults_of(card.panel).mappings = _mappings(words)
    return card


def matrix_card(
    title: str,
    text: str,
    ask: Ask,
    *,
    words: Sequence[tuple[float, str, str]],
    width: int = 24,
    height: int = 9,
    empty: str = "none",
) -> Card:
    """Return a matrix of states: a row for each series, a column for each moment looked at."""
    builder = (
        statushistory.Panel()
        .show_value(look.VisibilityMode.NEVER)
        .fill_opacity(80)
        .line_width(1)
        .tooltip(common.VizTooltipOptions().mode(look.TooltipDisplayMode.SINGLE).sort(look.SortOrder.NONE))
        .max_data_points(120.0)  # Grafana refuses to draw more columns than there are pixels for
    )
    card = card_of(builder.build(), title, text, (ask,), (width, height), "short", CALM, empty=empty)
    defaults_of(card.panel).mappings = _mappings(words)
    return card


def _mappings(words: Sequence[tuple[float, str, str]]) -> list[dashboard.ValueMapping]:
    shown = {
        f"{value:g}": dashboard.ValueMappingResult(text=text, color=colour, index=place)
        for place, (value, text, colour) in enumerate(words)
    }
    return [dashboard.ValueMap(options=shown)] if shown else []
