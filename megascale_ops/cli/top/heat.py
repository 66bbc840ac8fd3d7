# SPDX-License-Identifier: Apache-2.0
"""Rank by time in signs: whose own work took longer than the others', and since when; as the page's heat map has it.

A line is a rank, or neighbouring ranks of which the slowest is shown, so that one slow rank among 12,288 is still seen;
a column is a stretch of time, the same one as in the strip of step times above it. How slow a rank is shows in the
sign, and its colour only repeats it: without colours nothing is lost.

Pure: slots and a size in, lines out.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text

from megascale_ops.schema.live import Slot, Times

# Own work in per cent of the median rank's up to which a sign is shown; 0 is not known. As the page's colours: calm up
# to 105, a dot from 125 on, hottest from 200 on.
LEVELS = (0, 105, 125, 160, 200)
SIGNS = (" ", "·", "░", "▒", "▓", "█")
ASCII_SIGNS = (" ", ".", "-", "+", "#", "@")
# Dark and light terminals: none of them is near white or black.
STYLES = ("", "green", "green", "yellow", "red", "bold red")
# Fewer lines than 2 show no rank apart; more than 8 leave the map of ranks too little of 24.
LEAST_LINES, MOST_LINES = 2, 8


class Heat(NamedTuple):
    """Lines, and how many ranks one of them stands for."""

    lines: list[Text]
    fold: int


def draw(times: Times, slots: Sequence[Slot], label: int, most_lines: int, *, ascii_only: bool = False) -> Heat:
    """Draw the own work of all ranks in ``slots`` on at most ``most_lines`` lines; nothing where there is none to show.

    Args:
        times: what is known of the job's time: how many rows there are, and of how many ranks each.
        slots: the columns, oldest first.
        label: columns before the first sign; the first rank of a line stands there.
        most_lines: what there is room for.
        ascii_only: the terminal shows nothing else.
    """
    if min(most_lines, times.rows) < LEAST_LINES or not any(any(slot.cells) for slot in slots):
        return Heat([], 1)
    rows = -(-times.rows // min(most_lines, MOST_LINES))
    lines = []
    for first in range(0, times.rows, rows):
        line = Text().append(f"{first * times.row_ranks:>{label - 1},} ", style="dim")
        _signs(line, [max(slot.cells[first : first + rows], default=0) for slot in slots], ascii_only=ascii_only)
        lines.append(line)
    return Heat(lines, rows * times.row_ranks)


def legend(fold: int, *, ascii_only: bool = False) -> Text:
    """Return what the signs mean, and how many ranks a line stands for; 80 columns have room for it."""
    signs = ASCII_SIGNS if ascii_only else SIGNS
    text = Text().append("own work to ", style="dim")
    for sign, style, most in zip(signs[1:], STYLES[1:], (*LEVELS[1:], "more"), strict=True):
        text.append(sign, style=style).append(f"{most} ", style="dim")
    text.append("% of the median", style="dim")
    return text.append(f"   a line: worst of {fold:,}" if fold > 1 else "", style="dim")


def _signs(line: Text, shares: Sequence[int], *, ascii_only: bool) -> None:
    """Append signs, a stretch of equal ones at a time."""
    signs = ASCII_SIGNS if ascii_only else SIGNS
    levels = [sum(share > most for most in LEVELS) for share in shares]
    at = 0
    while at < len(levels):
        until = at
        while until < len(levels) and levels[until] == levels[at]:
            until += 1
        line.append(signs[levels[at]] * (until - at), style=STYLES[levels[at]])
        at = until
