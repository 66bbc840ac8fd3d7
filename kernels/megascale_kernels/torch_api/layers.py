# SPDX-License-Identifier: Apache-2.0
"""Two linear layers for tensor parallelism with sequence parallelism (Megatron-LM, 2205.05198, section 4.2.2).

Between a pair of them a rank holds all rows and a share of the features; outside, a share of the rows and all features:

    x [S/W, B, H]  ColumnParallelLinear  [S, B, F/W]  activation  [S, B, F/W]  RowParallelLinear  [S/W, B, H]
                   gather, then multiply                          multiply, then scatter

Weights lie as in `nn.Linear`, [out, in], cut along out in the first and along in in the second. Rows are cut along
`sequence_dim`; where it is not the outermost, rows are copied into that order and back (not for a batch of one).
"""

import math
from typing import Self

import torch
from torch import Tensor, nn

from megascale_kernels.errors import Unsupported
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config
from megascale_kernels.torch_api import autograd, custom_ops
from megascale_kernels.torch_api.operators import ag_gemm, gemm_rs, swiglu_gemm_rs


def column_parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None, workspace: Workspace, *, sequence_dim: int = 0,
    config: Config | None = None, save_gathered: bool = False,
) -> Tensor:  # fmt: skip
    """Gather x along its sequence and multiply by weight.T, [K, N] of a weight [N, K].

    Raises:
        Unsupported: x has no such dimension, or its features lie along it; and what `ag_gemm` raises.
    """
    check_sequence(x, sequence_dim, "column-parallel linear")
    x, weight, bias = under_autocast(x, weight, bias)
    rows = x.transpose(0, sequence_dim).contiguous()
    out = ag_gemm(rows, weight.T, workspace, bias=bias, config=config, save_gathered=save_gathered)
    return out.transpose(0, sequence_dim)


