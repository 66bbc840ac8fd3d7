# SPDX-License-Identifier: Apache-2.0
"""What a step would take if one rank, one stage or one link were as fast as its peers.

Recorded collectives make a graph. A collective begins on a rank some own work after the end of the one that ended last
before it there; it ends for all its ranks one transfer after the last of them has come. Both are taken from the
records, own work by each rank's own clock, the transfer as the shortest of the durations, so nothing has to be aligned.
Replaying the graph with nothing changed must give the step that was measured; by how much it does not is said with
every prediction. Then the own work of some ranks, or the transfers of some communicators, are set to their peers'
median where that is less, and the graph is replayed again.

What it can't know: work that was hidden behind a collective and would come to light, other choices of NCCL's, memory.

Pure. The order of ranks' own collectives must be complete: a sample is not enough.
"""

from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_ops.diagnosis.skew.tables import Bools, Ints, Longs, before
from megascale_ops.errors import UsageError

Doubles = npt.NDArray[np.float64]


class Operations(NamedTuple):
    """Recorded collectives, one row for each rank in each, in any order; each rank's clock is its own."""

    rank: Ints
    communicator: Ints
    function: Ints
    seq: Longs
    start_ns: Longs
    end_ns: Longs
    step: Ints  # the number of the step that the row belongs to; steps without a collective have no row


class Graph(NamedTuple):
    """Which row waits for which. R rows, J joins; rows are ordered by level, and within it by join."""

    rows: Operations
    join: Longs  # R: which join
    earlier: Longs  # R: the row that ended last before this one on its rank; -1: none
    own_s: Doubles  # R
    transfer_s: Doubles  # J
    communicator: Longs  # J
    levels: list[tuple[int, int]]  # first row and behind the last of each
    measured_s: float  # a step


class Prediction(NamedTuple):
    """What a change would do."""

    measured_s: float  # a step, as recorded
    replayed_s: float  # with nothing changed
    predicted_s: float  # with the change

    @property
    def error(self) -> float:
        """By what share of the measured step the replay with nothing changed is wrong."""
        return abs(self.replayed_s - self.measured_s) / self.measured_s if self.measured_s else 0.0

    @property
    def saved(self) -> float:
        """The share of every step that the change saves."""
        return 1.0 - self.predicted_s / self.replayed_s if self.replayed_s else 0.0


def build(operations: Operations) -> Graph:
    """Make the graph of recorded collectives.

    Raises:
        UsageError: there are fewer than three steps, or the records contradict each other (a rank's collectives came in
            another order than its peers').
    """
    if len(np.unique(operations.step)) < 3:
        raise UsageError("a prediction needs collectives of at least three whole steps")
    if np.any(operations.end_ns < operations.start_ns):
        raise UsageError("a collective that ended before it began: the clock was set back, its rank can't be replayed")
    key = np.stack([operations.communicator.astype(np.int64), operations.function.astype(np.int64), operations.seq])
    names, join = np.unique(key, axis=1, return_inverse=True)
    join = join.reshape(-1)
    earlier = before(operations.rank, operations.start_ns, operations.end_ns)
    level = _levels(join, earlier, names.shape[1])
    order = np.lexsort((operations.rank, join, level[join]))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    rows = Operations(*(column[order] for column in operations))
    join, earlier = join[order], np.where(earlier[order] >= 0, place[earlier[order]], -1)
    took_s = (rows.end_ns - rows.start_ns) * 1e-9
    transfer_s = np.full(names.shape[1], np.inf)
    np.minimum.at(transfer_s, join, took_s)
    own_s = np.where(earlier >= 0, (rows.start_ns - rows.end_ns[earlier]) * 1e-9, 0.0)
    bounds = np.searchsorted(level[join], np.arange(int(level.max()) + 2))
    levels = [(int(first), int(last)) for first, last in pairwise(bounds)]
    return Graph(
        rows,
        join,
        earlier,
        own_s,
        transfer_s,
        names[0],
        levels,
        _step_s(rows, np.asarray(rows.end_ns * 1e-9, np.float64)),
    )


def _levels(join: Longs, earlier: Longs, joins: int) -> Longs:
    """Return for each join the length of the longest chain of joins before it."""
    level = np.zeros(joins, np.int64)
    known = earlier >= 0
    after, first = join[known], join[earlier[known]]
    for _ in range(joins + 1):
        longer = np.zeros(joins, np.int64)
        np.maximum.at(longer, after, level[first] + 1)
        if np.array_equal(longer, level):
            return level
        level = longer
    raise UsageError(
        "the records contradict each other: ranks of a communicator came to its collectives in another order"
    )


def replay(graph: Graph, own_s: Doubles, transfer_s: Doubles) -> float:
    """Return how long a step takes with these times, seconds.

    Args:
        graph: which row waits for which.
        own_s: R, own work before each row.
        transfer_s: J, from the last arrival to the end.
    """
    end_s = np.zeros(len(graph.join))
    for first, last in graph.levels:
        rows = slice(first, last)
        earlier, join = graph.earlier[rows], graph.join[rows]
        # A rank's first collective has nothing before it: its arrival follows from its duration there.
        took_s = (graph.rows.end_ns[rows] - graph.rows.start_ns[rows]) * 1e-9
        arrived_s = np.where(earlier >= 0, end_s[earlier] + own_s[rows], graph.transfer_s[join] - took_s)
        begins = np.flatnonzero(np.diff(join, prepend=-1))
        ends_s = np.maximum.reduceat(arrived_s, begins) + transfer_s[join[begins]]
        end_s[rows] = np.repeat(ends_s, np.diff(begins, append=last - first))
    return _step_s(graph.rows, end_s)


