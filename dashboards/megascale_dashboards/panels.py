# SPDX-License-Identifier: Apache-2.0
"""One function for each kind of panel, so that all dashboards look alike.

The same colours, legends and units, and everywhere a word for when there is nothing to show. A panel comes as a
``Card``: the panel and the room that it wants.
"""

from collections.abc import Sequence
from typing import NamedTuple

from grafana_foundation_sdk.builders import bargauge, common, stat, timeseries
from grafana_foundation_sdk.models import common as look
from grafana_foundation_sdk.models import dashboard
from grafana_foundation_sdk.models.prometheus import Dataquery, PromQueryFormat

from megascale_dashboards.asking import Ask

Limits = tuple[tuple[float | None, str], ...]
SOURCE = look.DataSourceRef(type_val="prometheus", uid="${datasource}")
CALM: Limits = ((None, "green"),)
PLAIN: Limits = ((None, "text"),)
# More than nothing is bad.
ANY: Limits = ((None, "green"), (1e-9, "red"))


class Card(NamedTuple):
    """A panel with its width (of 24) and its height (a unit is 30 pixels)."""

    panel: dashboard.Panel
    width: int
    height: int


def limits(*steps: tuple[float, str], base: str = "green") -> Limits:
    """Return colours: ``base`` up to the first value, then each from its value on."""
    return ((None, base), *steps)


def stat_card(
    title: str,
    text: str,
    asks: Sequence[Ask],
    *,
    width: int = 4,
    height: int = 4,
    unit: str = "short",
    colours: Limits = PLAIN,
    names: bool = False,
    empty: str = "none",
    decimals: int | None = None,
) -> Card:
    """Return large figures; with ``names`` it is the legend that is large, for facts that are labels."""
    builder = (
        stat.Panel()
        .graph_mode(look.BigValueGraphMode.NONE)
        .color_mode(look.BigValueColorMode.BACKGROUND if colours != PLAIN else look.BigValueColorMode.VALUE)
        .text_mode(look.BigValueTextMode.NAME if names else _text_mode(asks))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(values=False))
    )
    room = (width, height)
    card = card_of(builder.build(), title, text, asks, room, unit, colours, empty=empty, instant=True)
    defaults_of(card.panel).decimals = decimals
    return card


def line_card(
    title: str,
    text: str,
    asks: Sequence[Ask],
    *,
    width: int = 12,
    height: int = 8,
    unit: str = "short",
    colours: Limits | None = None,
    stacked: bool = False,
    least: float | None = 0.0,
    most: float | None = None,
) -> Card:
    """Return lines over time; ``colours`` draws the limits as dashed lines."""
    builder = (
        timeseries.Panel()
        .line_width(1.0)
        .fill_opacity(60.0 if stacked else 8.0)
        .show_points(look.VisibilityMode.AUTO)
        .legend(
            common.VizLegendOptions()
            .display_mode(look.LegendDisplayMode.LIST)
            .placement(look.LegendPlacement.BOTTOM)
            .show_legend(show_legend=True)
            .calcs([])
        )
        .tooltip(common.VizTooltipOptions().mode(look.TooltipDisplayMode.MULTI).sort(look.SortOrder.DESCENDING))
    )
    if stacked:
        builder.stacking(common.StackingConfig().mode(look.StackingMode.NORMAL).group("A"))
    if colours:
        builder.thresholds_style(common.GraphThresholdsStyleConfig().mode(look.GraphThresholdsStyleMode.DASHED))
    card = card_of(builder.build(), title, text, asks, (width, height), unit, colours or CALM)
    defaults = defaults_of(card.panel)
    defaults.min_val, defaults.max_val = least, most
    defaults.color = dashboard.FieldColor(mode=dashboard.FieldColorModeId.PALETTE_CLASSIC)
    return card


def bar_card(
    title: str,
    text: str,
    asks: Sequence[Ask],
    *,
    width: int = 8,
    height: int = 8,
    unit: str = "short",
    colours: Limits = PLAIN,
    empty: str = "none",
) -> Card:
    """Return one horizontal bar for each series, as it is now."""
    builder = (
        bargauge.Panel()
        .display_mode(look.BarGaugeDisplayMode.BASIC)
        .orientation(look.VizOrientation.HORIZONTAL)
        .show_unfilled(show_unfilled=False)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(values=False))
    )
    room = (width, height)
    card = card_of(builder.build(), title, text, asks, room, unit, colours, empty=empty, instant=True)
    defaults_of(card.panel).min_val = 0.0
    return card


def query(
    ask: Ask, place: int, shape: PromQueryFormat = PromQueryFormat.TIME_SERIES, *, instant: bool = False
) -> Dataquery:
    """Return one query with a reference of its own (A, B, ...), over the window or, ``instant``, as of its end.

    What shows the state of now must be instant: a picture over the window still has what is gone since.
    """
    found = Dataquery(ref_id=chr(ord("A") + place), expr=ask.expr, datasource=SOURCE, format_val=shape)
    found.instant, found.range_val = instant, not instant
    if shape is not PromQueryFormat.TABLE:
        found.legend_format = ask.name or "__auto"
    return found


def _text_mode(asks: Sequence[Ask]) -> look.BigValueTextMode:
    return look.BigValueTextMode.VALUE_AND_NAME if any(ask.name for ask in asks) else look.BigValueTextMode.VALUE


def card_of(
    panel: dashboard.Panel,
    title: str,
    text: str,
    asks: Sequence[Ask],
    room: tuple[int, int],
    unit: str,
    colours: Limits,
    *,
    empty: str = "",
    shape: PromQueryFormat = PromQueryFormat.TIME_SERIES,
    instant: bool = False,
) -> Card:
    """Return a panel with what all panels have: words, queries, unit, colours, a word for nothing."""
    panel.title, panel.description, panel.datasource = title, text, SOURCE
    panel.targets = [query(ask, place, shape, instant=instant) for place, ask in enumerate(asks)]
    defaults = defaults_of(panel)
    defaults.unit = unit
    defaults.thresholds = thresholds(colours)
    defaults.color = dashboard.FieldColor(mode=dashboard.FieldColorModeId.THRESHOLDS)
    if empty:
        defaults.no_value = empty
    return Card(panel, *room)


def thresholds(colours: Limits) -> dashboard.ThresholdsConfig:
    """Return limits as Grafana writes them."""
    steps = [dashboard.Threshold(value=value, color=colour) for value, colour in colours]
    return dashboard.ThresholdsConfig(mode=dashboard.ThresholdsMode.ABSOLUTE, steps=steps)


def defaults_of(panel: dashboard.Panel) -> dashboard.FieldConfig:
    """Return the settings of all values of a panel, made where it has none."""
    if panel.field_config is None:
        panel.field_config = dashboard.FieldConfigSource()
    return panel.field_config.defaults
