# SPDX-License-Identifier: Apache-2.0
"""A run as one picture (SVG): how far it was, in which state, which faults hit it, and where its time went."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from textwrap import wrap

from megascale_ops.ledger import EFFECTIVE
from megascale_ops.sim.kinds import KINDS
from megascale_ops.sim.report import Report

WIDTH, LEFT, RIGHT = 1100, 70, 20
TOP, CURVE, STRIP, GAP = 84, 300, 26, 44
# Pixels of a line of text, and of a fault's letter; letters in a line that are nearer than that lie below each other.
LINE, LETTER, MOST_BELOW = 14, 11, 5
# Characters that fit between both edges.
LETTERS = 150
# Colours that people with any sight can tell apart (Okabe and Ito).
_GOOD, _SLOW, _BAD, _WAIT = "#009e73", "#56b4e9", "#d55e00", "#e69f00"
_STATES = {
    "running": _GOOD, "degraded": _SLOW, "catching_up": _SLOW, "suspect": _BAD, "confirming": _BAD,
    "stopping": _BAD, "diagnosing": _BAD, "failed": "#000000",
}  # fmt: skip
_MARKS = dict(zip(KINDS, "GSKEAXNHWUTL", strict=True))


def draw(run: Report) -> str:
    """Return the picture."""
    height = TOP + CURVE + GAP + STRIP + GAP + STRIP + GAP
    size = f'width="{WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_head(run),
        *_curve(run),
        *_strip(run, TOP + CURVE + GAP),
        *_shares(run, TOP + CURVE + GAP + STRIP + GAP),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


def _head(run: Report) -> Iterator[str]:
    laws = ", ".join(run.laws) or "no law of faults"
    yield _text(LEFT, 24, f"{run.ranks:,} ranks, {run.hours:g} h, seed {run.seed}, {laws}", 'font-size="16"')
    told = f"{run.effective:.2%}" if run.effective >= 0 else "not known"
    yield _text(
        LEFT,
        44,
        f"effective training time {told}; {len(run.faults)} faults, {run.restarts} restarts; "
        f"precision {run.precision:.0%}, recall {run.recall:.0%}"
        if run.faults and run.precision >= 0 and run.recall >= 0
        else f"effective training time {told}; {len(run.faults)} faults, {len(run.incidents)} incidents",
    )


def _x(run: Report, at_s: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, at_s / run.wall_s)


def _curve(run: Report) -> Iterator[str]:
    """Yield the step over time, with the faults on top."""
    bottom = TOP + CURVE
    most = max((step for _, step in run.progress), default=0) + 1
    yield f'<path d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}" fill="none" stroke="#888"/>'
    for part in range(5):
        step, y = most * part // 4, bottom - CURVE * part / 4
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#eee"/>'
        yield _text(LEFT - 6, y + 4, f"{step:,}", 'text-anchor="end"')
    yield from _hours(run, bottom)
    points = " ".join(f"{_x(run, at):.1f},{bottom - CURVE * (step + 1) / most:.1f}" for at, step in _held(run))
    yield f'<polyline points="{points}" fill="none" stroke="#0072b2" stroke-width="1.5"/>'
    letters = {_MARKS[fault.kind]: fault.kind for fault in run.faults}
    told = "".join(f", {letter}: {kind.replace('_', ' ')}" for letter, kind in letters.items())
    lines = wrap(f"step{told}{' (orange: not named rightly)' if told else ''}", LETTERS)
    for number, line in enumerate(reversed(lines)):
        yield _text(LEFT, TOP - 8 - LINE * number, line)
    places = _below([_x(run, fault.at_s) for fault in run.faults])
    for fault, below in zip(run.faults, places, strict=True):
        x, colour = _x(run, fault.at_s), _GOOD if fault.is_right else _BAD
        yield f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="{colour}" stroke-dasharray="3 3"/>'
        name = f"{fault.kind} of rank {fault.rank}: {'named rightly' if fault.is_right else 'not named rightly'}"
        letter = _text(x + 2, TOP + 10 + LINE * below, _MARKS[fault.kind])
        yield f'<g fill="{colour}"><title>{escape(name)}</title>{letter}</g>'


def _below(places: Sequence[float]) -> list[int]:
    """Return in which line each letter stands, so that none covers another; the last where all lines are full."""
    ends: list[float] = []
    found = []
    for x in places:
        line = next((number for number, end in enumerate(ends) if end <= x), len(ends))
        line = min(line, MOST_BELOW)
        ends[line:] = [x + LETTER, *ends[line + 1 :]]
        found.append(line)
    return found


def _held(run: Report) -> Iterator[tuple[float, int]]:
    """Yield when the job was at which step; while it stands still it stays where it was, and goes back at once."""
    before = -1
    for at_s, step in run.progress:
        if step <= before:
            yield at_s, before
        yield at_s, step
        before = step


def _hours(run: Report, bottom: float) -> Iterator[str]:
    every = next(each for each in (0.1, 0.25, 0.5, 1, 2, 4, 12, 24, 168, 720) if run.wall_s / 3600 / each <= 14)
    number = 0
    while number * every * 3600 <= run.wall_s:
        hour = number * every
        yield _text(_x(run, hour * 3600), bottom + 16, f"{hour:g} h", 'text-anchor="middle"')
        number += 1


def _strip(run: Report, y: float) -> Iterator[str]:
    """Yield the states of the job over time."""
    yield _text(LEFT, y - 6, "state: green trains, blue catches up, orange starts or waits, red stands or is stopped")
    turns = [*run.timeline, (run.wall_s, "")]
    for (since, state), (until, _) in pairwise(turns):
        x = _x(run, since)
        width = max(0.5, _x(run, until) - x)
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{STRIP}" '
            f'fill="{_STATES.get(state, _WAIT)}"><title>{escape(state)}</title></rect>'
        )


def _shares(run: Report, y: float) -> Iterator[str]:
    """Yield where the time went, as one bar, and what of it is what."""
    told = [(row, seconds) for row, seconds in run.rows.items() if seconds]
    yield _text(LEFT, y - 6, ", ".join(f"{row} {seconds / run.wall_s:.1%}" for row, seconds in told) or "no time")
    x = float(LEFT)
    palette = (_BAD, _WAIT, "#cc79a7", "#f0e442", "#0072b2", "#999999")
    for number, (row, seconds) in enumerate(told):
        width = (WIDTH - LEFT - RIGHT) * seconds / run.wall_s
        colour = _GOOD if row == "train" else _SLOW if row in EFFECTIVE else palette[number % len(palette)]
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{STRIP}" fill="{colour}">'
            f"<title>{escape(row)}</title></rect>"
        )
        x += width
