# SPDX-License-Identifier: Apache-2.0
"""What is kept of the ranks of a group for finding stragglers: their last steps, why one is named.

A group keeps columns, not an object for each rank: of 100,000 ranks a thousand bytes each are a garbage collector's
second and a process of one gigabyte. A rank is known by its *place*, the order in which it was first heard of.

Pure: plain records, and the arithmetic of one step.
"""

import math
import struct
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_ops.diagnosis.statistics.sampling import values_of_some
from megascale_ops.diagnosis.stragglers import step_table
from megascale_ops.schema.progress import StepWork

# 8 slow steps show that a rank is slow now.
SLOW_STEPS = 8

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]

# wall, waiting and checkpoint, which make the own work; then data, forward, backward, optimizer, gc, cpu: seconds.
_FIELDS = 9
_PARTS = struct.Struct(f"={_FIELDS}d")
# The same of a row.
_COLUMNS = [
    step_table.WALL_S, step_table.WAITING_S, step_table.CHECKPOINT_S, step_table.DATA_S, step_table.FORWARD_S,
    step_table.BACKWARD_S, step_table.OPTIMIZER_S, step_table.GC_S, step_table.CPU_S,
]  # fmt: skip


class Rank(NamedTuple):
    """One rank of a group."""

    place: int
    rank: int
    node: str


class Jump(NamedTuple):
    """One slow step of a rank that is otherwise not slow."""

    at: int  # the group's count of steps then
    excess_s: float
    work: StepWork
    equal: StepWork  # of a typical rank of the same step


class Held(NamedTuple):
    """Why a rank is named."""

    intermittent: bool
    since_step: int
    named_at: int  # the group's count of steps then
    window: int  # steps it took; it must be well for as long
    share: float  # of a step, what an excess had to be to be worth it


class Works:
    """What the ranks of a group did in one step, by place: 72 bytes each, for an object of each has 330.

    Of the losses nothing is kept, they are judged elsewhere.
    """

    __slots__ = ("_cells", "_count", "_told", "step")

    def __init__(self, step: int, ranks: int) -> None:
        self.step = step
        self._cells = bytearray(_PARTS.size * ranks)
        self._told = bytearray(ranks)
        self._count = 0

    def __len__(self) -> int:
        """How many ranks have reported theirs."""
        return self._count

    def __contains__(self, place: int) -> bool:
        """Return whether the rank of a place has reported its own."""
        return place < len(self._told) and self._told[place] == 1

    def __getitem__(self, place: int) -> StepWork:
        """Return what one rank did."""
        assert place in self
        wall_s, waiting_s, checkpoint_s, data_s, forward_s, backward_s, optimizer_s, gc_s, cpu_s = _PARTS.unpack_from(
            self._cells, place * _PARTS.size
        )
        return StepWork(
            self.step, wall_s, waiting_s, data_s, forward_s, backward_s, optimizer_s, checkpoint_s, gc_s, cpu_s
        )

    def put(self, place: int, work: StepWork) -> None:
        """Note what one rank did; of two reports the later one stands."""
        self._grow(place + 1)
        self._count += not self._told[place]
        self._told[place] = 1
        _PARTS.pack_into(
            self._cells, place * _PARTS.size,
            work.wall_s, work.waiting_s, work.checkpoint_s,
            work.data_s, work.forward_s, work.backward_s, work.optimizer_s, work.gc_s, work.cpu_s,
        )  # fmt: skip

    def put_rows(self, places: Places, rows: step_table.Table) -> None:
        """Note what many ranks did: a place and a row of ``step_table`` each."""
        self._grow(int(places.max()) + 1)
        told = np.frombuffer(self._told, np.uint8)
        told[places] = 1
        self._count = int(np.count_nonzero(told))
        np.frombuffer(self._cells).reshape(-1, _FIELDS)[places] = rows[:, _COLUMNS]

    def _grow(self, ranks: int) -> None:
        missing = ranks - len(self._told)
        if missing > 0:
            self._cells += bytes(_PARTS.size * missing)
            self._told += bytes(missing)

    def places(self) -> Places:
        """Return the places of the ranks that have reported theirs, in order."""
        return np.flatnonzero(np.frombuffer(self._told, np.uint8))

    def which(self, places: Places, first: int, most: int) -> Places | slice:
        """Return a piece of all places, as a slice where none is missing: that takes no copy."""
        until = min(first + most, len(places))
        return slice(first, until) if self._count == len(self._told) else places[first:until]

    def own_s(self, places: Places | slice) -> Floats:
        """Return how long these ranks worked (see ``own_work_s``)."""
        cells = np.frombuffer(self._cells).reshape(-1, _FIELDS)[places]
        found: Floats = np.maximum(cells[:, 0] - cells[:, 1] - cells[:, 2], 0.0)
        return found

    def walls_s(self, places: Places | slice) -> Floats:
        """Return how long the step was for these ranks."""
        found: Floats = np.frombuffer(self._cells).reshape(-1, _FIELDS)[places, 0]
        return found


class Row:
    """One step that was judged. Owned by its ``Rows``.

    ``excess_s`` is by place, NaN of ranks without a report; ``works`` is empty once the step is too far back.
    """

    __slots__ = ("excess_s", "step", "works")

    def __init__(self, works: Works, ranks: int) -> None:
        self.step = works.step
        self.works = works
        self.excess_s: Floats = np.full(ranks, np.nan)


