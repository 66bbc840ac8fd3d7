# SPDX-License-Identifier: Apache-2.0
"""The tables of the arrival-skew engine: rows as they come in, grids in which those that met stand side by side.

A *line* is one stream of collectives: one function of one communicator. A *place* is one rank in one line. Lines that
do the same in different corners of the mesh (every tensor-parallel group of eight does) are *siblings* and make one
*kind*; siblings have the same function, size and number of ranks, and their ranks lie apart in the same way. A *grid*
holds one kind: [line, rank of the line, sequence number]. ``matching`` makes grids of rows.

Shapes: R rows, P places, C lines of a kind, G ranks of a line, K sequence numbers. Pure.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_ops.diagnosis.statistics import sampling

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

PATIENCE = 2


class Line(NamedTuple):
    """One stream of collectives."""

    communicator: str
    function: str
    size_bits: int = 0
    weight: float = 1.0  # how many collectives each row stands for


class Rows(NamedTuple):
    """Finished collectives, one row for each rank in each; R values each."""

    place: Ints
    seq: Longs
    took_s: Floats
    own_s: Floats  # worked by itself before; NaN: not known
    age: npt.NDArray[np.uint8]  # passes that it has waited for the others

    def pick(self, which: Bools | Longs | slice) -> "Rows":
        """Return some of them."""
        return Rows(self.place[which], self.seq[which], self.took_s[which], self.own_s[which], self.age[which])


class Kind(NamedTuple):
    """Sibling lines."""

    function: str
    size_bits: int
    lines: Ints  # C
    places: Ints  # C, G
    ranks: Ints  # C, G
    weight: float


class Grid(NamedTuple):
    """The collectives of one kind that met."""

    kind: Kind
    seq: Longs  # K
    took_s: Floats  # C, G, K; NaN where a rank has not reported it
    own_s: Floats  # C, G, K; NaN where not known
    whole: bool  # nothing is missing in took_s


class Matched(NamedTuple):
    """What became of the rows."""

    grids: list[Grid]
    waiting: Rows  # to be given again with the next ones
    odd: int  # clocks that jumped
    dropped: int  # too few ranks reported them


def some_of(count: int, most: int) -> Longs:
    """Return the places of ``sampling.some_of``, to index arrays with."""
    return np.array(sampling.some_of(count, most), np.int64)


def no_rows() -> Rows:
    """Return an empty table."""
    return Rows(
        np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.float32),
        np.zeros(0, np.uint8),
    )  # fmt: skip


def join_rows(tables: Sequence[Rows]) -> Rows:
    """Return several tables as one."""
    if not tables:
        return no_rows()
    return Rows(
        place=np.concatenate([table.place for table in tables]),
        seq=np.concatenate([table.seq for table in tables]),
        took_s=np.concatenate([table.took_s for table in tables]),
        own_s=np.concatenate([table.own_s for table in tables]),
        age=np.concatenate([table.age for table in tables]),
    )


def arrange(lines: Sequence[Line], place_rank: Ints, place_line: Ints) -> list[Kind]:
    """Group places into lines and lines into kinds; lines of a single rank are left out.

    Args:
        lines: all lines.
        place_rank: P, whose place it is.
        place_line: P, in which line.
    """
    order = np.lexsort((place_rank, place_line))
    bounds = np.searchsorted(place_line[order], np.arange(len(lines) + 1))
    alike: dict[tuple[object, ...], list[tuple[int, Longs]]] = {}
    taken: dict[tuple[object, ...], int] = {}
    for number in sorted(range(len(lines)), key=lambda number: _turn_of(lines[number].communicator)):
        places = order[bounds[number] : bounds[number + 1]]
        if len(places) < 2:
            continue
        line, ranks = lines[number], place_rank[places]
        # Two communicators of the same ranks do different things: the first of each corner are siblings, the second.
        own = (line.function, line.size_bits, ranks.tobytes())
        turn = taken[own] = taken.get(own, -1) + 1
        shape: tuple[object, ...] = (line.function, line.size_bits, (ranks - ranks[0]).tobytes(), turn)
        alike.setdefault(shape, []).append((number, places))
    kinds = []
    for shape, members in alike.items():
        members.sort(key=lambda member: int(place_rank[member[1][0]]))
        places = np.array([places for _, places in members], np.int32)
        weights = sorted(lines[number].weight for number, _ in members)
        kinds.append(
            Kind(
                function=str(shape[0]),
                size_bits=lines[members[0][0]].size_bits,
                lines=np.array([number for number, _ in members], np.int32),
                places=places,
                ranks=place_rank[places],
                weight=weights[len(weights) // 2],
            )
        )
    return kinds


def _turn_of(communicator: str) -> int:
    """Return when a communicator was made, by its name: torch counts its groups; a hash has no order.

    Without an order, lines stay in the order in which they were first used, the same in every corner.
    """
    return int(communicator) if communicator.isdecimal() and len(communicator) < 20 else -1


def before(rank: Ints, start_ns: Longs, end_ns: Longs) -> Longs:
    """Return for each row which row of the same rank ended last before it started; -1: none did.

    Needs no order of the rows and no common clock: each rank's times are moved into a stretch of their own.
    """
    if not len(rank):
        return np.zeros(0, np.int64)
    ranks, index = np.unique(rank, return_inverse=True)
    origin = np.full(len(ranks), np.iinfo(np.int64).max)
    np.minimum.at(origin, index, np.minimum(start_ns, end_ns))
    start = start_ns - origin[index]
    end = end_ns - origin[index]
    stretch = int(max(start.max(), end.max())) + 2
    start, end = start + index * stretch, end + index * stretch
    order = np.argsort(end, kind="stable")
    found = np.searchsorted(end[order], start, side="right") - 1
    # A collective of no length ends where it starts: it is not before itself.
    found = np.where((found >= 0) & (order[np.maximum(found, 0)] == np.arange(len(rank))), found - 1, found)
    one = order[np.maximum(found, 0)]
    return np.where((found >= 0) & (index[one] == index), one, -1)
