# SPDX-License-Identifier: Apache-2.0
"""What all dashboards have in common: variables, links to each other, annotations, and panels put in their places.

Grafana's builders give no panel ids; here they are counted from 1 in reading order, so that a link to a panel stays
good as long as nothing is put before it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.models import dashboard
from grafana_foundation_sdk.models.dashboard import VariableOption

from megascale_dashboards.asking import JOB
from megascale_dashboards.panels import SOURCE, Card

WIDTH = 24
TAG = "megascale"


class Section(NamedTuple):
    """Lines of panels under one heading; each line's widths add up to 24, and all of it are equally high."""

    title: str
    lines: Sequence[Sequence[Card]]


class Note(NamedTuple):
    """An annotation: wherever ``expr`` has a value, something happened; neighbouring moments become one region."""

    name: str
    expr: str
    title: str
    colour: str


# A point of an annotation is queried once a minute, in long windows less often. The rate interval is longer than that
# by one scrape, so no change falls between two points.
RESTARTS = Note("Restarts", f"changes(megascale_job_round{{{JOB}}}[$__rate_interval]) > 0", "job restarted", "orange")
INCIDENTS = Note(
    "Incidents", f"max_over_time(megascale_incident_open{{{JOB}}}[$__rate_interval]) > 0", "{{verdict}}", "red"
)
# A checkpoint that was written: what lies behind it can't be lost any more.
CHECKPOINTS = Note(
    "Checkpoints",
    f"changes(megascale_checkpoint_last_success_timestamp_seconds{{{JOB}}}[$__rate_interval]) > 0",
    "checkpoint",
    "green",
)


def xids(where: str, then: str = "") -> Note:
    """Return Xids by ``where`` (the braces' inside); ``then`` is put behind the query.

    Nodes are scraped once a minute at the slowest: an Xid is younger than two in the first scrape after it, also when
    one was lost. A counter that is compared with its past takes a lost scrape for a new one.
    """
    new = f"min_over_time(megascale_gpu_xid_age_seconds{{{where}}}[$__rate_interval]) < 120"
    return Note("Xids", f"({new}) {then}" if then else new, "Xid {{xid}} on {{node}}", "purple")


class Page(NamedTuple):
    """A dashboard before it is put together. ``window`` is how far back it looks at first, ``refresh`` how often."""

    uid: str
    title: str
    text: str
    sections: Sequence[Section]
    variables: Sequence[build.QueryVariable | build.TextBoxVariable | build.CustomVariable] = ()
    notes: Sequence[Note] = ()
    window: str = "now-1h"
    refresh: str = "30s"


def job_variable() -> build.QueryVariable:
    """Return the choice of a job."""
    return _labels("job", "Job", "label_values(megascale_job_world_size, job)")


def node_variable(query: str = f"label_values(megascale_rank_info{{{JOB}}}, node)") -> build.QueryVariable:
    """Return the choice of nodes: those of the job, or whatever ``query`` finds. All is a pattern, not a long list."""
    return _all(_labels("node", "Node", query))


def label_variable(name: str, label: str, metric: str) -> build.QueryVariable:
    """Return the choice among the values of a label of a metric."""
    return _all(_labels(name, label, f"label_values({metric}, {name})"))


def rank_variable() -> build.TextBoxVariable:
    """Return a field for a rank, or a pattern such as ``1[0-9]``: a menu of 12,288 ranks would be no help."""
    return build.TextBoxVariable("rank").label("Rank (pattern)").default_value("0")


def choice_variable(name: str, label: str, values: Sequence[str]) -> build.CustomVariable:
    """Return the choice among a few words; the first is taken at first."""
    options = [VariableOption(text=value, value=value, selected=value == values[0]) for value in values]
    return build.CustomVariable(name).label(label).values(",".join(values)).options(options).current(options[0])


def _labels(name: str, label: str, query: str) -> build.QueryVariable:
    return (
        build.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query({"query": query, "refId": f"variable-{name}"})
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.NATURAL_ASC)
    )


def _all(variable: build.QueryVariable) -> build.QueryVariable:
    everything = VariableOption(text=["All"], value=["$__all"], selected=True)
    return variable.include_all(include_all=True).multi(multi=True).all_value(".*").current(everything)


def put_together(page: Page) -> dashboard.Dashboard:
    """Return the whole dashboard."""
    builder = (
        build.Dashboard(page.title)
        .uid(page.uid)
        .description(page.text)
        .tags([TAG])
        .timezone("browser")
        .time(page.window, "now")
        .refresh(page.refresh)
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .with_variable(build.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .link(_to_the_others())
    )
    for variable in page.variables:
        builder.with_variable(variable)
    for note in page.notes:
        builder.annotation(_annotation(note))
    whole = builder.build()
    whole.panels = _placed(page.sections)
    return whole


def _to_the_others() -> build.DashboardLink:
    return (
        build.DashboardLink("MegaScale Ops")
        .type(dashboard.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(as_dropdown=False)
        .include_vars(include_vars=True)
        .keep_time(keep_time=True)
        .target_blank(target_blank=False)
        .icon("external link")
        .tooltip("")
        .url("")
    )


def _annotation(note: Note) -> build.AnnotationQuery:
    return (
        build.AnnotationQuery()
        .name(note.name)
        .datasource(SOURCE)
        .enable(enable=True)
        .icon_color(note.colour)
        .expr(note.expr)
        .step("60s")
        .title_format(note.title)
        .text_format("job {{job}}")
        .target(prometheus.Dataquery().ref_id(f"note-{note.name}").expr(note.expr).interval("60s").range())
    )


def _placed(sections: Sequence[Section]) -> list[dashboard.Panel | dashboard.RowPanel]:
    """Give every panel an id and a place: lines from top to bottom, cards from left to right."""
    placed: list[dashboard.Panel | dashboard.RowPanel] = []
    top = 0
    for section in sections:
        if section.title:
            place = dashboard.GridPos(h=1, w=WIDTH, x=0, y=top)
            placed.append(dashboard.RowPanel(id_val=len(placed) + 1, title=section.title, grid_pos=place))
            top += 1
        for line in section.lines:
            left = 0
            for card in line:
                card.panel.id_val = len(placed) + 1
                card.panel.grid_pos = dashboard.GridPos(h=card.height, w=card.width, x=left, y=top)
                placed.append(card.panel)
                left += card.width
            assert left == WIDTH, f"the line of {line[0].panel.title!r} is {left} wide"
            assert len({card.height for card in line}) == 1, f"the line of {line[0].panel.title!r} is ragged"
            top += line[0].height
    return placed
