# SPDX-License-Identifier: Apache-2.0
"""The ranks that stand out, as a table of a few lines: named by a verdict, behind, silent, or slower than the median.

Pure: a frame in, rows out. Of 12,288 ranks only those that are shown become rows.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.text import Text

from megascale_ops.cli.terminal.tables import JUDGED_STYLES
from megascale_ops.cli.top.verdict import Look
from megascale_ops.schema.events import OVER
from megascale_ops.schema.live import JUDGED, UNKNOWN, Frame, numbers
from megascale_ops.schema.wording import printable

_GONE, _UNHEARD = JUDGED.index("gone"), JUDGED.index("unheard")
_NO_SHARE = 255
# 3 s: a rank moves between two heartbeats; what is below is chance.
_BLINK_S = 3
_COLUMNS = (("rank", 7), ("behind", 7), ("silent", 7), ("own work", 9), ("waits", 6))


class Row(NamedTuple):
    """One rank; -1 and "" where it is not known. ``own`` and ``waiting`` in per cent, ``silent_s`` whole seconds."""

    rank: int
    node: str
    behind: int
    silent_s: int
    own: int
    waiting: int
    phase: str
    judged: str


def standing_out(frame: Frame, most: int) -> list[Row]:
    """Return the ranks that one would look at first, the worst first."""
    columns, layout = frame.columns, frame.layout
    if columns is None or most < 1:
        return []
    judged, behind = numbers("judged", columns.judged), numbers("behind", columns.behind)
    quiet, own = numbers("quiet", columns.quiet), numbers("own", columns.own)
    waiting, phase = numbers("waiting", columns.waiting), numbers("phase", columns.phase)
    node = numbers("node", layout.node if layout is not None else b"")
    names = layout.nodes if layout is not None else ()
    phases = columns.phases or ()
    found = [place for *_, place in heapq.nsmallest(most, _ordered(judged, behind, quiet, own))]
    return [
        Row(
            rank,
            _word(names, _at(node, rank, UNKNOWN)),
            _known(_at(behind, rank, UNKNOWN), UNKNOWN),
            _known(_at(quiet, rank, UNKNOWN), UNKNOWN),
            _known(_at(own, rank, 0), 0),
            _known(_at(waiting, rank, _NO_SHARE), _NO_SHARE),
            _word(phases, _at(phase, rank, _NO_SHARE)),
            _word(JUDGED, judged[rank]),
        )
        for rank in found
    ]


def section(frame: Frame, most_rows: int, look: Look) -> list[Text]:
    """Return a heading and at most so many lines; the last one counts the ranks that are not well and have no room."""
    rows = standing_out(frame, most_rows)
    if not rows:
        return []
    left = unwell(frame) - len(rows)
    if left > 0:
        del rows[-1]  # its line has the count
    lines = [heading(), *(row(one) for one in rows)]
    if left > 0:
        where = "r lists them" if look.has_keys else f"`{look.reader.command('status')}` lists the worst of them"
        lines.append(Text(f"{left + 1:>7,} more are not well: {where}", style="bold yellow"))
    return lines


def unwell(frame: Frame) -> int:
    """Return how many ranks are slow, suspect, lost or gone; of a job that is over all ranks have to be gone."""
    judged = numbers("judged", frame.columns.judged) if frame.columns is not None else ()
    is_over = frame.pace is not None and frame.pace.state in OVER
    return sum(0 < one < (_GONE if is_over else _UNHEARD) for one in judged)


def heading() -> Text:
    """Return the line above the rows."""
    return Text("".join(f"{name:>{width}}" for name, width in _COLUMNS) + "  phase       judged    node", style="dim")


def row(one: Row) -> Text:
    """Return one rank as a line."""
    cells = (
        str(one.rank),
        f"{one.behind:,}" if one.behind >= 0 else "",
        f"{one.silent_s:,} s" if one.silent_s >= 0 else "",
        f"{one.own} %" if one.own >= 0 else "",
        f"{one.waiting} %" if one.waiting >= 0 else "",
    )
    line = Text("".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True)))
    line.append(f"  {printable(one.phase)[:10]:<10}  ")
    line.append(f"{one.judged:<8}", style=JUDGED_STYLES.get(one.judged, "red" if one.judged == "gone" else ""))
    return line.append(f"  {printable(one.node)}")


def _ordered(
    judged: Sequence[int], behind: Sequence[int], quiet: Sequence[int], own: Sequence[int]
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield what ranks are ordered by, the worst lowest: judged, behind, silent, own work, and at last their number."""
    ranks = len(judged)
    columns = (_filled(column, ranks, unknown) for column, unknown in ((behind, UNKNOWN), (quiet, UNKNOWN), (own, 0)))
    for rank, (judgement, lag, silent, work) in enumerate(zip(judged, *columns, strict=True)):
        # Own work in tenths: ranks that are about equal must not change places once a second.
        yield (
            0 if judgement >= _UNHEARD else -judgement,  # no report, or starting: no fault of the rank
            -(lag % UNKNOWN),
            -(silent % UNKNOWN) if silent > _BLINK_S else 0,
            -(work // 10),
            rank,
        )


def _filled(column: Sequence[int], ranks: int, unknown: int) -> Sequence[int]:
    """Return a column as long as there are ranks: one that nothing is known of may be empty."""
    return column if len(column) == ranks else [*column[:ranks], *[unknown] * (ranks - len(column))]


def _at(column: Sequence[int], rank: int, otherwise: int) -> int:
    return column[rank] if rank < len(column) else otherwise


def _known(value: int, unknown: int) -> int:
    return -1 if value == unknown else value


def _word(words: Sequence[str], place: int) -> str:
    return words[place] if place < len(words) else ""
