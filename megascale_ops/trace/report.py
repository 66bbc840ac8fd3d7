# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML file about a job: what broke and why, which ranks were slow and when, where the time went.

It opens from a disk on a machine without network: style, program, data and plotly.js stand inside (5 MB, nearly all of
it plotly.js), and the page forbids itself every request. Light and dark follow the reader's own setting.
"""

import json
from importlib import import_module
from importlib.resources import files

from megascale_ops.schema.wording import clock, doing_words, duration
from megascale_ops.trace import report_figures as figures
from megascale_ops.trace import report_parts as parts
from megascale_ops.trace.report_facts import Report
from megascale_ops.trace.report_plot import plot_of

# Nothing may be loaded from anywhere, and what ranks print can never become a program that loads more.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
_HOVER = "Point at a cell to read it. Drag to zoom, double-click to see all again. Blank: no step ended there."


def render(report: Report) -> str:
    """Return the page.

    Raises:
        ModuleNotFoundError: plotly is not installed (extra ``report``).
    """
    gathered = report.gathered
    plot = plot_of(report)
    state = doing_words(gathered.state)
    sections = [
        ("Verdicts", parts.cards(report)),
        ("Who was late, and when", _heat(report, has_plot=plot is not None)),
        (f"Neighbourhood of the {'suspects' if report.is_named else 'slowest rank'}", figures.neighbours(report)),
        ("Where the wall time went", figures.ledger(report)),
        ("All incidents", parts.incidents(report)),
        ("Settings", f"<details><summary>Policy of this job</summary>{parts.settings(report)}</details>"),
    ]
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{parts.text(gathered.job)} · MegaScale Ops report</title>
<style>{_asset("report.css")}</style></head>
<body><main>
<div class="top"><h1>{parts.text(gathered.job)}</h1>
<span class="pill {parts.tone(gathered.state)}">{parts.text(state)}</span>
<span class="faint">{parts.text(_span(report))}</span></div>
{parts.headline(report)}
{parts.notes(gathered.notes)}
{parts.tiles(report)}
{body}
<footer>Made by MegaScale Ops {parts.text(gathered.version)} on {parts.text(clock(gathered.made_wall_s, gathered.zone))}
from {parts.text(gathered.source)}. Times of day are those of the machine that made it.</footer>
</main>
{_programs(plot)}
</body></html>
"""


def _span(report: Report) -> str:
    gathered = report.gathered
    zone = gathered.zone
    wall_s = gathered.until_wall_s - gathered.began_wall_s
    return (
        f"{clock(gathered.began_wall_s, zone)} to {clock(gathered.until_wall_s, zone)} ({duration(max(0.0, wall_s))})"
    )


def _heat(report: Report, *, has_plot: bool) -> str:
    if not has_plot or report.times is None:
        return "<p>There is no picture: no finished steps of this job are known.</p>"
    ranks = len(report.times.own)
    rows = len(report.rows.labels) if report.rows is not None else 0
    folded = f" {ranks:,} ranks in {rows} rows: the worst by themselves, the rest folded." if rows < ranks else ""
    width = duration(report.times.edges_s[1] - report.times.edges_s[0])
    return (
        f'<p class="faint">A column is {width}.{folded} Red: an incident that stopped the job. Dotted: a warning.</p>'
        f'<p class="readout mono" id="readout">{_HOVER}</p><div id="plot" class="plot"></div>'
        "<noscript><p>The picture needs JavaScript; the table below does not.</p></noscript>"
        f"{figures.slowest(report)}"
    )


def _programs(plot: dict[str, object] | None) -> str:
    """Return data and programs; without a picture plotly is not needed, and the file stays small."""
    if plot is None:
        return f"<script>{_asset('report.js')}</script>"
    # "<" can't stand in the data: a rank's name must not end the element.
    data = json.dumps(plot, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    plotly: str = import_module("plotly.offline").get_plotlyjs()
    return (
        f'<script type="application/json" id="plot-data">{data}</script>\n<script>{plotly}</script>\n'
        f"<script>{_asset('report.js')}</script>"
    )


def _asset(name: str) -> str:
    return files("megascale_ops.trace").joinpath(name).read_text(encoding="utf-8")
