# SPDX-License-Identifier: Apache-2.0
"""Bring the collectives of all ranks together: rows in any order become grids.

A collective that not all its ranks have reported yet is given back and waited for; after two passes it is taken as it
is, with gaps, when at least half have reported it.

Nothing is sorted: places and sequence numbers are small and dense, so each row knows its cell. The grids of all kinds
are filled at once, by pieces of rows; what is not in them then has not been reported. Only where that would ask for too
much memory, or where a row came twice, each kind is looked at by itself and its rows are counted.

Shapes: R rows, P places, C lines of a kind, G ranks of a line, K sequence numbers. Pure.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megascale_ops.diagnosis.skew.tables import (
    PATIENCE,
    Bools,
    Grid,
    Kind,
    Longs,
    Matched,
    Rows,
    join_rows,
    no_rows,
)

# Rows at a time: what is made of them (8 bytes a row) stays in a cache. Twelve million rows in one go would spend half
# of the time on page faults and on fetching what the step before has written; 2^16 to 2^18 are alike.
_PIECE = 1 << 17
# A line with runaway numbers (a clash of names, garbage) must not take unbounded memory.
_MOST_SPREAD = 16
# Nor may siblings that report different numbers: so many cells for each row, most of them empty.
_MOST_CELLS = 2
# Numbers farther apart than this are garbage, and their differences may not fit.
_FARTHEST = 1 << 62


class _Codes(NamedTuple):
    """A number for each sequence number of each kind; a row's is ``first[place] + seq``."""

    first: Longs  # P
    low: Longs  # kinds: the sequence number of the first code of each
    told: Bools  # kinds, codes of each: whether a row has it

    def seqs(self, kind: int) -> Longs:
        """Return the sequence numbers that a kind has, in order: K."""
        found: Longs = np.flatnonzero(self.told[kind]) + self.low[kind]
        return found


class _Fate(NamedTuple):
    """What becomes of the sequence numbers of one kind that is not whole; K each."""

    whole: Bools  # all ranks of all lines have reported it
    partial: Bools  # waited for long enough: taken with gaps
    waits: Bools
    enough: Bools  # C, K: at least half of the line's ranks have reported it
    dropped: int  # rows waited for in vain


def match(rows: Rows, kinds: Sequence[Kind], places: int) -> Matched:
    """Put rows into grids.

    Args:
        rows: of all ranks, in any order.
        kinds: of ``arrange``.
        places: how many there are.
    """
    rows, odd = _even(rows)
    kind_of = np.full(places, -1, np.int64)
    for number, kind in enumerate(kinds):
        kind_of[kind.places] = number
    rows, alone = _split(rows, kind_of)
    # No other rank has reported this line yet: its other ranks may come.
    dropped = int(np.count_nonzero(alone.age >= PATIENCE))
    alone = _older(alone.pick(alone.age < PATIENCE))
    found = _together(rows, kinds, kind_of) or _one_by_one(rows, kinds, kind_of)
    return Matched(found.grids, join_rows([found.waiting, alone]), odd, dropped + found.dropped)


def _even(rows: Rows) -> tuple[Rows, int]:
    """Return the rows whose clock did not jump, and how many others there were."""
    # NaN is the least of what it is among, and not >= 0.
    if all(rows.took_s[part].min() >= 0 and not (rows.own_s[part] < 0).any() for part in _parts(len(rows.place))):
        return rows, 0
    good = (rows.took_s >= 0) & ~(rows.own_s < 0)
    return rows.pick(np.flatnonzero(good)), len(good) - int(np.count_nonzero(good))


def _split(rows: Rows, kind_of: Longs) -> tuple[Rows, Rows]:
    """Return the rows that belong to a kind, and those that do not."""
    alone = kind_of < 0
    if alone.any():
        is_alone = alone[rows.place]
        if is_alone.any():
            return rows.pick(np.flatnonzero(~is_alone)), rows.pick(np.flatnonzero(is_alone))
    return rows, no_rows()


def _older(rows: Rows) -> Rows:
    """Return rows that have waited for one more pass."""
    return rows._replace(age=rows.age + np.uint8(1))


