# SPDX-License-Identifier: Apache-2.0
"""The parts of a report that are drawn without plotly, as HTML: neighbourhoods, the slowest ranks, the ledger."""

from megascale_ops.ledger import ROWS, US
from megascale_ops.schema.wording import duration
from megascale_ops.trace.report_facts import LEAST_RANGE, Report, Slow
from megascale_ops.trace.report_neighbours import Neighbourhood
from megascale_ops.trace.report_parts import table, text

# 6 %: narrower parts of the bar have no room for their name.
_NAMED_SHARE = 0.06


def neighbours(report: Report) -> str:
    """The suspects among those they communicate with."""
    if not report.suspects:
        return "<p>No verdict names a rank, and no steps tell which is slowest.</p>"
    late = dict(enumerate(_mean_lateness(report)))
    parts = [] if report.is_named else ["<p>No verdict names a rank.</p>"]
    for hood in report.suspects:
        shown = [late[rank] for group in hood.groups for rank in group.ranks if rank in late]
        most = max([LEAST_RANGE * report.step_s, *shown])
        parts.append(f"<p><b>Rank {hood.rank}</b>{f' on {text(hood.node)}' if hood.node else ''}. {_place(hood)}</p>")
        for group in hood.groups:
            chips = "".join(_chip(rank, hood.rank, late.get(rank), most) for rank in group.ranks)
            left = group.size - len(group.ranks)
            more = f'<span class="faint">and {left:,} more</span>' if left else ""
            parts.append(
                f'<div class="group"><span class="faint">{text(group.name)}, {group.size:,}</span>'
                f'<div class="ranks">{chips}{more}</div></div>'
            )
    return (
        "".join(parts)
        + '<p class="faint">Colour: how late a rank was on average, against the latest shown, or 5 % of a step.</p>'
    )


def slowest(report: Report) -> str:
    """The ranks with the most own work above their equals'."""
    rows = [_slow_row(slow, report.step_s) for slow in report.slowest]
    return table(("rank", "node", "late a step", "of a step", "own work", "waiting"), rows, numbers=(0, 2, 3, 4, 5))


def ledger(report: Report) -> str:
    """Where the wall time went: a bar and its table."""
    bar, lines = [], []
    for row, us in report.ledger.rows.items():
        share, took = report.ledger.share(row), duration(us / US)
        is_named = share >= _NAMED_SHARE
        if us:
            bar.append(
                f'<div class="{row}{"" if is_named else " thin"}" style="width:{share * 100:.4f}%" '
                f'title="{row}: {took}">{row if is_named else ""}</div>'
            )
        lines.append(
            f"<tr{'' if us else ' class=faint'}><td><span class='chip {row}'></span>{row}</td>"
            f'<td class="number">{took}</td><td class="number">{share * 100:.2f} %</td><td>{ROWS[row]}</td></tr>'
        )
    total = (
        f'<tr><td><b>wall time</b></td><td class="number"><b>{duration(report.ledger.wall_us / US)}</b></td>'
        '<td class="number"><b>100 %</b></td><td></td></tr>'
    )
    head = '<tr><th>row</th><th class="number">time</th><th class="number">share</th><th>what it holds</th></tr>'
    notes = "".join(f'<p class="faint">{text(note)}.</p>' for note in report.ledger.notes)
    return (
        f'<div class="bar">{"".join(bar)}</div>'
        f'<div class="scroll"><table>{head}{"".join(lines)}{total}</table></div>{notes}'
    )


def _place(hood: Neighbourhood) -> str:
    if hood.mesh is None:
        return "The mesh is not known: neither the script nor its launcher told it, so only its node is shown."
    places = [f"{axis} {at}" for axis in ("tp", "pp", "dp", "ep") if (at := getattr(hood.mesh, axis)) >= 0]
    return f"Its place: {', '.join(places)}."


def _slow_row(slow: Slow, step_s: float) -> tuple[str, ...]:
    share = f"{slow.late_s / step_s * 100:.1f} %" if step_s else ""
    return (str(slow.rank), slow.node, _signed(slow.late_s), share, duration(slow.own_s), duration(slow.waiting_s))


def _chip(rank: int, suspect: int, late_s: float | None, most_s: float) -> str:
    heat = 80 * max(0.0, late_s) / most_s if late_s is not None and most_s else 0.0
    told = f"late by {_signed(late_s)} a step" if late_s is not None else "no steps known"
    self = " self" if rank == suspect else ""
    return f'<span class="rank{self}" style="--heat:{heat:.0f}" title="rank {rank}: {told}">{rank}</span>'


def _mean_lateness(report: Report) -> list[float]:
    import numpy as np

    if report.times is None:
        return []
    late = report.times.lateness
    known = np.isfinite(late)
    return [float(value) for value in np.where(known, late, 0).sum(axis=1) / np.maximum(1, known.sum(axis=1))]


def _signed(seconds: float) -> str:
    # Half a millisecond: less is shown as 0.
    if abs(seconds) < 0.0005:
        return "0 ms"
    return f"{'+' if seconds > 0 else '-'}{duration(abs(seconds))}"
