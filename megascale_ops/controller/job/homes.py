# SPDX-License-Identifier: Apache-2.0
"""Which node each rank of a job ran on, round by round: what it printed lies there.

Rounds that have the ranks where the round before had them share an entry, as nearly all do. A controller that is
started again, or a later life of the job, knows of the round that runs, and of later ones.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

# 32 changes: of 1,536 nodes 25 KB each.
_MOST = 32


class _Places(NamedTuple):
    """The nodes with the number of their ranks, in the order of ranks, from one round on."""

    since_round: int
    nodes: tuple[tuple[str, int], ...]


class Homes:
    """Where ranks ran. Owned by the job."""

    def __init__(self) -> None:
        self._known: deque[_Places] = deque(maxlen=_MOST)

    def note(self, round_: int, nodes: Iterable[tuple[str, int]]) -> None:
        """Note where the ranks of a round are: its nodes in order, each with how many ranks it has."""
        places = tuple(nodes)
        if places and not (self._known and self._known[-1].nodes == places):
            self._known.append(_Places(round_, places))

    def rounds_elsewhere(self, rank: int, node: str, newest: int) -> list[int]:
        """Return the rounds, as far as they are known, in which a rank was on another node than this."""
        found: list[int] = []
        until = newest
        for known in reversed(self._known):
            if self.node_of(rank, known.since_round) not in ("", node):
                found += range(until, known.since_round - 1, -1)
            until = known.since_round - 1
        return found

    def node_of(self, rank: int, round_: int) -> str:
        """Return the node of a rank in a round (below 0: the newest); "" where that is not known."""
        for known in reversed(self._known):
            if round_ >= 0 and known.since_round > round_:
                continue
            first = 0
            for node, ranks in known.nodes:
                if first <= rank < first + ranks:
                    return node
                first += ranks
            return ""
        return ""
