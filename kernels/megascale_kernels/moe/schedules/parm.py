# SPDX-License-Identifier: Apache-2.0
"""Parm's two schedules: experts under model, expert and expert-sharding parallelism (MP + EP + ESP).

Every rank of a model-parallel group holds the same tokens. Left alone, all of them would route, send and multiply
these, and get the same results. Parm (2407.00599) pauses model parallelism inside the layer, so that each rank handles
a share, and sends a token to all shards of an expert in one all-to-all over all ranks:

    S1   split tokens - route - all-to-all - experts - all-to-all - add up - all-gather [T, H]
    S2   route - split pairs - all-to-all - experts - all-to-all, and meanwhile all-gather [pairs, H] - add up

S1 gathers a row for each token, S2 one for each pair, but hidden behind the way back: S2 is ahead where a token has
few experts and links are the bottleneck (`schedule_model.parm_schedule`).

Rank r of W has experts E / n_ep of place r // esp, and of their inner features slice r % esp; ranks r of one
r // mp hold the same tokens.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megascale_kernels.errors import Unsupported
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe import all_to_all
from megascale_kernels.moe.router import Routed, Score, route
from megascale_kernels.moe.schedules.in_flight import Crew, Gathering, own_share, padded, share_size, summed_over
from megascale_kernels.moe.schedules.schedule_model import Layer, Links, Schedule, parm_schedule
from megascale_kernels.moe.schedules.shuffle import Shuffle, sums_like

PIECES = 2  # groups of experts whose way back and all-gather overlap (S2)


class ParmGroups:
    """Who holds the same tokens and who shares the same experts. Collective: all ranks make it alike.

    Args:
        workspace: of all ranks; its memory is not used.
        mp: ranks, one after another, that hold the same tokens.
        esp: ranks, one after another, that share the same experts.

    Raises:
        Unsupported: sizes that do not divide the ranks.
    """

    def __init__(self, workspace: Workspace, *, mp: int, esp: int) -> None:
        ranks = workspace.world_size
        if mp < 1 or esp < 1 or ranks % mp or ranks % esp:
            raise Unsupported(f"ParmGroups(mp={mp}, esp={esp}): both must divide the {ranks} ranks")
        self.workspace, self.mp, self.esp = workspace, mp, esp
        self.everyone = Crew(workspace.group, ranks, workspace.deadline_s)
        self.mp_rank = workspace.rank % mp
        own = None
        if mp > 1:
            members = dist.get_process_group_ranks(workspace.group)
            for first in range(0, ranks, mp):
                made = dist.new_group(members[first : first + mp])
                if first <= workspace.rank < first + mp:
                    own = made
        self.same_tokens = Crew(own, mp, workspace.deadline_s)

    @property
    def places(self) -> int:
        """Parts into which the experts are divided."""
        return self.everyone.ranks // self.esp


class ParmRouting(NamedTuple):
    """How `moe_parm` routes; what `router.route` takes."""

    top_k: int
    score: Score = "softmax"
    normalise: bool = True


def moe_parm(
    x: Tensor, router: Tensor, w_in: Tensor, w_out: Tensor, groups: ParmGroups, routing: ParmRouting, *,
    schedule: Schedule | None = None, links: Links | None = None,
) -> Tensor:  # fmt: skip
    """A mixture of experts under MP + EP + ESP by one of Parm's schedules (2407.00599).

    Args:
        x: the tokens of a model-parallel group, [T, H], the same on all its ranks; groups may have different numbers.
        router: [E, H], the same on all ranks.
        w_in: gate and up of this rank's experts and slice of inner features, [E / places, 2, I / esp, H].
        w_out: [E / places, H, I / esp].
        groups: who holds and shares what.
        routing: how tokens choose.
        schedule: "S1" or "S2"; "plain" lets every rank of a model-parallel group send all tokens (what Parm is
            compared with); None takes the one that the model says is faster. All ranks must pass the same.
        links: between the ranks, for that model.

    Returns:
        [T, H], the same on all ranks of a model-parallel group. Differentiable once in x, router, w_in and w_out: of x
        and router every rank of a model-parallel group has the whole gradient of the group's tokens, as of `x` there.

    Raises:
        Unsupported: shapes, types or a schedule that make no sense.
        RankMismatch: ranks called different things.
        TileTimeout: a peer did not come (on the CPU; NCCL has its own time limit).
    """
    _check(x, router, w_in, w_out, groups, routing)
    experts, _, inner, hidden = w_in.shape
    workspace = groups.workspace
    if schedule is None:
        tokens = workspace.max_rows * groups.mp // workspace.world_size
        layer = Layer(workspace.world_size, tokens, routing.top_k, experts, hidden, inner, x.element_size())
        schedule = parm_schedule(layer, groups.mp, groups.esp, links)
    if schedule not in ("S1", "S2", "plain"):
        raise Unsupported(f"moe_parm(schedule={schedule!r}): 'S1', 'S2', 'plain' or None")
    all_to_all.agree(
        f"moe_parm(H {hidden}, I {inner}, experts {experts}, {routing}, {schedule}, mp {groups.mp}, esp {groups.esp}, "
        f"{x.dtype})",
        workspace,
    )
    if schedule == "S1":
        return _split_tokens(x, router, w_in, w_out, groups, routing)
    if schedule == "S2":
        return _split_pairs(x, router, w_in, w_out, groups, routing)
    # Each copy of the tokens brings the weights the same gradient once more.
    w_in, w_out = (_scaled(weight, 1 / groups.mp) for weight in (w_in, w_out))
    routed = _routed(x, router, routing)
    return _through(x, routed, w_in, w_out, groups)


def _routed(x: Tensor, router: Tensor, routing: ParmRouting) -> Routed:
    return route(x @ router.T, routing.top_k, score=routing.score, normalise=routing.normalise)


def _through(x: Tensor, routed: Routed, w_in: Tensor, w_out: Tensor, groups: ParmGroups) -> Tensor:
    """Tokens to their experts' shards and back, added up."""
    shuffle = Shuffle(routed.ids, w_in.shape[0], groups.everyone, shards=groups.esp)
    y = shuffle.multiply(shuffle.dispatch(x, 0), 0, w_in, w_out)
    return shuffle.add(x, [shuffle.finish(shuffle.combine(y, 0), 0)], routed.gates)


