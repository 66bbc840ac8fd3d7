# SPDX-License-Identifier: Apache-2.0
"""What a look at each rank of nodes that stand still came to, for the heartbeats after it that tell the same.

While ranks wait for one that does not come, thousands of nodes tell each second that they are where they were, until
their silence is long enough for a suspicion. What follows from such a heartbeat is known beforehand: from which moment
on one of the ranks looks odd, and how far they are. It holds as long as a node tells nothing but that time passes
(``Columns.stirred``), under one policy.

Pure: ranks' reports in, moments by their nodes' own clocks out.
"""

from collections.abc import Collection

import numpy as np

from megascale_ops.controller.cluster.columns import Counts, Flags, Numbers, Places
from megascale_ops.diagnosis.watchdog import odd_after_s
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import Progress, RankReport

# 1 ms before a rank looks odd it is looked at by itself again: sums of seconds are that exact, and more.
_EXACT_S = 1e-3
_NO_STEP = -2  # below -1, which rounds are at before their first
_NEVER = -1  # no heartbeat has this number
_LEAST = 64


class Stood:
    """The columns, by a node's place in the registry. Owned by the round."""

    __slots__ = ("_moved_mono_s", "_odd_mono_s", "_progress", "_step", "_stirred", "policy")

    def __init__(self, policy: JobPolicy) -> None:
        self.policy = policy
        self._stirred, self._step = np.full(_LEAST, _NEVER, np.int64), np.full(_LEAST, _NO_STEP, np.int64)
        self._odd_mono_s, self._moved_mono_s = np.zeros(_LEAST), np.zeros(_LEAST)
        self._progress = np.full(_LEAST, None, object)

    def knows(self, places: Places, stirred: Counts) -> Flags:
        """Return which nodes were looked at since they told of more than time passing; by that heartbeat's number."""
        self._grow(int(places.max(initial=0)) + 1)
        found: Flags = self._stirred[places] == stirred
        return found

    def note(self, place: int, stirred: int, reports: Collection[RankReport], floor_mono_s: float) -> None:
        """Note what a node's ranks tell, all of which have a black box, now that each was looked at.

        Args:
            place: the node's.
            stirred: the number of the last heartbeat in which it told of more than time passing.
            reports: of its ranks.
            floor_mono_s: no silence counts from before.
        """
        self._grow(place + 1)
        told = [(report, report.progress) for report in reports if report.progress is not None]
        odd_s = [max(at.moved_mono_s, floor_mono_s) + odd_after_s(report, self.policy) for report, at in told]
        furthest = max((at.step for _, at in told if at.steps_seen), default=_NO_STEP)
        moved_s = [at.moved_mono_s for _, at in told if at.steps_seen and at.step == furthest]
        self._stirred[place] = stirred
        self._odd_mono_s[place] = min(odd_s, default=float("inf"))
        self._step[place], self._moved_mono_s[place] = furthest, max(moved_s, default=0.0)
        self._progress[place] = _alike([at for _, at in told])

    def may_look_odd(self, places: Places, sent_mono_s: Numbers) -> Flags:
        """Return in which known nodes a rank may look odd by now, by when each was heard last, its own clock."""
        found: Flags = sent_mono_s > self._odd_mono_s[places] - _EXACT_S
        return found

    def last_moved(self, places: Places, step: int) -> tuple[Flags, Numbers]:
        """Return which known nodes have a rank that made so many steps, and when the last of these moved, its clock."""
        return self._step[places] == step, self._moved_mono_s[places]

    def progress(self, place: int) -> Progress | None:
        """Return how far each rank of a known node is, as one of them tells it; None: they are not equally far."""
        found: Progress | None = self._progress[place]
        return found

    def _grow(self, size: int) -> None:
        missing = size - len(self._stirred)
        if missing <= 0:
            return
        missing = max(missing, len(self._stirred))
        self._stirred = np.concatenate([self._stirred, np.full(missing, _NEVER, np.int64)])
        self._step = np.concatenate([self._step, np.full(missing, _NO_STEP, np.int64)])
        self._odd_mono_s = np.concatenate([self._odd_mono_s, np.zeros(missing)])
        self._moved_mono_s = np.concatenate([self._moved_mono_s, np.zeros(missing)])
        self._progress = np.concatenate([self._progress, np.full(missing, None, object)])


def _alike(told: list[Progress]) -> Progress | None:
    """Return the progress of ranks that are all equally far, as the pace of their round goes by it."""
    if not told:
        return None
    first = told[0]
    is_alike = all(
        at.steps_seen == first.steps_seen
        and at.step == first.step
        and at.step_p50_s == first.step_p50_s
        and at.step_is_absolute == first.step_is_absolute
        for at in told
    )
    return first if is_alike else None
