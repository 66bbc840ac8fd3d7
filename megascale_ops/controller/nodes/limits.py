# SPDX-License-Identifier: Apache-2.0
"""How many nodes may be moved out by themselves: a share of the cluster a day, and then a person decides.

A rule that is wrong is wrong everywhere at once: a driver that logs an Xid at every start would empty a cluster within
an hour. What people move by hand is not counted and not limited.

Pure: moves and the time in, how much room there is out.
"""

from collections.abc import Iterable

from megascale_ops.controller.nodes.life import LEAVES, NodeState
from megascale_ops.schema.health import NodeMove

DAY_S = 86_400.0
# A tenth: Meta's Llama 3 run lost 419 nodes' worth of work in 54 days on 2,048 hosts, 0.4 % a day; 25 times that is no
# bad luck any more.
SHARE = 0.1


def most_out(known: int, share: float = SHARE) -> int:
    """Return how many of ``known`` nodes may go in a day: one of a small cluster, and never the only one."""
    return 0 if known < 2 else max(1, int(known * share))


def leaves(move: NodeMove) -> bool:
    """Return whether a move has put a node out by itself; a check that confirms a quarantine does not."""
    return move.event in LEAVES and move.before.was != NodeState.QUARANTINED


def moved_out(moves: Iterable[NodeMove], wall_s: float) -> int:
    """Return how many of these moves have put a node out by themselves in the day before ``wall_s``.

    One that a person has taken back since counts all the same: where evidence is wrong, the limit is what stops it.
    """
    return sum(leaves(move) and wall_s - DAY_S < move.wall_s <= wall_s for move in moves)
