# SPDX-License-Identifier: Apache-2.0
"""Multiply on Hopper with one warp that fetches and two warpgroups that compute: what all operators share.

C[M, N] = A[M, K] @ B[K, N], bf16 or fp16 in, fp32 accumulation. One program per multiprocessor lives for the whole
kernel and walks over output tiles (*persistent*). Its warps have fixed roles (*warp specialisation*):

- the *producer*, one warp, waits until a slot of the shared-memory ring is empty and asks the copy engine of the
  multiprocessor (TMA) to fill it. It runs ahead of the arithmetic by the depth of the ring, also across tiles, so the
  first slots of the next tile arrive while the current one is still being stored. In an all-gather it is the one that
  waits for peers, and the consumers do not notice as long as the ring is not drained;
- each *consumer*, a warpgroup of four warps, owns 64 rows of the tile and one accumulator in registers. It waits until
  a slot is full, starts a `wgmma` on it, and hands back the slot *before* that one: one `wgmma` is always in flight.
  The consumers never wait for each other. While one of them stores its rows, the other has the tensor cores.

A slot changes hands through two mbarriers: `full` counts the bytes that TMA delivered, `empty` counts one arrival per
consumer. Both sides count phases, so nothing is ever reset.

**The last wave.** 448 tiles on 132 multiprocessors are 3.39 waves, and the fourth would run at 39 %. With CUT the
tiles of the last, partial wave are cut along K: either each into `split` parts, one unit of work each (SPLIT_K), or all
of them together into as many shares as there are programs, each the same number of K blocks and mostly the end of one
tile and the beginning of the next (STREAM_K). All parts of a tile but the last leave their fp32 accumulators in a
workspace and raise a flag. The last one's producer waits for them and sends them through the ring after its own K
blocks, and the consumers add them in the order of K. The cut depends on the shape alone, so the result is the same bit
for bit in every run. A part waits only for units of work with a smaller number, and every program takes its units in
ascending order, so no parts wait for each other in a circle: a share begins with the partial that others wait for.

After a wait gave up (`signals.wait_for`), a role goes on turning the ring without waiting: the others leave by
themselves, and what they store is garbage that the host refuses.

Sources: PTX ISA 8.x, sections on mbarrier, wgmma, cp.async.bulk.tensor and the memory model; the data-parallel plus
stream-K hybrid (STREAM_K) is Osama et al., arXiv 2301.03598.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from megascale_kernels.device.layout import COMMUNICATE
from megascale_kernels.device.primitives import consumer_tile_wait, producer_tile_notify
from megascale_kernels.planning import tiling
from megascale_kernels.planning.tile_order import share_of, turns_of_share

# Triton 3.8 gave them these names, and 3.9 took the older ones away.
tma_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
tma_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)
# Gluon's only way to see a buffer in another shape, public since 3.9: reinterpreted(buffer, dtype, shape, layout).
_OF_BUFFERS = vars(gl.shared_memory_descriptor)
reinterpreted = _OF_BUFFERS.get("reinterpret") or _OF_BUFFERS["_reinterpret"]

WHOLE, SPLIT_K, STREAM_K = map(gl.constexpr, (tiling.WHOLE, tiling.SPLIT_K, tiling.STREAM_K))
PARTIAL_PIECES, PARTIAL_WIDTH = map(gl.constexpr, (tiling.PARTIAL_PIECES, tiling.PARTIAL_WIDTH))


@aggregate
class Ring:
    """The slots between producer and consumers: operands in shared memory, one full and one empty barrier a slot."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, a, b, full, empty) -> None:
        self.a = a
        self.b = b
        self.full = full
        self.empty = empty


class Work(NamedTuple):
    """What there is to do, in tiles of all shards together.

    Attributes:
        blocks_m: row blocks of one shard.
        blocks_n: column blocks.
        blocks_k: K blocks of a tile.
        group_m: row blocks walked together.
        whole_tiles: tiles computed in one piece; the rest are cut into `split` parts each, or into a share a program.
        split: parts of each of the others; where programs have shares, teams of them.
        units: units of work: whole tiles and parts; where programs have shares, tiles.
        partials: fp32 workspace of the cut tiles.
    """

    blocks_m: Any
    blocks_n: Any
    blocks_k: Any
    group_m: Any
    whole_tiles: Any
    split: Any
    units: Any
    partials: Any


