# SPDX-License-Identifier: Apache-2.0
"""What the steps of a job cost, for its ledger while it lives: time covered, waited for the slowest, and checkpoints.

Steps are taken by number: a block of them is closed when all ranks have reported it, and becomes one ``StepTime``
and, step by step, the slowest rank's time. A step in whose middle a bucket of time would end is so counted once, a rank
that is missing changes no sum, and a report after its block was closed is too late. Blocks are joined as they age,
each at most 1/32 of its age long: 60 for ten minutes, some 350 for a week.

Pure: the time of a report, and the time now, are arguments.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_ops.diagnosis.statistics.cooperative import Pieces, run_through
from megascale_ops.diagnosis.statistics.sampling import some_of
from megascale_ops.diagnosis.stragglers.step_table import (
    CHECKPOINT_S,
    END_S,
    NUMBER,
    RANK,
    WAITING_S,
    WALL_S,
    WEIGHT,
    Table,
)
from megascale_ops.distribution import Distribution
from megascale_ops.ledger import StepTime
from megascale_ops.schema.metrics import METRICS
from megascale_ops.schema.progress import StepWork

Column = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]

# 1 s, and 10 s of more than 512 ranks: closing a block of 12,288 takes 12 ms.
BLOCK_S, BLOCK_LARGE_S, LARGE = 1.0, 10.0, 512
# 3 s: heartbeats come once a second, and a late one is still taken.
GRACE_S = 3.0
# A block may wait for a rank that is far behind while the others go on; of more, the oldest is closed.
MOST_OPEN = 4
_AGE_SHARE = 32.0
# 2,048 ranks are looked at in one piece, 1 to 2 ms.
PIECE = 2_048
MOST_SORTED = 4_096
# A script may begin to count anew, as each epoch does: such a lap lifts its numbers above all those before.
_LAP = 1 << 40


class _Block:
    """Steps ``first`` to ``last`` while ranks still report them; arrays by rank."""

    __slots__ = (
        "checkpoint_s", "ends_s", "first", "full_s", "last", "slowest_s", "start_s", "steps", "touched_s",
        "waiting_s", "wall_s",
    )  # fmt: skip

    def __init__(self, first: int, last: int, ranks: int) -> None:
        self.first, self.last = first, last
        self.steps, self.wall_s, self.waiting_s, self.checkpoint_s = (array("f", bytes(4 * ranks)) for _ in range(4))
        self.slowest_s: dict[int, float] = {}  # by step
        self.ends_s: dict[int, float] = {}  # by step: the earliest end that a rank reports, nearest to the truth
        self.start_s = math.inf
        self.touched_s = self.full_s = 0.0

    def add(self, rank: int, step: int, work: StepWork, weight: float, end_s: float) -> None:
        if rank >= len(self.steps):
            self._grow(rank + 1)
        wall_s = work.wall_s
        self.steps[rank] += weight
        self.wall_s[rank] += weight * wall_s
        self.waiting_s[rank] += weight * work.waiting_s
        if work.checkpoint_s:
            self.checkpoint_s[rank] += weight * work.checkpoint_s
        if wall_s > self.slowest_s.get(step, -1.0):
            self.slowest_s[step] = wall_s
        if end_s < self.ends_s.get(step, math.inf):
            self.ends_s[step] = end_s
            self.start_s = min(self.start_s, end_s - wall_s)

    def add_rows(self, step: int, rows: Table, origin_s: float, ranks: int) -> None:
        """Take one step of many ranks."""
        self._grow(ranks)
        rank, end_s = rows[:, RANK].astype(np.intp), rows[:, END_S] + origin_s
        weight, wall_s = rows[:, WEIGHT], rows[:, WALL_S]
        added = (weight, weight * wall_s, weight * rows[:, WAITING_S], weight * rows[:, CHECKPOINT_S])
        for cells, values in zip((self.steps, self.wall_s, self.waiting_s, self.checkpoint_s), added, strict=True):
            np.add.at(np.frombuffer(cells, np.float32), rank, values.astype(np.float32))
        self.slowest_s[step] = max(self.slowest_s.get(step, -1.0), float(wall_s.max()))
        first = int(end_s.argmin())
        if end_s[first] < self.ends_s.get(step, math.inf):
            self.ends_s[step] = float(end_s[first])
            self.start_s = min(self.start_s, float(end_s[first] - wall_s[first]))

    def _grow(self, ranks: int) -> None:
        more = bytes(4 * max(0, ranks - len(self.steps)))
        for cells in (self.steps, self.wall_s, self.waiting_s, self.checkpoint_s):
            cells.frombytes(more)


class _Round:
    """What is known of steps as long as a round: in the next, ranks begin anew and may make the same steps again."""

    __slots__ = ("done", "lap", "last", "step_s")

    def __init__(self) -> None:
        self.done = -1  # the last step of the blocks that are closed
        self.last, self.lap = array("q"), array("q")  # by rank: its last step, and the lap it is in
        self.step_s = 0.0  # of late; 0: not known

    def grow(self, ranks: int) -> None:
        """Make room for so many ranks."""
        missing = max(0, ranks - len(self.last))
        self.last.extend([-1] * missing)
        self.lap.extend([0] * missing)


class StepCosts:
    """The steps of one life of one job. Owned by its ``StepHistory``."""

    def __init__(self) -> None:
        self.closed: list[StepTime] = []
        self.durations = Distribution(METRICS["megascale_step_duration_seconds"].buckets)  # of each step the slowest
        self.checkpoint_wall_s = 0.0  # when the last step with a checkpoint in it has ended; 0: none is known
        self.waiting: Sequence[float] = ()  # by rank: share of its steps in the last block that it waited; -1: none
        self._open: list[_Block] = []
        self._round = _Round()
        self._now_s = 0.0

    @property
    def step_s(self) -> float:
        """How long a step takes of late; 0: not known."""
        return self._round.step_s

    def ingest_steps(self, rank: int, works: Sequence[tuple[StepWork, float]], weight: float, ranks: int) -> None:
        """Take finished steps of one rank, oldest first.

        Args:
            rank: whose they are.
            works: each step with when it ended, wall clock seconds.
            weight: how many steps each of them stands for.
            ranks: how many ranks there are so far.
        """
        block: _Block | None = None
        for (work, end_s), step in zip(works, self.count(rank, [work for work, _ in works]), strict=True):
            if block is None or not block.first <= step <= block.last:
                block = self._at(step, work.wall_s, ranks) if step > self._round.done else None
            if work.checkpoint_s:
                self.checkpoint_wall_s = max(self.checkpoint_wall_s, end_s)
            if block is not None:
                block.add(rank, step, work, weight, end_s)
                block.touched_s = self._now_s
                if step >= block.last and not block.full_s:
                    block.full_s = self._now_s

    def count(self, rank: int, works: Iterable[StepWork]) -> list[int]:
        """Return the numbers of one rank's steps among all of this life, whatever the script counts; once for each."""
        known = self._round
        if rank >= len(known.last):
            known.grow(rank + 1)
        last, lap = known.last[rank], known.lap[rank]
        numbers = []
        for work in works:
            if work.step <= last:
                lap += _LAP
            last = work.step
            numbers.append(lap + last)
        known.last[rank], known.lap[rank] = last, lap
        return numbers

    def count_rows(self, ranks: Places, steps: Column) -> Column:
        """Do the same with one step of each of many ranks."""
        known = self._round
        known.grow(int(ranks.max()) + 1)
        last, lap = np.frombuffer(known.last, np.int64), np.frombuffer(known.lap, np.int64)
        made = steps.astype(np.int64)
        lap[ranks] += _LAP * (made <= last[ranks])
        last[ranks] = made
        return (lap[ranks] + made).astype(float)

    def take_rows(self, rows: Table, origin_s: float, ranks: int) -> None:
        """Take steps of many ranks as ``StepHistory`` puts them by; their ends count from ``origin_s``."""
        saved = rows[rows[:, CHECKPOINT_S] > 0.0]
        if len(saved):
            self.checkpoint_wall_s = max(self.checkpoint_wall_s, float(saved[:, END_S].max()) + origin_s)
        numbers = rows[:, NUMBER]
        is_one = bool((numbers == numbers[0]).all())  # nearly always
        for number in numbers[:1] if is_one else np.unique(numbers):
            step = int(number)
            some = rows if is_one else rows[numbers == number]
            block = self._at(step, float(some[0, WALL_S]), ranks) if step > self._round.done else None
            if block is not None:
                block.add_rows(step, some, origin_s, ranks)
                block.touched_s = self._now_s
                if step >= block.last and not block.full_s:
                    block.full_s = self._now_s

    def _at(self, step: int, wall_s: float, ranks: int) -> _Block | None:
        """Return the block of a step, a new one when it is further than all; None when its block is closed."""
        for block in reversed(self._open):
            if block.first <= step <= block.last:
                return block
        if self._open and step < self._open[-1].first:
            return None
        self._round.step_s = self._round.step_s or wall_s
        length_s = BLOCK_S if ranks <= LARGE else BLOCK_LARGE_S
        steps = min(1000, max(1, round(length_s / max(self.step_s, 1e-4))))
        made = _Block(step, step + steps - 1, ranks)
        self._open.append(made)
        return made

    def pieces(self, now_s: float, equals: Sequence[int]) -> Pieces[None]:
        """Close the blocks that enough ranks reported, of a large job at most one a look; more may come in between.

        Args:
            now_s: wall clock seconds.
            equals: by rank, the number of its group: those of its pipeline stage and tensor place.
        """
        self._now_s = now_s
        while self._open:
            block = self._open[0]
            told_s = block.full_s or block.touched_s
            if not told_s:
                block.touched_s = now_s
            if len(self._open) <= MOST_OPEN and not told_s <= now_s - GRACE_S:
                return
            yield from self._close(block, equals)
            if len(block.steps) > LARGE:
                return

    def end_round(self, equals: Sequence[int]) -> None:
        """Close everything: ranks begin anew, and may make the same steps again."""
        while self._open:
            run_through(self._close(self._open[0], equals))
        self._round = _Round()

    def _close(self, block: _Block, equals: Sequence[int]) -> Pieces[None]:
        self._open.remove(block)
        self._round.done = max(self._round.done, *block.slowest_s)
        until_s = block.ends_s[max(block.ends_s)]
        took = yield from _add_up(block, equals)
        self._round.step_s = took.covered_s / took.steps
        self._append(
            StepTime(
                start_s=min(block.start_s, until_s),
                until_s=until_s,
                covered_s=took.covered_s,
                straggle_s=took.steps * took.straggle_s,
                checkpoint_s=took.checkpoint_s,
            )
        )
        for slowest_s in block.slowest_s.values():
            self.durations.observe(slowest_s)
        self.waiting = took.waiting

    def _append(self, made: StepTime) -> None:
        """Add a block, and join neighbours that are old enough for it."""
        self.closed.append(made)
        now_s = made.until_s
        joined: list[StepTime] = []
        for one in self.closed:
            before = joined[-1] if joined else None
            if before is not None and one.until_s - before.start_s <= (now_s - one.until_s) / _AGE_SHARE:
                joined[-1] = _join(before, one)
            else:
                joined.append(one)
        self.closed = joined

    def shift(self, step_s: float) -> None:
        """Move everything with a wall clock that was stepped."""
        self.closed = [one._replace(start_s=one.start_s + step_s, until_s=one.until_s + step_s) for one in self.closed]
        for block in self._open:
            block.start_s += step_s
            block.ends_s = {step: end_s + step_s for step, end_s in block.ends_s.items()}
            block.touched_s += step_s
            block.full_s += step_s if block.full_s else 0.0
        self.checkpoint_wall_s += step_s if self.checkpoint_wall_s else 0.0
        self._now_s += step_s

    def restore(self, closed: Iterable[Sequence[float]]) -> None:
        """Go on with what another controller has kept."""
        self.closed = [StepTime(*one) for one in closed]
        self.checkpoint_wall_s = max((one.until_s for one in self.closed if one.checkpoint_s), default=0.0)


