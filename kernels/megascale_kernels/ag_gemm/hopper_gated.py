# SPDX-License-Identifier: Apache-2.0
"""SwiGLU's gradient behind an all-gather + GEMM, while the product is still in registers.

In the backward of y = swiglu(wide) @ w the product gather(dy) @ w^T is the gradient of swiglu's result, [M, F], and
needed for nothing but that of wide, [M, 2 F]: gates in the first half of the columns, values in the second. A kernel in
between reads and writes F columns more than there is to know. Here the producer sends the gates and values of a tile
through the ring behind the last operands, `store_columns` columns of both consumers in a slot, gates over A and values
over B; the consumers turn each such slice of their sums into two, and store them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from megascale_kernels.device.hopper_gemm import column_slices, next_slot, reinterpreted, tma_load, tma_store

GATES, VALUES = map(gl.constexpr, range(2))


@gluon.jit
def sigmoid_of(gate):
    """1 / (1 + exp(-gate)), fp32: two instructions of the special unit, which decide how long this takes.

    What the compiler makes of exp and a division has as many again around each, for results that are denormal.
    """
    return gl.inline_asm_elementwise(
        """
        {
            .reg .f32 power;
            mul.ftz.f32 power, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 power, power;
            add.ftz.f32 power, power, 0f3F800000;
            rcp.approx.ftz.f32 $0, power;
        }
        """,
        "=f,f", [gate], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def gradient_of_pair(gate, value, dout):
    """Gradients of gate and value of silu(gate) * value; all fp32."""
    sigmoid = sigmoid_of(gate)
    silu = gate * sigmoid
    return dout * value * (sigmoid + silu * (1.0 - sigmoid)), dout * silu


@gluon.jit
def _boxes(memory, COUNT: gl.constexpr, CFG: gl.constexpr):
    """Shared memory as boxes of `store_columns` columns of a consumer's rows."""
    shape: gl.constexpr = [COUNT, CFG.rows, CFG.store_columns]
    return reinterpreted(memory, memory.dtype, shape, CFG.store_layout)


@gluon.jit
def _tma_boxes(memory, COUNT: gl.constexpr, CFG: gl.constexpr):
    """The same as the TMA unit sees them: a shard and a half of the columns deep."""
    shape: gl.constexpr = [COUNT, 1, CFG.rows, 1, CFG.store_columns]
    return reinterpreted(memory, memory.dtype, shape, CFG.store_layout_of_half)


@gluon.jit
def fetch_gates(ring, wide_desc, source, row, column, slot, phase, CFG: gl.constexpr):
    """Role of the producer behind a tile's operands: gates and values at the tile's place, in the order of columns."""
    gates = _tma_boxes(ring.a, CFG.slots * CFG.boxes_in_a, CFG)
    values = _tma_boxes(ring.b, CFG.slots * CFG.boxes_in_b, CFG)
    consumers: gl.constexpr = CFG.consumers
    count: gl.constexpr = CFG.columns // CFG.store_columns
    for i in gl.static_range(count):
        full = ring.full.index(slot)
        mbarrier.wait(ring.empty.index(slot), phase)
        mbarrier.expect(full, 2 * CFG.box_bytes * CFG.across_n)
        for me in gl.static_range(consumers):
            first = row + (me % CFG.across_m) * CFG.rows
            at = column + (me % CFG.across_n) * CFG.columns + i * CFG.store_columns
            tma_load(wide_desc, [source, first, GATES, at], full, gates.index(slot * CFG.boxes_in_a + me))
            tma_load(wide_desc, [source, first, VALUES, at], full, values.index(slot * CFG.boxes_in_b + me))
        slot, phase = next_slot(slot, phase, CFG.slots)
    return slot, phase


@gluon.jit
def store_gradients(ring, acc, staging, out_desc, source, row, column, slot, phase, ME: gl.constexpr,
                    CFG: gl.constexpr):  # fmt: skip
    """Take this consumer's part of a finished product; store the gradients of its gates and its values by TMA."""
    gates = _boxes(ring.a, CFG.slots * CFG.boxes_in_a, CFG)
    values = _boxes(ring.b, CFG.slots * CFG.boxes_in_b, CFG)
    buffers: gl.constexpr = CFG.consumers * CFG.store_buffers
    boxes = _tma_boxes(staging, buffers, CFG)
    count: gl.constexpr = CFG.columns // CFG.store_columns
    slices = column_slices(acc, count)
    layout: gl.constexpr = slices[0].type.layout
    for i in gl.static_range(count):
        piece = slices[i]
        mbarrier.wait(ring.full.index(slot), phase)
        gate = gates.index(slot * CFG.boxes_in_a + ME).load(layout)
        value = values.index(slot * CFG.boxes_in_b + ME).load(layout)
        mbarrier.arrive(ring.empty.index(slot))
        slot, phase = next_slot(slot, phase, CFG.slots)
        dgate, dvalue = gradient_of_pair(gate.to(gl.float32), value.to(gl.float32), piece)
        _store_half(dgate, staging, boxes, out_desc, GATES, source, row, column + i * CFG.store_columns, ME, CFG)
        _store_half(dvalue, staging, boxes, out_desc, VALUES, source, row, column + i * CFG.store_columns, ME, CFG)
    return slot, phase


@gluon.jit
def _store_half(part, staging, boxes, out_desc, HALF: gl.constexpr, source, row, column, ME: gl.constexpr,
                CFG: gl.constexpr):  # fmt: skip
    """Round a slice and write it into one half of the columns; each half and each shard clips its own."""
    index: gl.constexpr = ME * CFG.store_buffers + HALF % CFG.store_buffers
    tma.store_wait(CFG.store_buffers - 1)
    staging.index(index).store(part.to(out_desc.dtype))
    fence_async_shared()
    tma_store(out_desc, [source, row, HALF, column], boxes.index(index))
