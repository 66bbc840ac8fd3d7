# SPDX-License-Identifier: Apache-2.0
"""An agent that answers each order for evidence with what a test says of its ranks."""

from collections.abc import Mapping

import msgspec

from megascale_ops.schema.messages import Evidence, EvidenceItem
from tests.fakes.controlled_job import World


def answer_looks(world: World, node: str, items: Mapping[int, tuple[EvidenceItem, ...]]) -> int:
    """Let a node's agent obey every order for evidence that it holds; return how many.

    Args:
        world: the job, and the controller that orders.
        node: whose agent.
        items: what is known, by rank; an order is answered with those of its kind.
    """
    orders = [order for order in world.beat(node).orders if order.kind.startswith("dump_")]
    for order in orders:
        kind = order.kind.removeprefix("dump_")
        told = [msgspec.structs.replace(item, rank=rank) for rank, all_ in items.items() for item in all_]
        mine = tuple(item for item in told if item.kind == kind)
        world.loop.evidence(Evidence(node, "job", order.incident, order.id, items=mine))
    return len(orders)
