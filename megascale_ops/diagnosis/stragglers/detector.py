# SPDX-License-Identifier: Apache-2.0
"""Find the ranks that need longer for their own work than their equals, and make all the others wait.

A synchronous job is as fast as its slowest rank, and every rank shows the same step time: the culprit's is filled with
work, a victim's with waiting. So only *own work* is compared (the step without what was waited for others and without
checkpoints), of the same step, with the median of the other ranks of the same pipeline and tensor coordinates. What is
common to all (long sequences, an evaluation, a slow network) cancels there; what is random averages out.

Three ways to be slow, three tests on each rank's excess over that median, in units of the run's own noise:

- *much*: a cumulative sum with allowance 0.5 (see ``false_alarms``); 20 % are named after 5 to 10 steps;
- *a little, or creeping*: another whose allowance is half of the smallest excess worth naming;
- *now and then*: single slow steps of a rank, counted against how often all others have such steps.

Each alarm must also be worth it (``straggler_share`` of a step, in the median of the slow steps) and have a rank that
waits for it. A name is taken back when the excess has been below half of that for as long as it took to name it.

Pure: steps in, the slow ranks out. A step of many ranks is judged in pieces, so that the caller can do
something else in between.
"""

import statistics
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from megascale_ops.diagnosis.statistics.cooperative import Pieces, run_through
from megascale_ops.diagnosis.stragglers.own_work import Held, Rank
from megascale_ops.diagnosis.stragglers.peer_group import Group
from megascale_ops.diagnosis.stragglers.step_table import RANK, Table, rows_at
from megascale_ops.schema.history import Place
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import StepWork

# Values a second that are looked at (1.5 us each); of jobs with more ranks than that only every n-th step is.
MOST_VALUES = 40_000.0
# 0.3 of the newest second: three seconds count, as many as the first alarms take.
_NEWEST = 0.3
# 64 ranks show how starved a typical one is.
_MOST_ASKED = 64
# What fits into 16 bits.
_MOST_SMALL = 32_767


class Watch:
    """All ranks of one round of one job."""

    def __init__(self) -> None:
        self.groups: dict[tuple[int, int], Group] = {}
        self._seen: set[int] = set()
        self._starved: dict[int, float] = {}  # by rank, of the last seconds: share runnable without a core
        self._stride = 1
        # Of a large job, by rank: the number of its group, -1 where it has none yet, and its place in it.
        self._group_of, self._place_of = array("q"), array("q")
        self._numbers: dict[tuple[int, int], int] = {}

    def ingest_steps(self, rank: int, node: str, mesh: Mesh, works: Sequence[StepWork]) -> None:
        """Take finished steps of one rank."""
        self._seen.add(rank)
        self._group(mesh).ingest_steps(rank, node, works, self._stride)

    def hear(self, rank: int, starved: float) -> None:
        """Take in for which share of the last second a rank wanted a core in vain."""
        before = self._starved.get(rank)
        if before != starved:  # of most ranks it is 0 all the time
            self._starved[rank] = starved if before is None else before + _NEWEST * (starved - before)

    def starved_of(self, rank: int) -> float:
        """Return for which share of the time a rank wants a core in vain, more than a typical one."""
        some = islice(self._starved.values(), _MOST_ASKED)
        return self._starved.get(rank, 0.0) - statistics.median([0.0, *some])

    def take_rows(self, rows: Table, places: Mapping[int, Place], came: Iterable[int]) -> None:
        """Take finished steps of many ranks.

        Args:
            rows: the steps, as ``step_table`` has them.
            places: where every rank is.
            came: ranks that may be elsewhere than in the call before.
        """
        ranks = rows[:, RANK].astype(np.intp)
        self._grow(int(ranks.max()) + 1)
        for rank in came:
            # A rank without a report in this round may never send one: an older history has ranks of a larger world.
            if rank < len(self._group_of) and self._group_of[rank] >= 0:
                self._settle(places[rank])
        for rank in np.unique(ranks[np.frombuffer(self._group_of, np.int64)[ranks] < 0]):
            self._settle(places[int(rank)])
        numbers = np.frombuffer(self._group_of, np.int64)[ranks]
        at = np.frombuffer(self._place_of, np.int64)[ranks]
        # Of numbers of 16 bits NumPy makes heaps, which takes a tenth of sorting.
        small = numbers.astype(np.int16) if len(self._numbers) <= _MOST_SMALL else numbers
        order = np.argsort(small, kind="stable")
        begins = np.flatnonzero(np.diff(numbers[order], prepend=-1))
        keys = list(self._numbers)  # in the order of their numbers
        at, rows = at[order], rows_at(rows, order)
        ends = [*begins[1:].tolist(), len(order)]
        for number, first, until in zip(numbers[order[begins]].tolist(), begins.tolist(), ends, strict=True):
            self.groups[keys[number]].take_rows(at[first:until], rows[first:until], self._stride)

    def _grow(self, ranks: int) -> None:
        missing = max(0, ranks - len(self._group_of))
        self._group_of.extend([-1] * missing)
        self._place_of.extend([0] * missing)

    def _settle(self, place: Place) -> None:
        """Give a rank its place in its group."""
        key = place.mesh.pp, place.mesh.tp
        self._seen.add(place.rank)
        self._grow(place.rank + 1)
        self._group_of[place.rank] = self._numbers.setdefault(key, len(self._numbers))
        self._place_of[place.rank] = self._group(place.mesh).admit(place.rank, place.node)

    def _group(self, mesh: Mesh) -> Group:
        group = self.groups.get((mesh.pp, mesh.tp))
        if group is None:
            group = self.groups[mesh.pp, mesh.tp] = Group()
        return group

    def advance(self, policy: JobPolicy, world_size: int) -> bool:
        """Judge what has come in; return whether anything was judged. Nothing is, until all ranks were seen."""
        return run_through(self.pieces(policy, world_size))

    def pieces(self, policy: JobPolicy, world_size: int) -> Pieces[bool]:
        """Do the same piece by piece; more steps may be taken in between."""
        if len(self._seen) < world_size:
            return False
        moved = False
        for group in list(self.groups.values()):
            if (yield from group.advance(policy)):
                moved = True
                yield
        step_s = max((group.step_s for group in self.groups.values()), default=0.0)
        if step_s:
            self._stride = max(1, round(world_size / (MOST_VALUES * step_s)))
        return moved

    def held(self) -> Iterator[tuple[Group, Rank, Held]]:
        """Yield the ranks that are named now."""
        for group in self.groups.values():
            for place in sorted(group.held):
                yield group, group.rank(place), group.held[place]
