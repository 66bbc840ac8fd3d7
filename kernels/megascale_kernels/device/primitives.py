# SPDX-License-Identifier: Apache-2.0
"""TileLink's primitives (2503.20313): how tiles of one kernel talk to tiles of another, on any rank.

    signals   producer_tile_notify   consumer_tile_wait     between tiles of one rank
              peer_tile_notify       peer_tile_wait         between a tile and a tile of a peer
              rank_notify            rank_wait              between whole ranks, and with the copy engine
    data      tile_push_data                                carried by the multiprocessors
              rank_copy_data                                carried by the copy engine

The ninth, tile_pull_data, is not here: in all of our operators the rank that has the rows sends them.
Ours is consumer_tile_seen, which asks without waiting, to choose what to wait for.

A `Channel` (the paper's BlockChannel) holds the ranks, the flags and the deadline. *Where* a tile's flag lies is a
mapping (`tile_order.py`): the primitives take the flag's index, so an affine mapping and a table filled at run time
serve alike. A notify is a release at system scope of everything the CTA wrote before; what TMA wrote must be drained
first (`signals.drain_tma_stores`), because a TMA store is complete only after `cp.async.bulk.wait_group` without
`.read`. A wait is an acquire at system scope followed by the proxy fence that TMA loads need; it returns 0, or why the
CTA must leave (the deadline passed, a peer gave up, a peer runs something else), and never traps.
"""

import triton
import triton.language as tl
from torch import Tensor

from megascale_kernels.device.layout import COMPUTE
from megascale_kernels.device.signals import flag_of, peer_words, publish, wait_for

RANK_CHANNEL = tl.constexpr(0)


@triton.jit
def producer_tile_notify(channel, index):
    """Announce a tile to consumers on this rank.

    Ordering: release at system scope by one thread after a barrier of the CTA.
    """
    publish(channel, flag_of(channel, channel.control, channel.rank, index))


@triton.jit
def consumer_tile_wait(channel, index, source, role, tile):
    """Wait for the tile or rows that flag `index` of rank `source` announces to us.

    Ordering: acquire at system scope, then a proxy fence, so both ordinary and TMA loads may follow.

    Returns:
        0, or `layout.EXPIRED`, `ABORTED`, `MISMATCH`.
    """
    return wait_for(channel, flag_of(channel, channel.control, source, index), role, tile, source, index)


@triton.jit
def consumer_tile_seen(channel, index, source):
    """Whether flag `index` of rank `source` has been raised, without waiting: to choose what is waited for.

    Ordering: none; a `consumer_tile_wait` must come before what the flag announces is read.
    """
    seen = tl.atomic_add(flag_of(channel, channel.control, source, index), 0, sem="relaxed", scope="gpu")
    return seen == channel.stamp


@triton.jit
def peer_tile_notify(channel, index, peer):
    """Announce a tile of ours to a peer, where it was written.

    Ordering: release at system scope by one thread after a barrier of the CTA; TMA stores must have been drained.
    """
    publish(channel, flag_of(channel, peer_words(channel, peer), channel.rank, index))


@triton.jit
def peer_tile_wait(channel, index, peer, role, tile):
    """Wait for a tile that a peer announces to us; the counterpart of `peer_tile_notify`.

    Ordering and answer as in `consumer_tile_wait`.
    """
    return wait_for(channel, flag_of(channel, channel.control, peer, index), role, tile, peer, index)


@triton.jit
def await_partials(channel, index, tile):
    """Wait for every peer's partial of one of our tiles."""
    code = 0
    for step in range(1, channel.world_size):
        if code == 0:
            code = peer_tile_wait(channel, index, (channel.rank + step) % channel.world_size, COMPUTE, tile)
    return code


@triton.jit
def rank_notify(channel, peer):
    """Notify a peer that this rank has come here (one flag per pair of ranks).

    Ordering: release at system scope; what the copy engine wrote is ordered by the stream, before the kernel that
    notifies.
    """
    peer_tile_notify(channel, RANK_CHANNEL, peer)


@triton.jit
def rank_wait(channel, peer, role):
    """Wait until a peer has come here, or until what it copied has arrived.

    Ordering and answer as in `consumer_tile_wait`.
    """
    return wait_for(channel, flag_of(channel, channel.control, peer, RANK_CHANNEL), role, peer, peer, RANK_CHANNEL)


@triton.jit
def tile_push_data(target_ptr, source_ptr, begin, end, ELEMENTS: tl.constexpr):
    """Copy elements [begin, end) from our memory to the same place of a peer's, by the threads of this CTA.

    Ordering: ordinary stores; a notify of this CTA publishes them.
    """
    for at in range(begin, end, ELEMENTS):
        here = at + tl.arange(0, ELEMENTS)
        tl.store(target_ptr + here, tl.load(source_ptr + here, mask=here < end), mask=here < end)


def rank_copy_data(target: Tensor, source: Tensor) -> None:
    """Let the copy engine carry `source` to a peer's `target` on the current stream (host function).

    Ordering: whatever follows on the stream, a stream write or a kernel that notifies, comes after the copy.
    """
    target.copy_(source, non_blocking=True)
