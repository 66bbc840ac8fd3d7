# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts as people call it: with its gradient in eager code, one node each way while torch compiles."""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascale_kernels.dispatch import moe_path
from megascale_kernels.errors import Unsupported
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe import layer
from megascale_kernels.moe.moe_config import MoeConfig
from megascale_kernels.moe.schedules import locality
from megascale_kernels.torch_api.custom_ops import _operator, _shapes_of, workspace_named

# How `fused` travels in a graph, whose constants are numbers and texts.
PATHS: tuple[bool | None, ...] = (None, False, True)


def moe_experts(
    x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, workspace: Workspace, *,
    config: MoeConfig | None = None, fused: bool | None = None, tensor_parallel: int = 1,
) -> Tensor:  # fmt: skip
    """Give each token the sum over its experts e of gate * w_out[e] (silu(w_in[e, 0] x) * (w_in[e, 1] x)).

    Under `torch.compile` the layer is one node of the graph, and its gradient another, which runs the forward again:
    the overlapped backward starts from the routing's tables, and from gate and up of every row, which no node returns.

    Args:
        x: this rank's tokens, [T, H], contiguous; ranks may have different numbers of them, also none.
        ids: the experts of each token, [T, top_k], integers; a pair whose expert is below zero is dropped.
        gates: their weights, [T, top_k], floating point.
        w_in: gate and up matrices of this rank's experts, [E / W, 2, I, H]: rank r has experts r E / W and further.
        w_out: their down matrices, [E / W, H, I].
        workspace: with `max_rows` at least W times the most tokens of a rank, and `max_gather_cols` at least H.
        config: how our kernels run; None decides. All ranks must pass the same.
        fused: False takes the serial path; True refuses it; None decides. All ranks must pass the same.
        tensor_parallel: ranks among which each expert is cut along I, S (`expert_shards`): rank r has of the experts of
            group r // S, [E S / W, 2, I / S, H] and [E S / W, H, I / S], shard r % S. Tokens are each rank's own.

    Returns:
        [T, H]: a token without experts gets zeros. Differentiable once in x, gates, w_in and w_out.

    Raises:
        Unsupported: shapes, types or devices that make no sense; with `fused` also what our kernels cannot run.
        WorkspaceTooSmall: more tokens than the workspace was made for.
        RankMismatch: ranks called different things.
        TileTimeout: a peer did not come.

    Source: COMET (2502.19811).
    """
    if torch.compiler.is_compiling():
        out: Tensor = MoeNode.apply(  # type: ignore[no-untyped-call]  # torch gives it no types
            x, ids, gates, w_in, w_out, workspace.name, pack(config), PATHS.index(fused), tensor_parallel
        )
        return out
    return moe_path.moe_experts(
        x, ids, gates, w_in, w_out, workspace, config=config, fused=fused, tensor_parallel=tensor_parallel
    )


