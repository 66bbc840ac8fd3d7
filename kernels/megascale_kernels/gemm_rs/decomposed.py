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
from megascale_kernels.launching.ready import BIAS, OUT, Copy, W, copies_alone, ready
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


class Part(NamedTuple):
    """One product, and what of it travels; sizes and places as `Tensor.as_strided` takes them.

    Attributes:
        rows: shape of its rows of the input.
        offset: of their first element.
        shape: of its partial results.
        place: of their first element among all of them.
        owners: (owner, row among all partial results) of each peer's shard in it.
    """

    rows: tuple[int, int]
    offset: int
    shape: tuple[int, int]
    place: int
    owners: tuple[tuple[int, int], ...]


class Ready(NamedTuple):
    """What the driver launches, for one slot: copies behind each product that has any, and the sum."""

    copies: tuple[object, ...]
    sum: object


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
        self.parts = self._parts([own] if self.is_whole else others)
        self.own_part = self._part(rank, rank + 1, 0)
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
        self.ready: list[Ready | None] = [self._ready(slot, out, bias) for slot in range(SLOTS)]

    def _parts(self, pieces: list[Piece]) -> list[Part]:
        """The products of peers' rows; their partial results lie as the rows do, or one product behind the other."""
        row, parts = 0, []
        for piece in pieces:
            for begin, end in piece.runs:
                parts.append(self._part(begin, end, row))
                row += (end - begin) * self.m_shard
        return parts

    def _part(self, begin: int, end: int, row: int) -> Part:
        """The product of shards [begin, end), whose partial results begin at a row."""
        m_shard, rank, count = self.m_shard, self.workspace.rank, (end - begin) * self.m_shard
        owners = tuple((owner, row + (owner - begin) * m_shard) for owner in range(begin, end) if owner != rank)
        rows = (count, self.product.depth)
        return Part(rows, begin * m_shard * self.k_size, (count, self.n_size), row * self.n_size, owners)

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

    def _ready(self, slot: int, out: Tensor, bias: Tensor | None) -> Ready | None:
        native = self.workspace.native
        if native is None:
            return None
        row_bytes = self.n_size * out.element_size()
        sources = {"own_ptr": W, "out_ptr": OUT, "bias_ptr": OUT if bias is None else BIAS}
        arguments = self._arguments(slot, 0, out, out, bias)
        summed = ready(native, add_partials_kernel, arguments, self.options, self.grid, sources)
        copies = tuple(
            copies_alone(native, [self._copy(owner, first, slot, row_bytes) for owner, first in part.owners])
            for part in self.parts
        )
        return Ready(copies, summed) if summed is not None else None

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
        workspace = self.workspace
        made = self.ready[workspace.slot ^ 1]
        counted = workspace.counts_on_device()
        if made is not None and not counted:
            slot = workspace.next_slot()
        else:
            made, slot = None, workspace.begin(self.key, lambda: self._warm(out, bias))
        w, base, (x_stride, out_stride) = self.product.weight(matrix), x.storage_offset(), self.strides
        partial = out.new_empty(self.partials)
        for index, (rows, offset, shape, place, _) in enumerate(self.parts):
            target = partial.as_strided(shape, out_stride, place)
            matmul_into(target, x.as_strided(rows, x_stride, base + offset), w)
            if made is not None:
                workspace.launch(made.copies[index], self.stamp, partial, partial, partial, None, join=False)
            else:
                self._send(partial, index, slot, counted=counted)
        rows, offset, shape, _, _ = self.own_part
        if self.is_whole:
            own = partial.as_strided(shape, out_stride, workspace.rank * self.m_shard * self.n_size)
        else:
            own = out
            matmul_into(out, x.as_strided(rows, x_stride, base + offset), w)
        if made is not None:
            workspace.launch(made.sum, self.stamp, partial, own, out, bias, join=True)
            return
        add_partials_kernel[self.grid](*self._arguments(slot, int(counted), own, out, bias), **self.options)
        workspace.join_copies()

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
