# SPDX-License-Identifier: Apache-2.0
"""What a restart can load: which sets of files on the nodes are whole, and what the shared storage has. Pure.

A set is what one save has left: files that belong to one manifest. It is named by the digest of that manifest, which
every node that took part has; so files of two saves of one step never count as one set. A set is whole when each of its
files is on some node that is here.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

from megascale_ops.checkpoint.tiers.nodes import Nodes

# What rank n wrote.
_OF_RANK = re.compile(r"__(\d+)_")


class Held(msgspec.Struct, frozen=True):
    """What one node has of one set."""

    step: int
    set_id: str
    names: tuple[str, ...]  # all files of the set, in the order of its manifest
    present: tuple[int, ...]  # which of them are here in their full size
    written_wall_s: float = 0.0


class Candidate(NamedTuple):
    """Something that may be loaded.

    Attributes:
        step: of which it is.
        set_id: of a set on the nodes; empty: a checkpoint in the shared storage.
        place: which of the shared checkpoints, as they were listed.
        holders: of a set on the nodes, the nodes that have each file, by name.
    """

    step: int
    set_id: str
    place: int
    holders: dict[str, tuple[int, ...]]

    @property
    def missing(self) -> tuple[str, ...]:
        """Files that no node has."""
        return tuple(sorted(name for name, nodes in self.holders.items() if not nodes))

    def without(self, lost: Collection[tuple[int, str]]) -> "Candidate":
        """The same, where some nodes turned out not to have some files as they were sealed."""
        left = {name: tuple(node for node in nodes if (node, name) not in lost) for name, nodes in self.holders.items()}
        return self._replace(holders=left)

    def is_from_buddy(self, nodes: Nodes) -> bool:
        """Whether a file is no more on the node of the rank that wrote it, so that the buddy's copy is needed.

        Of a job with other ranks than the one that saved it is told by the numbers that ranks have now.
        """
        wrote = ((_OF_RANK.match(name), held) for name, held in self.holders.items())
        ranks = sum(map(len, nodes.members))
        written = ((int(found[1]), held) for found, held in wrote if found)
        return any(rank < ranks and nodes.node_of(rank) not in held for rank, held in written)


def candidates(inventories: Sequence[Iterable[Held]], shared_steps: Sequence[int]) -> list[Candidate]:
    """All that may be loaded, the newest first; of one step what is on the nodes first, for it is near.

    Args:
        inventories: what each node has, by the number of the node.
        shared_steps: what the shared storage has, in the order in which it would be tried.

    Returns:
        Also sets that are not whole: the caller tells of them what is missing and passes them over.
    """
    found: defaultdict[tuple[int, str], dict[str, list[int]]] = defaultdict(dict)
    written: dict[tuple[int, str], float] = {}
    for node, held in enumerate(inventories):
        for each in held:
            key = each.step, each.set_id
            written[key] = each.written_wall_s
            holders = found[key]
            for name in each.names:
                holders.setdefault(name, [])
            for number in each.present:
                holders[each.names[number]].append(node)
    local = [
        Candidate(step, set_id, -1, {name: tuple(nodes) for name, nodes in holders.items()})
        for (step, set_id), holders in found.items()
    ]
    local.sort(key=lambda one: (bool(one.missing), -written[one.step, one.set_id], one.set_id))
    shared = [Candidate(step, "", place, {}) for place, step in enumerate(shared_steps)]
    # Sorting is stable: of one step whole sets, then those that lack something, then the shared storage.
    return sorted((*local, *shared), key=lambda one: -one.step)


def incomplete_sentence(candidate: Candidate) -> str:
    """Why a set on the nodes can't be loaded."""
    missing = candidate.missing
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return (
        f"the local checkpoint of step {candidate.step} is not whole: {missing[0]}{more} of "
        f"{len(candidate.holders)} files on no node that is here"
    )