@gluon.jit
def make_ring(a_desc, b_desc, CFG: gl.constexpr):
    """Allocate the ring and initialise its barriers; before the roles part."""
    a = gl.allocate_shared_memory(a_desc.dtype, [CFG.slots * CFG.across_m] + a_desc.block_type.shape, a_desc.layout)
    # Not what one box of B's brings: two may lie in a consumer's piece.
    height: gl.constexpr = CFG.columns if CFG.b_is_nk else CFG.block_k
    width: gl.constexpr = CFG.block_k if CFG.b_is_nk else CFG.columns
    shape: gl.constexpr = [CFG.slots * CFG.across_n, height, width]
    b = gl.allocate_shared_memory(b_desc.dtype, shape, b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [CFG.slots, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [CFG.slots, 1], mbarrier.MBarrierLayout())
    slots: gl.constexpr = CFG.slots
    for i in gl.static_range(slots):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CFG.consumers)
    fence_async_shared()
    return Ring(a, b, full, empty)


@gluon.jit
def end_of_units(work, CUT: gl.constexpr):
    """Where this program's units of work end; they are every `num_programs`-th one."""
    if CUT != STREAM_K:
        return work.units
    else:  # noqa: RET505 - Triton decides at compile time which branch exists
        programs = gl.num_programs(0)
        tiles = work.units - work.whole_tiles
        turns = turns_of_share(gl.program_id(0), programs, work.split, tiles, work.blocks_k)
        return work.whole_tiles + turns * programs


@gluon.jit
def unit_of_work(work, unit, CUT: gl.constexpr):
    """Return the tile of a unit, its K blocks, where it stores its partial, and how many others lie before it."""
    if CUT == WHOLE:
        return unit, work.blocks_k * 0, work.blocks_k, unit * 0, unit * 0
    else:  # noqa: RET505 - Triton decides at compile time which branch exists
        cut = gl.maximum(unit - work.whole_tiles, 0)
        if CUT == SPLIT_K:
            tile = cut // work.split
            before = cut % work.split
            first = work.blocks_k * before // work.split
            last = work.blocks_k * (before + 1) // work.split
            place = tile * (work.split - 1) + before
        else:
            programs = gl.num_programs(0)
            tiles = work.units - work.whole_tiles
            place = cut % programs
            tile, first, last, before = share_of(place, cut // programs, programs, work.split, tiles, work.blocks_k)
        whole = unit < work.whole_tiles
        tile = gl.where(whole, unit, work.whole_tiles + tile)
        first = gl.where(whole, 0, first)
        last = gl.where(whole, work.blocks_k, last)
        return tile, first, last, place, gl.where(whole, 0, before)


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """Step around the ring; the phase flips on every lap."""
    following = slot + 1
    wrapped = following == SLOTS
    return gl.where(wrapped, 0, following), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def fetch(ring, a_desc, row, b_desc, column, first, last, slot, phase, CFG: gl.constexpr):
    """Role of the producer for one unit of work: K blocks [first, last) of A's rows and B's columns into the ring."""
    across_m: gl.constexpr = CFG.across_m
    across_n: gl.constexpr = CFG.across_n
    for block in range(first, last):
        full = ring.full.index(slot)
        mbarrier.wait(ring.empty.index(slot), phase)
        mbarrier.expect(full, CFG.slot_bytes)
        k = block * CFG.block_k
        for i in gl.static_range(across_m):
            a = ring.a.index(slot * CFG.across_m + i)
            tma_load(a_desc, [row + i * CFG.rows, k], full, a)
        for j in gl.static_range(across_n):
            b = ring.b.index(slot * CFG.across_n + j)
            if CFG.b_is_nk:
                tma_load(b_desc, [column + j * CFG.columns, k], full, b)
            else:
                tma_load(b_desc, [k, column + j * CFG.columns], full, b)
        slot, phase = next_slot(slot, phase, CFG.slots)
    return slot, phase


@gluon.jit
def multiply(ring, slot, phase, first, last, ME: gl.constexpr, CFG: gl.constexpr):
    """Accumulate K blocks [first, last) of this consumer's part of the tile; one wgmma stays in flight."""
    rows: gl.constexpr = CFG.rows
    columns: gl.constexpr = CFG.columns
    layout: gl.constexpr = CFG.acc_layout
    acc = gl.zeros((rows, columns), gl.float32, layout)
    # "+ 0": a name that enters a loop as the same value as another is taken for a constant of that loop (Triton 3.6).
    previous = slot + 0
    for block in range(first, last):
        a = ring.a.index(slot * CFG.across_m + ME % CFG.across_m)
        b = ring.b.index(slot * CFG.across_n + ME % CFG.across_n)
        if CFG.b_is_nk:
            b = b.permute((1, 0))
        mbarrier.wait(ring.full.index(slot), phase)
        token = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(token,))
        mbarrier.arrive(ring.empty.index(previous), pred=block > first)
        previous = slot
        slot, phase = next_slot(slot, phase, CFG.slots)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(ring.empty.index(previous))
    return acc, slot, phase


