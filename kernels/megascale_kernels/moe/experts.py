# SPDX-License-Identifier: Apache-2.0
"""`moe_experts`: routed tokens through experts that are divided among the ranks (expert parallelism).

Our kernels run forward and backward where they can, a serial path elsewhere: `sync_free` where it can, `all_to_all` for
all else. Which path a call takes is decided from what all ranks share, never from the number of tokens of one.
"""

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megascale_kernels.errors import Unsupported, WorkspaceTooSmall
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe import all_to_all, sync_free
from megascale_kernels.moe.expert_shards import check_shards, choose_shards

if TYPE_CHECKING:
    from megascale_kernels.moe.moe_config import MoeConfig
    from megascale_kernels.moe.tables import Sizes

LOG = logging.getLogger("megascale_kernels")
HOPPER = 9  # major compute capability
ALIGNED = 16  # bytes; and rows of H and I are multiples of so many elements
MOST_EXPERTS = 256  # of one rank, in our kernels' tables
MOST_TOP_K = 16
MOST_CHOSEN = 64  # experts of a token times shards of each


def moe_experts(
    x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, workspace: Workspace, *,
    config: "MoeConfig | None" = None, fused: bool | None = None, tensor_parallel: int = 1,
) -> Tensor:  # fmt: skip
    """Give each token the sum over its experts e of gate * w_out[e] (silu(w_in[e, 0] x) * (w_in[e, 1] x)).

    Args:
        x: this rank's tokens, [T, H], contiguous; ranks may have different numbers of them, also none.
        ids: the experts of each token, [T, top_k], integers; a pair whose expert is below zero is dropped.
        gates: their weights, [T, top_k], floating point.
        w_in: gate and up matrices of this rank's experts, [E / W, 2, I, H]: rank r has experts r E / W and further.
        w_out: their down matrices, [E / W, H, I].
        workspace: with `max_rows` at least W times the most tokens of a rank, and `max_gather_cols` at least H.
        config: how our kernels run; None takes the default. All ranks must pass the same.
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
    """
    check_experts(x, ids, gates, w_in, w_out, workspace)
    check_shards(tensor_parallel, workspace.world_size)
    ids, gates = choose_shards(ids, gates, w_in.shape[0], tensor_parallel)
    reason = "it was asked for" if fused is False else _why_serial(x, ids.shape[1], w_in, workspace, tensor_parallel)
    if fused and reason:
        raise Unsupported(f"moe_experts(fused=True): {reason}")
    call = f"moe_experts(H {x.shape[1]}, I {w_out.shape[2]}, experts {w_in.shape[0]}, top {ids.shape[1]}, {x.dtype})"
    if tensor_parallel > 1:
        call = f"{call[:-1]}, tensor_parallel {tensor_parallel})"
    if reason:
        _say_once(call, reason)
        return serial(x, ids, gates, w_in, w_out, workspace, tensor_parallel, call)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, gates, w_in, w_out)):
        out: Tensor = _Experts.apply(x, ids, gates, w_in, w_out, workspace, config, tensor_parallel)  # type: ignore[no-untyped-call]  # torch gives it no types
        return out
    return _fused(*_operands(x, ids, gates, w_in, w_out), workspace, _chosen(config), tensor_parallel)[0]


def serial(
    x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, workspace: Workspace, shards: int, call: str
) -> Tensor:  # fmt: skip
    """The layer in series, `ids` and `gates` those of shards: without a wait of the host where that can be.

    Args:
        x: [T, H].
        ids: [T, top_k].
        gates: [T, top_k].
        w_in: [E / W, 2, I, H].
        w_out: [E / W, H, I].
        workspace: of the group.
        shards: of each expert.
        call: what ranks compare before the first of its kind.

    Raises:
        WorkspaceTooSmall: more tokens than the workspace was made for, where all ranks' are gathered.
        RankMismatch: ranks called different things.
        TileTimeout: a rank did not come.
    """
    why = sync_free.why_not(_sizes_with(ids.shape[1], w_in, workspace, shards), workspace)
    sizes = None if why else _sizes(x, ids, w_in, workspace, shards)
    all_to_all.agree(call, workspace)
    if sizes is None:
        _say_once(call, why)
        return all_to_all.moe(x, ids, gates, w_in, w_out, workspace)
    ids = ids.to(torch.int32)
    return sync_free.moe(_readable(x), ids, gates, _readable(w_in), _readable(w_out), workspace, sizes)


