# SPDX-License-Identifier: Apache-2.0
"""Agree through the group's store: rank 0's text for all ranks, or the least of what they say.

The store is a table on the host (TCP), so this needs no GPU, disturbs no stream and may happen while a CUDA graph is
being captured. All ranks must make the same calls in the same order, as with any collective.
"""

from datetime import timedelta
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist

from megascale_kernels.errors import KernelError
from megascale_kernels.memory.agreement import among

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Ranks come to their first launch up to minutes apart: data loading, compilation. NCCL's own default is 600 s.
DEADLINE_S = 300.0

_asked: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def store_of(group: dist.ProcessGroup) -> "Store":
    """The store of a process group; the public name is younger than torch 2.11."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)  # noqa: SLF001 - the only way to it before that


def from_rank_zero(
    group: dist.ProcessGroup | None, rank: int, world_size: int, text: str, what: str, *, deadline_s: float = DEADLINE_S
) -> str:
    """Return rank 0's `text` on every rank.

    Args:
        group: the process group.
        rank: this rank in it.
        world_size: ranks in it.
        text: rank 0's text; ignored on the others.
        what: what the text is, for the error message.
        deadline_s: how long to wait for rank 0, seconds.

    Raises:
        KernelError: rank 0 did not come in time.
    """
    if world_size == 1 or group is None:
        return text
    count = _asked.get(group, 0)
    _asked[group] = count + 1
    store, key = store_of(group), f"megascale_kernels/{what.replace(' ', '_')}/{count}"
    if rank == 0:
        store.set(key, text)
        return text
    try:
        store.wait([key], timedelta(seconds=deadline_s))
    except RuntimeError as error:
        raise KernelError(
            f"rank {rank} waited {deadline_s:.0f} s for rank 0's {what}: rank 0 has not come to the same call; "
            f"all ranks must call the same operators in the same order{among(group)}"
        ) from error
    said: str = store.get(key).decode()
    # The last reader clears the table.
    if store.add(f"{key}/read", 1) == world_size - 1:
        store.delete_key(key)
        store.delete_key(f"{key}/read")
    return said


def least_of_ranks(
    group: dist.ProcessGroup | None, rank: int, world_size: int, number: int, what: str, *,
    deadline_s: float = DEADLINE_S,
) -> int:  # fmt: skip
    """Return the least of all ranks' numbers on every rank.

    Args:
        group: the process group.
        rank: this rank in it.
        world_size: ranks in it.
        number: this rank's.
        what: what the number is, for the error message.
        deadline_s: how long to wait for the others, seconds.

    Raises:
        KernelError: a rank did not come in time.
    """
    if world_size == 1 or group is None:
        return number
    count = _asked.get(group, 0)
    _asked[group] = count + 1
    store, key = store_of(group), f"megascale_kernels/{what.replace(' ', '_')}/{count}"
    store.set(f"{key}/{rank}", str(number))
    keys = [f"{key}/{other}" for other in range(world_size)]
    try:
        store.wait(keys, timedelta(seconds=deadline_s))
    except RuntimeError as error:
        missing = ", ".join(str(other) for other in range(world_size) if not store.check([keys[other]]))
        raise KernelError(
            f"rank {rank} waited {deadline_s:.0f} s for every rank's {what}: {missing or 'a rank'} has not come to the "
            f"same call; all ranks must call the same operators in the same order{among(group)}"
        ) from error
    said = min(int(store.get(one)) for one in keys)
    # The last reader clears the table.
    if store.add(f"{key}/read", 1) == world_size:
        for one in (*keys, f"{key}/read"):
            store.delete_key(one)
    return said
