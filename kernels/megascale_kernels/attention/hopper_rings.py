# SPDX-License-Identifier: Apache-2.0
"""What both passes of the warp-specialised backward share: shared memory, and how it is filled and emptied.

A tile keeps two operands, of which each consumer has 64 rows; blocks of two others come through a ring of slots.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.language.core import _aggregate as aggregate

from megascale_kernels.attention.hopper import as_boxes, make_barriers
from megascale_kernels.device.hopper_gemm import next_slot, tma_load, tma_store


@aggregate
class Rings:
    """Shared memory between producer and consumers: two operands that a tile keeps, slots of two that come, barriers.

    In the pass over queries a tile keeps q and dout, and k and v come; in the pass over keys it is the other way round.
    """

    kept: gl.shared_memory_descriptor
    kept_too: gl.shared_memory_descriptor
    come: gl.shared_memory_descriptor
    come_too: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    tile_full: gl.shared_memory_descriptor
    tile_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    full_too: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, kept, kept_too, come, come_too, out, tile_full, tile_empty, full, full_too, empty
    ) -> None:  # fmt: skip
        self.kept = kept
        self.kept_too = kept_too
        self.come = come
        self.come_too = come_too
        self.out = out
        self.tile_full = tile_full
        self.tile_empty = tile_empty
        self.full = full
        self.full_too = full_too
        self.empty = empty


@gluon.jit
def make_rings(dtype: gl.constexpr, CFG: gl.constexpr):
    """Allocate everything in shared memory; before the roles part."""
    rings = Rings(
        gl.allocate_shared_memory(dtype, [CFG.consumers, CFG.rows, CFG.head_dim], CFG.flat),
        gl.allocate_shared_memory(dtype, [CFG.consumers, CFG.rows, CFG.head_dim], CFG.flat),
        gl.allocate_shared_memory(dtype, [CFG.slots, CFG.block_n, CFG.head_dim], CFG.flat),
        gl.allocate_shared_memory(dtype, [CFG.slots, CFG.block_n, CFG.head_dim], CFG.flat),
        gl.allocate_shared_memory(dtype, [CFG.consumers, CFG.rows, CFG.head_dim], CFG.flat),
        make_barriers(1, 1), make_barriers(1, CFG.consumers), make_barriers(CFG.slots, 1), make_barriers(CFG.slots, 1),
        make_barriers(CFG.slots, CFG.consumers),
    )  # fmt: skip
    fence_async_shared()
    return rings


@gluon.jit
def fetch_tile(rings, desc, desc_too, box, row, column, tile_phase, CFG: gl.constexpr):
    """The two operands that a tile keeps."""
    consumers: gl.constexpr = CFG.consumers
    first = as_boxes(rings.kept, CFG.consumers, CFG.rows, CFG)
    second = as_boxes(rings.kept_too, CFG.consumers, CFG.rows, CFG)
    full = rings.tile_full.index(0)
    mbarrier.wait(rings.tile_empty.index(0), tile_phase)
    mbarrier.expect(full, 2 * CFG.q_bytes)
    for i in gl.static_range(consumers):
        tma_load(desc, [box, row + i * CFG.rows, column], full, first.index(i))
        tma_load(desc_too, [box, row + i * CFG.rows, column], full, second.index(i))


@gluon.jit
def fetch_pairs(rings, desc, desc_too, box, column, first, count, gap_at, gap, slot, phase, CFG: gl.constexpr):
    """`count` blocks of the two operands that come, `gap` blocks left out after `gap_at` of them."""
    boxes = as_boxes(rings.come, CFG.slots, CFG.block_n, CFG)
    boxes_too = as_boxes(rings.come_too, CFG.slots, CFG.block_n, CFG)
    for turn in range(count):
        row = (first + turn + gl.where(turn >= gap_at, gap, 0)) * CFG.block_n
        mbarrier.wait(rings.empty.index(slot), phase)
        mbarrier.expect(rings.full.index(slot), CFG.block_bytes)
        tma_load(desc, [box, row, column], rings.full.index(slot), boxes.index(slot))
        mbarrier.expect(rings.full_too.index(slot), CFG.block_bytes)
        tma_load(desc_too, [box, row, column], rings.full_too.index(slot), boxes_too.index(slot))
        slot, phase = next_slot(slot, phase, CFG.slots)
    return slot, phase


@gluon.jit
def no_products(CFG: gl.constexpr):
    """Registers for a product of a tile's rows and a block's."""
    rows: gl.constexpr = CFG.rows
    columns: gl.constexpr = CFG.block_n
    layout: gl.constexpr = CFG.scores
    return gl.zeros((rows, columns), gl.float32, layout)


@gluon.jit
def begin_product(kept, come, full, slot, phase, CFG: gl.constexpr):
    """Start the product of what a tile keeps and the transpose of what came."""
    mbarrier.wait(full.index(slot), phase)
    return warpgroup_mma(kept, come.index(slot).permute((1, 0)), no_products(CFG), use_acc=False, is_async=True)


@gluon.jit
def store_tile(rings, desc, acc, box, row, column, ME: gl.constexpr, CFG: gl.constexpr):
    """Round a gradient and store it by TMA, which clips what lies behind the chunk."""
    tma.store_wait(0)
    rings.out.index(ME).store(acc.to(desc.dtype))
    fence_async_shared()
    tma_store(desc, [box, row, column], as_boxes(rings.out, CFG.consumers, CFG.rows, CFG).index(ME))
