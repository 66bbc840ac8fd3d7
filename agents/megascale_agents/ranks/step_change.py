# SPDX-License-Identifier: Apache-2.0
"""Whether the steps that a rank has just finished differ from those before, so that they are reported at once.

Steps travel once a second with everything else. A rank that becomes slow shall be named within 20 steps, and of 50 ms
steps a second has as many; so half-way the agent asks this. The test is more sensitive than the detector
(``diagnosis/stragglers``): a shift too small to be seen here takes the controller far more than 20 steps. A
false alarm costs one heartbeat.

Pure: step times in, yes or no out.
"""

import math
from collections.abc import Sequence

from megascale_ops.schema.progress import StepWork

# 30 steps: fewer give no baseline, and every step would count as a change.
LEARNED_STEPS = 30
# 64 steps: a rank that has become slow is unlike itself for some 60 steps, three times what naming it may take.
_MEMORY_STEPS = 64
# A hundredth of a step: half of the least excess that is ever named (``straggler_share``, 2 %).
_LEAST_SHARE = 0.01
# Two and a half standard errors of a median: one batch in forty is sent needlessly. From a median deviation to the
# standard error of one: 1.48 times 1.25.
_DEVIATIONS = 2.5 * 1.48 * 1.25


class _Usual:
    """One time of the steps, over the last 64: median, mean, and median deviation.

    The first step connects and compiles: a mean deviation with it inside hides all that comes in the next minute. The
    median does not see what is slow now and then; the mean does.
    """

    __slots__ = ("deviation_s", "mean_s", "median_s")

    def __init__(self) -> None:
        self.median_s = self.mean_s = self.deviation_s = 0.0

    def is_like(self, fresh_s: list[float], least_s: float) -> bool:
        """Return whether new times are such as were to be expected."""
        count = len(fresh_s)
        bound_s = max(least_s, _DEVIATIONS * self.deviation_s / math.sqrt(count))
        median_off_s = abs(_median(fresh_s) - self.median_s)
        return median_off_s <= bound_s and abs(sum(fresh_s) / count - self.mean_s) <= bound_s

    def learn(self, fresh_s: list[float], known: int) -> None:
        """Take new times in; the first ones weigh as much as there are."""
        count = len(fresh_s)
        weight = count / min(known + count, _MEMORY_STEPS + count)
        self.mean_s += weight * (sum(fresh_s) / count - self.mean_s)
        median_s = _median(fresh_s)
        self.median_s += weight * (median_s - self.median_s)
        self.deviation_s += weight * (_median([abs(time_s - median_s) for time_s in fresh_s]) - self.deviation_s)


def _median(times_s: list[float]) -> float:
    return sorted(times_s)[len(times_s) // 2]


class StepHabit:
    """What is usual of one rank: how long its steps take, and how long its own work in them.

    Attributes:
        is_changing: Whether the last steps were unlike those before; not while nothing is known of what is usual.
    """

    def __init__(self) -> None:
        self.is_changing = False
        self._known = 0
        self._wall, self._own = _Usual(), _Usual()

    def is_news(self, fresh: Sequence[StepWork]) -> bool:
        """Return whether steps, each handed in at most once, are unlike those before; learn from them."""
        if not fresh:
            return False
        # All ranks show in the wall time that one of them has become slow; only that one shows it in its own work.
        wall_s = [one.wall_s - one.checkpoint_s for one in fresh]
        own_s = [whole_s - one.waiting_s for whole_s, one in zip(wall_s, fresh, strict=True)]
        least_s = _LEAST_SHARE * self._wall.median_s
        is_like = self._wall.is_like(wall_s, least_s) and self._own.is_like(own_s, least_s)
        is_like = is_like and all(one.loss_is_finite for one in fresh)
        is_known = self._known >= LEARNED_STEPS
        self._wall.learn(wall_s, self._known)
        self._own.learn(own_s, self._known)
        self._known += len(fresh)
        self.is_changing = is_known and not is_like
        return not (is_known and is_like)
