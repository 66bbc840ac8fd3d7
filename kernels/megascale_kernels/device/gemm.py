# SPDX-License-Identifier: Apache-2.0
"""The matrix product that all operators share: one output tile at a time, fp32 accumulation.

Legend: M rows of the output, N its columns, K what is summed over; x_MK, w_KN or w_NK, out_MN.
The loads are TMA descriptors, so tails in M, N and K read zeros; Triton pipelines the loop over K.
"""

import triton
import triton.language as tl


@triton.jit
def multiply(x_desc, row, w_desc, col, k_size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
             W_IS_NK: tl.constexpr):  # fmt: skip
    """acc[BLOCK_M, BLOCK_N] = x[row:, :] @ w[:, col:] in fp32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, k_size, BLOCK_K):
        x = x_desc.load([row, k])
        if W_IS_NK:
            w = w_desc.load([col, k]).T
        else:
            w = w_desc.load([k, col])
        acc = tl.dot(x, w, acc)
    return acc


@triton.jit
def add_bias(acc, bias_ptr, col, n_size, BLOCK_N: tl.constexpr):
    """Add bias[col:] to acc, in fp32."""
    cols = col + tl.arange(0, BLOCK_N)
    bias = tl.load(bias_ptr + cols, mask=cols < n_size, other=0.0)
    return acc + bias.to(tl.float32)[None, :]


@triton.jit
def quarters(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The accumulator as four groups of columns, left to right.

    An epilogue by quarters needs a quarter of the shared memory and of the registers: a whole 128 x 256 tile with its
    addresses does not fit beside the accumulator.
    """
    left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
    first, second = left.reshape(BLOCK_M, 2, BLOCK_N // 4).permute(0, 2, 1).split()
    third, fourth = right.reshape(BLOCK_M, 2, BLOCK_N // 4).permute(0, 2, 1).split()
    return first, second, third, fourth


@triton.jit
def store_rows(out_ptr, part, row, row_end, col, n_size, BLOCK_M: tl.constexpr, COLS: tl.constexpr):
    """Store the rows of a part below `row_end`: what lies beyond belongs to another shard."""
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, COLS)
    here = out_ptr + rows.to(tl.int64)[:, None] * n_size + cols[None, :]
    tl.store(here, part.to(out_ptr.dtype.element_ty), mask=(rows < row_end)[:, None] & (cols < n_size)[None, :])


@triton.jit
def store_tile(out_desc, out_ptr, acc, row, row_end, col, n_size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
               BY_TMA: tl.constexpr):  # fmt: skip
    """Store an accumulator: by TMA, or by masked stores where a tail must be cut."""
    parts = quarters(acc, BLOCK_M, BLOCK_N)
    for index in tl.static_range(4):
        at = col + index * (BLOCK_N // 4)
        if BY_TMA:
            out_desc.store([row, at], parts[index].to(out_ptr.dtype.element_ty))
        else:
            store_rows(out_ptr, parts[index], row, row_end, at, n_size, BLOCK_M, BLOCK_N // 4)
