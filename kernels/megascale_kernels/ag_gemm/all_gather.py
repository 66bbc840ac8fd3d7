# SPDX-License-Identifier: Apache-2.0
"""All-gather beside an operator: copy engines carry the rows while the multiprocessors multiply.

The backward of `ag_gemm` needs the gathered input again for the gradient of the weight, and meanwhile computes the
gradient of the input by `gemm_rs`. So the gather is begun first (`start`: copies and announcements on the copy stream),
the operator runs, and only then a kernel of one CTA waits for the rows (`finish`).

Launches of one workspace end in the order in which they began; these two cross. Hence the gather runs in a workspace
of its own (`Workspace.beside`). A slot is reused two gathers later, when every peer has read it: its own next gather
begins, on its stream, behind its last use of this one.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megascale_kernels.ag_gemm.launch import channel_arguments, push_by_copy_engine
from megascale_kernels.ag_gemm.triton_kernel import AG_GEMM, announce_kernel
from megascale_kernels.device.layout import COMMUNICATE, EPOCH, OPERATORS, signature
from megascale_kernels.device.primitives import rank_wait
from megascale_kernels.device.progress import head_board, show_done, show_tile
from megascale_kernels.device.signals import finish_launch, open_channel, publish_launch
from megascale_kernels.memory.workspace import Workspace

ALL_GATHER = OPERATORS.index("all_gather")
RUNTIME = ("slot", "rank", "signature", "deadline_us", "flags", "channels", "counted", "m_shard", "k_size")


@triton.jit(do_not_specialize=RUNTIME)
def all_gather_kernel(
    control, peers, status, board, trace,
    flags, channels, slot, rank, world_size, signature, deadline_us, counted, m_shard, k_size,
    OPERATOR: tl.constexpr, PROGRESS: tl.constexpr,
):  # fmt: skip
    """rank_wait for every peer's rows; `counted`: the announcements count the launch themselves."""
    channel = open_channel(
        tl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    head_board(channel, board, 1, world_size - 1, m_shard, 0, k_size, PROGRESS)
    publish_launch(channel, m_shard, 0, k_size, 0)
    code = 0
    for step in range(1, world_size):
        source = (rank + step) % world_size
        if code == 0:
            show_tile(channel, COMMUNICATE, source, PROGRESS)
            code = rank_wait(channel, source, COMMUNICATE)
    show_done(channel, COMMUNICATE, PROGRESS)
    finish_launch(channel, 1, counted)


class Begun(NamedTuple):
    """A gather under way.

    Attributes:
        x: this rank's rows, which copy engines still read.
        workspace: the gather's own.
        common: what its kernels are launched with.
        counted: the announcements count the launch, as in a captured graph.
        gathered: where the rows of all ranks are going to lie.
    """

    x: Tensor
    workspace: Workspace
    common: tuple[Any, ...]
    counted: bool
    gathered: Tensor


def start(x: Tensor, workspace: Workspace) -> Begun:
    """Begin to gather x, [M / W, K], behind what the current stream has done so far.

    Raises:
        WorkspaceTooSmall: the gathered rows do not fit.
        TileTimeout, RankMismatch: an earlier launch failed.
    """
    m_shard, k_size = x.shape
    world_size, rank = workspace.world_size, workspace.rank
    workspace.need(world_size * x.numel() * x.element_size(), 1, f"all_gather of {world_size} x {tuple(x.shape)}")
    stamp = signature(ALL_GATHER, m_shard, 0, k_size, 0)
    options = {"PROGRESS": workspace.progress, "enable_fp_fusion": True, "num_warps": 1, "grid": (1,)}

    def warm() -> None:
        # Also the kernel that only graphs use: nothing may be compiled later, while one is captured.
        common = channel_arguments(workspace, 0, stamp)
        all_gather_kernel.warmup(*common, 0, m_shard, k_size, OPERATOR=ALL_GATHER, **options)
        for either in (False, True):
            announce_kernel.warmup(*common, 0, 0, LAST=either, OPERATOR=AG_GEMM, TRACE=False, **options)

    counted = workspace.counts_on_device()
    slot = workspace.begin("all_gather", warm)
    common = channel_arguments(workspace, slot, stamp)
    gathered = workspace.local(slot, (world_size * m_shard, k_size))
    with workspace.copying():
        gathered[rank * m_shard : (rank + 1) * m_shard].copy_(x, non_blocking=True)
    push_by_copy_engine(x, workspace, slot, m_shard, common if counted else stamp)
    return Begun(x, workspace, common, counted, gathered)


def finish(begun: Begun) -> Tensor:
    """Wait on the current stream for the rows of all ranks: [M, K], overwritten two gathers later."""
    workspace = begun.workspace
    all_gather_kernel[(1,)](
        *begun.common,
        int(begun.counted),
        *begun.x.shape,
        OPERATOR=ALL_GATHER,
        PROGRESS=workspace.progress,
        num_warps=1,
        enable_fp_fusion=True,
    )
    workspace.join_copies()
    return begun.gathered