class _Took(NamedTuple):
    """What a block's steps took."""

    steps: float  # of the rank that made most
    covered_s: float
    checkpoint_s: float  # of the rank that saved longest
    straggle_s: float  # a step
    waiting: Sequence[float]  # by rank: share of its steps that it waited; -1: none


def _add_up(block: _Block, equals: Sequence[int]) -> Pieces[_Took]:
    """Add a block up: 22 to 30 ms of 100,000 ranks, 9 at most in one piece."""
    columns = (block.steps, block.wall_s, block.waiting_s, block.checkpoint_s)
    steps, wall_s, waiting_s, checkpoint_s = (np.frombuffer(column, np.float32).astype(float) for column in columns)
    groups = np.full(len(steps), -1)
    known = np.array(equals[: len(steps)])
    groups[: len(known)] = known
    yield
    seen = steps > 0
    count = steps[seen]
    own_s, waits_s, groups = (wall_s - waiting_s - checkpoint_s)[seen] / count, waiting_s[seen] / count, groups[seen]
    order = np.argsort(groups, kind="stable")
    ends = np.flatnonzero(np.diff(groups[order])) + 1
    yield
    straggle_s = yield from _straggle_s(np.split(own_s[order], ends), waits_s)
    with np.errstate(divide="ignore", invalid="ignore"):
        waiting = np.where(wall_s > 0, np.minimum(waiting_s / wall_s, 1.0), -1.0)
    most = float(steps.max())
    covered_s = most * float(wall_s.sum() / steps.sum())
    return _Took(most, covered_s, float(checkpoint_s.max()), straggle_s, waiting.tolist())