def _together(rows: Rows, kinds: Sequence[Kind], kind_of: Longs) -> Matched | None:
    """Fill the grids of all kinds at once; None where that asks for too much memory, or a row came twice.

    There are as many cells that are not empty as rows: so no two rows share a cell.
    """
    codes = _codes(rows, kind_of, len(kinds))
    if codes is None:
        return None
    sizes = [kind.places.size * int(np.count_nonzero(told)) for kind, told in zip(kinds, codes.told, strict=True)]
    cells = sum(sizes)
    if cells > _MOST_CELLS * len(rows.place):
        return None
    firsts = np.cumsum([0, *sizes]).tolist()  # the grids lie one behind the other
    start = np.zeros(len(kind_of), np.int64)
    for kind, first, size in zip(kinds, firsts, sizes, strict=False):
        start[kind.places.ravel()] = first + size // kind.places.size * np.arange(kind.places.size)
    took_s = np.full(cells, np.nan, np.float32)
    own_s = np.empty_like(took_s) if cells == len(rows.place) else took_s.copy()
    for part, cell in _cells(rows, kind_of, codes, start):
        took_s[cell] = rows.took_s[part]
        own_s[cell] = rows.own_s[part]
    if sum(np.count_nonzero(took_s[part] >= 0) for part in _parts(cells)) < len(rows.place):
        return None
    grids = []
    for number, (kind, first, size) in enumerate(zip(kinds, firsts, sizes, strict=False)):
        shape, part = (*kind.places.shape, size // kind.places.size), slice(first, first + size)
        took, own = took_s[part].reshape(shape), own_s[part].reshape(shape)
        grids.append(Grid(kind, codes.seqs(number), took, own, whole=True))
    if cells == len(rows.place):
        return Matched([grid for grid in grids if len(grid.seq)], no_rows(), 0, 0)
    return _with_gaps(rows, grids, kind_of, codes)


def _codes(rows: Rows, kind_of: Longs, kinds: int) -> _Codes | None:
    """Number the sequence numbers of each kind; None where there are none, or too far apart for a table.

    Args:
        rows: all of some kind.
        kind_of: P.
        kinds: how many there are.
    """
    parts = _parts(len(rows.place))
    if not parts:
        return None
    ends = [(int(rows.seq[part].min()), int(rows.seq[part].max())) for part in parts]
    lowest, highest = min(end[0] for end in ends), max(end[1] for end in ends)
    if highest - lowest >= _FARTHEST:
        return None
    most = (len(rows.place) + 65_536) // kinds  # a byte for each row
    low, spread = np.full(kinds, lowest), highest - lowest + 1
    if spread > most:
        # Each communicator counts by itself; those of one kind have come about as far.
        low = _some_seq(rows, kind_of, low)
        ends = [(int(away.min()), int(away.max())) for _, away in _sums(rows, -low[kind_of])]
        least = min(end[0] for end in ends)
        low, spread = low + least, max(end[1] for end in ends) - least + 1
        if spread > most:
            return None
    first = (np.arange(kinds) * spread - low)[kind_of]
    told = np.zeros(kinds * spread, np.bool_)
    for _, code in _sums(rows, first):
        told[code] = True
    return _Codes(first, low, told.reshape(kinds, spread))


def _some_seq(rows: Rows, kind_of: Longs, default: Longs) -> Longs:
    """Return a sequence number of each kind, any that occurs."""
    found, unseen = default.copy(), np.ones(len(default), np.bool_)
    for part in _parts(len(rows.place)):
        kind = kind_of[rows.place[part]]
        found[kind], unseen[kind] = rows.seq[part], False
        if not unseen.any():
            break
    return found


def _cells(rows: Rows, kind_of: Longs, codes: _Codes, start: Longs) -> Iterator[tuple[slice, Longs]]:
    """Yield pieces of the rows, and which cell each row belongs into: its place's first plus its number's column."""
    lowest, above = codes.told.argmax(axis=1), codes.told.shape[1] - codes.told[:, ::-1].argmax(axis=1)
    told = np.count_nonzero(codes.told, axis=1)
    if ((told == 0) | (told == above - lowest)).all():  # columns are as far apart as numbers
        yield from _sums(rows, start - (codes.low + lowest)[kind_of])
        return
    column = np.cumsum(codes.told, axis=1).ravel() - 1
    for part, code in _sums(rows, codes.first):
        cell = start[rows.place[part]]
        cell += column[code]
        yield part, cell


def _sums(rows: Rows, of_place: Longs) -> Iterator[tuple[slice, Longs]]:
    """Yield pieces of the rows, and for each row ``of_place[place] + seq``, valid until the next piece."""
    space = np.empty(_PIECE, np.int64)
    for part in _parts(len(rows.place)):
        place = rows.place[part]
        sums = space[: len(place)]
        np.take(of_place, place, out=sums, mode="clip")  # "raise" copies; every place is one of P
        sums += rows.seq[part]
        yield part, sums


def _parts(size: int) -> list[slice]:
    """Return the pieces of so many rows."""
    return [slice(first, min(first + _PIECE, size)) for first in range(0, size, _PIECE)]


def _with_gaps(rows: Rows, filled: Sequence[Grid], kind_of: Longs, codes: _Codes) -> Matched:
    """Take what met, or has waited for long enough, out of grids with empty cells; give the rest back."""
    aged, waits = np.zeros_like(codes.told), np.zeros_like(codes.told)
    late = np.flatnonzero(rows.age >= PATIENCE)
    aged.ravel()[codes.first[rows.place[late]] + rows.seq[late]] = True
    grids: list[Grid] = []
    dropped = 0
    for grid, told, late_ones, waiting in zip(filled, codes.told, aged, waits, strict=True):
        fate = _fate(grid, late_ones[told])
        waiting[told] = fate.waits
        dropped += fate.dropped
        grids += _taken(grid, fate)
    if not waits.any():
        return Matched(grids, no_rows(), 0, dropped)
    given = waits.ravel()
    back = np.concatenate([np.flatnonzero(given[code]) + part.start for part, code in _sums(rows, codes.first)])
    kinds = kind_of[rows.place[back]].astype(np.min_scalar_type(len(filled)))
    return Matched(grids, _older(rows.pick(back[np.argsort(kinds, kind="stable")])), 0, dropped)


def _fate(grid: Grid, aged: Bools) -> _Fate:
    """Decide for each sequence number of a grid: take, take with gaps, wait or drop.

    Args:
        grid: all that was reported; NaN where it was not.
        aged: K, whether a row of it has waited for long enough.
    """
    lines, ranks, width = grid.took_s.shape
    empty = np.flatnonzero(np.isnan(grid.took_s))
    missing = np.bincount(empty // (ranks * width) * width + empty % max(width, 1), minlength=lines * width)
    told = ranks - missing.reshape(lines, width)
    whole, enough = (told == ranks).all(axis=0), 2 * told >= ranks
    partial = ~whole & aged & enough.any(axis=0)
    dropped = int(told[~enough & (~whole & aged)].sum())
    return _Fate(whole, partial, ~whole & ~aged, enough, dropped)


def _taken(grid: Grid, fate: _Fate) -> list[Grid]:
    """Return the sequence numbers that are whole as a grid, and as another those that are taken with gaps."""
    if fate.whole.all():
        return [grid] if len(grid.seq) else []
    found = []
    for chosen, is_whole in ((fate.whole, True), (fate.partial, False)):
        if chosen.any():
            took_s, own_s = (np.compress(chosen, column, axis=2) for column in (grid.took_s, grid.own_s))
            if not is_whole:
                few = np.broadcast_to(~fate.enough[:, None, chosen], took_s.shape)
                took_s[few] = own_s[few] = np.nan
            found.append(Grid(grid.kind, grid.seq[chosen], took_s, own_s, is_whole))
    return found


def _one_by_one(rows: Rows, kinds: Sequence[Kind], kind_of: Longs) -> Matched:
    """Fill the grids of one kind after the other, counting how many rows of each collective there are."""
    at = np.zeros(len(kind_of), np.int64)
    for kind in kinds:
        at[kind.places.ravel()] = np.arange(kind.places.size)
    row_kind = kind_of[rows.place]
    grids: list[Grid] = []
    waiting: list[Rows] = []
    dropped = 0
    for number, kind in enumerate(kinds):
        picked = rows.pick(np.flatnonzero(row_kind == number))
        if len(picked.place):
            dropped += _fill(picked, kind, at, grids, waiting)
    return Matched(grids, join_rows(waiting), 0, dropped)


def _fill(rows: Rows, kind: Kind, at: Longs, grids: list[Grid], waiting: list[Rows]) -> int:
    """Make the grids of one kind; return how many rows were dropped."""
    seqs, column = _columns(rows.seq)
    if len(column) == kind.places.size * len(seqs):  # all ranks have reported everything
        grid = _grid(rows, kind, at, (seqs, column, np.ones(len(seqs), np.bool_)), is_whole=True)
        if grid.whole:
            grids.append(grid)
            return 0
    ranks = kind.places.shape[1]
    line_cell = at[rows.place] // ranks * len(seqs) + column
    # How many ranks of each line have reported each number: lines of one kind need not have the same numbers.
    told = np.bincount(line_cell, minlength=len(kind.lines) * len(seqs)).reshape(len(kind.lines), -1)
    whole = (told == ranks).all(axis=0)
    aged = np.zeros(len(seqs), np.bool_)
    aged[column[rows.age >= PATIENCE]] = True
    waits = rows.pick(~whole[column] & ~aged[column])
    waiting.append(_older(waits))
    enough = (2 * told >= ranks).ravel()[line_cell]
    partial = ~whole & aged & (2 * told >= ranks).any(axis=0)
    dropped = int(np.count_nonzero(~whole[column] & aged[column] & ~enough))
    if whole.any():
        grids.append(_grid(rows, kind, at, (seqs, column, whole), is_whole=True))
    if partial.any():
        grids.append(_grid(rows.pick(enough), kind, at, (seqs, column[enough], partial), is_whole=False))
    return dropped


def _columns(seq: Longs) -> tuple[Longs, Longs]:
    """Return the sequence numbers that occur, and the place of each row's among them."""
    low = int(seq.min())
    spread = int(seq.max()) - low + 1
    if spread > _MOST_SPREAD * len(seq) + 65_536:
        found, column = np.unique(seq, return_inverse=True)
        return found, column
    away = seq - low
    present = np.zeros(spread, np.bool_)
    present[away] = True
    found = np.flatnonzero(present)
    if len(found) == spread:
        return found + low, away
    index = np.cumsum(present, dtype=np.int64)
    index -= 1
    return found + low, index[away]


def _grid(rows: Rows, kind: Kind, at: Longs, columns: tuple[Longs, Longs, Bools], *, is_whole: bool) -> Grid:
    """Put rows of one kind into a grid.

    Args:
        rows: of the kind.
        kind: which.
        at: P, which of the kind's places each is.
        columns: its sequence numbers (K), which of them each row has (R), and which to take (K).
        is_whole: whether every rank should have reported each of these.
    """
    seqs, column, chosen = columns
    width = int(np.count_nonzero(chosen))
    if width < len(seqs):
        renumbered = np.cumsum(chosen) - 1
        keep = chosen[column]
        rows, column = rows.pick(keep), renumbered[column[keep]]
    cell = at[rows.place]
    cell *= width
    cell += column
    shape = (*kind.places.shape, width)
    took_s = np.full(kind.places.size * width, np.nan, np.float32)
    own_s = np.full(kind.places.size * width, np.nan, np.float32)
    took_s[cell] = rows.took_s
    own_s[cell] = rows.own_s
    # The same row twice hides one that is missing.
    is_whole = is_whole and not np.isnan(took_s.sum())
    return Grid(kind, seqs[chosen], took_s.reshape(shape), own_s.reshape(shape), is_whole)
