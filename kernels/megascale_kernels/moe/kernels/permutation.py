# SPDX-License-Identifier: Apache-2.0
"""Kernels of the serial path without waits of the host: whose pairs are, rows by expert, SwiGLU, a token's sum.

What was chosen lies as [tokens, 2 TOP_K] words: a token's experts, then the bits of their weights. One program takes
one row, or one token; grids are those of the most rows there may be, and programs behind the last row end at once.
"""

import triton
import triton.language as tl


@triton.jit
def find_ours(chosen_ptr, key_ptr, pairs, first, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Set key[p] to the place of pair p's expert among ours, to EXPERTS where it is not ours or was dropped."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    expert = tl.load(chosen_ptr + pair // TOP_K * (2 * TOP_K) + pair % TOP_K, mask=inside, other=-1)
    ours = (expert >= first) & (expert < first + EXPERTS)
    tl.store(key_ptr + pair, tl.where(ours, expert - first, EXPERTS).to(tl.int16), mask=inside)


@triton.jit
def take_rows(
    x_ptr, order_ptr, place_ptr, out_ptr, count_ptr, columns, TOP_K: tl.constexpr, PLACES: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Set out[i] to the token of pair order[i], and with PLACES place[order[i]] to i, for i below the count."""
    index = tl.program_id(0).to(tl.int64)
    if index < tl.load(count_ptr):
        pair = tl.load(order_ptr + index).to(tl.int64)
        if PLACES:
            tl.store(place_ptr + pair, index.to(tl.int32))
        token = pair // TOP_K
        for at in range(0, columns, COLS):
            cols = at + tl.arange(0, COLS)
            value = tl.load(x_ptr + token * columns + cols, mask=cols < columns)
            tl.store(out_ptr + index * columns + cols, value, mask=cols < columns)


@triton.jit
def take_swiglu(both_ptr, out_ptr, count_ptr, inner, COLS: tl.constexpr):
    """Set out = silu(both[:, :inner]) * both[:, inner:], for rows below the count."""
    index = tl.program_id(0).to(tl.int64)
    if index < tl.load(count_ptr):
        for at in range(0, inner, COLS):
            cols = at + tl.arange(0, COLS)
            inside = cols < inner
            gate = tl.load(both_ptr + index * 2 * inner + cols, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(both_ptr + index * 2 * inner + inner + cols, mask=inside, other=0.0).to(tl.float32)
            value = gate / (1.0 + tl.exp(-gate)) * up
            tl.store(out_ptr + index * inner + cols, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_rows(
    y_ptr, place_ptr, key_ptr, gate_ptr, out_ptr, columns, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Set out[t] to the sum of y[place] over the pairs of t that are ours, in fp32, WEIGHTED by their gates or not.

    `gate_ptr` is what was chosen, as fp32: a token's weights are the second half of its words.
    """
    token = tl.program_id(0).to(tl.int64)
    for at in range(0, columns, COLS):
        cols = at + tl.arange(0, COLS)
        total = tl.zeros((COLS,), dtype=tl.float32)
        for index in tl.static_range(TOP_K):
            pair = token * TOP_K + index
            ours = tl.load(key_ptr + pair) < EXPERTS
            place = tl.load(place_ptr + pair, mask=ours, other=0).to(tl.int64)
            value = tl.load(y_ptr + place * columns + cols, mask=(cols < columns) & ours, other=0.0).to(tl.float32)
            if WEIGHTED:
                value = value * tl.load(gate_ptr + token * (2 * TOP_K) + TOP_K + index)
            total += tl.where(ours, value, 0.0)
        tl.store(out_ptr + token * columns + cols, total.to(out_ptr.dtype.element_ty), mask=cols < columns)


@triton.jit
def swiglu_backward(
    u_ptr, both_ptr, out_ptr, order_ptr, gate_ptr, dgate_ptr, count_ptr, inner, TOP_K: tl.constexpr, COLS: tl.constexpr
):
    """From u, the gradient of an expert's h: that of gate and up, [rows, 2 inner], and of the pair's weight.

    u becomes weight * h, what the gradient of w_out is made of.
    """
    index = tl.program_id(0).to(tl.int64)
    if index < tl.load(count_ptr):
        pair = tl.load(order_ptr + index).to(tl.int64)
        weight = tl.load(gate_ptr + pair // TOP_K * (2 * TOP_K) + TOP_K + pair % TOP_K)
        dgate = tl.zeros((COLS,), dtype=tl.float32)
        for at in range(0, inner, COLS):
            cols = at + tl.arange(0, COLS)
            inside = cols < inner
            u = tl.load(u_ptr + index * inner + cols, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(both_ptr + index * 2 * inner + cols, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(both_ptr + index * 2 * inner + inner + cols, mask=inside, other=0.0).to(tl.float32)
            sigmoid = 1.0 / (1.0 + tl.exp(-gate))
            silu = gate * sigmoid
            dgate += u * silu * up
            of_gate = weight * u * up * (sigmoid + silu * (1.0 - sigmoid))
            kind = out_ptr.dtype.element_ty
            tl.store(out_ptr + index * 2 * inner + cols, of_gate.to(kind), mask=inside)
            tl.store(out_ptr + index * 2 * inner + inner + cols, (weight * u * silu).to(kind), mask=inside)
            tl.store(u_ptr + index * inner + cols, (weight * silu * up).to(kind), mask=inside)
        tl.store(dgate_ptr + pair, tl.sum(dgate))