def _straggle_s(own_s: Iterable[Column], waits_s: Column) -> Pieces[float]:
    """Return what a typical rank waited in a step, as far as the slowest rank's own work explains it.

    Args:
        own_s: what the ranks of each group of equals worked in a step; each is compared with its equals' median.
        waits_s: what each rank waited in a step.
    """
    lost_s = 0.0
    for own in own_s:
        yield
        some = _some_sorted(own)
        middle = len(some) // 2
        typical_s = some[middle] if len(some) % 2 else (some[middle - 1] + some[middle]) / 2
        lost_s = max(lost_s, float(own.max()) - typical_s)
    yield
    some = _some_sorted(waits_s)
    return max(0.0, min(lost_s, some[len(some) // 2]))


def _some_sorted(values: Column) -> list[float]:
    """Return values in order, of many a sample: its median is nearly the same, and sorting takes no 40 ms."""
    some = some_of(len(values), MOST_SORTED)
    found: list[float] = np.sort(values if len(some) == len(values) else values[np.array(some)]).tolist()
    return found


def _join(one: StepTime, other: StepTime) -> StepTime:
    return StepTime(
        start_s=min(one.start_s, other.start_s),
        until_s=max(one.until_s, other.until_s),
        covered_s=one.covered_s + other.covered_s,
        straggle_s=one.straggle_s + other.straggle_s,
        checkpoint_s=one.checkpoint_s + other.checkpoint_s,
    )
