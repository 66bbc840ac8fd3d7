# SPDX-License-Identifier: Apache-2.0
"""The schedules of one layer as calls, family by family; the first of a family is what the others are compared with."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from megascale_kernels.bench.moe.moe_shapes import MoeShape, routing
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe import all_to_all
from megascale_kernels.moe.experts import moe_experts
from megascale_kernels.moe.schedules.expert_pipeline import moe_pipelined
from megascale_kernels.moe.schedules.locality import LEAK, local_experts
from megascale_kernels.moe.schedules.parm import ParmGroups, ParmRouting, moe_parm
from megascale_kernels.torch_api.moe_shortcut import ShortcutBlock, ShortcutExperts

HEAD_DIM = 128
DENSE_ROWS = 1024  # rows of an expert from which the pipeline's dense products are tried


class Way(NamedTuple):
    """One way to run a layer.

    Attributes:
        family: what it belongs to.
        name: which way.
        call: the forward; its result is this rank's.
        leaves: what the backward gives gradients of.
        same: it gives what the first of its family gives.
    """

    family: str
    name: str
    call: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    same: bool = True


class Given(NamedTuple):
    """A layer's operands on this rank."""

    x: Tensor
    ids: Tensor
    gates: Tensor
    w_in: Tensor
    w_out: Tensor


def values(workspace: Workspace, seed: int, *size: int, scale: float = 1.0) -> Tensor:
    """Random numbers, a leaf of a graph."""
    generator = torch.Generator(workspace.device).manual_seed(seed)
    drawn = torch.randn(size, generator=generator, device=workspace.device, dtype=torch.float32)
    return drawn.mul_(scale).to(workspace.dtype).requires_grad_()


def operands(shape: MoeShape, workspace: Workspace, seed: int) -> Given:
    """Random ones; ranks draw apart."""
    own = seed + 104729 * (workspace.rank + 1)
    experts, tokens = shape.experts // workspace.world_size, shape.tokens // workspace.world_size
    ids, gates = routing(shape, tokens, seed, workspace.rank, workspace.device)
    return Given(
        values(workspace, own, tokens, shape.hidden), ids, gates.requires_grad_(),
        values(workspace, own + 1, experts, 2, shape.inner, shape.hidden, scale=shape.hidden**-0.5),
        values(workspace, own + 2, experts, shape.hidden, shape.inner, scale=shape.inner**-0.5),
    )  # fmt: skip


def pipeline(given: Given, workspace: Workspace) -> list[Way]:
    """EPS-MoE: the plain layer, then groups of experts in flight; on a GPU our fused kernels as well."""
    leaves = (given.x, given.gates, given.w_in, given.w_out)
    experts = given.w_in.shape[0]
    ways = [Way("EPS-MoE", "plain", lambda: all_to_all.moe(*given, workspace), leaves)]
    for groups in (1, 2, 4, 8, None):
        if groups is None or groups <= experts:
            name = "model's groups" if groups is None else f"{groups} groups"
            ways.append(Way("EPS-MoE", name, partial(moe_pipelined, *given, workspace, groups=groups), leaves))
    dense = partial(moe_pipelined, *given, workspace, dense_rows=DENSE_ROWS)
    ways.append(Way("EPS-MoE", f"dense from {DENSE_ROWS}", dense, leaves))
    if workspace.device.type == "cuda":
        ways.append(Way("EPS-MoE", "ours, fused", lambda: moe_experts(*given, workspace), leaves))
    return ways


def parm(shape: MoeShape, workspace: Workspace, seed: int) -> list[Way]:
    """Parm: all ranks hold the same tokens; experts apart, and where the inner features can be cut, in shards."""
    ranks, ways = workspace.world_size, []
    tokens = shape.tokens // ranks
    x = values(workspace, seed, tokens, shape.hidden)
    router = values(workspace, seed + 1, shape.experts, shape.hidden, scale=shape.hidden**-0.5)
    for esp in dict.fromkeys((1, ranks)):
        if shape.inner % esp or ranks == 1:
            continue
        groups = ParmGroups(workspace, mp=ranks, esp=esp)
        experts, inner, own = shape.experts // groups.places, shape.inner // esp, seed + 7919 * (workspace.rank + 2)
        w_in = values(workspace, own, experts, 2, inner, shape.hidden, scale=shape.hidden**-0.5)
        w_out = values(workspace, own + 1, experts, shape.hidden, inner, scale=shape.inner**-0.5)
        for schedule in ("plain", "S1", "S2"):
            call = partial(moe_parm, x, router, w_in, w_out, groups, ParmRouting(shape.top_k), schedule=schedule)
            ways.append(Way(f"Parm, mp {ranks} esp {esp}", schedule, call, (x, router, w_in, w_out)))
    return ways


