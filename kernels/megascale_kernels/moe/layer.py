# SPDX-License-Identifier: Apache-2.0
"""`MoELayer`: a router, experts divided among the ranks, and shared experts that see every token."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megascale_kernels.errors import Unsupported
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe.expert_shards import check_shards
from megascale_kernels.moe.experts import moe_experts
from megascale_kernels.moe.moe_config import MoeConfig
from megascale_kernels.moe.router import Routed, Score, route


class MoELayer(nn.Module):
    """A mixture of SwiGLU experts with expert parallelism, tensor parallelism, or both.

    The router is replicated: its gradient is that of this rank's tokens, to be summed over the data-parallel ranks like
    any other parameter's. Weights of experts have the gradients of all ranks' tokens.

    Args:
        hidden: elements of a token, H.
        inner: elements between an expert's products, I.
        experts: of all ranks together; a multiple of the ranks.
        top_k: experts of a token.
        workspace: of the ranks that share the experts.
        score: softmax over experts, or a sigmoid for each.
        normalise: a token's weights add up to one.
        capacity_factor: of an even share, what an expert takes of one rank's tokens; None drops nothing.
        correct_bias: keep a bias that moves the choice of experts and not their weights; the training loop
            adjusts it by `routed.load` (auxiliary-loss-free balance).
        shared_inner: I of the shared experts as one; 0 has none.
        config: how our kernels run.
        tensor_parallel: ranks among which each expert is cut along I (`expert_shards`); they follow one another in the
            workspace's group, and their tokens are their own.
        device: of the parameters; the workspace's by default.

    Attributes:
        routed: what the router decided at the last call; None before.

    Raises:
        Unsupported: experts that do not divide among the ranks, or sizes that make no sense.
    """

    choice_bias: Tensor | None

    def __init__(
        self, hidden: int, inner: int, experts: int, top_k: int, workspace: Workspace, *, score: Score = "softmax",
        normalise: bool = True, capacity_factor: float | None = None, correct_bias: bool = False, shared_inner: int = 0,
        config: MoeConfig | None = None, tensor_parallel: int = 1, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        ranks = workspace.world_size
        if min(hidden, inner, experts, top_k) < 1 or top_k > experts:
            raise Unsupported(
                f"MoELayer(hidden={hidden}, inner={inner}, experts={experts}, top_k={top_k}): sizes are positive, and "
                "a token has at most all experts"
            )
        check_shards(tensor_parallel, ranks)
        groups = ranks // tensor_parallel
        if experts % groups:
            who = f"{groups} ranks" if tensor_parallel == 1 else f"{groups} groups of {tensor_parallel} ranks"
            raise Unsupported(
                f"MoELayer(experts={experts}): {who} cannot share them evenly; take a multiple of {groups}"
            )
        if inner % tensor_parallel:
            raise Unsupported(
                f"MoELayer(inner={inner}, tensor_parallel={tensor_parallel}): the ranks cannot cut I evenly; take "
                f"a multiple of {tensor_parallel}"
            )
        if score not in ("softmax", "sigmoid"):
            raise Unsupported(f"MoELayer(score={score!r}): 'softmax' or 'sigmoid'")
        if capacity_factor is not None and not capacity_factor > 0:
            raise Unsupported(f"MoELayer(capacity_factor={capacity_factor}): a positive number, or None")
        self.workspace, self.top_k, self.config = workspace, top_k, config
        self.inner, self.tensor_parallel = inner, tensor_parallel
        self.score, self.normalise, self.capacity_factor = score, normalise, capacity_factor
        where: dict[str, Any] = {"device": workspace.device if device is None else device, "dtype": workspace.dtype}
        self.router = nn.Parameter(torch.empty(experts, hidden, **where))
        self.w_in = nn.Parameter(torch.empty(experts // groups, 2, inner // tensor_parallel, hidden, **where))
        self.w_out = nn.Parameter(torch.empty(experts // groups, hidden, inner // tensor_parallel, **where))
        self.shared_in = nn.Parameter(torch.empty(2 * shared_inner, hidden, **where)) if shared_inner else None
        self.shared_out = nn.Parameter(torch.empty(hidden, shared_inner, **where)) if shared_inner else None
        bias = torch.zeros(experts, device=where["device"]) if correct_bias else None
        self.register_buffer("choice_bias", bias)
        self.routed: Routed | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as `nn.Linear` does; the router and the shared experts must then be made equal on all ranks."""
        for weight in self.parameters():
            bound = 1 / math.sqrt(self.inner if weight is self.w_out else weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens to tokens, [..., H].

        Raises:
            Whatever `moe_experts` raises.
        """
        tokens = x.reshape(-1, x.shape[-1])
        self.routed = routed = route(
            tokens @ self.router.T, self.top_k, score=self.score, normalise=self.normalise,
            capacity_factor=self.capacity_factor, bias=self.choice_bias,
        )  # fmt: skip
        out = self.run_experts(tokens, routed.ids, routed.gates)
        if self.shared_in is not None and self.shared_out is not None:
            gate, up = (tokens @ self.shared_in.T).chunk(2, dim=-1)
            out = out + (functional.silu(gate) * up) @ self.shared_out.T
        return out.view_as(x)

    def run_experts(self, tokens: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """Routed tokens through the experts: [T, H] to the same."""
        return moe_experts(
            tokens, ids, gates, self.w_in, self.w_out, self.workspace, config=self.config,
            tensor_parallel=self.tensor_parallel,
        )  # fmt: skip

    def load_statistics(self) -> dict[str, float]:
        """How even the last call's load was on this rank's tokens, for metrics; waits for the device.

        Returns:
            pairs; dropped: share of them; max_over_mean: 1 when even; idle: share of experts without a token; std:
            standard deviation of the experts' shares; balance_loss.
        """
        if self.routed is None:
            return {}
        load, kept = self.routed.load.double(), self.routed.kept.double()
        pairs = float(load.sum())
        shares = load / max(1.0, pairs)
        return {
            "pairs": pairs,
            "dropped": 1 - float(kept.sum()) / pairs if pairs else 0.0,
            "max_over_mean": float(shares.max()) * len(shares) if pairs else 1.0,
            "idle": float((load == 0).double().mean()),
            "std": float(shares.std(correction=0)),
            "balance_loss": float(self.routed.balance_loss.detach()),
        }

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        experts, _, inner, hidden = self.w_in.shape
        return f"hidden={hidden}, inner={inner}, experts={experts} of {self.router.shape[0]}, top_k={self.top_k}"
