# SPDX-License-Identifier: Apache-2.0
"""Which GPU has not begun a collective in which the GPUs of the other ranks wait.

All ranks have given the collective to their GPUs, so by the hosts' side no rank is missing. On the GPUs' side one
is: where a kernel before it does not end, NCCL's kernel has not begun. A rank is named by that when

- the same collective has begun on others: where it has on none, all are late alike (a barrier behind a slow loader);
- nothing that its GPU has begun is unfinished: one that waits inside another communicator is a victim there, and what
  is queued behind that waits for it;
- those that have begun are at least as many: of three that have not and one that has, that one was early;
- all that is before the collective was timed, or nothing of it is known (thinned timing, a plugin that is off).

A GPU with a long queue looks the same until something of it is seen to end: that takes a comparison of two looks.

Pure: queues by rank in, ranks out.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megascale_ops.schema.gpu_queue import GpuOperation, GpuQueue
from megascale_ops.schema.messages import CollectiveFact

Place = tuple[str, str, int]  # communicator, function, number


class NotBegun(NamedTuple):
    """The ranks whose GPUs have not begun, in which operation, and how many ranks' GPUs wait in it."""

    ranks: tuple[int, ...]
    operation: GpuOperation  # as the first of them has it
    waiting: int


def not_begun(queues: Mapping[int, GpuQueue]) -> NotBegun | None:
    """Return the ranks whose GPU has not begun what most others wait in; None: no rank, or not known."""
    begun: dict[Place, set[int]] = {}
    late: dict[Place, dict[int, GpuOperation]] = {}
    for rank, queue in queues.items():
        waits = queue.is_partial or any(one.begun for one in queue.operations)
        for one in queue.operations:
            if one.peer >= 0:  # its other end has another number of it
                continue
            place = (one.communicator, one.function, one.seq)
            if one.begun:
                begun.setdefault(place, set()).add(rank)
            elif not waits:
                late.setdefault(place, {})[rank] = one
    found = [
        NotBegun(tuple(sorted(ranks)), ranks[min(ranks)], len(begun[place]))
        for place, ranks in late.items()
        if place in begun and len(ranks) <= len(begun[place])
    ]
    return max(found, key=lambda one: (one.waiting, -one.ranks[0]), default=None)


def queue_of_facts(facts: Sequence[CollectiveFact]) -> GpuQueue | None:
    """Return the same from a flight recorder whose timing is on; None where it has no begins."""
    known = [fact for fact in facts if fact.begun is not None and fact.seq >= 0]
    if not known:
        return None
    operations = tuple(
        GpuOperation(fact.group[:128], fact.function, fact.seq, name=f"group {fact.group}", begun=bool(fact.begun))
        for fact in known
        if not fact.done
    )
    # The pieces of a batch of sends have no times of their own: whether the GPU is inside one is not known.
    is_partial = any(fact.seq < 0 and not fact.done for fact in facts)
    return GpuQueue(operations, sum(bool(fact.begun) + fact.done for fact in known), is_partial=is_partial)
