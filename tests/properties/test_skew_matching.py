# SPDX-License-Identifier: Apache-2.0
"""Collectives brought together, against a plain model: rows doubled, lost, odd, early, and numbers that run wild."""

from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.diagnosis.skew import matching
from megascale_ops.diagnosis.skew.matching import match
from megascale_ops.diagnosis.skew.tables import PATIENCE, Kind, Line, Rows, arrange

LOWEST = (0, 0, 7, -3, 1_000_000, 1 << 40, -(1 << 63))


class Case(NamedTuple):
    """Rows, and what they belong to."""

    kinds: list[Kind]
    places: int
    rows: Rows


class Expected(NamedTuple):
    """What the model says; cells and rows by what they hold."""

    grids: list[tuple[Kind, list[int], npt.NDArray[np.float32], npt.NDArray[np.float32], bool]]
    waiting: list[tuple[float, ...]]
    odd: int
    dropped: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw some kinds of sibling lines, some of a single rank, and their rows with so many faults of each sort."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=3))
    width, stride = draw(st.integers(1, 5)), draw(st.sampled_from((1, 1, 3)))
    lost, doubled, odd, aged, wild = (draw(st.sampled_from((0.0, 0.0, 0.1, 0.5))) for _ in range(5))
    order = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    lines, place_rank, place_line, rows = [], [], [], []
    for number, (siblings, ranks) in enumerate(shapes):
        low = draw(st.sampled_from(LOWEST))
        for sibling in range(siblings):
            for rank in range(ranks):
                place_rank.append(sibling * ranks + rank)
                place_line.append(len(lines))
                seqs = [low + stride * at for at in range(width) if order.random() >= lost]
                seqs += [seq for seq in seqs if order.random() < doubled * 0.3]
                seqs += [int(order.integers(-(1 << 60), 1 << 60))] * bool(order.random() < wild * 0.2)
                rows += [(len(place_rank) - 1, seq) for seq in seqs]
            lines.append(Line(f"{number}-{sibling}", f"function-{number}"))
    order.shuffle(rows)
    count = len(rows)
    took_s, own_s = order.random(count, np.float32), order.random(count, np.float32)
    own_s[order.random(count) < 0.2] = np.nan
    for column in (took_s, own_s):
        column[order.random(count) < odd * 0.2] = -1
    took_s[order.random(count) < odd * 0.1] = np.nan
    age = np.where(order.random(count) < aged, order.integers(1, 4, count), 0).astype(np.uint8)
    place = np.array([one[0] for one in rows], np.int32)
    seq = np.array([one[1] for one in rows], np.int64)
    kinds = arrange(lines, np.array(place_rank, np.int32), np.array(place_line, np.int32))
    return Case(kinds, len(place_rank), Rows(place, seq, took_s, own_s, age))


def model(case: Case) -> Expected:
    """Match rows one after the other."""
    rows = list(zip(*(column.tolist() for column in case.rows), strict=True))
    good = [row for row in rows if row[2] >= 0 and not row[3] < 0]
    expected = Expected([], [], len(rows) - len(good), 0)
    dropped = 0
    for kind in case.kinds:
        cell_of = {place: at for at, place in np.ndenumerate(kind.places)}
        mine = [(cell_of[row[0]], row) for row in good if row[0] in cell_of]
        ranks = kind.places.shape[1]
        told = Counter((line, row[1]) for (line, _), row in mine)
        aged = {row[1] for _, row in mine if row[4] >= PATIENCE}
        seqs = sorted({row[1] for _, row in mine})
        whole = [seq for seq in seqs if all(told[line, seq] == ranks for line in range(len(kind.lines)))]
        enough = {(line, seq) for line, seq in told if 2 * told[line, seq] >= ranks}
        partial = [seq for seq in seqs if seq in aged and seq not in whole and any(key[1] == seq for key in enough)]
        expected.waiting.extend(
            (*row[:4], row[4] + 1.0) for _, row in mine if row[1] not in whole and row[1] not in aged
        )
        dropped += sum(
            row[1] in aged and row[1] not in whole and (line, row[1]) not in enough for (line, _), row in mine
        )
        for chosen, is_whole in ((whole, True), (partial, False)):
            took_s, own_s = np.full((2, *kind.places.shape, len(chosen)), np.nan, np.float32)
            for (line, rank), row in mine:
                if row[1] in chosen and (is_whole or (line, row[1]) in enough):
                    at = (line, rank, chosen.index(row[1]))
                    took_s[at], own_s[at] = row[2:4]
            if chosen:
                expected.grids.append((kind, chosen, took_s, own_s, is_whole and not np.isnan(took_s).any()))
    known = {place for kind in case.kinds for place in kind.places.ravel().tolist()}
    alone = [row for row in good if row[0] not in known]
    expected.waiting.extend((*row[:4], row[4] + 1.0) for row in alone if row[4] < PATIENCE)
    return expected._replace(dropped=dropped + sum(row[4] >= PATIENCE for row in alone))


@pytest.mark.parametrize("piece", [3, 1 << 17], ids=["in pieces", "in one go"])
@given(case=cases())
def test_rows_meet_as_the_model_says(piece: int, case: Case) -> None:
    """Grids, what waits and in which order, what is odd and what is dropped: to the last bit."""
    expected = model(case)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matching, "_PIECE", piece)
        matched = match(case.rows, case.kinds, case.places)

    assert (matched.odd, matched.dropped) == (expected.odd, expected.dropped)
    assert len(matched.grids) == len(expected.grids)
    for grid, (kind, seqs, took_s, own_s, is_whole) in zip(matched.grids, expected.grids, strict=True):
        assert grid.kind is kind
        assert grid.seq.tolist() == seqs
        np.testing.assert_array_equal(grid.took_s, took_s, strict=True)
        np.testing.assert_array_equal(grid.own_s, own_s, strict=True)
        assert grid.whole == is_whole
    waiting = np.array(expected.waiting, object).reshape(-1, 5)
    for column, wanted in zip(matched.waiting, waiting.T, strict=True):
        np.testing.assert_array_equal(column, wanted.astype(column.dtype), strict=True)


@given(case=cases())
def test_what_waits_is_the_same_however_the_rows_are_looked_at(case: Case) -> None:
    """All kinds at once, or one by one: the fast way is never a different one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matching, "_MOST_CELLS", 0)
        slow = match(case.rows, case.kinds, case.places)

    fast = match(case.rows, case.kinds, case.places)

    assert (fast.odd, fast.dropped, len(fast.grids)) == (slow.odd, slow.dropped, len(slow.grids))
    for one, other in zip(fast.grids, slow.grids, strict=True):
        for column, same in zip(one[1:], other[1:], strict=True):
            np.testing.assert_array_equal(column, same)
    for column, same in zip(fast.waiting, slow.waiting, strict=True):
        np.testing.assert_array_equal(column, same, strict=True)
