# SPDX-License-Identifier: Apache-2.0
"""The layers without their collectives: what a step costs that never waits, the bound of every way to overlap.

Rows of other ranks are read in memory that is never filled, and sums over ranks are left out, so the results are wrong
and the time is that of the products and the pointwise parts alone. Each layer is one opaque operator, as ours are:
torch would see otherwise that rows are not used and leave out what makes them.
"""

from typing import Any

import torch
from torch import Tensor, nn

_LIBRARY = torch.library.Library("megascale_bench", "DEF")  # type: ignore[no-untyped-call]  # torch gives it no types


def _product(x: Tensor, w: Tensor, gathered: Tensor) -> Tensor:
    return gathered @ w.T


def _product_backward(dout: Tensor, x: Tensor, w: Tensor, gathered: Tensor) -> tuple[Tensor, Tensor]:
    return (dout @ w)[: x.shape[0]], dout.T @ gathered


def _partial(x: Tensor, w: Tensor, world_size: int) -> Tensor:
    return (x @ w.T)[: x.shape[0] // world_size]


def _partial_backward(dout: Tensor, x: Tensor, w: Tensor, gathered: Tensor) -> tuple[Tensor, Tensor]:
    return gathered @ w, gathered.T @ x


for _name, _function in (
    ("product", _product), ("product_backward", _product_backward), ("partial", _partial),
    ("partial_backward", _partial_backward),
):  # fmt: skip
    _LIBRARY.define(_name + torch.library.infer_schema(_function, mutates_args=()))  # type: ignore[no-untyped-call]  # torch gives it no types
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # as above
    torch.library.register_fake(f"megascale_bench::{_name}", _function, lib=_LIBRARY)
_OPERATORS: Any = torch.ops.megascale_bench


class Gathering(torch.autograd.Function):
    """The product of an all-gather's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, gathered: Tensor) -> Tensor:
        """Take x [M / W, K], w [N, K] and [M, K] in place of what is gathered; give [M, N]."""
        ctx.save_for_backward(x, w, gathered)
        out: Tensor = _OPERATORS.product(x, w, gathered)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """[M, N] to something of the size of the gradients of x and w."""
        return *_OPERATORS.product_backward(dout.contiguous(), *ctx.saved_tensors), None


class Scattering(torch.autograd.Function):
    """The product whose sum over ranks is left out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, gathered: Tensor, world_size: int) -> Tensor:
        """Take x [M, K], w [N, K] and [M, N] in place of the gathered gradient; give [M / W, N]."""
        ctx.save_for_backward(x, w, gathered)
        out: Tensor = _OPERATORS.partial(x, w, world_size)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """[M / W, N] to something of the size of the gradients of x and w."""
        return *_OPERATORS.partial_backward(dout.contiguous(), *ctx.saved_tensors), None, None


class AloneLinear(nn.Module):
    """A layer of one rank that communicates nothing.

    Args:
        weight: [N, K], this rank's.
        gathered: [M, d], in place of rows or gradients that come from other ranks.
        world_size: ranks.
        gathers: its input would be gathered; else its output would be summed and scattered.
    """

    def __init__(self, weight: Tensor, gathered: Tensor, world_size: int, *, gathers: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.gathered, self.world_size, self.gathers = gathered, world_size, gathers

    def forward(self, x: Tensor) -> Tensor:
        """[M / W, d] to [M, N], or [M, K] to [M / W, d]."""
        out: Tensor
        if self.gathers:
            out = Gathering.apply(x, self.weight, self.gathered)  # type: ignore[no-untyped-call]  # torch gives it no types
        else:
            out = Scattering.apply(x, self.weight, self.gathered, self.world_size)  # type: ignore[no-untyped-call]  # as above
        return out
