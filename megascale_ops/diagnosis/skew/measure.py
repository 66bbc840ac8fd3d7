# SPDX-License-Identifier: Apache-2.0
"""Measure one pass: which ranks waited, came last, worked longer than their equals, and which lines move slowly.

All ranks of a collective leave it at about the same moment. So the shortest of their durations is what moving the data
took, and what a rank needed beyond that it waited; no clock of one machine is compared with that of another.

Equals are ranks of the same class (``classes``). A rank's own work before a collective is compared with the median of
its equals before the same collective of the same or a sibling line. Of many more than ``SAMPLED`` equals so many are
asked for the median, from all places of the mesh: it is off by a tenth of one rank's noise, and for all of them alike.

Shapes: N ranks, B blocks; of a grid C lines, G ranks of a line, K collectives. Pure.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_ops.diagnosis.skew.tables import Bools, Floats, Grid, Ints, Kind, Longs, some_of
from megascale_ops.diagnosis.statistics.cooperative import Pieces

SAMPLED = 64
# 96 collectives show a rank's median and its worst cases; all 1,000 would cost as much as the rest of the pass.
_LATE_SAMPLED = 96
# Below it, each one's equals are all but itself.
_SMALL = 16
# A single late start is far out of the noise and a good part of a step, as in ``stragglers``.
JUMP_NOISES, JUMP_SHARE = 8.0, 0.25
_MAD_TO_SPREAD = 1.4826
# Of a pass; a cluster where more happens has another problem.
_MOST_JUMPS = 2048

Doubles = npt.NDArray[np.float64]


class Jump(NamedTuple):
    """One late start of one rank."""

    rank: int
    block: int
    excess_s: float
    weight: float  # how many such starts it stands for


class Transfers(NamedTuple):
    """What moving the data took, of the lines of one kind."""

    kind: Kind
    excess_s: Floats  # C, B: more than the median of the siblings; NaN where there is none to compare
    ratio: Floats  # C: to the median of the siblings
    transfer_s: Floats  # C: the median


class Pass(NamedTuple):
    """One pass. Seconds are estimates for all collectives, also those that were not sampled."""

    met: Longs  # N: how many of the rank's collectives were looked at
    waited_s: Doubles  # N
    last: Doubles  # N: in how many of ``met`` it came last
    late_p50_s: Floats  # N: behind the first to arrive; NaN where nothing met
    late_p99_s: Floats  # N
    excess_s: Floats  # N, B: own work beyond the median of its equals; NaN where it has none or reported nothing
    jumps: list[Jump]
    transfers: list[Transfers]


class Others(NamedTuple):
    """What own work is compared with: rows of one grid that are equals."""

    rows: Longs
    middle_s: Floats  # (1 or len(rows)), K


def measure(grids: Sequence[Grid], classes: Ints, blocks: int, jump_s: float) -> Pieces[Pass]:
    """Measure one pass piece by piece: of 12,288 ranks and 40 collectives each piece takes 5 to 8 ms.

    Args:
        grids: of ``match``.
        classes: N, equal numbers for equal ranks; negative: it has no equals.
        blocks: into how many equal parts to cut the pass.
        jump_s: the least excess of a single start that counts as a jump.
    """
    ranks = len(classes)
    found = Pass(
        met=np.zeros(ranks, np.int64),
        waited_s=np.zeros(ranks),
        last=np.zeros(ranks),
        late_p50_s=np.full(ranks, np.nan, np.float32),
        late_p99_s=np.full(ranks, np.nan, np.float32),
        excess_s=np.full((ranks, blocks), np.nan, np.float32),
        jumps=[],
        transfers=[],
    )
    late: list[tuple[Ints, Floats]] = []
    for grid in grids:
        low = _fastest(grid)
        late.append((grid.kind.ranks.ravel(), _waits(grid, low, found)))
        yield
        own_work(grid, classes, found, jump_s)
        transfers = _transfers(grid, _of_all(grid, low), blocks)
        if transfers is not None:
            found.transfers.append(transfers)
        yield
    _lateness(late, found)
    found.jumps.sort(key=lambda jump: -jump.excess_s)
    del found.jumps[_MOST_JUMPS:]
    return found


def _fastest(grid: Grid) -> Floats:
    """Return what moving the data took: C, K."""
    took_s = grid.took_s if grid.whole else np.where(np.isnan(grid.took_s), np.float32(np.inf), grid.took_s)
    low: Floats = took_s.min(axis=1)
    return low


def _of_all(grid: Grid, low: Floats) -> Floats:
    """Return the time of moving the data where every rank reported it, else infinity: the last may be missing."""
    if grid.whole:
        return low
    moved: Floats = np.where(np.isnan(grid.took_s).any(axis=1), np.float32(np.inf), low)
    return moved


def _waits(grid: Grid, low: Floats, found: Pass) -> Floats:
    """Add up waiting and coming last; return the lateness in some of the collectives: C * G, up to 96."""
    ranks = grid.kind.ranks.ravel()
    took_s, width = grid.took_s, grid.took_s.shape[2]
    if grid.whole:
        met = np.full(took_s.shape[:2], width)
        waited = took_s.sum(axis=2) - low.sum(axis=1)[:, None]
    else:
        there = ~np.isnan(took_s)
        met = there.sum(axis=2)
        waited = np.where(there, took_s - low[:, None], 0).sum(axis=2)
    last = np.count_nonzero(took_s <= low[:, None], axis=2)
    np.add.at(found.met, ranks, met.ravel())
    np.add.at(found.waited_s, ranks, waited.ravel() * grid.kind.weight)
    np.add.at(found.last, ranks, last.ravel())
    # A copy: what follows reads it twice, and reads single numbers of a row slowly.
    some = np.ascontiguousarray(took_s[:, :, some_of(width, _LATE_SAMPLED)])
    high = some.max(axis=1) if grid.whole else np.where(np.isnan(some), -np.float32(np.inf), some).max(axis=1)
    late: Floats = (high[:, None] - some).reshape(len(ranks), -1)
    return late


def _lateness(late: list[tuple[Ints, Floats]], found: Pass) -> None:
    """Note each rank's median and 99th percentile over all its lines."""
    together: dict[int, list[tuple[Ints, Floats]]] = {}
    for ranks, late_s in late:
        together.setdefault(len(ranks), []).append((ranks, late_s))
    # Kinds in which the same ranks take part stand side by side; of other kinds the worst counts.
    for group in together.values():
        parts = {ranks.tobytes(): (ranks, []) for ranks, _ in group}  # type: dict[bytes, tuple[Ints, list[Floats]]]
        for ranks, late_s in group:
            parts[ranks.tobytes()][1].append(late_s)
        for ranks, columns in parts.values():
            ordered = np.sort(np.concatenate(columns, axis=1), axis=1)  # NaN last
            count = np.count_nonzero(~np.isnan(ordered), axis=1)
            row, high = np.arange(len(ranks)), np.maximum(count - 1, 0)
            np.fmax.at(found.late_p50_s, ranks, ordered[row, high // 2])
            np.fmax.at(found.late_p99_s, ranks, ordered[row, np.ceil(0.99 * high).astype(np.int64)])


def own_work(grid: Grid, classes: Ints, found: Pass, jump_s: float) -> None:
    """Add up how much longer each rank worked by itself than its equals, block by block; note single jumps."""
    ranks = grid.kind.ranks.ravel()
    own_s = grid.own_s.reshape(len(ranks), -1)
    width, blocks = own_s.shape[1], found.excess_s.shape[1]
    block_of = (np.arange(width) * blocks) // width
    for others in _equals(own_s, classes[ranks]):
        mine, noise_s = own_s[_slice(others.rows)], _noise_s(own_s, others)
        sums = _by_block(mine, block_of, blocks)
        who, touched = ranks[others.rows], np.unique(block_of)
        told: Bools = np.ones(len(who), np.bool_)
        if np.isnan(sums.sum()):
            # What is not known is taken for as long as the equals'; a rank of which nothing is known stays NaN.
            told = np.asarray(np.isfinite(mine).any(axis=1))
            mine = np.where(np.isnan(mine), others.middle_s, mine)
            sums = _by_block(mine, block_of, blocks)
        sums -= _by_block(others.middle_s, block_of, blocks)
        _add(found.excess_s, who[told], sums[told] * np.float32(grid.kind.weight), touched)
        most_s = others.middle_s + np.float32(max(jump_s, JUMP_NOISES * noise_s))
        beyond = mine > most_s
        if beyond.any():
            rows, columns = np.nonzero(beyond)
            over_s = mine[rows, columns] - np.broadcast_to(others.middle_s, mine.shape)[rows, columns]
            worst = np.argsort(-over_s)[:_MOST_JUMPS]
            found.jumps.extend(
                Jump(int(who[rows[one]]), int(block_of[columns[one]]), float(over_s[one]), grid.kind.weight)
                for one in worst
            )


def _slice(rows: Longs) -> slice | Longs:
    """Return neighbouring rows as a slice: they need not be copied then."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def _add(total: Floats, ranks: Ints, sums: Floats, touched: Longs) -> None:
    """Add ``sums`` of these ranks in the touched blocks; what was not known so far is known then."""
    at = np.ix_(ranks, touched)
    if len(np.unique(ranks)) == len(ranks):
        now = total[at]
        total[at] = np.where(np.isnan(now), 0, now) + sums[:, touched]
        return
    for rank, row in zip(ranks.tolist(), sums[:, touched], strict=True):
        now = total[rank, touched]
        total[rank, touched] = np.where(np.isnan(now), 0, now) + row


def _equals(own_s: Floats, classes: Ints) -> list[Others]:
    """Return for each class what its members are compared with."""
    found = []
    for number in np.unique(classes[classes >= 0]):
        rows = np.flatnonzero(classes == number)
        if len(rows) > 1:
            found.append(Others(rows, _middle(own_s[rows[some_of(len(rows), SAMPLED)]], len(rows) > _SMALL)))
    return found


def _middle(own_s: Floats, many: bool) -> Floats:
    """Return the median of all (1, K), or of few the median of all others for each."""
    if many:
        middle: Floats = _median(own_s)[None]
        return middle
    if np.isnan(own_s.sum()):
        return np.stack([_median(np.delete(own_s, row, axis=0)) for row in range(len(own_s))])
    # Of sorted values, the median of all but one is one of three.
    ordered = np.sort(own_s, axis=0)
    others = len(own_s) - 1
    high = others // 2
    low = high if others % 2 else high - 1
    above = ordered[low + 1] + ordered[high + 1]
    at = ordered[low] + ordered[high + 1]
    below = ordered[low] + ordered[high]
    twice = np.where(own_s <= ordered[low], above, np.where(own_s > ordered[high], below, at))
    return (twice / 2).astype(np.float32)


def _median(values: Floats) -> Floats:
    """Return the median over the first axis without NaN; 0 where there is nothing."""
    ordered = np.sort(values, axis=0)
    count = np.count_nonzero(~np.isnan(ordered), axis=0)
    column = np.arange(values.shape[1])
    low, high = ordered[np.maximum(count - 1, 0) // 2, column], ordered[np.minimum(count // 2, len(values) - 1), column]
    found: Floats = np.where(count > 0, (low + high) / 2, np.float32(0))
    return found


def _noise_s(own_s: Floats, others: Others) -> float:
    """Return the spread of single starts around the median of the equals."""
    some = some_of(len(others.rows), SAMPLED)
    middle = others.middle_s if len(others.middle_s) == 1 else others.middle_s[some]
    away = np.abs(own_s[others.rows[some]] - middle)
    away = away[~np.isnan(away)]
    return _MAD_TO_SPREAD * float(np.median(away)) if len(away) else 0.0


def _by_block(values: Floats, block_of: Longs, blocks: int) -> Floats:
    """Return the sums of the columns of each block; 0 for a block without columns."""
    sums = np.zeros((len(values), blocks), np.float32)
    touched, first = np.unique(block_of, return_index=True)
    sums[:, touched] = np.add.reduceat(values, first, axis=1)
    return sums


def _transfers(grid: Grid, low: Floats, blocks: int) -> Transfers | None:
    """Compare what moving the data took with the siblings'; None where a line has fewer than two of them."""
    lines, width = low.shape
    there: Bools = np.isfinite(low) & (low > 0)
    if lines < 3 or not there.any():
        return None
    known = np.where(there, low, np.float32(np.nan))
    middle = _median(known[some_of(lines, SAMPLED)])
    over = np.where(there & (middle > 0), known - middle, np.float32(0))
    block_of = (np.arange(width) * blocks) // width
    excess_s = np.full((lines, blocks), np.nan, np.float32)
    touched = np.unique(block_of)
    excess_s[:, touched] = (_by_block(over, block_of, blocks) * np.float32(grid.kind.weight))[:, touched]
    excess_s[~there.any(axis=1)] = np.nan
    transfer_s = _median(known[:, some_of(width, _LATE_SAMPLED)].T)
    typical = float(np.median(transfer_s))
    ratio = transfer_s / np.float32(typical) if typical > 0 else np.ones(lines, np.float32)
    return Transfers(grid.kind, excess_s, ratio, transfer_s)
