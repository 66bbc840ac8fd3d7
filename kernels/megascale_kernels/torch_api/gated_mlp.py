# SPDX-License-Identifier: Apache-2.0
"""A gated MLP as one operator: a `ColumnParallelLinear` and a `RowParallelLinear`, and SwiGLU between.

    x [S/W, B, H]  gates and values [S, B, 2 F/W]  silu(gate) * value [S, B, F/W]  [S/W, B, H]

As separate layers the second reads what the first stored before it can multiply; here the first one's product is turned
into both while it is in registers (`ag_gemm/hopper_swiglu`).
"""

import torch
from torch import Tensor, nn

from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.torch_api import autograd, custom_ops
from megascale_kernels.torch_api.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    check_sequence,
    share,
    under_autocast,
)
from megascale_kernels.torch_api.operators import gated_mlp


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * value(x)) over ranks: [S/W, ..., hidden] to [S/W, ..., hidden].

    `up` holds this rank's gates and, below them, its values, [2 inner/W, hidden]; `down` is [hidden, inner/W].

    Args:
        hidden: features outside.
        inner: features between, those of the gates or of the values, a multiple of W.
        workspace: made for S * ... rows of `hidden`, gathered and scattered.
        bias: whether both layers have one.
        sequence_dim: dimension along which input and output are cut.
        save_gathered: keep the gathered input for backward rather than gather it again.
        device: of the parameters; the workspace's by default.
        dtype: of the parameters; the workspace's by default.

    Raises:
        ValueError: the inner features cannot be shared evenly.
    """

    def __init__(
        self, hidden: int, inner: int, workspace: Workspace, *, bias: bool = True, sequence_dim: int = 0,
        save_gathered: bool = False, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        share(inner, workspace, "inner")
        self.up = ColumnParallelLinear(
            hidden, 2 * inner, workspace, bias=bias, sequence_dim=sequence_dim, save_gathered=save_gathered,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.down = RowParallelLinear(
            inner, hidden, workspace, bias=bias, sequence_dim=sequence_dim, gated=True, device=device, dtype=dtype
        )

    @classmethod
    def from_linears(
        cls, gate: nn.Linear, value: nn.Linear, down: nn.Linear, workspace: Workspace, *, sequence_dim: int = 0,
        save_gathered: bool = False,
    ) -> "GatedMLP":  # fmt: skip
        """This rank's shares of whole layers (Llama's `gate_proj`, `up_proj` and `down_proj`), gate and value alike."""
        has_bias = gate.bias is not None
        layer = cls(
            gate.in_features, gate.out_features, workspace, bias=has_bias, sequence_dim=sequence_dim,
            save_gathered=save_gathered, device=gate.weight.device, dtype=gate.weight.dtype,
        )  # fmt: skip
        ranks, rank = workspace.world_size, workspace.rank
        with torch.no_grad():
            layer.up.weight.copy_(torch.cat([one.weight.chunk(ranks)[rank] for one in (gate, value)]))
            if layer.up.bias is not None:
                layer.up.bias.copy_(torch.cat([one.bias.chunk(ranks)[rank] for one in (gate, value)]))
        layer.down = RowParallelLinear.from_linear(down, workspace, sequence_dim=sequence_dim, gated=True)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """[S/W, ..., hidden] to the same.

        Raises:
            Unsupported: x has no such dimension, or its features lie along it; and what `gated_mlp` raises.
        """
        up, down = self.up, self.down
        check_sequence(x, up.sequence_dim, "gated MLP")
        x, w_up, bias_up = under_autocast(x, up.weight, up.bias)
        _, w_down, bias_down = under_autocast(x, down.weight, down.bias)
        if bias_down is not None:
            room = custom_ops if torch.compiler.is_compiling() else autograd
            bias_down = room.replicated(bias_down, up.workspace)
        rows = x.transpose(0, up.sequence_dim).contiguous()
        out = gated_mlp(
            rows, w_up.T, w_down.T, up.workspace, bias_up=bias_up, bias_down=bias_down, save_gathered=up.save_gathered
        )
        return out.transpose(0, up.sequence_dim)