def _split_tokens(
    x: Tensor, router: Tensor, w_in: Tensor, w_out: Tensor, groups: ParmGroups, routing: ParmRouting
) -> Tensor:
    """S1: each rank of a model-parallel group takes a share of the tokens all the way."""
    crew = groups.same_tokens
    share = own_share(x, crew, groups.mp_rank)
    # A rank sees the router's gradient of its share alone.
    routed = _routed(share, summed_over(router, crew), routing)
    out = _through(share, routed, w_in, w_out, groups)
    whole = Gathering(padded(out, share_size(x.shape[0], crew.ranks)), crew, groups.mp_rank).land()
    return whole[: x.shape[0]]


def _split_pairs(
    x: Tensor, router: Tensor, w_in: Tensor, w_out: Tensor, groups: ParmGroups, routing: ParmRouting
) -> Tensor:
    """S2: all route all tokens, each takes a share of every expert's pairs, and results come back to all at once."""
    crew, experts = groups.same_tokens, w_in.shape[0]
    parts = min(PIECES, experts)
    routed = _routed(x, router, routing)
    orders, mine = _shares(routed.ids, experts, parts, groups)
    shuffle = Shuffle(mine, experts, groups.everyone, parts=parts, shards=groups.esp)
    # A rank sees the tokens' gradient of its share of the pairs alone.
    tokens = summed_over(x, crew)
    coming = [shuffle.dispatch(tokens, part) for part in range(parts)]
    weights = zip(shuffle.by_part(w_in), shuffle.by_part(w_out), strict=True)
    going = [
        shuffle.combine(shuffle.multiply(begun, part, part_in, part_out), part)
        for part, (begun, (part_in, part_out)) in enumerate(zip(coming, weights, strict=True))
    ]
    gathering = []
    for part, begun in enumerate(going):
        y = shuffle.finish(begun, part).to(x.dtype)
        gathering.append(Gathering(padded(y, share_size(len(orders[part]), crew.ranks)), crew, groups.mp_rank))
    out = sums_like(x)
    for order, begun_gathering in zip(orders, gathering, strict=True):
        rows = begun_gathering.land().view(crew.ranks, -1, x.shape[1]).transpose(0, 1).reshape(-1, x.shape[1])
        y = rows[: len(order)].to(out.dtype) * routed.gates.reshape(-1)[order].to(out.dtype)[:, None]
        out = out.index_add(0, order // routing.top_k, y)
    return out.to(x.dtype)


def _shares(ids: Tensor, experts: int, parts: int, groups: ParmGroups) -> tuple[list[Tensor], Tensor]:
    """All pairs of each part, sorted by expert; and ids without the pairs that are other ranks' shares.

    Every rank of a model-parallel group takes each mp-th pair, so that its share of every expert is the same to a row.
    """
    flat = ids.reshape(-1).long()
    bounds = torch.tensor([experts * part // parts for part in range(1, parts)], device=ids.device)
    part_of = torch.bucketize(flat % experts, bounds, right=True)
    order = (part_of * experts * groups.places + flat).argsort(stable=True)
    orders = list(torch.split(order, torch.bincount(part_of, minlength=parts).tolist()))
    mine = torch.full_like(flat, -1)
    for pairs in orders:
        share = pairs[groups.mp_rank :: groups.mp]
        mine[share] = flat[share]
    return orders, mine.view_as(ids)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, factor: float) -> Tensor:  # type: ignore[no-untyped-def]  # torch gives it no types
        ctx.factor = factor
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]  # torch gives it no types
        return grad * ctx.factor, None


def _scaled(weight: Tensor, factor: float) -> Tensor:
    """A parameter as it is, with a factor on its gradient."""
    out: Tensor = _Scaled.apply(weight, factor)  # type: ignore[no-untyped-call]  # torch gives it no types
    return out


def _check(x: Tensor, router: Tensor, w_in: Tensor, w_out: Tensor, groups: ParmGroups, routing: ParmRouting) -> None:
    if x.ndim != 2 or w_in.ndim != 4 or w_in.shape[1] != 2 or w_in.shape[3] != x.shape[1]:
        raise Unsupported(
            f"moe_parm: x is [T, H] and w_in [experts, 2, I, H]; got {tuple(x.shape)} and {tuple(w_in.shape)}"
        )
    wanted = (w_in.shape[0], w_in.shape[3], w_in.shape[2])
    if tuple(w_out.shape) != wanted:
        raise Unsupported(f"moe_parm: w_out must be [experts, H, I] = {wanted}; got {tuple(w_out.shape)}")
    everyone = w_in.shape[0] * groups.places
    if tuple(router.shape) != (everyone, x.shape[1]):
        raise Unsupported(
            f"moe_parm: {groups.places} places with {w_in.shape[0]} experts each want a router [{everyone}, "
            f"{x.shape[1]}]; got {tuple(router.shape)}"
        )
    if not 1 <= routing.top_k <= everyone:
        raise Unsupported(f"moe_parm(top_k={routing.top_k}): there are {everyone} experts")
    kinds = {(tensor.dtype, tensor.device.type) for tensor in (x, router, w_in, w_out)}
    if kinds != {(groups.workspace.dtype, groups.workspace.device.type)}:
        raise Unsupported(
            f"moe_parm: tensors of {sorted(map(str, kinds))}, the workspace of {groups.workspace.dtype} on "
            f"{groups.workspace.device.type}: make them equal"
        )
