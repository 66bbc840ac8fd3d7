# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter beside a kernel: copy engines carry each rank's share to its owner, who adds them in order.

What a rank's queries contribute to the gradients of its peers' keys lies in [W, elements]. Copies to the owners begin
as soon as that is written (`start`), another kernel runs meanwhile, and then one kernel waits for the shares of all
peers and adds them in fp32 in the order of ranks (`finish`), so the sum is the same from run to run. It runs in a
workspace of its own (`Workspace.beside`), because its launch crosses the one beside it.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megascale_kernels.ag_gemm.triton_kernel import AG_GEMM
from megascale_kernels.device.announce import announce_kernel
from megascale_kernels.device.layout import ABORT, COMMUNICATE, EPOCH, OPERATORS, signature
from megascale_kernels.device.primitives import rank_copy_data, rank_wait
from megascale_kernels.device.progress import head_board, show_done, show_tile
from megascale_kernels.device.signals import finish_launch, open_channel, publish_launch
from megascale_kernels.memory.channel_arguments import channel_arguments
from megascale_kernels.memory.operands import processors
from megascale_kernels.memory.workspace import Workspace

REDUCE_SCATTER = OPERATORS.index("reduce_scatter")
RUNTIME = ("slot", "rank", "signature", "deadline_us", "flags", "channels", "counted", "world_size")
BLOCK = 4096  # elements a program adds at a time: 16 bytes a thread and two loads in flight
SMALL = {"num_warps": 1, "enable_fp_fusion": True}


@triton.jit(do_not_specialize=RUNTIME)
def sum_partials_kernel(
    own_ptr, staged_ptr, out_ptr, beside_ptr,
    control, peers, status, board, trace,
    flags, channels, slot, rank, world_size, signature, deadline_us, counted, elements,
    SIZE: tl.constexpr, OPERATOR: tl.constexpr, PROGRESS: tl.constexpr,
):  # fmt: skip
    """Every program waits for every peer's share, then adds every `programs`-th block of all shares.

    `beside_ptr`: the words of the workspace whose kernels made the shares. Where they gave up no share is waited for:
    what comes of it is refused by the host, and a second deadline would keep it from saying so.
    """
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    channel = open_channel(
        tl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    if cta == ctas - 1:
        head_board(channel, board, ctas, world_size, 1, elements, 0, PROGRESS)
        publish_launch(channel, 1, elements, 0, 0)
    code = tl.atomic_add(beside_ptr + ABORT, 0, sem="acquire", scope="sys")
    for step in range(1, world_size):
        source = (rank + step) % world_size
        if code == 0:
            show_tile(channel, COMMUNICATE, source, PROGRESS)
            code = rank_wait(channel, source, COMMUNICATE)
    end = tl.where(code == 0, elements, 0)
    for first in range(cta * SIZE, end, ctas * SIZE):
        here = first + tl.arange(0, SIZE)
        inside = here < elements
        total = tl.zeros((SIZE,), dtype=tl.float32)
        for source in range(world_size):
            share = staged_ptr + tl.cast(source, tl.int64) * elements
            if source == rank:
                share = own_ptr
            total += tl.load(share + here, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + here, total.to(out_ptr.dtype.element_ty), mask=inside)
    show_done(channel, COMMUNICATE, PROGRESS)
    finish_launch(channel, ctas, counted)


class Sent(NamedTuple):
    """Shares under way.

    Attributes:
        partials: what copy engines still read, [W, elements].
        workspace: whose launch it is.
        beside: whose launch made the shares.
        slot: where the peers' shares are going to lie.
        counted: the announcements count the launch, as in a captured graph.
    """

    partials: Tensor
    workspace: Workspace
    beside: Workspace
    slot: int
    counted: bool


def start(partials: Tensor, workspace: Workspace, beside: Workspace) -> Sent:
    """Send each peer its share, behind what the current stream has done so far.

    Args:
        partials: [W, elements], fewer than 2^31 elements a share.
        workspace: of its own (`Workspace.beside`).
        beside: the workspace of the kernel that makes them.

    Raises:
        WorkspaceTooSmall: the shares of all ranks do not fit.
        TileTimeout, RankMismatch: an earlier launch failed.
    """
    world_size, elements = partials.shape
    workspace.need(partials.numel() * partials.element_size(), 1, f"the sum of {world_size} x {elements} elements")
    stamp = _stamp(elements)
    sent = Sent(partials, workspace, beside, 0, counted=False)

    def warm() -> None:
        sum_partials_kernel.warmup(*_arguments(sent, partials), grid=(1,), **_options(workspace))
        common = channel_arguments(workspace, 0, stamp)
        for last in (False, True):
            announce_kernel.warmup(
                *common, 0, 0, LAST=last, OPERATOR=AG_GEMM, PROGRESS=workspace.progress, TRACE=False, grid=(1,), **SMALL
            )

    slot = workspace.begin(("reduce_scatter", elements % 16), warm)
    counted = workspace.counts_on_device()
    with workspace.copying():
        for step in range(1, world_size):
            peer = (workspace.rank - step) % world_size
            rank_copy_data(workspace.peer(peer, slot, (elements,), workspace.rank * elements), partials[peer])
            if not counted:
                workspace.announce(peer, slot, 0, stamp)
                continue
            announce_kernel[(1,)](
                *channel_arguments(workspace, slot, stamp), peer, 0, LAST=step == world_size - 1, OPERATOR=AG_GEMM,
                PROGRESS=workspace.progress, TRACE=False, **SMALL,
            )  # fmt: skip
    return sent._replace(slot=slot, counted=counted)


def finish(sent: Sent) -> Tensor:
    """Wait on the current stream for the peers' shares, and add all: [elements]."""
    workspace, elements = sent.workspace, sent.partials.shape[1]
    out = torch.empty_like(sent.partials[0])
    programs = max(1, min(processors(workspace.device), -(-elements // BLOCK)))
    # Before the kernel: it may fill the device, and no announcement then finds room beside it.
    workspace.join_copies()
    sum_partials_kernel[(programs,)](*_arguments(sent, out), **_options(workspace))
    return out


def _stamp(elements: int) -> int:
    return signature(REDUCE_SCATTER, 1, elements, 0, 0)


def _options(workspace: Workspace) -> dict[str, Any]:
    return {
        "SIZE": BLOCK, "OPERATOR": REDUCE_SCATTER, "PROGRESS": workspace.progress, "enable_fp_fusion": True,
        "num_warps": 8,
    }  # fmt: skip


def _arguments(sent: Sent, out: Tensor) -> tuple[Any, ...]:
    world_size, elements = sent.partials.shape
    workspace, slot = sent.workspace, sent.slot
    return (
        sent.partials[workspace.rank], workspace.local(slot, (world_size, elements)), out, sent.beside.memory,
        *channel_arguments(workspace, slot, _stamp(elements)), int(sent.counted), elements,
    )  # fmt: skip
