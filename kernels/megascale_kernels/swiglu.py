# SPDX-License-Identifier: Apache-2.0
"""SwiGLU of a product whose columns are gates, then values: silu(gate) * value, and its gradient.

Between two products of a tensor-parallel MLP this is all that is left. torch.compile's gradient of chunk, silu and mul
is one kernel over the concatenated columns: on H200 it took 4 % of a training step of Llama-3.1-8B, and moved its bytes
at a lower rate than its own forward (0.6 by six passes over memory, which is an estimate). Here a program has gates and
values of the same columns. Sums are in fp32, rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

FAST = (torch.bfloat16, torch.float16, torch.float32)  # that the kernels add in no less than they come in
BLOCK = 1024  # columns of a program: 16 bytes a thread and tensor
WARPS = 4


@triton.jit
def place(columns, BLOCK: tl.constexpr):
    """Row and columns of a program: neighbours have neighbouring memory."""
    blocks = tl.cdiv(columns, BLOCK)
    row = tl.program_id(0) // blocks
    return row.to(tl.int64), tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def swiglu_kernel(wide_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """[rows, 2 columns] to [rows, columns]; a program has a block of one row."""
    row, here = place(columns, BLOCK)
    inside = here < columns
    gate = tl.load(wide_ptr + row * 2 * columns + here, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(wide_ptr + row * 2 * columns + columns + here, mask=inside, other=0.0).to(tl.float32)
    out = gate * value / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * columns + here, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_gradient_kernel(wide_ptr, dout_ptr, dwide_ptr, columns, BLOCK: tl.constexpr):
    """[rows, 2 columns] and the gradient of the result, [rows, columns], to that of both halves, [rows, 2 columns]."""
    row, here = place(columns, BLOCK)
    inside = here < columns
    gate = tl.load(wide_ptr + row * 2 * columns + here, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(wide_ptr + row * 2 * columns + columns + here, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + row * columns + here, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    dgate = dout * value * (sigmoid + silu * (1.0 - sigmoid))
    element = dwide_ptr.dtype.element_ty
    tl.store(dwide_ptr + row * 2 * columns + here, dgate.to(element), mask=inside)
    tl.store(dwide_ptr + row * 2 * columns + columns + here, (dout * silu).to(element), mask=inside)


def silu_times_value(wide: Tensor) -> Tensor:
    """silu(gate) * value, [..., 2 F] to [..., F]: by a kernel on a GPU, else by torch."""
    if not _is_fast(wide):
        gate, value = wide.chunk(2, -1)
        return functional.silu(gate) * value
    out = wide.new_empty((*wide.shape[:-1], wide.shape[-1] // 2))
    launch(wide.reshape(-1, wide.shape[-1]), out.view(-1, out.shape[-1]))
    return out


def gradient_of_wide(wide: Tensor, dout: Tensor) -> Tensor:
    """The gradient of wide, [..., 2 F], from that of `silu_times_value`'s result, [..., F]: by a kernel on a GPU."""
    if not _is_fast(wide):
        gate, value = wide.chunk(2, -1)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        return torch.cat((dout * value * (sigmoid + silu * (1 - sigmoid)), dout * silu), -1)
    dwide = wide.new_empty(wide.shape)
    launch_gradient(wide.reshape(-1, wide.shape[-1]), dout.reshape(-1, dout.shape[-1]), dwide.view(-1, dwide.shape[-1]))
    return dwide


def _is_fast(wide: Tensor) -> bool:
    return wide.device.type == "cuda" and wide.dtype in FAST


def launch(wide: Tensor, out: Tensor) -> None:
    """Launch on the current stream: wide [rows, 2 F], out [rows, F], both contiguous."""
    rows, columns = out.shape
    if out.numel():
        grid = (rows * triton.cdiv(columns, BLOCK),)
        swiglu_kernel[grid](wide, out, columns, BLOCK=BLOCK, num_warps=WARPS)


def launch_gradient(wide: Tensor, dout: Tensor, dwide: Tensor) -> None:
    """Launch on the current stream: wide and dwide [rows, 2 F], dout [rows, F], all contiguous."""
    rows, columns = dout.shape
    if dout.numel():
        grid = (rows * triton.cdiv(columns, BLOCK),)
        swiglu_gradient_kernel[grid](wide, dout, dwide, columns, BLOCK=BLOCK, num_warps=WARPS)