def _step_s(rows: Operations, end_s: Doubles) -> float:
    """Return the median step: from the last end of one step to the last end of the next, rank by rank.

    A step between them of which no collective was recorded took its part of that time, and counts.
    """
    steps, index = np.unique(rows.step, return_inverse=True)
    ranks, who = np.unique(rows.rank, return_inverse=True)
    last_s = np.full((len(ranks), len(steps)), -np.inf)
    np.maximum.at(last_s, (who, index), end_s)
    there = np.isfinite(last_s).all(axis=1)
    if not there.any():
        raise UsageError("no rank has collectives in every step")
    # The mean over the steps, the first left out: it has no beginning.
    return float(np.median((last_s[there, -1] - last_s[there, 0]) / (int(steps[-1]) - int(steps[0]))))


def if_ranks_were_as_fast(graph: Graph, ranks: Collection[int], classes: Ints | None = None) -> Prediction:
    """Predict the step if these ranks' own work took no longer than their peers'.

    Peers of a rank are the others of its class before the same collective (of the same or of a sibling communicator).
    Where the whole class is asked for (a pipeline stage), its work is scaled to that of the median rank of the others.

    Args:
        graph: of the recorded collectives.
        ranks: which ranks.
        classes: by rank, equal numbers for equals; None: all are.
    """
    rows = graph.rows
    classes = classes if classes is not None else np.zeros(int(rows.rank.max()) + 1, np.int32)
    asked = np.isin(rows.rank, np.fromiter(ranks, np.int64))
    if not asked.any():
        raise UsageError("none of these ranks has recorded a collective")
    of_class = classes[rows.rank]
    whole = [number for number in np.unique(of_class[asked]) if np.all(asked[of_class == number])]
    own_s = graph.own_s.copy()
    for number in whole:
        mine = of_class == number
        others = _totals(graph, ~asked)
        if others.size:
            own_s[mine] *= min(1.0, float(np.median(others)) / max(float(np.median(_totals(graph, mine))), 1e-12))
    alone = asked & ~np.isin(of_class, np.array(whole, of_class.dtype))
    peers = _peers_median(graph, of_class, ~asked)
    own_s[alone] = np.fmin(own_s[alone], peers[alone])
    return _predict(graph, own_s, graph.transfer_s)


def if_links_were_as_fast(graph: Graph, communicators: Collection[int]) -> Prediction:
    """Predict the step if these communicators moved data as fast as those that do the same at the same time."""
    rows = graph.rows
    first = np.zeros(len(graph.transfer_s), np.int64)
    first[graph.join[::-1]] = np.arange(len(graph.join))[::-1]
    size = np.bincount(graph.join, minlength=len(graph.transfer_s))
    asked = np.isin(graph.communicator, np.fromiter(communicators, np.int64))
    if not asked.any():
        raise UsageError("none of these communicators has recorded a collective")
    alike = np.stack([rows.function[first].astype(np.int64), rows.seq[first], size])
    _, group = np.unique(alike, axis=1, return_inverse=True)
    peers = _median_by(group.reshape(-1), graph.transfer_s, ~asked)
    return _predict(graph, graph.own_s, np.where(asked, np.fmin(graph.transfer_s, peers), graph.transfer_s))


def _predict(graph: Graph, own_s: Doubles, transfer_s: Doubles) -> Prediction:
    replayed_s = replay(graph, graph.own_s, graph.transfer_s)
    return Prediction(graph.measured_s, replayed_s, replay(graph, own_s, transfer_s))


def _totals(graph: Graph, which: Bools) -> Doubles:
    """Return the own work of each rank that has some of these rows."""
    ranks, index = np.unique(graph.rows.rank[which], return_inverse=True)
    return np.asarray(np.bincount(index, graph.own_s[which], minlength=len(ranks)), np.float64)


def _peers_median(graph: Graph, of_class: Ints, which: Bools) -> Doubles:
    """Return for each row the median own work of its class before the same collective; NaN where it has no peers."""
    rows = graph.rows
    size = np.bincount(graph.join, minlength=len(graph.transfer_s))[graph.join]
    key = np.stack([of_class.astype(np.int64), rows.function.astype(np.int64), rows.seq, size])
    _, group = np.unique(key, axis=1, return_inverse=True)
    return _median_by(group.reshape(-1), graph.own_s, which & (graph.earlier >= 0))


def _median_by(group: Longs, values: Doubles, which: Bools) -> Doubles:
    """Return for each row the median of the values of its group, of those in ``which``; NaN of none."""
    order = np.lexsort((values[which], group[which]))
    ordered, of = values[which][order], group[which][order]
    numbers = np.arange(int(group.max()) + 1)
    low, high = np.searchsorted(of, numbers), np.searchsorted(of, numbers, side="right")
    count = high - low
    some = np.minimum(low + np.maximum(count - 1, 0) // 2, max(0, len(ordered) - 1))
    other = np.minimum(low + count // 2, max(0, len(ordered) - 1))
    if not len(ordered):
        return np.full(len(group), np.nan)
    median = np.where(count > 0, (ordered[some] + ordered[other]) / 2, np.nan)
    return np.asarray(median[group], np.float64)