def row_parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None, workspace: Workspace, *, sequence_dim: int = 0,
    config: Config | None = None, gated: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply x by weight.T, sum over ranks, keep this rank's share of the sequence; all ranks have the same bias.

    `gated`: multiply swiglu(x).

    Raises:
        Unsupported: x has no such dimension, its features lie along it, or the ranks cannot share it evenly; and what
            `gemm_rs` raises.
    """
    check_sequence(x, sequence_dim, "row-parallel linear", workspace.world_size)
    x, weight, bias = under_autocast(x, weight, bias)
    if bias is not None:
        bias = (custom_ops if torch.compiler.is_compiling() else autograd).replicated(bias, workspace)
    rows = x.transpose(0, sequence_dim).contiguous()
    operator = swiglu_gemm_rs if gated else gemm_rs
    return operator(rows, weight.T, workspace, bias=bias, config=config).transpose(0, sequence_dim)


def check_sequence(x: Tensor, sequence_dim: int, what: str, shares: int = 1) -> None:
    """Refuse an input whose sequence is not in dimension `sequence_dim`.

    A matrix given to a layer whose sequence is dimension 1 would be turned round, its features gathered instead of its
    rows, and where both are as long nothing else would notice.

    Raises:
        Unsupported: the message names the wrong dimension.
    """
    if not -x.ndim <= sequence_dim < x.ndim or sequence_dim % x.ndim == x.ndim - 1:
        raise Unsupported(
            f"{what}: x is {list(x.shape)}, and its sequence should be dimension {sequence_dim}, before the last, "
            "which holds the features: give it a batch dimension, or the layer another sequence_dim"
        )
    if x.shape[sequence_dim] % shares:
        raise Unsupported(
            f"{what}: dimension {sequence_dim} of x, {x.shape[sequence_dim]} of {list(x.shape)}, cannot be dealt out "
            f"to {shares} ranks: pad it to a multiple of {shares}"
        )


def under_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What autocast does to `nn.Linear`."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def share(total: int, workspace: Workspace, what: str) -> int:
    """One rank's share of a number of features.

    Raises:
        ValueError: the ranks cannot share it evenly.
    """
    if total % workspace.world_size:
        raise ValueError(f"{what}={total} cannot be shared evenly by {workspace.world_size} ranks")
    return total // workspace.world_size


class _ParallelLinear(nn.Module):
    """What both layers have in common: sizes, parameters, how they are printed."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, workspace: Workspace, shape: tuple[int, int], bias_size: int | None,
        sequence_dim: int, config: Config | None, device: torch.device | str | None, dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.workspace, self.sequence_dim, self.config = workspace, sequence_dim, config
        device, dtype = device or workspace.device, dtype or workspace.dtype
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        bias = None if bias_size is None else nn.Parameter(torch.empty(bias_size, device=device, dtype=dtype))
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as `nn.Linear` draws the whole one; biases begin at zero, so that ranks agree on them.

        Each rank draws its own share: give the ranks different seeds, or cut a whole layer with `from_linear`.
        """
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """What the whole layer is, and this rank's share of it."""
        workspace = self.workspace
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"weight={list(self.weight.shape)} of rank {workspace.rank}/{workspace.world_size}"
        )

    def _take(self, weight: Tensor, bias: Tensor | None, linear: nn.Linear) -> Self:
        with torch.no_grad():
            self.weight.copy_(weight)
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias)
        self.weight.requires_grad_(linear.weight.requires_grad)
        if self.bias is not None:
            self.bias.requires_grad_(linear.bias.requires_grad)
        return self


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose output features are shared by the ranks: [S/W, ..., in] to [S, ..., out/W].

    Args:
        in_features: of the whole layer.
        out_features: of the whole layer, a multiple of W.
        workspace: made for S * ... rows of `in_features`.
        bias: whether there is one, [out/W].
        sequence_dim: dimension along which the input is cut.
        config: how to run; None lets the tuner decide.
        save_gathered: keep the gathered input for backward rather than gather it again.
        device: of the parameters; the workspace's by default.
        dtype: of the parameters; the workspace's by default.

    Raises:
        ValueError: the features cannot be shared evenly.
    """

    def __init__(
        self, in_features: int, out_features: int, workspace: Workspace, *, bias: bool = True, sequence_dim: int = 0,
        config: Config | None = None, save_gathered: bool = False, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        own = share(out_features, workspace, "out_features")
        shape, bias_size = (own, in_features), own if bias else None
        super().__init__(in_features, out_features, workspace, shape, bias_size, sequence_dim, config, device, dtype)
        self.save_gathered = save_gathered

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, workspace: Workspace, *, sequence_dim: int = 0, config: Config | None = None,
        save_gathered: bool = False,
    ) -> "ColumnParallelLinear":  # fmt: skip
        """This rank's share of a whole layer, on its device and of its type."""
        layer = cls(
            linear.in_features, linear.out_features, workspace, bias=linear.bias is not None, sequence_dim=sequence_dim,
            config=config, save_gathered=save_gathered, device=linear.weight.device, dtype=linear.weight.dtype,
        )  # fmt: skip
        bias = None if linear.bias is None else linear.bias.chunk(workspace.world_size)[workspace.rank]
        return layer._take(linear.weight.chunk(workspace.world_size)[workspace.rank], bias, linear)

    def forward(self, x: Tensor) -> Tensor:
        """[S/W, ..., in] to [S, ..., out/W]."""
        return column_parallel(
            x, self.weight, self.bias, self.workspace, sequence_dim=self.sequence_dim, config=self.config,
            save_gathered=self.save_gathered,
        )  # fmt: skip


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose input features are shared by the ranks: [S, ..., in/W] to [S/W, ..., out].

    Args:
        in_features: of the whole layer, a multiple of W.
        out_features: of the whole layer.
        workspace: made for S * ... rows of `out_features`.
        bias: whether there is one, [out], the same on all ranks; its gradient is summed over ranks.
        sequence_dim: dimension along which the output is cut.
        config: how to run; None lets the tuner decide.
        gated: the input is [S, ..., 2 in/W], gates and values side by side, and `swiglu` of it is multiplied
            (`swiglu_gemm_rs`).
        device: of the parameters; the workspace's by default.
        dtype: of the parameters; the workspace's by default.

    Raises:
        ValueError: the features cannot be shared evenly.
    """

    def __init__(
        self, in_features: int, out_features: int, workspace: Workspace, *, bias: bool = True, sequence_dim: int = 0,
        config: Config | None = None, gated: bool = False, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        shape = (out_features, share(in_features, workspace, "in_features"))
        bias_size = out_features if bias else None
        super().__init__(in_features, out_features, workspace, shape, bias_size, sequence_dim, config, device, dtype)
        self.gated = gated

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, workspace: Workspace, *, sequence_dim: int = 0, config: Config | None = None,
        gated: bool = False,
    ) -> "RowParallelLinear":  # fmt: skip
        """This rank's share of a whole layer, on its device and of its type."""
        layer = cls(
            linear.in_features, linear.out_features, workspace, bias=linear.bias is not None, sequence_dim=sequence_dim,
            config=config, gated=gated, device=linear.weight.device, dtype=linear.weight.dtype,
        )  # fmt: skip
        return layer._take(linear.weight.chunk(workspace.world_size, 1)[workspace.rank], linear.bias, linear)

    def forward(self, x: Tensor) -> Tensor:
        """[S, ..., in/W], twice as wide where `gated`, to [S/W, ..., out]."""
        return row_parallel(
            x, self.weight, self.bias, self.workspace, sequence_dim=self.sequence_dim, config=self.config,
            gated=self.gated,
        )  # fmt: skip
