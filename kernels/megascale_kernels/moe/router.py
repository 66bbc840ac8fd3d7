# SPDX-License-Identifier: Apache-2.0
"""Which experts a token goes to: scores, the top k of them, weights, a capacity, and how even the load is."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Score = Literal["softmax", "sigmoid"]
TINY = 1e-20  # keeps a sum of sigmoid scores that all vanish from dividing by zero


class Routed(NamedTuple):
    """What a router decided.

    Attributes:
        ids: [T, top_k] int32, -1 where the capacity was spent.
        gates: [T, top_k] fp32 (fp64 of fp64 tokens).
        load: [experts] int64, pairs of each expert before any was dropped.
        kept: [experts] int64, after.
        balance_loss: experts * sum over experts of load share * mean score; 1 when even (Switch, 2101.03961, eq. 4).
    """

    ids: Tensor
    gates: Tensor
    load: Tensor
    kept: Tensor
    balance_loss: Tensor


def capacity(tokens: int, top_k: int, experts: int, factor: float | None) -> int | None:
    """Pairs that one rank's tokens may send to one expert; None is dropless."""
    return None if factor is None else max(1, int(factor * tokens * top_k / experts))


def route(
    logits: Tensor, top_k: int, *, score: Score = "softmax", normalise: bool = True,
    capacity_factor: float | None = None, bias: Tensor | None = None,
) -> Routed:  # fmt: skip
    """Choose experts.

    Args:
        logits: [T, experts].
        top_k: experts of a token.
        score: softmax over experts, or a sigmoid for each.
        normalise: a token's weights add up to one.
        capacity_factor: of an even share, what an expert takes of this rank's tokens; later tokens are dropped first.
            None drops nothing.
        bias: [experts] added to the scores where experts are chosen, not to the weights (DeepSeek-V3, 2412.19437).
    """
    tokens, experts = logits.shape
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = exact.softmax(dim=-1) if score == "softmax" else exact.sigmoid()
    ids = (scores if bias is None else scores + bias).topk(top_k, dim=-1).indices
    gates = scores.gather(1, ids)
    if normalise:
        gates = gates / (gates.sum(dim=-1, keepdim=True) + TINY)
    load = kept = torch.zeros(experts, dtype=torch.int64, device=logits.device).scatter_add(
        0, ids.reshape(-1), torch.ones_like(ids.reshape(-1))
    )
    share = load.to(exact.dtype) / max(1, tokens * top_k)
    means = scores / scores.sum(dim=-1, keepdim=True).clamp_min(TINY)
    loss = experts * (share * means.sum(dim=0) / max(1, tokens)).sum()
    most = capacity(tokens, top_k, experts, capacity_factor)
    if most is not None:
        place = functional.one_hot(ids.reshape(-1), experts).cumsum(dim=0).gather(1, ids.reshape(-1, 1)).view_as(ids)
        ids = torch.where(place <= most, ids, -1)
        kept = load.clamp_max(most)
    return Routed(ids.to(torch.int32), gates, load, kept, loss)
