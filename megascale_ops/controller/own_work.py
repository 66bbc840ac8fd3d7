# SPDX-License-Identifier: Apache-2.0
"""What is kept of the ranks of a group for finding stragglers: their last steps, why one is named.

A group keeps columns, not an object for each rank: of 100,000 ranks a thousand bytes each are a garbage collector's
second and a process of one gigabyte. A rank is known by its *place*, the order in which it was first heard of.

Pure: plain records, and the arithmetic of one step.
"""

import math
from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from megascale_ops.schema.progress import StepWork


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


class Row:
    """One step that was judged. Owned by its ``Rows``.

    ``excess_s`` is by place, NaN of whom nothing was told; ``works`` is empty once the step is too far back.
    """

    __slots__ = ("excess_s", "step", "works")

    def __init__(self, step: int, works: dict[int, StepWork], ranks: int) -> None:
        self.step = step
        self.works = works
        self.excess_s = array("d", (math.nan,)) * ranks


class Rows:
    """The last steps of a group, oldest first.

    Args:
        kept: how many.
        works_kept: of how many of them also what each rank did in them.
    """

    def __init__(self, kept: int, works_kept: int) -> None:
        self._rows: deque[Row] = deque()
        self._with_works: deque[Row] = deque()
        self._spent: list[dict[int, StepWork]] = []
        self.keep(kept, works_kept)

    def keep(self, kept: int, works_kept: int) -> None:
        """Keep so many from now on."""
        self._kept, self._works_kept = kept, works_kept

    def add(self, step: int, works: dict[int, StepWork], ranks: int) -> Row:
        """Add a step of which nobody's excess is known yet."""
        made = Row(step, works, ranks)
        self._rows.append(made)
        self._with_works.append(made)
        while len(self._rows) > self._kept:
            self._rows.popleft()
        while len(self._with_works) > self._works_kept:
            self.spend(self._with_works[0].works)
            self._with_works.popleft().works = {}
        return made

    def spend(self, works: dict[int, StepWork]) -> None:
        """Take over what nobody needs any more, to be freed little by little: 100,000 at once take 50 ms."""
        self._spent.append(works)

    def free(self, most: int) -> bool:
        """Free so many of them; tell whether some are left."""
        while self._spent and most > 0:
            works = self._spent[-1]
            for _ in range(min(most, len(works))):
                works.popitem()
                most -= 1
            if not works:
                self._spent.pop()
        return bool(self._spent)

    def step_back(self, steps: int) -> int:
        """Return the number of the step so many back (1: the newest), at most the oldest that is kept."""
        return self._rows[-min(steps, len(self._rows))].step

    def excesses_s(self, place: int) -> list[float]:
        """Return the excesses of one rank, oldest first."""
        told = (row.excess_s[place] for row in self._rows if place < len(row.excess_s))
        return [one for one in told if one == one]  # noqa: PLR0124  NaN is not equal to itself

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


class MediansOfOthers:
    """Give each value the median of all the others: with sorted values it is one of three, told by two limits."""

    __slots__ = ("above", "at", "below", "start", "until")

    def __init__(self, values: Sequence[float]) -> None:
        ordered = sorted(values)
        others = len(ordered) - 1
        high = others // 2
        low = high if others % 2 else high - 1
        self.until, self.start = ordered[low], ordered[high]
        self.above = (ordered[low + 1] + ordered[high + 1]) / 2
        self.at = (ordered[low] + ordered[high + 1]) / 2
        self.below = (ordered[low] + ordered[high]) / 2

    def __call__(self, value: float) -> float:
        """Return the median of the values other than this one."""
        if value <= self.until:
            return self.above
        return self.below if value > self.start else self.at
