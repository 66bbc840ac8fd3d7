# SPDX-License-Identifier: Apache-2.0
"""LocMoE: a loss that keeps tokens near, and how small an expert's capacity may be.

Between hosts an all-to-all runs at a fraction of NVLink's speed. LocMoE (2401.13920) adds a loss to training that draws
a rank's tokens to experts of its own host, beside the loss that keeps all experts busy (`Routed.balance_loss`), and
bounds the capacity that experts need by the widest angle between a token and the router's row that it is assigned to.

**The loss** is the Kullback-Leibler divergence of the distribution of a rank's tokens over experts, as the router's
scores have it, from a distribution that is as local as is wanted: even over the experts of the own host, with a small
`leak`, even over all others, so that it is finite and no expert is out of reach. (LocMoE's wanted distribution is
wholly local; the loss's weight in training is the caller's here.)

**The bound.** Of tokens that point anywhere (unit vectors of d dimensions), those whose cosine with a given direction
is beyond delta, either way, are two caps of the sphere. For many dimensions their share is

    erfc(sqrt(d delta^2 / (2 - delta^2)))

and a router's row must see at least one token of its caps to tell its class from others. Among n experts each needs the
n-th part of as many tokens as that takes:

    capacity >= 1 / (n erfc(sqrt(d delta^2 / (2 - delta^2)))),   delta the cosine at the widest angle of a token and the
                                                                 row of an expert that it is assigned to

erfc(z) <= exp(-z^2), so exp(d delta^2 / (2 - delta^2)) / n, the form of the same authors' next paper (2406.00023), is
below it. There the capacity is the larger of that and the even share of tokens; `MoELayer.bound_capacity` does so too.
"""

import math

import torch
from torch import Tensor

from megascale_kernels.errors import Unsupported

LEAK = 0.1  # of the load is welcome elsewhere
TINY = 1e-20


def local_experts(rank: int, world_size: int, experts: int, *, ranks_per_host: int | None = None) -> slice:
    """The experts of a rank's host.

    Args:
        rank: whose.
        world_size: ranks that share the experts.
        experts: of all ranks; rank r has the r-th equal part.
        ranks_per_host: consecutive ranks of one host; None takes the rank's own experts alone.

    Raises:
        Unsupported: numbers that do not divide, or a rank that there is not.
    """
    near = 1 if ranks_per_host is None else ranks_per_host
    if not 0 <= rank < world_size or near < 1 or world_size % near or experts < 1 or experts % world_size:
        raise Unsupported(
            f"local_experts(rank={rank}, world_size={world_size}, experts={experts}, ranks_per_host={ranks_per_host}): "
            "hosts divide the ranks, ranks the experts, and the rank is one of them"
        )
    size = near * (experts // world_size)
    host = rank // near
    return slice(host * size, (host + 1) * size)


def locality_loss(logits: Tensor, local: slice, *, leak: float = LEAK) -> Tensor:
    """How far a rank's tokens are from staying on their host; 0 when their distribution is the wanted one.

    Args:
        logits: of the router, [T, E], of this rank's tokens; the gradient goes through them.
        local: the experts of the rank's host (`local_experts`).
        leak: the share of the load that is wanted elsewhere, above 0 and below 1.

    Returns:
        KL(current || wanted) in nats, a scalar in fp32 (fp64 of fp64); 0 without tokens, and where every expert is
        local.

    Raises:
        Unsupported: no experts, or a leak that is no share.

    Source: LocMoE (2401.13920), the locality loss.
    """
    if logits.ndim != 2:
        raise Unsupported(f"locality_loss: logits are [T, E]; got {tuple(logits.shape)}")
    experts = logits.shape[1]
    near = len(range(experts)[local])
    if not 0 < near <= experts:
        raise Unsupported(f"locality_loss(local={local}): it names none of the {experts} experts")
    if not 0 < leak < 1:
        raise Unsupported(f"locality_loss(leak={leak}): a share above 0 and below 1")
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if near == experts or not logits.shape[0]:
        return exact.sum() * 0
    current = exact.softmax(dim=1).mean(dim=0)
    wanted = torch.full_like(current, leak / (experts - near))
    wanted[local] = (1 - leak) / near
    return (current * ((current + TINY).log() - wanted.log())).sum()


def least_cosine(tokens: Tensor, router: Tensor, ids: Tensor) -> Tensor:
    """The cosine at the widest angle between a token and the row of an expert it goes to, 0 to 1; 1 without pairs.

    Args:
        tokens: [T, H].
        router: [E, H].
        ids: experts of each token, [T, top_k]; below zero is dropped.
    """
    exact = torch.promote_types(tokens.dtype, torch.float32)
    unit, rows = (torch.nn.functional.normalize(one.detach().to(exact), dim=1) for one in (tokens, router))
    cosines = (unit @ rows.T).gather(1, ids.long().clamp_min(0))
    kept = torch.where(ids >= 0, cosines, cosines.new_ones(()))
    return kept.min().clamp(0, 1) if kept.numel() else cosines.new_ones(())


def capacity_bound(cosine: float, hidden: int, experts: int, tokens: int) -> int:
    """The least pairs that an expert should be able to take: 1 / (n erfc(sqrt(d delta^2 / (2 - delta^2)))).

    Args:
        cosine: at the widest angle of a token and its expert's row, 0 to 1 (`least_cosine`, the least over ranks).
        hidden: d, dimensions of a token.
        experts: n.
        tokens: of one rank, the most that an expert can get of them.

    Returns:
        1 to `tokens`.

    Raises:
        Unsupported: a cosine or sizes that make no sense.

    Source: LocMoE (2401.13920), the lower bound of expert capacity; explained in this file's docstring.
    """
    if not 0 <= cosine <= 1 or hidden < 1 or experts < 1 or tokens < 0:
        raise Unsupported(
            f"capacity_bound(cosine={cosine}, hidden={hidden}, experts={experts}, tokens={tokens}): a cosine is 0 to "
            "1, and sizes are positive"
        )
    share = math.erfc(math.sqrt(hidden * cosine**2 / (2 - cosine**2)))
    # Of a share too small for the tokens there are nothing is left to bound; far out erfc is 0.
    if share * experts * max(1, tokens) <= 1:
        return max(1, tokens)
    return max(1, min(tokens, math.ceil(1 / (share * experts))))


def bounded_factor(bound: int, tokens: int, top_k: int, experts: int) -> float:
    """The `capacity_factor` of `route` and `MoELayer` that lets an expert take `bound` pairs of a rank's tokens.

    Args:
        bound: pairs, `capacity_bound`.
        tokens: of one rank.
        top_k: experts of a token.
        experts: of all ranks.

    Raises:
        Unsupported: sizes below one.
    """
    if min(bound, tokens, top_k, experts) < 1:
        raise Unsupported(
            f"bounded_factor(bound={bound}, tokens={tokens}, top_k={top_k}, experts={experts}): positive numbers"
        )
    # Half a pair more than `bound`: `router.capacity` rounds down.
    return (bound + 0.5) * experts / (tokens * top_k)
