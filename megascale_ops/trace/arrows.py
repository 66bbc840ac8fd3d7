# SPDX-License-Identifier: Apache-2.0
"""Arrows from the rank that came last into a collective to those that had waited for it. Pure.

An arrow needs both its ends in the picture, and it must be possible: where the clocks of two nodes are so far apart
that the last rank would arrive before another came, or after it left, there is none.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megascale_ops.trace.matching import Key, Meeting
from megascale_ops.trace.rank_plan import RankPlan

if TYPE_CHECKING:
    from megascale_ops.trace.rank_records import CollectiveSpan

# 100 us: what a scheduler takes to wake a thread; moving may seem to begin so much before the last rank arrived.
LEAST_SLACK_NS = 100_000
# 10 ms: ten of a busy machine's time slices; beyond it a clock is wrong, and no arrow is better than a wrong one.
MOST_SLACK_NS = 10_000_000


class Arrows(NamedTuple):
    """Of one collective: its own number, when the last rank arrived (reference clock), and one arrow to each victim."""

    kin: int
    arrived_ns: int
    to: dict[int, int]  # rank -> number of the arrow


class ArrowBook:
    """Gives out arrows, each collective's when it is first asked for; ``left_out`` counts impossible ones."""

    def __init__(self, plans: Sequence[RankPlan], meetings: Mapping[Key, Meeting], residual_ns: int) -> None:
        self._meetings = meetings
        self._spans: dict[Key, list[tuple[RankPlan, CollectiveSpan]]] = {}
        for plan in plans:
            for key, span in plan.drawn.items():
                self._spans.setdefault(key, []).append((plan, span))
        self._known: dict[Key, Arrows] = {}
        self._slack_ns = min(MOST_SLACK_NS, max(LEAST_SLACK_NS, 3 * residual_ns))
        self._next = 1
        self.drawn = 0
        self.left_out = 0

    def of(self, key: Key) -> Arrows:
        """Return the arrows of one collective."""
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._find(key)
        return found

    def _find(self, key: Key) -> Arrows:
        kin, self._next = self._next, self._next + 1
        meeting, members = self._meetings[key], self._spans[key]
        last = next((one for one in members if one[0].rank == meeting.last_rank), None)
        if last is None or len(members) < 2:
            return Arrows(kin, 0, {})
        arrived_ns = last[1].started_ns - last[0].offset_ns
        to = {}
        for plan, span in members:
            if plan.rank == meeting.last_rank or not span.ended_ns:
                continue
            came_ns, left_ns = span.started_ns - plan.offset_ns, span.ended_ns - plan.offset_ns
            earliest_ns = came_ns - self._slack_ns
            latest_ns = min(left_ns, left_ns - meeting.moving_ns + self._slack_ns)
            if not earliest_ns <= arrived_ns <= latest_ns:
                self.left_out += 1
                continue
            to[plan.rank] = self._next
            self._next += 1
        self.drawn += len(to)
        return Arrows(kin, arrived_ns, to)
