# SPDX-License-Identifier: Apache-2.0
"""By which nodes a controller is asked, and when a leader gives way to a standby that they ask instead. Pure.

A leader may have its lock and its database, and be reached by no agent: its network to them is cut, or it takes
connections and answers none. Agents and runners try all addresses that they have, so a standby hears those that the
leader does not: it refuses them, keeps their names, and once they have gone on for ``STEADY_S`` writes them into the
database, for the leader to read (a *petition*). The leader decides, since it alone knows both sides. It gives way when

- it has answered no request from another machine for ``UNHEARD_S``, though its loop was turning. A request from its own
  machine crosses no network, and proves nothing about one;
- more than half of the nodes of its jobs have asked one standby all the while, and have not asked it. Without any
  job, one node is enough: there is nothing to lose;
- fewer than ``MOST_AN_HOUR`` leaders have given way within the hour.

So a leader that one agent reaches stays, whatever standbys hear; where all agents are gone, no standby hears them, and
nothing changes; of a network that is in two halves neither has more than half.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

# 20 s: an agent speaks each second and a runner each three, and both need ten at most to find a new leader.
UNHEARD_S = 20.0
# 10 s: longer than an agent's start, which asks all addresses once, and than its return after a leader was replaced.
STEADY_S = 10.0
# 15 s: an agent whose requests are swallowed by the leader's network waits five seconds for it and pauses two.
GAP_S = 15.0
# 15 s: petitions are written each 2 s, those of very many nodes each 10.
FRESH_S = 15.0
# 6 an hour: a network that is cut elsewhere each ten minutes; beyond it a change of leader mends nothing.
MOST_AN_HOUR = 6
HOUR_S = 3600.0
# 131,072 names, as many as a controller knows nodes.
_MOST_NODES = 131_072


class Hearing:
    """Nodes that one controller is asked by: as a leader those that it answers, as a standby those that it refuses.

    Noted by the loop's thread and read by another: each change is a single step.

    Args:
        now_s: monotonic seconds.
    """

    def __init__(self, now_s: float) -> None:
        self._began_s = now_s
        self._elsewhere_s = now_s  # when a request came from another machine
        self._heard_s: float | None = None
        self._nodes: dict[str, tuple[float, float]] = {}  # since when without a gap, and last

    def note(self, node: str, now_s: float, *, is_own_machine: bool = False) -> None:
        """Take note of a request from a node; ``is_own_machine``: it came from the machine of this controller."""
        since_s, last_s = self._nodes.get(node, (now_s, now_s))
        if len(self._nodes) >= _MOST_NODES and node not in self._nodes:
            self._forget(now_s)
        self._nodes[node] = (since_s if now_s - last_s <= GAP_S else now_s, now_s)
        self._heard_s = now_s
        if not is_own_machine:
            self._elsewhere_s = now_s

    def begin_anew(self, now_s: float) -> None:
        """Forget for how long no request came: this controller was away itself, or has just begun to answer."""
        self._began_s = now_s

    def unheard_s(self, now_s: float) -> float:
        """Return for how long no request came at all, as far as this controller was there."""
        return max(0.0, now_s - max(self._began_s, self._heard_s or self._began_s))

    def unheard_elsewhere_s(self, now_s: float) -> float:
        """Return the same of requests from other machines."""
        return max(0.0, now_s - max(self._began_s, self._elsewhere_s))

    def nodes(self, now_s: float, steady_s: float = 0.0) -> list[str]:
        """Return who was heard of late, and has gone on for so long without a gap, in order."""
        found = list(self._nodes.items())
        return sorted(
            node for node, (since_s, last_s) in found if now_s - last_s <= GAP_S and last_s - since_s >= steady_s
        )

    def _forget(self, now_s: float) -> None:
        self._nodes = {node: at for node, at in self._nodes.items() if now_s - at[1] <= GAP_S}
        if len(self._nodes) >= _MOST_NODES:
            self._nodes = {}


class Petition(NamedTuple):
    """What a standby has written: the nodes that ask it. ``age_s``: by the database's clock."""

    standby: str  # its identity
    url: str
    nodes: frozenset[str]
    age_s: float


class Heir(NamedTuple):
    """The standby that a leader gives way to, and why, in one sentence."""

    id: str
    reason: str


def heir_of(
    unheard_s: float, here: Collection[str], expected: Collection[str], petitions: Iterable[Petition]
) -> Heir | None:
    """Return to whom a leader gives way now; None: it stays.

    Args:
        unheard_s: for how long it has answered no request from another machine.
        here: nodes that it has answered of late, those on its own machine.
        expected: nodes of its jobs that are not over.
        petitions: of the standbys that are connected to the database.
    """
    if unheard_s < UNHEARD_S:
        return None
    wanted, mine = frozenset(expected), frozenset(here)
    best: tuple[int, Petition] | None = None
    for one in petitions:
        if one.age_s > FRESH_S:
            continue
        there = one.nodes - mine
        count = len(there & wanted) if wanted else len(there)
        if count * 2 > len(wanted) and (best is None or count > best[0]):
            best = count, one
    if best is None:
        return None
    count, one = best
    asking = f"{count} of the {len(wanted)} nodes of its jobs" if wanted else f"{count} node{'s' * (count > 1)}"
    return Heir(
        one.standby,
        f"it has answered no agent or runner on another machine for {unheard_s:.0f} s, while the standby at {one.url}, "
        f"which gets its place, is asked by {asking}",
    )


def may_give_way(ages_s: Sequence[float]) -> bool:
    """Return whether a leader may give way once more, told how long ago leaders have."""
    return sum(age_s < HOUR_S for age_s in ages_s) < MOST_AN_HOUR
