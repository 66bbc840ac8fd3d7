# SPDX-License-Identifier: Apache-2.0
"""SwiGLU behind an all-gather + GEMM, while the product is still in registers.

The product gather(x) @ w is [M, 2 F], gates in the first half of the columns, values in the second, and what comes next
is silu(gate) * value, [M, F]. A kernel in between reads all of it again. Here a tile has half of its columns among the
gates and the same ones among the values: the producer fetches two boxes of the weight for each K block, which lie in
shared memory as one does otherwise. A consumer then has the gates in the first half of its sums and their values in the
second, in the same threads. It rounds both, as they are stored or would be, and stores silu(gate) * value of what is
rounded: bit for bit what the kernel behind the product makes of it (`swiglu.swiglu_kernel`), since both compute in the
same instructions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from megascale_kernels.device.hopper_gemm import (
    add_bias_slice,
    column_slices,
    next_slot,
    reinterpreted,
    tma_load,
    tma_store,
)

GATES, VALUES = map(gl.constexpr, range(2))


@gluon.jit
def fetch_halves(ring, a_desc, row, b_desc, column, inner, first, last, slot, phase, CFG: gl.constexpr):
    """As `hopper_gemm.fetch`, half of B's columns from `column` on, the others from `inner + column` on."""
    half: gl.constexpr = CFG.columns // 2
    across_m: gl.constexpr = CFG.across_m
    gl.static_assert(CFG.across_n == 1)
    if CFG.b_is_nk:
        boxes = reinterpreted(ring.b, ring.b.dtype, [2 * CFG.slots, half, CFG.block_k], ring.b.layout)
    else:
        boxes = reinterpreted(ring.b, ring.b.dtype, [2 * CFG.slots, CFG.block_k, half], ring.b.layout)
    for block in range(first, last):
        full = ring.full.index(slot)
        mbarrier.wait(ring.empty.index(slot), phase)
        mbarrier.expect(full, CFG.slot_bytes)
        k = block * CFG.block_k
        for i in gl.static_range(across_m):
            tma_load(a_desc, [row + i * CFG.rows, k], full, ring.a.index(slot * CFG.across_m + i))
        for j in gl.static_range(2):
            if CFG.b_is_nk:
                tma_load(b_desc, [column + j * inner, k], full, boxes.index(2 * slot + j))
            else:
                tma_load(b_desc, [k, column + j * inner], full, boxes.index(2 * slot + j))
        slot, phase = next_slot(slot, phase, CFG.slots)
    return slot, phase


@gluon.jit
def store_swiglu(acc, staging, wide_desc, out_desc, bias_ptr, source, row, column, inner, ME: gl.constexpr,
                 CFG: gl.constexpr, HAS_BIAS: gl.constexpr, KEEPS_WIDE: gl.constexpr):  # fmt: skip
    """Store silu(gate) * value of this consumer's part of a finished product by TMA, and gates and values if kept."""
    count: gl.constexpr = CFG.columns // CFG.store_columns // 2
    slices = column_slices(acc, 2 * count)
    stored: gl.constexpr = 3 if KEEPS_WIDE else 1
    for i in gl.static_range(count):
        gate = slices[i]
        value = slices[count + i]
        at = column + i * CFG.store_columns
        if HAS_BIAS:
            gate = add_bias_slice(gate, bias_ptr, at, inner)
            value = add_bias_slice(value, bias_ptr + inner, at, inner)
        gate = gate.to(out_desc.dtype)
        value = value.to(out_desc.dtype)
        if KEEPS_WIDE:
            _store(gate, staging, wide_desc, GATES, source, row, at, 3 * i, ME, CFG)
            _store(value, staging, wide_desc, VALUES, source, row, at, 3 * i + 1, ME, CFG)
        act = silu_times_value(gate.to(gl.float32), value.to(gl.float32)).to(out_desc.dtype)
        _store(act, staging, out_desc, None, source, row, at, stored * (i + 1) - 1, ME, CFG)


@gluon.jit
def silu_times_value(gate, value):
    """The same operations as in `swiglu.swiglu_kernel`, in the same order; all fp32."""
    return gate * value / (1.0 + gl.exp(-gate))


@gluon.jit
def _store(part, staging, desc, HALF: gl.constexpr, source, row, column, NUMBER: gl.constexpr, ME: gl.constexpr,
           CFG: gl.constexpr):  # fmt: skip
    """Write a slice into a shard of a matrix, or into one half of its columns; each clips its own.

    NUMBER: of the slice among those of a tile; staging buffers are taken in turn.
    """
    buffers: gl.constexpr = CFG.consumers * CFG.store_buffers
    index: gl.constexpr = ME * CFG.store_buffers + NUMBER % CFG.store_buffers
    tma.store_wait(CFG.store_buffers - 1)
    staging.index(index).store(part)
    fence_async_shared()
    if HALF is None:
        shard: gl.constexpr = [buffers, 1, CFG.rows, CFG.store_columns]
        boxes = reinterpreted(staging, staging.dtype, shard, CFG.store_layout_of_shard)
        tma_store(desc, [source, row, column], boxes.index(index))
    else:
        part_of_shard: gl.constexpr = [buffers, 1, CFG.rows, 1, CFG.store_columns]
        boxes = reinterpreted(staging, staging.dtype, part_of_shard, CFG.store_layout_of_half)
        tma_store(desc, [source, row, HALF, column], boxes.index(index))
