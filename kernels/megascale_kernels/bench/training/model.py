# SPDX-License-Identifier: Apache-2.0
"""The blocks that are trained: x + down(activation(up(norm(x)))), a residual MLP as in a transformer without attention.

Rows lie along dimension 0 and are cut along it between blocks, so that no variant has to copy rows into another order:
the layout that is best for torch too. SwiGLU's gate and value come from one weight, so their input is gathered once.

Legend: M rows over all ranks, W ranks, d hidden size, f inner size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

ACTIVATIONS = ("swiglu", "gelu")


class Block(nn.Module):
    """One block; what its three parts are, and what computes SwiGLU, a variant decides."""

    def __init__(
        self, norm: nn.Module, up: nn.Module, down: nn.Module, activation: str,
        swiglu: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm, self.up, self.down = norm, up, down
        self.is_gated, self.swiglu = activation == "swiglu", swiglu

    def forward(self, x: Tensor) -> Tensor:
        """[M / W, d] to [M / W, d]."""
        wide = self.up(self.norm(x))
        if self.is_gated and self.swiglu is not None:
            wide = self.swiglu(wide)
        elif self.is_gated:
            gate, value = wide.chunk(2, -1)
            wide = functional.silu(gate) * value
        else:
            wide = functional.gelu(wide, approximate="tanh")
        out: Tensor = x + self.down(wide)
        return out


class GatedBlock(nn.Module):
    """A block whose MLP is one module."""

    def __init__(self, norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = norm, mlp

    def forward(self, x: Tensor) -> Tensor:
        """[M / W, d] to [M / W, d]."""
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class BlockWeights(NamedTuple):
    """This rank's weights of one block.

    Attributes:
        norm: [d], the same on all ranks.
        up: [f / W, d], twice the rows for a gated activation.
        down: [d, f / W].
    """

    norm: Tensor
    up: Tensor
    down: Tensor


class Task(NamedTuple):
    """What all variants compute on, the same tensors.

    Attributes:
        weights: one for each block.
        x: this rank's input, [M / W, d].
        gradient: that of the output, [M / W, d].
        activation: one of `ACTIVATIONS`.
        hidden: d.
        inner: f.
        m: M.
    """

    weights: list[BlockWeights]
    x: Tensor
    gradient: Tensor
    activation: str
    hidden: int
    inner: int
    m: int


def draw_task(
    hidden: int, inner: int, m: int, *, blocks: int, activation: str, rank: int, world_size: int,
    device: torch.device, dtype: torch.dtype,
) -> Task:  # fmt: skip
    """Random weights as `nn.Linear` draws them, and random input; ranks draw apart."""
    generator = torch.Generator(device).manual_seed(1000 + rank)

    def uniform(rows: int, columns: int, fan_in: int) -> Tensor:
        drawn = torch.empty(rows, columns, device=device, dtype=dtype)
        return drawn.uniform_(-(fan_in**-0.5), fan_in**-0.5, generator=generator)

    def noise() -> Tensor:
        return torch.randn(m // world_size, hidden, generator=generator, device=device, dtype=dtype)

    share, widths = inner // world_size, 2 if activation == "swiglu" else 1
    weights = [
        BlockWeights(
            torch.ones(hidden, device=device, dtype=dtype),
            uniform(widths * share, hidden, hidden),
            uniform(hidden, share, inner),
        )
        for _ in range(blocks)
    ]
    return Task(weights, noise(), noise(), activation, hidden, inner, m)
