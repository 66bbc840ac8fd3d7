# SPDX-License-Identifier: Apache-2.0
"""What is kept of each rank for finding stragglers: its own work, its excess over its equals, why it is named.

Pure: plain records, and the arithmetic of one step.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from megascale_ops.schema.progress import StepWork


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


class Rank:
    """What is kept of one rank. Owned by its group."""

    __slots__ = ("began", "blocks_s", "excess_s", "held", "jumps", "node", "rank", "sums", "works")

    def __init__(self, rank: int, node: str, kept: int) -> None:
        self.rank = rank
        self.node = node
        self.excess_s: deque[float] = deque(maxlen=kept)
        self.blocks_s: deque[float] = deque(maxlen=kept)
        self.works: deque[StepWork] = deque(maxlen=max(4, kept // 4))
        self.sums = [0.0, 0.0]
        self.began = [0, 0]  # the group's count of steps when each sum last was zero
        self.jumps: deque[Jump] = deque(maxlen=32)
        self.held: Held | None = None


def own_work_s(work: StepWork) -> float:
    """Return how long a rank worked in a step, without waiting for others and without checkpoints."""
    return max(0.0, work.wall_s - work.waiting_s - work.checkpoint_s)


def intermittent_steps(rank: Rank, count: int) -> float:
    """Return over how many steps a rank's single slow steps spread, one gap more than lies between them."""
    number = len(rank.jumps)
    return max(1.0, (count - rank.jumps[0].at) * number / max(1, number - 1))


class MediansOfOthers:
    """Give each value the median of all the others: with sorted values it is one of three."""

    __slots__ = ("_above", "_at", "_below", "_from", "_until")

    def __init__(self, values: Sequence[float]) -> None:
        ordered = sorted(values)
        others = len(ordered) - 1
        high = others // 2
        low = high if others % 2 else high - 1
        self._until, self._from = ordered[low], ordered[high]
        self._above = (ordered[low + 1] + ordered[high + 1]) / 2
        self._at = (ordered[low] + ordered[high + 1]) / 2
        self._below = (ordered[low] + ordered[high]) / 2

    def __call__(self, value: float) -> float:
        """Return the median of the values other than this one."""
        if value <= self._until:
            return self._above
        return self._below if value > self._from else self._at