class Attention(nn.Module):
    """Causal attention of a rank's tokens among themselves: what a shortcut hides its dispatch behind."""

    def __init__(self, hidden: int, workspace: Workspace, seed: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // HEAD_DIM)
        self.project = nn.Parameter(values(workspace, seed, 3 * hidden, hidden, scale=hidden**-0.5).detach())
        self.out = nn.Parameter(values(workspace, seed + 1, hidden, hidden, scale=hidden**-0.5).detach())

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] to the same."""
        tokens, hidden = x.shape
        query, key, value = (x @ self.project.T).view(tokens, 3, self.heads, -1).permute(1, 2, 0, 3)[:, None]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed[0].transpose(0, 1).reshape(tokens, hidden) @ self.out.T


class Shared(nn.Module):
    """The shared expert, as large as a routed one."""

    def __init__(self, hidden: int, inner: int, workspace: Workspace, seed: int) -> None:
        super().__init__()
        self.up = nn.Parameter(values(workspace, seed, 2 * inner, hidden, scale=hidden**-0.5).detach())
        self.down = nn.Parameter(values(workspace, seed + 1, hidden, inner, scale=inner**-0.5).detach())

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] to the same."""
        gate, up = (x @ self.up.T).chunk(2, dim=1)
        return (functional.silu(gate) * up) @ self.down.T


def shortcut(shape: MoeShape, given: Given, workspace: Workspace, seed: int) -> list[Way]:
    """ScMoE: the same block with its experts in a row before attention, and in flight beside it."""
    experts = ShortcutExperts(shape.hidden, shape.inner, shape.experts, shape.top_k, workspace)
    with torch.no_grad():
        experts.router.copy_(values(workspace, seed, *experts.router.shape, scale=shape.hidden**-0.5))
        experts.w_in.copy_(given.w_in)
        experts.w_out.copy_(given.w_out)
    block = ShortcutBlock(
        Attention(shape.hidden, workspace, seed + 1), Shared(shape.hidden, shape.inner, workspace, seed + 3), experts
    )
    x = given.x
    before = values(workspace, seed + 5 + workspace.rank, *x.shape)

    def in_a_row() -> Tensor:
        routed = experts(block.norm_experts(before))
        attended = x + block.attention(block.norm_attention(x))
        out: Tensor = attended + block.shared(block.norm_shared(attended)) + routed
        return out

    leaves = (x, before, *block.parameters())
    return [Way("ScMoE", "in a row", in_a_row, leaves), Way("ScMoE", "shortcut", lambda: block(x, before), leaves)]


def locality(shape: MoeShape, given: Given, workspace: Workspace) -> list[Way]:
    """LocMoE: the plain layer with an even routing, and with one as local as its loss wants it."""
    local = local_experts(workspace.rank, workspace.world_size, shape.experts)
    near = local.stop - local.start
    generator = torch.Generator(workspace.device).manual_seed(workspace.rank)
    weight = torch.full((shape.experts,), LEAK / max(1, shape.experts - near), device=workspace.device)
    weight[local] = (1 - LEAK) / near
    noise = (
        -torch.empty(given.x.shape[0], shape.experts, device=workspace.device).exponential_(generator=generator).log()
    )
    ids = (weight.log() + noise).topk(shape.top_k, dim=1).indices.to(torch.int32)
    leaves = (given.x, given.gates, given.w_in, given.w_out)
    home = given._replace(ids=ids)
    stays = float(((ids >= local.start) & (ids < local.stop)).double().mean())
    return [
        Way("LocMoE", "even routing", lambda: all_to_all.moe(*given, workspace), leaves),
        Way("LocMoE", f"{stays:.0%} at home", lambda: all_to_all.moe(*home, workspace), leaves, same=False),
    ]


def all_ways(shape: MoeShape, workspace: Workspace, seed: int) -> list[list[Way]]:
    """All families of one layer. Collective: Parm makes process groups."""
    given = operands(shape, workspace, seed)
    found = [
        pipeline(given, workspace),
        shortcut(shape, given, workspace, seed + 11),
        locality(shape, given, workspace),
    ]
    sharded = parm(shape, workspace, seed + 23)
    by_groups: dict[str, list[Way]] = {}
    for way in sharded:
        by_groups.setdefault(way.family, []).append(way)
    return [*found, *by_groups.values()]