def _sizes(x: Tensor, ids: Tensor, w_in: Tensor, workspace: Workspace, shards: int) -> "Sizes":
    """Sizes of a layer, `ids` those of shards; refuse more tokens than there is room for."""
    sizes = _sizes_with(ids.shape[1], w_in, workspace, shards)
    if x.shape[0] > sizes.pitch:
        raise WorkspaceTooSmall(
            f"moe_experts: {x.shape[0]} tokens, but the workspace was made with max_rows={workspace.max_rows} for "
            f"{workspace.world_size} ranks, {sizes.pitch} tokens each: make it with larger sizes"
        )
    return sizes


def _chosen(config: "MoeConfig | None") -> "MoeConfig":
    from megascale_kernels.moe.moe_config import MoeConfig

    chosen = MoeConfig() if config is None else config
    chosen.check()
    return chosen


def _fused(
    x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, workspace: Workspace, config: "MoeConfig",
    shards: int, saved: Tensor | None = None, *, keeps_tables: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The forward by our kernels, operands as `_operands` makes them: output, and the routing's tables if asked for."""
    from megascale_kernels.moe.launch import planned

    out = torch.empty_like(x)
    sizes = _sizes(x, ids, w_in, workspace, shards)
    launch = planned(x, ids, gates, w_in, w_out, out, sizes, workspace, config, saved)
    tables = torch.empty_like(launch.buffers.tables) if keeps_tables else None
    launch.run(x, ids, gates, w_in, w_out, out, saved, tables)
    return out, tables


def _operands(
    x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Operands as our kernels read them."""
    return (
        _readable(x.detach()), _readable(ids.to(torch.int32)), _readable(gates.detach().to(torch.float32)),
        _readable(w_in.detach()), _readable(w_out.detach()),
    )  # fmt: skip


def _readable(tensor: Tensor) -> Tensor:
    """The tensor contiguous, and where every rank's is: one elsewhere would be compiled for apart."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNED == 0 else tensor.clone()


class _Experts(torch.autograd.Function):
    """Our kernels, forward and backward."""

    @staticmethod
    def forward(ctx, x, ids, gates, w_in, w_out, workspace, config, shards) -> Tensor:  # type: ignore[no-untyped-def]  # torch gives it no types
        given = _operands(x, ids, gates, w_in, w_out)
        chosen = _chosen(config)
        saved = None
        if chosen.keep:
            sizes = _sizes(x, ids, w_in, workspace, shards)
            saved = torch.empty(sizes.rows, 2 * sizes.inner, dtype=x.dtype, device=x.device)
        out, tables = _fused(*given, workspace, chosen, shards, saved, keeps_tables=True)
        ctx.save_for_backward(*given, saved, tables)
        ctx.workspace, ctx.config, ctx.shards, ctx.type_of_gates = workspace, chosen, shards, gates.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[no-untyped-def]  # torch gives it no types
        from megascale_kernels.moe.gradient_launch import Given, planned_backward

        x, ids, gates, w_in, w_out, saved, tables = ctx.saved_tensors
        given = Given(x, ids, gates, w_in, w_out, _readable(grad))
        dx, dgates = torch.empty_like(given.x), torch.empty_like(given.gates)
        wants_x, _, wants_gates, wants_in, wants_out, *_ = ctx.needs_input_grad
        wanted = [name for name, wants in (("w_in", wants_in), ("w_out", wants_out)) if wants]
        sizes = _sizes(given.x, given.ids, given.w_in, ctx.workspace, ctx.shards)
        launch = planned_backward(given, dx, dgates, sizes, ctx.workspace, ctx.config)
        found = launch.run(given, tables, saved, dx, dgates, wanted)
        return (
            dx if wants_x else None, None, dgates.to(ctx.type_of_gates) if wants_gates else None, found.get("w_in"),
            found.get("w_out"), None, None, None,
        )  # fmt: skip


def check_experts(x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, workspace: Workspace) -> None:
    """Refuse tensors that make no layer.

    Raises:
        Unsupported: the message names the tensor.
    """
    if x.ndim != 2 or w_in.ndim != 4 or w_in.shape[1] != 2 or w_in.shape[3] != x.shape[1]:
        raise Unsupported(
            f"moe_experts: x is [T, H] and w_in [experts, 2, I, H]; got {tuple(x.shape)} and {tuple(w_in.shape)}"
        )
    wanted = (w_in.shape[0], w_in.shape[3], w_in.shape[2])
    if tuple(w_out.shape) != wanted:
        raise Unsupported(f"moe_experts: w_out must be [experts, H, I] = {wanted}; got {tuple(w_out.shape)}")
    if ids.ndim != 2 or ids.shape[0] != x.shape[0] or ids.shape != gates.shape or ids.shape[1] < 1:
        raise Unsupported(
            f"moe_experts: ids and gates are [{x.shape[0]}, top_k]; got {tuple(ids.shape)} and {tuple(gates.shape)}"
        )
    if ids.is_floating_point() or not gates.is_floating_point():
        raise Unsupported(f"moe_experts: ids are integers and gates floating point; got {ids.dtype} and {gates.dtype}")
    types = {tensor.dtype for tensor in (x, w_in, w_out)}
    if types != {workspace.dtype}:
        raise Unsupported(f"moe_experts: x and weights are {types}, the workspace {workspace.dtype}: make them equal")
    devices = {tensor.device.type for tensor in (x, ids, gates, w_in, w_out)}
    if devices != {workspace.device.type}:
        raise Unsupported(f"moe_experts: tensors on {devices}, the workspace on {workspace.device.type}")


def serves(
    x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, workspace: Workspace, shards: int = 1
) -> bool:  # fmt: skip
    """Whether our kernels can run a call, `ids` those of whole experts; the same on all ranks.

    Raises:
        Unsupported: tensors that make no layer, or ranks that do not divide into groups of so many shards.
    """
    check_experts(x, ids, gates, w_in, w_out, workspace)
    check_shards(shards, workspace.world_size)
    return not _why_serial(x, shards * ids.shape[1], w_in, workspace, shards)


def sizes_of(ids: Tensor, w_in: Tensor, workspace: Workspace, shards: int = 1) -> "Sizes":
    """What all ranks agree on: the sizes of a layer with the most tokens that the workspace was made for.

    Args:
        ids: whole experts of each token, [T, top_k].
        w_in: of this rank's experts or shards.
        workspace: whose layer it is.
        shards: of each expert.
    """
    return _sizes_with(shards * ids.shape[1], w_in, workspace, shards)


def _sizes_with(top_k: int, w_in: Tensor, workspace: Workspace, shards: int) -> "Sizes":
    from megascale_kernels.moe.tables import Sizes

    experts, _, inner, hidden = w_in.shape
    pitch = workspace.max_rows // workspace.world_size
    return Sizes(workspace.world_size, pitch, top_k, experts, hidden, inner, shards=shards)


def _why_serial(x: Tensor, top_k: int, w_in: Tensor, workspace: Workspace, shards: int) -> str:
    """Why our kernels cannot run the call, "" when they can; from what all ranks share."""
    if x.device.type != "cuda":
        return f"the tensors are on the {x.device.type}"
    major, minor = torch.cuda.get_device_capability(x.device)
    if major != HOPPER:
        return f"the device has compute capability {major}.{minor} and the kernels need {HOPPER}.0"
    experts, _, inner, hidden = w_in.shape
    if hidden > max(workspace.max_gather_cols, workspace.max_scatter_cols):
        return f"the workspace was made for rows of at most {workspace.max_gather_cols} elements, H is {hidden}"
    return why_sizes_cannot(top_k, experts, hidden, inner, shards)


def why_sizes_cannot(top_k: int, experts: int, hidden: int, inner: int, shards: int) -> str:
    """Why our kernels cannot run a layer of these sizes, "" when they can.

    Args:
        top_k: shards that a token chooses.
        experts: of one rank, each a shard.
        hidden: elements of a token, H.
        inner: elements between the products of a shard, I / S.
        shards: of each expert, S.
    """
    if hidden % ALIGNED or inner % ALIGNED or min(hidden, inner) < 1:
        return f"H {hidden} or I {inner} is no multiple of {ALIGNED}"
    if not 1 <= experts <= MOST_EXPERTS:
        return f"a rank has {experts} experts, and the tables hold 1 to {MOST_EXPERTS}"
    if top_k // shards > MOST_TOP_K:
        return f"a token has {top_k // shards} experts, at most {MOST_TOP_K} are added up at once"
    if top_k > MOST_CHOSEN:
        return f"a token has {top_k // shards} experts of {shards} shards each, at most {MOST_CHOSEN} are looked at"
    return ""


@cache
def _say_once(call: str, reason: str) -> None:
    LOG.debug("%s: serial path because %s", call, reason)
