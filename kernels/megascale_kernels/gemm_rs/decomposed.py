# SPDX-License-Identifier: Apache-2.0
"""GEMM + reduce-scatter taken apart: cuBLAS multiplies the peers' rows, copy engines carry them, one kernel adds.

The peers' rows piece by piece: while the next piece is multiplied, the last one's partial results travel to the slots
of their owners. Our own rows come last, so that the others' are on their way meanwhile; then a kernel waits for every
peer's partial, with the deadline and the words of all our kernels, and adds in fp32 in the order of ranks, so that
the result is the same from run to run. For shapes at which cuBLAS multiplies faster than our tiles. With one piece all
rows are multiplied at once, and then travel.

Unlike in our tiles' kernels our own term is rounded before it is added, as the peers' are.

The board shows which rank is waited for; while cuBLAS multiplies it shows the launch before. There are no events in a
trace.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megascale_kernels.device.announce import announce_kernel
from megascale_kernels.device.layout import COMMUNICATE, EPOCH, SLOTS, signature
from megascale_kernels.device.primitives import RANK_CHANNEL, rank_copy_data, rank_wait
from megascale_kernels.device.progress import head_board, show_done, show_tile
from megascale_kernels.device.signals import finish_launch, open_channel, publish_launch
from megascale_kernels.gemm_rs.triton_kernel import GEMM_RS
from megascale_kernels.launching.products import Operand, Shape
from megascale_kernels.launching.ready import BIAS, OUT, Copy, W, X, copies_alone, in_a_row, ready
from megascale_kernels.memory.channel_arguments import channel_arguments
from megascale_kernels.memory.operands import Weight, compiled_apart, processors, product_of
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config
from megascale_kernels.planning.pieces import Piece, pieces_of
from megascale_kernels.planning.tile_order import python, staging_slot
from megascale_kernels.reference import matmul_into

BLOCK = 8192  # elements a turn: with eight warps 64 bytes of each partial per thread are under way
WIDE_BYTES = 16
SLOT_ELEMENTS = 64  # a peer's slot begins at a multiple: 128 bytes
# A thread may own 128 registers: the announcements of a captured graph, a warp each, find room beside these CTAs, which
# wait for peers that wait for those.
OPTIONS = {"enable_fp_fusion": True, "num_warps": 8, "maxnreg": 128}
RUNTIME = (
    "slot", "rank", "signature", "deadline_us", "flags", "channels", "counted", "m_shard", "n_size", "k_size",
    "variant",
)  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def add_partials_kernel(
    control, peers, status, board, trace,
    flags, channels, slot, rank, world_size, signature, deadline_us, staged_ptr, own_ptr, out_ptr, bias_ptr, counted,
    size, slot_elements, m_shard, n_size, k_size, variant,
    WORLD_SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, OPERATOR: tl.constexpr,
    PROGRESS: tl.constexpr,
):  # fmt: skip
    """Each CTA waits for every peer's partial, then adds its part of our rows: all ranks' terms in their order.

    `staged_ptr`: the peers' partials of `size` elements, `slot_elements` from one to the next; `own_ptr`: our own term,
    which may be the output. `counted`: the announcements count the launch themselves.
    """
    cta, ctas = tl.program_id(0), tl.num_programs(0)
    channel = open_channel(
        tl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    if cta == ctas - 1:
        head_board(channel, board, ctas, world_size, m_shard, n_size, k_size, PROGRESS)
        publish_launch(channel, m_shard, n_size, k_size, variant)
    code = 0
    for step in range(1, world_size):
        peer = (rank + step) % world_size
        if code == 0:
            show_tile(channel, COMMUNICATE, peer, PROGRESS)
            code = rank_wait(channel, peer, COMMUNICATE)
    if code == 0:
        for first in range(cta.to(tl.int64) * BLOCK, size, ctas.to(tl.int64) * BLOCK):
            here = first + tl.arange(0, BLOCK)
            inside = here < size
            total = tl.zeros((BLOCK,), dtype=tl.float32)
            for source in tl.static_range(WORLD_SIZE):
                staged = staged_ptr + staging_slot(source, rank, WORLD_SIZE).to(tl.int64) * slot_elements
                term = tl.where(source == rank, own_ptr, staged)
                total += tl.load(term + here, mask=inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                column = ((first % n_size).to(tl.int32) + tl.arange(0, BLOCK)) % n_size
                total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(out_ptr + here, total.to(out_ptr.dtype.element_ty), mask=inside)
    show_done(channel, COMMUNICATE, PROGRESS)
    finish_launch(channel, ctas, counted)


# What else a call hands over: the partial results come first, which copies read.
PARTIAL, INPUT, WEIGHT = X, 4, 5


class Part(NamedTuple):
    """One product, and what of it travels; sizes and places as `Tensor.as_strided` takes them.

    Attributes:
        rows: shape of its rows of the input.
        offset: of their first element.
        shape: of its partial results.
        place: of their first element among all of them.
        owners: (owner, row among all partial results) of each peer's shard in it.
        into: which of a call's addresses the products are written to.
        product: what the driver launches, None where torch multiplies.
    """

    rows: tuple[int, int]
    offset: int
    shape: tuple[int, int]
    place: int
    owners: tuple[tuple[int, int], ...]
    into: int = PARTIAL
    product: object | None = None


class DecomposedScatter:
    """All that is the same in every launch of one shape: made once, kept by the workspace.

    Args:
        x: [M, K].
        weight: [K, N].
        out: [M / world_size, N].
        bias: [N], or None.
        workspace: whose launches they are.
        config: how many pieces.

    Raises:
        WorkspaceTooSmall: the partial results do not fit.
    """

    def __init__(
        self, x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, workspace: Workspace, config: Config
    ) -> None:
        self.m_shard, self.n_size = out.shape
        self.k_size, self.product = x.shape[1], product_of(weight)
        world_size, rank = workspace.world_size, workspace.rank
        self.workspace, self.config = workspace, config
        self.slot_elements = -(-out.numel() // SLOT_ELEMENTS) * SLOT_ELEMENTS
        needed = (world_size - 1) * self.slot_elements * out.element_size()
        workspace.need(needed, 1, f"gemm_rs of {tuple(x.shape)} x {self.n_size}")
        self.stamp = signature(GEMM_RS, self.m_shard, self.n_size, self.k_size, config.code)
        # With one piece our own term lies among the others, at no address that the sum could read in wide words here.
        is_read_wide = out.numel() * out.element_size() % WIDE_BYTES == 0
        own, *others = pieces_of(rank, world_size, config.pieces if is_read_wide else None)
        self.is_whole = not others
        self.columns, self.element_bytes = weight.matrix.shape[1], out.element_size()
        self.parts = self._parts([own] if self.is_whole else others)
        self.own_part = self._part(rank, rank + 1, 0, OUT)
        self.partials = ((world_size - (not self.is_whole)) * self.m_shard, self.n_size)
        self.strides = (self.k_size, 1), (self.n_size, 1)
        self.options = {
            "WORLD_SIZE": world_size, "HAS_BIAS": bias is not None, "BLOCK": BLOCK, "OPERATOR": GEMM_RS,
            "PROGRESS": workspace.progress, **OPTIONS,
        }  # fmt: skip
        self.grid = (min(processors(x.device), -(-out.numel() // BLOCK)),)
        self.staged = [workspace.local(slot, (needed // out.element_size(),)) for slot in range(SLOTS)]
        self.key = ("decomposed gemm_rs", bias is None, out.numel() >> 31 > 0, compiled_apart(out.numel()))
        workspace.compile(self.key, lambda: self._warm(out, bias))
        self.ready: list[tuple[Any, ...] | None] = [self._ready(slot, out, bias) for slot in range(SLOTS)]

    def _parts(self, pieces: list[Piece]) -> list[Part]:
        """The products of peers' rows; their partial results lie as the rows do, or one product behind the other."""
        row, parts = 0, []
        for piece in pieces:
            for begin, end in piece.runs:
                parts.append(self._part(begin, end, row))
                row += (end - begin) * self.m_shard
        return parts

    def _part(self, begin: int, end: int, row: int, into: int = PARTIAL) -> Part:
        """The product of shards [begin, end), whose partial results begin at a row of where they are written to."""
        m_shard, rank, count = self.m_shard, self.workspace.rank, (end - begin) * self.m_shard
        owners = tuple((owner, row + (owner - begin) * m_shard) for owner in range(begin, end) if owner != rank)
        offset, place, product = begin * m_shard * self.k_size, row * self.n_size, None
        if self.workspace.products is not None:
            product = self.workspace.products.product(
                Shape(count, self.n_size, self.product.depth, self.product.is_nk),
                Operand(INPUT, 0, self.k_size).at(offset * self.element_bytes), Operand(WEIGHT, 0, self.columns),
                Operand(into, 0, self.n_size).at(place * self.element_bytes),
            )  # fmt: skip
        return Part((count, self.product.depth), offset, (count, self.n_size), place, owners, into, product)

    def _warm(self, out: Tensor, bias: Tensor | None) -> None:
        add_partials_kernel.warmup(*self._arguments(0, 0, out, out, bias), grid=self.grid, **self.options)
        common = channel_arguments(self.workspace, 0, self.stamp)
        for last in (False, True):
            announce_kernel.warmup(*common, 0, 0, LAST=last, grid=(1,), **self._announcement())

    def _announcement(self) -> dict[str, Any]:
        return {
            "OPERATOR": GEMM_RS, "PROGRESS": self.workspace.progress, "TRACE": False, "num_warps": 1,
            "enable_fp_fusion": True,
        }  # fmt: skip

    def _arguments(self, slot: int, counted: int, own: Tensor, out: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
        return (
            *channel_arguments(self.workspace, slot, self.stamp), self.staged[slot], own, out,
            bias if bias is not None else out, counted, out.numel(), self.slot_elements, self.m_shard, self.n_size,
            self.k_size, self.config.code,
        )  # fmt: skip

    def _ready(self, slot: int, out: Tensor, bias: Tensor | None) -> tuple[Any, ...] | None:
        """What a call does, one thing after another: runs of launches, and products that are torch's."""
        native = self.workspace.native
        if native is None:
            return None
        row_bytes = self.n_size * out.element_size()
        sources = {"own_ptr": W, "out_ptr": OUT, "bias_ptr": OUT if bias is None else BIAS}
        arguments = self._arguments(slot, 0, out, out, bias)
        summed = ready(native, add_partials_kernel, arguments, self.options, self.grid, sources)
        if summed is None:
            return None
        steps: list[Any] = []
        for part in self.parts:
            copies = [self._copy(owner, first, slot, row_bytes) for owner, first in part.owners]
            steps += [part if part.product is None else part.product, copies_alone(native, copies)]
        if not self.is_whole:
            own = self.own_part
            steps.append(own if own.product is None else own.product)
        return in_a_row([*steps, summed], Part)

    def _copy(self, owner: int, first: int, slot: int, row_bytes: int) -> Copy:
        workspace = self.workspace
        target = workspace.data_address(owner, slot) + self._place(owner) * (row_bytes // self.n_size)
        flag = workspace.flag_address(owner, slot, RANK_CHANNEL.value)
        return first * row_bytes, self.m_shard * row_bytes, target, flag

    def _place(self, owner: int) -> int:
        """The first element of our slot on a peer."""
        place: int = python(staging_slot)(self.workspace.rank, owner, self.workspace.world_size)
        return place * self.slot_elements

    def run(self, x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None) -> None:
        """Launch on the current stream.

        Raises:
            TileTimeout, RankMismatch: an earlier launch failed.
        """
        workspace, made = self.workspace, self.ready[self.workspace.slot ^ 1]
        if made is None or workspace.counts_on_device():
            self._run_by_triton(x, matrix, out, bias)
            return
        workspace.next_slot()
        partial = out.new_empty(self.partials)
        addresses = self._addresses(x, matrix, partial, out, bias)
        for step in made:
            if isinstance(step, Part):
                self._multiply(step, x, matrix, partial, out)
            else:
                workspace.launch_at(step.launches, self.stamp, *addresses, join=step.is_last)

    def _addresses(
        self, x: Tensor, matrix: Tensor, partial: Tensor, out: Tensor, bias: Tensor | None
    ) -> tuple[int, ...]:
        first = partial.data_ptr()
        own = first + self._own_place() * self.element_bytes if self.is_whole else out.data_ptr()
        of_bias = 0 if bias is None else bias.data_ptr()
        return first, own, out.data_ptr(), of_bias, x.data_ptr(), matrix.data_ptr()

    def _own_place(self) -> int:
        """The first element of our own term, where all lie among the partial results."""
        return self.workspace.rank * self.m_shard * self.n_size

    def _run_by_triton(self, x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None) -> None:
        """Launch where only the device knows the launch number, or the driver is out of reach."""
        workspace, counted = self.workspace, self.workspace.counts_on_device()
        slot = workspace.begin(self.key, lambda: self._warm(out, bias))
        partial = out.new_empty(self.partials)
        for index, part in enumerate(self.parts):
            self._multiply(part, x, matrix, partial, out)
            self._send(partial, index, slot, counted=counted)
        own = out
        if self.is_whole:
            own = partial.as_strided((self.m_shard, self.n_size), self.strides[1], self._own_place())
        else:
            self._multiply(self.own_part, x, matrix, partial, out)
        # Before the kernel: it may fill the device, and no announcement then finds room beside it.
        workspace.join_copies()
        add_partials_kernel[self.grid](*self._arguments(slot, int(counted), own, out, bias), **self.options)

    def _multiply(self, part: Part, x: Tensor, matrix: Tensor, partial: Tensor, out: Tensor) -> None:
        """One product alone; the same in a graph as outside, to the bit."""
        if part.product is not None:
            addresses = self._addresses(x, matrix, partial, out, None)
            self.workspace.launch_at(part.product, self.stamp, *addresses, join=False)
            return
        x_stride, out_stride = self.strides
        target = partial if part.into == PARTIAL else out
        matmul_into(
            target.as_strided(part.shape, out_stride, target.storage_offset() + part.place),
            x.as_strided(part.rows, x_stride, x.storage_offset() + part.offset),
            self.product.weight(matrix),
        )

    def _send(self, partial: Tensor, index: int, slot: int, *, counted: bool) -> None:
        """Copy the partial results of one product to their owners, where the driver is out of reach or in a graph."""
        workspace, owners = self.workspace, self.parts[index].owners
        with workspace.copying():
            for number, (owner, first) in enumerate(owners):
                rows = partial[first : first + self.m_shard]
                rank_copy_data(workspace.peer(owner, slot, rows.shape, self._place(owner)), rows)
                if not counted:
                    workspace.announce(owner, slot, RANK_CHANNEL.value, self.stamp)
                    continue
                last = index == len(self.parts) - 1 and number == len(owners) - 1
                announce_kernel[(1,)](
                    *channel_arguments(workspace, slot, self.stamp), owner, RANK_CHANNEL.value, LAST=last,
                    **self._announcement(),
                )  # fmt: skip
