# SPDX-License-Identifier: Apache-2.0
"""The activation between a `ColumnParallelLinear` and a `RowParallelLinear` as one operator each way."""

from typing import Any

import torch
from torch import Tensor

from megascale_kernels.errors import Unsupported
from megascale_kernels.swiglu import gradient_of_wide, silu_times_value

_LIBRARY = torch.library.Library("megascale_kernels", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch gives it no types


def swiglu(wide: Tensor) -> Tensor:
    """silu(gate) * value, differentiable once, one kernel each way; under `torch.compile` one node.

    Args:
        wide: [..., 2 F], gates in the first half of the columns, values in the second: the output of one
            `ColumnParallelLinear` whose weight holds this rank's rows of both, one below the other. On a GPU in bf16,
            fp16 or fp32; elsewhere torch computes it.

    Returns:
        [..., F]. It is kept for the gradient of the weight that it is multiplied with, where torch.compile would
        compute it again.

    Raises:
        Unsupported: no dimension, or an odd number of columns.
    """
    if wide.ndim == 0 or wide.shape[-1] % 2:
        raise Unsupported(f"swiglu: wide must be [..., 2 F], gates and values side by side, got {tuple(wide.shape)}")
    out: Tensor = SwiGLU.apply(wide)  # type: ignore[no-untyped-call]  # torch gives it no types
    return out


class SwiGLU(torch.autograd.Function):
    """`swiglu` with its gradient."""

    @staticmethod
    def forward(ctx: Any, wide: Tensor) -> Tensor:
        """Take [..., 2 F]; give [..., F]."""
        ctx.save_for_backward(wide)
        out: Tensor = torch.ops.megascale_kernels.swiglu(wide)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        """[..., F] to the gradient of both halves, [..., 2 F]."""
        dwide: Tensor = torch.ops.megascale_kernels.swiglu_backward(ctx.saved_tensors[0], dout)
        return dwide


def _swiglu(wide: Tensor) -> Tensor:
    return silu_times_value(wide)


def _swiglu_backward(wide: Tensor, dout: Tensor) -> Tensor:
    return gradient_of_wide(wide, dout)


def _like(wide: Tensor, columns: int) -> Tensor:
    return wide.new_empty((*wide.shape[:-1], columns))


def _shape(wide: Tensor) -> Tensor:
    return _like(wide, wide.shape[-1] // 2)


def _shape_of_gradient(wide: Tensor, dout: Tensor) -> Tensor:
    return _like(wide, wide.shape[-1])


for _function, _shapes in ((_swiglu, _shape), (_swiglu_backward, _shape_of_gradient)):
    _name = _function.__name__.removeprefix("_")
    _schema = torch.library.infer_schema(_function, mutates_args=())
    _LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]  # as above
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # as above
    torch.library.register_fake(f"megascale_kernels::{_name}", _shapes, lib=_LIBRARY)
