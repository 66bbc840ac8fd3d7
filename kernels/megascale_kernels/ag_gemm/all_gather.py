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

from megascale_kernels.ag_gemm.push import copies_of, push_by_copy_engine
from megascale_kernels.ag_gemm.triton_kernel import AG_GEMM
from megascale_kernels.device.announce import announce_kernel
from megascale_kernels.device.layout import COMMUNICATE, EPOCH, OPERATORS, SLOTS, signature
from megascale_kernels.device.primitives import rank_wait
from megascale_kernels.device.progress import head_board, show_done, show_tile
from megascale_kernels.device.signals import finish_launch, open_channel, publish_launch
from megascale_kernels.launching.ready import Copy, copies_alone, ready
from megascale_kernels.memory.channel_arguments import channel_arguments
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
        plan: what it is a launch of.
        slot: where the rows of all ranks are going to lie.
        counted: the announcements count the launch, as in a captured graph.
    """

    x: Tensor
    plan: "AllGatherLaunch"
    slot: int
    counted: bool


class AllGatherLaunch:
    """All that is the same in every gather of one shape: made once, kept by the workspace.

    Args:
        x: this rank's rows, [M / W, K].
        workspace: the gather's own.

    Raises:
        WorkspaceTooSmall: the gathered rows do not fit.
    """

    def __init__(self, x: Tensor, workspace: Workspace) -> None:
        m_shard, k_size = x.shape
        self.workspace, self.m_shard, self.k_size = workspace, m_shard, k_size
        self.bytes = x.numel() * x.element_size()
        world_size = workspace.world_size
        workspace.need(world_size * self.bytes, 1, f"all_gather of {world_size} x {tuple(x.shape)}")
        self.stamp = signature(ALL_GATHER, m_shard, 0, k_size, 0)
        self.options = {"PROGRESS": workspace.progress, "enable_fp_fusion": True, "num_warps": 1}
        workspace.compile("all_gather", self._warm)
        self.copies: list[object | None] = [None] * SLOTS
        self.kernels: list[object | None] = [None] * SLOTS
        if workspace.native is not None:
            constants = {"OPERATOR": ALL_GATHER, **self.options}
            for slot in range(SLOTS):
                arguments = self._arguments(slot, 0)
                self.copies[slot] = copies_alone(workspace.native, self._copies(slot))
                self.kernels[slot] = ready(workspace.native, all_gather_kernel, arguments, constants, (1,), {})

    def _warm(self) -> None:
        # Also the kernel that only graphs use: nothing may be compiled later, while one is captured.
        all_gather_kernel.warmup(*self._arguments(0, 0), OPERATOR=ALL_GATHER, grid=(1,), **self.options)
        common = channel_arguments(self.workspace, 0, self.stamp)
        for either in (False, True):
            announce_kernel.warmup(*common, 0, 0, LAST=either, OPERATOR=AG_GEMM, TRACE=False, grid=(1,), **self.options)

    def _arguments(self, slot: int, counted: int) -> tuple[Any, ...]:
        return *channel_arguments(self.workspace, slot, self.stamp), counted, self.m_shard, self.k_size

    def _copies(self, slot: int) -> list[Copy]:
        """Our own rows, which nothing announces, and the peers'."""
        workspace = self.workspace
        own = workspace.data_address(workspace.rank, slot) + workspace.rank * self.bytes
        row_bytes = self.bytes // self.m_shard
        return [
            (0, self.bytes, own, 0),
            *copies_of(workspace, slot, self.m_shard, self.m_shard, self.m_shard, row_bytes),
        ]

    def start(self, x: Tensor) -> Begun:
        """Begin, behind what the current stream has done so far.

        Raises:
            TileTimeout, RankMismatch: an earlier launch failed.
        """
        workspace = self.workspace
        counted = workspace.counts_on_device()
        made = self.copies[workspace.slot ^ 1]
        if made is not None and not counted:
            slot = workspace.next_slot()
            workspace.launch(made, self.stamp, x, x, x, None, join=False)
            return Begun(x, self, slot, counted)
        slot = workspace.begin("all_gather", self._warm)
        announced = channel_arguments(workspace, slot, self.stamp) if counted else self.stamp
        with workspace.copying():
            first = workspace.rank * self.m_shard
            self.gathered(slot)[first : first + self.m_shard].copy_(x, non_blocking=True)
        push_by_copy_engine(x, workspace, slot, self.m_shard, announced)
        return Begun(x, self, slot, counted)

    def finish(self, begun: Begun) -> Tensor:
        """Wait on the current stream for the rows of all ranks."""
        workspace, slot = self.workspace, begun.slot
        made = self.kernels[slot]
        if made is not None and not begun.counted:
            workspace.launch(made, self.stamp, begun.x, begun.x, begun.x, None, join=True)
        else:
            arguments = self._arguments(slot, int(begun.counted))
            all_gather_kernel[(1,)](*arguments, OPERATOR=ALL_GATHER, **self.options)
            workspace.join_copies()
        return self.gathered(slot)

    def gathered(self, slot: int) -> Tensor:
        """The rows of all ranks, [M, K]."""
        return self.workspace.local(slot, (self.workspace.world_size * self.m_shard, self.k_size))


def start(x: Tensor, workspace: Workspace) -> Begun:
    """Begin to gather x, [M / W, K], behind what the current stream has done so far.

    Raises:
        WorkspaceTooSmall: the gathered rows do not fit.
        TileTimeout, RankMismatch: an earlier launch failed.
    """
    key = ("all_gather", *x.shape, workspace.deadline_s)
    plan: AllGatherLaunch = workspace.plan(key, lambda: AllGatherLaunch(x, workspace))
    return plan.start(x)


def finish(begun: Begun) -> Tensor:
    """Wait on the current stream for the rows of all ranks: [M, K], overwritten two gathers later."""
    return begun.plan.finish(begun)
