# SPDX-License-Identifier: Apache-2.0
"""The kernels of the tuned serial opponent: gather rows, take SwiGLU, add a token's rows."""

import triton
import triton.language as tl


@triton.jit
def take_rows(x_ptr, row_ptr, out_ptr, count_ptr, columns, COLS: tl.constexpr):
    """Set out[i] = x[row[i]], as long as i is below the count."""
    index = tl.program_id(0)
    if index < tl.load(count_ptr):
        row = tl.load(row_ptr + index).to(tl.int64)
        for at in range(0, columns, COLS):
            cols = at + tl.arange(0, COLS)
            value = tl.load(x_ptr + row * columns + cols, mask=cols < columns)
            tl.store(out_ptr + index.to(tl.int64) * columns + cols, value, mask=cols < columns)


@triton.jit
def take_swiglu(both_ptr, out_ptr, count_ptr, inner, COLS: tl.constexpr):
    """Set out = silu(both[:, :inner]) * both[:, inner:]."""
    index = tl.program_id(0).to(tl.int64)
    if index < tl.load(count_ptr):
        for at in range(0, inner, COLS):
            cols = at + tl.arange(0, COLS)
            gate = tl.load(both_ptr + index * 2 * inner + cols, mask=cols < inner).to(tl.float32)
            up = tl.load(both_ptr + index * 2 * inner + inner + cols, mask=cols < inner).to(tl.float32)
            value = gate / (1.0 + tl.exp(-gate)) * up
            tl.store(out_ptr + index * inner + cols, value.to(out_ptr.dtype.element_ty), mask=cols < inner)


@triton.jit
def add_rows(y_ptr, place_ptr, gate_ptr, ours_ptr, out_ptr, columns, TOP_K: tl.constexpr, COLS: tl.constexpr):
    """Set out[t] = sum over the pairs of t that are ours of gate * y[place], in fp32."""
    token = tl.program_id(0).to(tl.int64)
    for at in range(0, columns, COLS):
        cols = at + tl.arange(0, COLS)
        total = tl.zeros((COLS,), dtype=tl.float32)
        for index in tl.static_range(TOP_K):
            pair = token * TOP_K + index
            ours = tl.load(ours_ptr + pair) != 0
            place = tl.load(place_ptr + pair).to(tl.int64)
            value = tl.load(y_ptr + place * columns + cols, mask=(cols < columns) & ours, other=0.0)
            total += tl.load(gate_ptr + pair) * value.to(tl.float32)
        tl.store(out_ptr + token * columns + cols, total.to(out_ptr.dtype.element_ty), mask=cols < columns)


@triton.jit
def swiglu_gradient(u_ptr, both_ptr, out_ptr, pair_ptr, gate_ptr, dgate_ptr, count_ptr, inner, COLS: tl.constexpr):
    """Gradients of gate and up, and of the pair's weight; u becomes weight * h."""
    index = tl.program_id(0).to(tl.int64)
    if index < tl.load(count_ptr):
        pair = tl.load(pair_ptr + index)
        weight = tl.load(gate_ptr + pair)
        dgate = 0.0
        for at in range(0, inner, COLS):
            cols = at + tl.arange(0, COLS)
            inside = cols < inner
            u = tl.load(u_ptr + index * inner + cols, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(both_ptr + index * 2 * inner + cols, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(both_ptr + index * 2 * inner + inner + cols, mask=inside, other=0.0).to(tl.float32)
            sigmoid = 1.0 / (1.0 + tl.exp(-gate))
            silu = gate * sigmoid
            dgate += tl.sum(u * silu * up)
            of_gate = weight * u * up * (sigmoid + silu * (1.0 - sigmoid))
            type_of = out_ptr.dtype.element_ty
            tl.store(out_ptr + index * 2 * inner + cols, of_gate.to(type_of), mask=inside)
            tl.store(out_ptr + index * 2 * inner + inner + cols, (weight * u * silu).to(type_of), mask=inside)
            tl.store(u_ptr + index * inner + cols, (weight * silu * up).to(type_of), mask=inside)
        tl.store(dgate_ptr + pair, dgate)