class Rows:
    """The last steps of a group, oldest first.

    Args:
        kept: how many.
        works_kept: of how many of them also what each rank did in them.
    """

    def __init__(self, kept: int, works_kept: int) -> None:
        self._rows: deque[Row] = deque()
        self._with_works: deque[Row] = deque()
        self.keep(kept, works_kept)

    def keep(self, kept: int, works_kept: int) -> None:
        """Keep so many from now on."""
        self._kept, self._works_kept = kept, works_kept

    def add(self, works: Works, ranks: int) -> Row:
        """Add a step of which no rank's excess is known yet."""
        made = Row(works, ranks)
        self._rows.append(made)
        self._with_works.append(made)
        while len(self._rows) > self._kept:
            self._rows.popleft()
        while len(self._with_works) > self._works_kept:
            spent = self._with_works.popleft()
            spent.works = Works(spent.step, 0)
        return made

    def step_back(self, steps: int) -> int:
        """Return the number of the step so many back (1: the newest), at most the oldest that is kept."""
        return self._rows[-min(steps, len(self._rows))].step

    def __len__(self) -> int:
        """How many steps are kept."""
        return len(self._rows)

    def excesses_s(self, place: int) -> list[float]:
        """Return the excesses of one rank, oldest first, without the steps that it did not report."""
        (row,) = self.excesses_of(np.array([place]))
        found: list[float] = row[~np.isnan(row)].tolist()
        return found

    def newest_s(self, place: int, most: int) -> list[float]:
        """Return the newest of a rank's excesses, at most so many, the newest first; cheap, for it is asked often."""
        found: list[float] = []
        for row in reversed(self._rows):
            excess_s = float(row.excess_s[place]) if place < len(row.excess_s) else math.nan
            if not math.isnan(excess_s):
                found.append(excess_s)
                if len(found) == most:
                    break
        return found

    def excesses_of(self, places: Places, most: int | None = None) -> Floats:
        """Return the excesses of some ranks (places, steps), oldest first; NaN where nothing was reported.

        ``most``: of so many of the newest steps.
        """
        rows = list(self._rows)[-most:] if most is not None else self._rows
        found: Floats = np.full((len(places), len(rows)), np.nan)
        furthest = places.max(initial=-1)
        for column, row in enumerate(rows):
            if len(row.excess_s) > furthest:
                found[:, column] = row.excess_s[places]
            else:
                there = places < len(row.excess_s)
                found[there, column] = row.excess_s[places[there]]
        return found

    def works(self, place: int, last: int) -> list[StepWork]:
        """Return what one rank did in the last steps, at most so many, oldest first."""
        return [row.works[place] for row in self._with_works if place in row.works][-last:]


def own_work_s(work: StepWork) -> float:
    """Return how long a rank worked in a step, without waiting for others and without checkpoints."""
    return max(0.0, work.wall_s - work.waiting_s - work.checkpoint_s)


def intermittent_steps(jumps: Sequence[Jump], count: int) -> float:
    """Return over how many steps a rank's single slow steps spread, one gap more than lies between them."""
    number = len(jumps)
    return max(1.0, (count - jumps[0].at) * number / max(1, number - 1))


def well_after(held: Held) -> int:
    """Return for how many steps a named rank must be as fast as its equals."""
    return max(20, held.window)


class Slowest:
    """The most excess in each step of a rank that is not slow all the time; once a step for all who ask."""

    def __init__(self) -> None:
        self._found: tuple[tuple[int, float, int], Floats] | None = None

    def of(self, rows: Rows, size: int, worth_s: float, count: int, held: list[int]) -> Floats:
        """Return it for the steps that are kept, oldest first.

        Args:
            rows: Those steps.
            size: How many ranks there are.
            worth_s: A rank whose excess is typically as much is slow all the time.
            count: The group's count of steps now.
            held: Ranks that are named, by place.
        """
        key = count, worth_s, len(held)
        if self._found is None or self._found[0] != key:
            excesses_s = rows.excesses_of(np.arange(size))
            newest_s = excesses_s[:, -SLOW_STEPS:]
            is_slow = np.partition(newest_s, newest_s.shape[1] // 2, axis=1)[:, newest_s.shape[1] // 2] >= worth_s
            is_slow[held] = True
            others_s = np.where(np.isnan(excesses_s[~is_slow]), 0.0, excesses_s[~is_slow])
            self._found = key, others_s.max(axis=0, initial=0.0)
        return self._found[1]


def typical_of(works: Works, most: int) -> StepWork:
    """Return what the rank in the middle did, of at most so many."""
    places = works.places()
    some = values_of_some(places, most)
    order = np.argsort(works.own_s(some), kind="stable")
    return works[int(some[order[(len(order) - 1) // 2]])]


class MediansOfOthers:
    """Give each value the median of all the others: with sorted values it is one of three, chosen by two limits."""

    __slots__ = ("above", "at", "below", "start", "until")

    def __init__(self, values: Floats) -> None:
        others = len(values) - 1
        high = others // 2
        low = high if others % 2 else high - 1
        ordered = np.sort(values)[: high + 2].tolist()
        self.until, self.start = ordered[low], ordered[high]
        self.above = (ordered[low + 1] + ordered[high + 1]) / 2
        self.at = (ordered[low] + ordered[high + 1]) / 2
        self.below = (ordered[low] + ordered[high]) / 2

    def of(self, values: Floats) -> Floats:
        """Return for each value the median of those other than it."""
        at_or_below = np.where(values > self.start, self.below, self.at)
        return np.where(values <= self.until, self.above, at_or_below)
