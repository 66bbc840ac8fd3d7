# SPDX-License-Identifier: Apache-2.0
"""All-gather + GEMM taken apart: copy engines carry the rows, and cuBLAS multiplies each piece when its rows are there.

Our own rows first, in place, while the peers' come; before every further piece a kernel of one CTA waits for its rows,
with the deadline and the words of all our kernels. For shapes at which cuBLAS multiplies faster than our tiles. With
one piece the rows are gathered, and then multiplied at once: an all-gather by copy engines has half the latency of
NCCL's.

The board shows which rank's rows are waited for; while cuBLAS multiplies, it shows the last rows that came. There are
no events in a trace.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megascale_kernels.ag_gemm.push import copies_of, push_by_copy_engine
from megascale_kernels.ag_gemm.triton_kernel import AG_GEMM
from megascale_kernels.device.announce import announce_kernel
from megascale_kernels.device.layout import COMMUNICATE, EPOCH, SLOTS, signature
from megascale_kernels.device.primitives import rank_wait
from megascale_kernels.device.progress import head_board, show_done, show_tile
from megascale_kernels.device.signals import finish_launch, open_channel, publish_launch
from megascale_kernels.launching.ready import copies_alone, ready
from megascale_kernels.memory.channel_arguments import channel_arguments
from megascale_kernels.memory.operands import Weight, product_of
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config
from megascale_kernels.planning.pieces import pieces_of
from megascale_kernels.reference import matmul_into

RUNTIME = (
    "slot", "rank", "signature", "deadline_us", "flags", "channels", "counted", "first", "last", "m_shard", "n_size",
    "k_size", "variant",
)  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def await_shards_kernel(
    control, peers, status, board, trace,
    flags, channels, slot, rank, world_size, signature, deadline_us, counted, first, last, m_shard, n_size, k_size,
    variant, OPERATOR: tl.constexpr, PROGRESS: tl.constexpr,
):  # fmt: skip
    """rank_wait for the rows of steps [first, last); the first of a launch publishes it, the last counts it.

    `counted`: the announcements count the launch themselves.
    """
    channel = open_channel(
        tl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    if first == 1:
        head_board(channel, board, 1, world_size, m_shard, n_size, k_size, PROGRESS)
        publish_launch(channel, m_shard, n_size, k_size, variant)
    code = 0
    for step in range(first, last):
        source = (rank + step) % world_size
        if code == 0:
            show_tile(channel, COMMUNICATE, source, PROGRESS)
            code = rank_wait(channel, source, COMMUNICATE)
    if last == world_size:
        show_done(channel, COMMUNICATE, PROGRESS)
        finish_launch(channel, 1, counted)


class Ready(NamedTuple):
    """What the driver launches, for one slot: the copies, and a wait for each piece that has one."""

    copies: object
    waits: tuple[object, ...]


class Part(NamedTuple):
    """One product; sizes and places as `Tensor.as_strided` takes them, at a third of what a slice costs the host.

    Attributes:
        wait: which wait comes before it, None where none does.
        rows: of the gathered ones; None is our own, where the caller has them.
        shape: of its part of the output.
        offset: of its first element there.
    """

    wait: int | None
    rows: Tensor | None
    shape: tuple[int, int]
    offset: int


class DecomposedGather:
    """All that is the same in every launch of one shape: made once, kept by the workspace.

    Args:
        x: this rank's rows, [M / world_size, K].
        weight: [K, N].
        workspace: whose launches they are.
        config: how many pieces.

    Raises:
        WorkspaceTooSmall: the gathered input does not fit.
    """

    def __init__(self, x: Tensor, weight: Weight, workspace: Workspace, config: Config) -> None:
        self.m_shard, self.k_size = x.shape
        world_size, rank = workspace.world_size, workspace.rank
        self.workspace, self.config, self.n_size, self.product = workspace, config, weight.n_size, product_of(weight)
        needed = world_size * x.numel() * x.element_size()
        workspace.need(needed, 1, f"ag_gemm of {world_size} x {tuple(x.shape)}")
        self.stamp = signature(AG_GEMM, self.m_shard, self.n_size, self.k_size, config.code)
        self.pieces = pieces_of(rank, world_size, config.pieces)
        self.awaits = [(max(1, piece.first), piece.last) for piece in self.pieces if piece.last > 1]
        self.options = {"OPERATOR": AG_GEMM, "PROGRESS": workspace.progress, "enable_fp_fusion": True, "num_warps": 1}
        shape = (world_size * self.m_shard, self.k_size)
        self.rows = [workspace.local(slot, shape) for slot in range(SLOTS)]
        self.own = [rows[rank * self.m_shard : (rank + 1) * self.m_shard] for rows in self.rows]
        self.out_stride = (self.n_size, 1)
        self.parts = [self._parts(rows[:, : self.product.depth]) for rows in self.rows]
        self.key = ("decomposed ag_gemm",)
        workspace.compile(self.key, self._warm)
        self.ready: list[Ready | None] = [self._ready(slot, x) for slot in range(SLOTS)]

    def _parts(self, rows: Tensor) -> list[Part]:
        """The products, on the gathered rows of one slot."""
        m_shard, waits, parts = self.m_shard, 0, []
        for piece in self.pieces:
            for number, (begin, end) in enumerate(piece.runs):
                own, count = piece.last == 1, (end - begin) * m_shard
                wait = None if own or number else waits
                waits += wait is not None
                taken = None if own else rows[begin * m_shard : end * m_shard]
                parts.append(Part(wait, taken, (count, self.n_size), begin * m_shard * self.n_size))
        return parts

    def _warm(self) -> None:
        await_shards_kernel.warmup(*self._arguments(0, 0, (1, 1)), grid=(1,), **self.options)
        # The announcements of graphs too: nothing may be compiled while one is captured.
        common = channel_arguments(self.workspace, 0, self.stamp)
        for last in (False, True):
            announce_kernel.warmup(*common, 0, 0, LAST=last, TRACE=False, grid=(1,), **self.options)

    def _arguments(self, slot: int, counted: int, steps: tuple[int, int]) -> tuple[Any, ...]:
        common = channel_arguments(self.workspace, slot, self.stamp)
        return (*common, counted, *steps, self.m_shard, self.n_size, self.k_size, self.config.code)

    def _ready(self, slot: int, x: Tensor) -> Ready | None:
        native = self.workspace.native
        if native is None:
            return None
        copies = copies_of(
            self.workspace, slot, self.m_shard, self.m_shard, self.m_shard, self.k_size * x.element_size()
        )
        waits = [
            ready(native, await_shards_kernel, self._arguments(slot, 0, steps), self.options, (1,), {})
            for steps in self.awaits
        ]
        return Ready(copies_alone(native, copies), tuple(waits)) if None not in waits else None

    def run(self, x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None) -> int:
        """Launch on the current stream; returns the slot in which the gathered rows are.

        Raises:
            TileTimeout, RankMismatch: an earlier launch failed.
        """
        workspace = self.workspace
        made = self.ready[workspace.slot ^ 1]
        counted = workspace.counts_on_device()
        if made is not None and not counted:
            slot = workspace.next_slot()
            workspace.launch(made.copies, self.stamp, x, x, x, None, join=False)
        else:
            made, slot = None, workspace.begin(self.key, self._warm)
            announced = channel_arguments(workspace, slot, self.stamp) if counted else self.stamp
            push_by_copy_engine(x, workspace, slot, self.m_shard, announced)
        self._multiply(x, matrix, out, bias, slot, made, counted=counted)
        return slot

    def _multiply(
        self, x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None, slot: int, made: Ready | None, *,
        counted: bool,
    ) -> None:  # fmt: skip
        w, base = self.product.weight(matrix), out.storage_offset()
        own = x if self.product.depth == self.k_size else x[:, : self.product.depth]
        if len(self.pieces) == 1:
            self.own[slot].copy_(x, non_blocking=True)
        for wait, rows, shape, offset in self.parts[slot]:
            if wait is not None:
                self._wait(wait, slot, made, x, counted=counted)
            target = out.as_strided(shape, self.out_stride, base + offset)
            matmul_into(target, own if rows is None else rows, w, bias)

    def _wait(self, index: int, slot: int, made: Ready | None, x: Tensor, *, counted: bool) -> None:
        """Let the stream wait for the rows of a piece; behind the last wait x may be reused."""
        workspace, is_last = self.workspace, index == len(self.awaits) - 1
        if made is not None:
            workspace.launch(made.waits[index], self.stamp, x, x, x, None, join=is_last)
            return
        arguments = self._arguments(slot, int(counted), self.awaits[index])
        await_shards_kernel[(1,)](*arguments, **self.options)
        if is_last:
            workspace.join_copies()

    def gathered(self, x: Tensor, slot: int) -> Tensor:  # noqa: ARG002 - as `GatherLaunch` has it
        """The gathered rows of the launch that took `slot`, [world_size, M / world_size, K], perhaps without ours."""
        return self.rows[slot].view(self.workspace.world_size, self.m_shard, self.k_size)