class MoELayer(layer.MoELayer):
    """A mixture of SwiGLU experts with expert parallelism, also under `torch.compile` (`fullgraph=True`).

    The router is replicated: its gradient is that of this rank's tokens, to be summed over the data-parallel ranks like
    any other parameter's. Weights of experts have the gradients of all ranks' tokens. Arguments are those of
    `moe.layer.MoELayer`.
    """

    def locality_loss(self, x: Tensor, *, ranks_per_host: int | None = None, leak: float = locality.LEAK) -> Tensor:
        """LocMoE's loss of tokens [..., H] under this layer's router, to be added to the training's (2401.13920).

        Args:
            x: this rank's tokens, what the layer is called with.
            ranks_per_host: consecutive ranks of one host, whole tensor-parallel groups; None takes the rank's own
                experts alone as near.
            leak: the share of the load that is welcome elsewhere.

        Raises:
            Unsupported: ranks that do not divide, or a leak that is no share.
        """
        workspace, experts = self.workspace, self.router.shape[0]
        shards = self.tensor_parallel
        if ranks_per_host is not None and ranks_per_host % shards:
            raise Unsupported(
                f"MoELayer.locality_loss(ranks_per_host={ranks_per_host}): a host has whole groups of "
                f"tensor_parallel={shards} ranks"
            )
        hosts = None if ranks_per_host is None else ranks_per_host // shards
        near = locality.local_experts(
            workspace.rank // shards, workspace.world_size // shards, experts, ranks_per_host=hosts
        )  # fmt: skip
        return locality.locality_loss(x.reshape(-1, x.shape[-1]) @ self.router.T, near, leak=leak)

    @torch.no_grad()
    def bound_capacity(self, x: Tensor) -> int:
        """Set the capacity to LocMoE's lower bound for tokens [..., H] (2401.13920). Collective; waits for the device.

        Never below the even share of pairs, with which an even load drops none (2406.00023).

        Returns:
            pairs of one rank's tokens that an expert takes from now on; the same on ranks with as many tokens.

        Raises:
            Unsupported: this rank has no tokens.
        """
        tokens = x.reshape(-1, x.shape[-1])
        ids = (tokens @ self.router.T).topk(self.top_k, dim=1).indices
        widest = locality.least_cosine(tokens, self.router, ids).to(torch.float64)
        dist.all_reduce(widest, op=dist.ReduceOp.MIN, group=self.workspace.group)
        experts, count = self.router.shape[0], tokens.shape[0]
        bound = locality.capacity_bound(float(widest), tokens.shape[1], experts, count)
        bound = max(bound, -(-count * self.top_k // experts))
        self.capacity_factor = locality.bounded_factor(bound, count, self.top_k, experts)
        return bound

    def run_experts(self, tokens: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """Routed tokens through the experts: [T, H] to the same."""
        return moe_experts(
            tokens, ids, gates, self.w_in, self.w_out, self.workspace, config=self.config,
            tensor_parallel=self.tensor_parallel,
        )  # fmt: skip


def pack(config: MoeConfig | None) -> str:
    """A configuration as a text; none is the empty one."""
    return "" if config is None else ",".join(str(value) for value in config)


@cache
def unpack(text: str) -> MoeConfig | None:
    """The configuration that `pack` wrote down."""
    constants = {"True": True, "False": False, "None": None}
    values: list[Any] = [
        constants[word] if word in constants else int(word) if word.lstrip("-").isdigit() else word
        for word in text.split(",")
    ]
    return MoeConfig(*values) if text else None


@_operator
def _moe_experts(
    x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, workspace: str, config: str, path: int,
    tensor_parallel: int,
) -> Tensor:  # fmt: skip
    with torch.no_grad():
        return moe_path.moe_experts(
            x, ids, gates, w_in, w_out, workspace_named(workspace), config=unpack(config), fused=PATHS[path],
            tensor_parallel=tensor_parallel,
        )  # fmt: skip


@_shapes_of(_moe_experts)
def _(
    x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, workspace: str, config: str, path: int,
    tensor_parallel: int,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


@_operator
def _moe_experts_backward(
    dout: Tensor, x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, workspace: str, config: str,
    path: int, tensor_parallel: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in (x, gates, w_in, w_out)]
        out = moe_path.moe_experts(
            leaves[0], ids, leaves[1], leaves[2], leaves[3], workspace_named(workspace), config=unpack(config),
            fused=PATHS[path], tensor_parallel=tensor_parallel,
        )  # fmt: skip
    dx, dgates, din, ddown = torch.autograd.grad(out, leaves, dout, materialize_grads=True)
    return dx.contiguous(), dgates.contiguous(), din.contiguous(), ddown.contiguous()


@_shapes_of(_moe_experts_backward)
def _(
    dout: Tensor, x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, workspace: str, config: str,
    path: int, tensor_parallel: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), gates.new_empty(gates.shape), w_in.new_empty(w_in.shape), w_out.new_empty(w_out.shape)


class MoeNode(torch.autograd.Function):
    """`moe_experts` with its gradients, for torch to look into."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, workspace: str, config: str,
        path: int, tensor_parallel: int,
    ) -> Tensor:  # fmt: skip
        """Take x [T, H], ids and gates [T, top_k] and both weights; give [T, H]."""
        ctx.save_for_backward(x, ids, gates, w_in, w_out)
        ctx.workspace, ctx.config, ctx.path, ctx.tensor_parallel = workspace, config, path, tensor_parallel
        out: Tensor = _moe_experts(x, ids, gates, w_in, w_out, workspace, config, path, tensor_parallel)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """[T, H] to gradients of x, gates, w_in and w_out; all, since the peers wait for those of the weights."""
        x, ids, gates, w_in, w_out = ctx.saved_tensors
        dx, dgates, din, ddown = _moe_experts_backward(
            dout.contiguous(), x, ids, gates, w_in, w_out, ctx.workspace, ctx.config, ctx.path, ctx.tensor_parallel
        )
        wants_x, _, wants_gates, wants_in, wants_out, *_ = ctx.needs_input_grad
        return (
            dx if wants_x else None, None, dgates if wants_gates else None, din if wants_in else None,
            ddown if wants_out else None, None, None, None, None,
        )  # fmt: skip
