# SPDX-License-Identifier: Apache-2.0
"""Announce a copy of the copy engine where the host does not know the launch number: in captured graphs."""

import triton
import triton.language as tl

from megascale_kernels.device.layout import PUSHES
from megascale_kernels.device.primitives import peer_tile_notify
from megascale_kernels.device.signals import open_channel

RUNTIME = ("slot", "rank", "signature", "deadline_us", "flags", "channels")


@triton.jit(do_not_specialize=(*RUNTIME, "peer", "unit"))
def announce_kernel(
    control, peers, status, board, trace,
    flags, channels, slot, rank, world_size, signature, deadline_us, peer, unit,
    LAST: tl.constexpr, OPERATOR: tl.constexpr, PROGRESS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Announce a copy of the copy engine: this kernel follows the copy on its stream (TileLink's rank_notify)."""
    epoch = tl.load(control + PUSHES) + 1
    channel = open_channel(
        epoch, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    peer_tile_notify(channel, unit, peer)
    if LAST:
        tl.store(control + PUSHES, epoch)
