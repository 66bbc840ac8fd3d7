# SPDX-License-Identifier: Apache-2.0
"""A barrier of all ranks on the stream: no rank's later kernels run before all ranks' earlier ones have ended.

One CTA notifies every peer and waits for every peer. It precedes the first launch of freshly compiled code (a rank that
still compiles would let the others run into their deadline) and the launches of captured graphs.
"""

from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

from megascale_kernels.device.layout import COMMUNICATE, EPOCH, HELLO, HELLO_LINE, OPERATORS, signature
from megascale_kernels.device.primitives import rank_notify, rank_wait
from megascale_kernels.device.progress import head_board, show_done, show_tile
from megascale_kernels.device.signals import finish_launch, open_channel, publish_launch

BARRIER = OPERATORS.index("meet")  # as boards and faults call it
# A barrier's flags are no slot's: a replayed graph may begin with it after a launch of either slot, whose flags a peer
# may still be reading. They lie behind the hello of each source rank, on its line; two, for barriers in a row.
BARRIER_FLAGS = HELLO.value + 16
RUNTIME = ("slot", "rank", "signature", "deadline_us", "flags", "channels")


class Launching(Protocol):
    """Memory of a rank, and which launch is next: what a barrier needs of a workspace."""

    memory: Tensor
    peers: Tensor
    status: Tensor
    board: Tensor
    rank: int
    world_size: int
    slot: int
    launches: int
    progress: bool


@triton.jit(do_not_specialize=RUNTIME)
def barrier_kernel(
    control, peers, status, board, flags, channels, slot, rank, world_size, signature, deadline_us,
    OPERATOR: tl.constexpr, PROGRESS: tl.constexpr,
):  # fmt: skip
    """rank_notify to every peer, then rank_wait for every peer."""
    channel = open_channel(
        tl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    head_board(channel, board, 1, world_size, 0, 0, 0, PROGRESS)
    show_tile(channel, COMMUNICATE, rank, PROGRESS)
    publish_launch(channel, 0, 0, 0, 0)
    for step in range(1, world_size):
        peer = (rank + step) % world_size
        rank_notify(channel, peer)
    code = 0
    for step in range(1, world_size):
        peer = (rank + step) % world_size
        if code == 0:
            code = rank_wait(channel, peer, COMMUNICATE)
    show_done(channel, COMMUNICATE, PROGRESS)
    finish_launch(channel, 1, 0)


def barrier(workspace: Launching, deadline_s: float) -> None:
    """Launch a barrier on the current stream."""
    workspace.slot ^= 1
    workspace.launches += 1
    barrier_kernel[(1,)](
        workspace.memory, workspace.peers, workspace.status, workspace.board,
        BARRIER_FLAGS + workspace.slot, HELLO_LINE.value, workspace.slot, workspace.rank, workspace.world_size,
        signature(BARRIER, 0, 0, 0, 0), int(deadline_s * 1e6),
        OPERATOR=BARRIER, PROGRESS=workspace.progress, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
