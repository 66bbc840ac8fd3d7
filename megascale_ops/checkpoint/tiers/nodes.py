# SPDX-License-Identifier: Apache-2.0
"""Which ranks share a node, and which node keeps a copy of which. Pure.

Nodes are paired, 0 with 1, 2 with 3; of an odd number the last three form a ring. So the loss of any one node loses
nothing, and of two nodes only the loss of a pair does (n / 2 pairs of all n (n - 1) / 2, where a ring would lose n).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Nodes:
    """All ranks of a job by node, in the order of the lowest rank of each."""

    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, keys: Sequence[Hashable]) -> "Nodes":
        """From what identifies the node of each rank."""
        found: dict[Hashable, list[int]] = {}
        for rank, key in enumerate(keys):
            found.setdefault(key, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in found.values()))

    def node_of(self, rank: int) -> int:
        """The number of a rank's node."""
        return next(number for number, ranks in enumerate(self.members) if rank in ranks)

    def lead_of(self, rank: int) -> int:
        """The rank that acts for the node of a rank."""
        return self.members[self.node_of(rank)][0]

    def buddy_of(self, node: int) -> int | None:
        """The node that keeps a copy of a node's files; None: there is no other."""
        count = len(self.members)
        if count < 2:
            return None
        if count % 2 and node >= count - 3:
            return count - 3 + (node - (count - 3) + 1) % 3
        return node ^ 1

    def partner_of(self, rank: int) -> int | None:
        """The rank to which a rank sends its files; None: there is no other node."""
        node = self.node_of(rank)
        buddy = self.buddy_of(node)
        if buddy is None:
            return None
        there = self.members[buddy]
        return there[self.members[node].index(rank) % len(there)]
