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
from megascale_kernels.launching.products import Operand, Shape
from megascale_kernels.launching.ready import ABSENT, BIAS, OUT, W, X, copies_alone, in_a_row, ready
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


class Part(NamedTuple):
    """One product.

    Attributes:
        wait: which wait comes before it, None where none does.
        rows: of the gathered ones; None is our own, where the caller has them.
        shape: of its part of the output, as `Tensor.as_strided` takes it.
        offset: of its first element there.
        product: what the driver launches, None where torch multiplies.
    """

    wait: int | None
    rows: Tensor | None
    shape: tuple[int, int]
    offset: int
    product: object | None


class DecomposedGather:
    """All that is the same in every launch of one shape: made once, kept by the workspace.

    Args:
        x: this rank's rows, [M / world_size, K].
        weight: [K, N].
        workspace: whose launches they are.
        config: how many pieces.
        has_bias: one is added.
        own: this rank's rows are copied among the gathered ones too, while cuBLAS multiplies.

    Raises:
        WorkspaceTooSmall: the gathered input does not fit.
    """

    def __init__(
        self, x: Tensor, weight: Weight, workspace: Workspace, config: Config, *, has_bias: bool = False,
        own: bool = False,
    ) -> None:  # fmt: skip
        self.m_shard, self.k_size = x.shape
        world_size, rank = workspace.world_size, workspace.rank
        self.workspace, self.config, self.n_size, self.product = workspace, config, weight.n_size, product_of(weight)
        needed = world_size * x.numel() * x.element_size()
        workspace.need(needed, 1, f"ag_gemm of {world_size} x {tuple(x.shape)}")
        self.stamp = signature(AG_GEMM, self.m_shard, self.n_size, self.k_size, config.code)
        self.pieces = pieces_of(rank, world_size, config.pieces)
        self.has_own = own or len(self.pieces) == 1  # that one multiplies them there
        self.awaits = [(max(1, piece.first), piece.last) for piece in self.pieces if piece.last > 1]
        self.options = {"OPERATOR": AG_GEMM, "PROGRESS": workspace.progress, "enable_fp_fusion": True, "num_warps": 1}
        shape = (world_size * self.m_shard, self.k_size)
        self.rows = [workspace.local(slot, shape) for slot in range(SLOTS)]
        self.own = [rows[rank * self.m_shard : (rank + 1) * self.m_shard] for rows in self.rows]
        self.out_stride = (self.n_size, 1)
        self.bias = BIAS if has_bias else -1
        self.parts = [self._parts(rows[:, : self.product.depth], weight.matrix.shape[1]) for rows in self.rows]
        self.key = ("decomposed ag_gemm",)
        workspace.compile(self.key, self._warm)
        self.ready: list[tuple[Any, ...] | None] = [self._ready(slot, x) for slot in range(SLOTS)]

    def _parts(self, rows: Tensor, columns: int) -> list[Part]:
        """The products, on the gathered rows of one slot; `columns` of the weight as it lies."""
        m_shard, waits, parts, products = self.m_shard, 0, [], self.workspace.products
        bytes_, w = rows.element_size(), Operand(W, 0, columns)
        for piece in self.pieces:
            for number, (begin, end) in enumerate(piece.runs):
                own, count = piece.last == 1, (end - begin) * m_shard
                wait = None if own or number else waits
                waits += wait is not None
                taken = None if own else rows[begin * m_shard : end * m_shard]
                offset, product = begin * m_shard * self.n_size, None
                if products is not None:
                    x = Operand(X, 0, self.k_size)
                    if taken is not None:
                        x = Operand(ABSENT, 0, self.k_size).at(taken.data_ptr())
                    out = Operand(OUT, 0, self.n_size).at(offset * bytes_)
                    shape = Shape(count, self.n_size, self.product.depth, self.product.is_nk)
                    product = products.product(shape, x, w, out, self.bias)
                parts.append(Part(wait, taken, (count, self.n_size), offset, product))
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

    def _ready(self, slot: int, x: Tensor) -> tuple[Any, ...] | None:
        """What a call does, one thing after another: runs of launches, and products that are torch's."""
        native = self.workspace.native
        if native is None:
            return None
        row_bytes = self.k_size * x.element_size()
        waits = [
            ready(native, await_shards_kernel, self._arguments(slot, 0, steps), self.options, (1,), {})
            for steps in self.awaits
        ]
        if None in waits:
            return None
        copies = copies_of(self.workspace, slot, self.m_shard, self.m_shard, self.m_shard, row_bytes)
        own = (0, self.m_shard * row_bytes, self.own[slot].data_ptr(), 0)
        is_whole = len(self.pieces) == 1
        if self.has_own and not is_whole:  # behind the peers', who wait for theirs
            copies = [*copies, own]
        steps: list[Any] = [copies_alone(native, copies)]
        if is_whole:
            steps.append(copies_alone(native, [own], here=True))
        for part in self.parts[slot]:
            steps += [] if part.wait is None else [waits[part.wait]]
            steps.append(part if part.product is None else part.product)
        return in_a_row(steps, Part)

    def run(self, x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None) -> int:
        """Launch on the current stream; returns the slot in which the gathered rows are.

        Raises:
            TileTimeout, RankMismatch: an earlier launch failed.
        """
        workspace = self.workspace
        made = self.ready[workspace.slot ^ 1]
        if made is None or workspace.counts_on_device():
            return self._run_by_triton(x, matrix, out, bias)
        slot = workspace.next_slot()
        addresses = (x.data_ptr(), matrix.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr())
        for step in made:
            if isinstance(step, Part):
                self._multiply(step, x, matrix, out, bias)
            else:  # behind the last wait x may be reused
                workspace.launch_at(step.launches, self.stamp, *addresses, join=step.is_last)
        return slot

    def _run_by_triton(self, x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None) -> int:
        """Launch where only the device knows the launch number, or the driver is out of reach."""
        workspace, counted = self.workspace, self.workspace.counts_on_device()
        slot = workspace.begin(self.key, self._warm)
        announced = channel_arguments(workspace, slot, self.stamp) if counted else self.stamp
        push_by_copy_engine(x, workspace, slot, self.m_shard, announced)
        if len(self.pieces) == 1:
            self.own[slot].copy_(x, non_blocking=True)
        elif self.has_own:
            with workspace.copying():
                self.own[slot].copy_(x, non_blocking=True)
        for part in self.parts[slot]:
            if part.wait is not None:
                arguments = self._arguments(slot, int(counted), self.awaits[part.wait])
                await_shards_kernel[(1,)](*arguments, **self.options)
                if part.wait == len(self.awaits) - 1:
                    workspace.join_copies()
            self._multiply(part, x, matrix, out, bias)
        return slot

    def _multiply(self, part: Part, x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None) -> None:
        """One product alone; the same in a graph as outside, to the bit."""
        if part.product is not None:
            self.workspace.launch(part.product, self.stamp, x, matrix, out, bias, join=False)
            return
        rows = x[:, : self.product.depth] if part.rows is None else part.rows
        target = out.as_strided(part.shape, self.out_stride, out.storage_offset() + part.offset)
        matmul_into(target, rows, self.product.weight(matrix), bias)

    def gathered(self, x: Tensor, slot: int) -> Tensor:  # noqa: ARG002 - as `GatherLaunch` has it
        """The gathered rows of the launch that took `slot`, [world_size, M / world_size, K]; ours if `has_own`."""
        return self.rows[slot].view(self.workspace.world_size, self.m_shard, self.k_size)