@gluon.jit
def column_slices(acc, SLICES: gl.constexpr):
    """Cut an accumulator into SLICES equal ranges of columns; registers are renamed, nothing moves."""
    if SLICES == 1:
        return (acc,)
    else:  # noqa: RET505 - Triton decides at compile time which branch exists
        rows: gl.constexpr = acc.shape[0]
        half: gl.constexpr = acc.shape[1] // 2
        left, right = gl.split(acc.reshape((rows, 2, half)).permute((0, 2, 1)))
        return column_slices(left, SLICES // 2) + column_slices(right, SLICES // 2)


@gluon.jit
def columns_joined(slices):
    """The inverse of `column_slices`."""
    if len(slices) == 1:
        return slices[0]
    else:  # noqa: RET505 - Triton decides at compile time which branch exists
        left = columns_joined(slices[: len(slices) // 2])
        right = columns_joined(slices[len(slices) // 2 :])
        return gl.join(left, right).permute((0, 2, 1)).reshape((left.shape[0], 2 * left.shape[1]))


@gluon.jit
def store_slice(part, staging, out_desc, row, column, INDEX: gl.constexpr, ME: gl.constexpr, CFG: gl.constexpr):
    """Round a slice of columns to the output's type and write it by TMA; what lies beyond the output is clipped."""
    buffer = staging.index(ME * CFG.store_buffers + INDEX % CFG.store_buffers)
    tma.store_wait(CFG.store_buffers - 1)
    buffer.store(part.to(out_desc.dtype))
    fence_async_shared()
    tma_store(out_desc, [row, column + INDEX * CFG.store_columns], buffer)


@gluon.jit
def store_slice_of_shard(part, staging, boxes, out_desc, shard, row, column, INDEX: gl.constexpr, ME: gl.constexpr,
                         CFG: gl.constexpr):  # fmt: skip
    """As `store_slice`, into a matrix of shards whose last rows do not fill a tile: each shard clips its own.

    `boxes` are the staging buffers as the TMA unit sees them, one shard deep.
    """
    index: gl.constexpr = ME * CFG.store_buffers + INDEX % CFG.store_buffers
    tma.store_wait(CFG.store_buffers - 1)
    staging.index(index).store(part.to(out_desc.dtype))
    fence_async_shared()
    tma_store(out_desc, [shard, row, column + INDEX * CFG.store_columns], boxes.index(index))


@gluon.jit
def slice_offsets(part, row, column, n_size):
    """Where the elements of a slice lie in a row-major matrix of `n_size` columns: rows, columns, offsets."""
    layout: gl.constexpr = part.type.layout
    rows = row + gl.arange(0, part.shape[0], layout=gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, part.shape[1], layout=gl.SliceLayout(0, layout))
    return rows, columns, rows.to(gl.int64)[:, None] * n_size + columns[None, :]


@gluon.jit
def store_slice_masked(part, out_ptr, row, row_end, column, n_size):
    """Write a slice of columns with the threads' own stores, only rows below `row_end`."""
    rows, columns, offsets = slice_offsets(part, row, column, n_size)
    mask = (rows < row_end)[:, None] & (columns < n_size)[None, :]
    gl.store(out_ptr + offsets, part.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def add_bias_slice(part, bias_ptr, column, n_size):
    """Add bias[column:] to part, in fp32."""
    layout: gl.constexpr = part.type.layout
    columns = column + gl.arange(0, part.shape[1], layout=gl.SliceLayout(0, layout))
    bias = gl.load(bias_ptr + columns, mask=columns < n_size, other=0.0)
    return part + bias.to(gl.float32)[None, :]


@gluon.jit
def _by_lanes(acc, CFG: gl.constexpr):
    """An accumulator as it is stored: 16 bytes a thread, a warp's side by side. Registers are renamed, none moves."""
    gl.static_assert(CFG.rows == 64)
    parts = acc.reshape((4, 2, 8, CFG.columns // 16, 2, 4, 2)).permute((3, 0, 1, 2, 5, 4, 6))
    return gl.convert_layout(parts.reshape((PARTIAL_PIECES * CFG.partial_rows, PARTIAL_WIDTH)), CFG.partial_layout)


@gluon.jit
def _by_columns(piece, like, CFG: gl.constexpr):
    """A quarter of a stored partial as a quarter of an accumulator's columns: the inverse of `_by_lanes`."""
    parts = piece.reshape((CFG.columns // 16 // PARTIAL_PIECES, 4, 2, 8, 4, 2, 2)).permute((1, 2, 3, 0, 5, 4, 6))
    return gl.convert_layout(parts.reshape((CFG.rows, CFG.columns // PARTIAL_PIECES)), like.type.layout)


@gluon.jit
def _partial_box(ring, slot, me: gl.constexpr, CFG: gl.constexpr):
    """Where in a slot a quarter of a consumer's partial lies: both consumers' over B."""
    gl.static_assert(CFG.across_n == 1)
    over_b = reinterpreted(
        ring.b, gl.float32, [CFG.slots * CFG.consumers, CFG.partial_rows, PARTIAL_WIDTH], CFG.partial_shared_layout
    )
    return over_b.index(slot * CFG.consumers + me)


@gluon.jit
def store_split_partial(channel, acc, work, place, ME: gl.constexpr, CFG: gl.constexpr):
    """Leave this part's accumulator for the last part of the tile (our own rank's flags announce it)."""
    mine = place * CFG.consumers + ME
    rows = mine * PARTIAL_PIECES * CFG.partial_rows + gl.arange(
        0, PARTIAL_PIECES * CFG.partial_rows, layout=gl.SliceLayout(1, CFG.partial_layout)
    )
    columns = gl.arange(0, PARTIAL_WIDTH, layout=gl.SliceLayout(0, CFG.partial_layout))
    gl.store(work.partials + rows[:, None] * PARTIAL_WIDTH + columns[None, :], _by_lanes(acc, CFG))
    producer_tile_notify(channel, mine)


@gluon.jit
def fetch_split_partials(ring, split_desc, channel, tile, place, before, code, slot, phase, CFG: gl.constexpr):
    """Role of the producer for the last part of a cut tile: what the `before` other parts left at the places below.

    It waits for them and sends their sums through the ring, a quarter of the columns in a slot, in the order of K.
    """
    consumers: gl.constexpr = CFG.consumers
    for other in range(place - before, place):
        for me in gl.static_range(consumers):
            if code == 0:
                code = consumer_tile_wait(channel, other * consumers + me, channel.rank, COMMUNICATE, tile)
        for piece in gl.static_range(PARTIAL_PIECES):
            full = ring.full.index(slot)
            mbarrier.wait(ring.empty.index(slot), phase)
            mbarrier.expect(full, CFG.partial_bytes)
            for me in gl.static_range(consumers):
                row = ((other * consumers + me) * PARTIAL_PIECES + piece) * CFG.partial_rows
                tma_load(split_desc, [row, 0], full, _partial_box(ring, slot, me, CFG))
            slot, phase = next_slot(slot, phase, CFG.slots)
    return slot, phase, code


@gluon.jit
def add_split_partials(ring, acc, before, slot, phase, ME: gl.constexpr, CFG: gl.constexpr):
    """Add what the producer fetched of the other parts of this tile to our own sums."""
    for _ in range(before):
        slices = column_slices(acc, PARTIAL_PIECES)
        added = ()  # a tuple that grows at compile time
        for piece in gl.static_range(PARTIAL_PIECES):
            mbarrier.wait(ring.full.index(slot), phase)
            partial = _partial_box(ring, slot, ME, CFG).load(CFG.partial_layout)
            added = added + (slices[piece] + _by_columns(partial, slices[piece], CFG),)  # type: ignore[assignment] # it grows
            mbarrier.arrive(ring.empty.index(slot))
            slot, phase = next_slot(slot, phase, CFG.slots)
        acc = gl.convert_layout(columns_joined(added), CFG.acc_layout)
    return acc, slot, phase
