# SPDX-License-Identifier: Apache-2.0
"""Routings as uneven as asked for: shares of the load with a given standard deviation, and draws from them.

COMET (2502.19811) measures its layers with standard deviations of 0, 0.032 and 0.05 over experts: what is chosen for
one of them must do for all, since training wanders between them.
"""

import torch
from torch import Tensor

SKEWS = (0.0, 0.032, 0.05)


def shares(experts: int, std: float, generator: torch.Generator) -> Tensor:
    """Each expert's share of the load, with about this standard deviation; as uneven as can be where it is large."""
    steps = torch.randn(experts, generator=generator, dtype=torch.float64)
    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        if float((middle * steps).softmax(0).std(correction=0)) < std:
            low = middle
        else:
            high = middle
    return (low * steps).softmax(0)


def drawn_routing(
    experts: int, top_k: int, tokens: int, std: float, *, seed: int, rank: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Experts and gates of a rank's tokens: different experts for a token, drawn by their shares (Gumbel top k).

    Args:
        experts: of all ranks.
        top_k: experts of a token.
        tokens: of this rank.
        std: standard deviation of the experts' shares.
        seed: of the shares, which are the same on all ranks, and of the draw.
        rank: ranks draw apart.
        device: where.

    Returns:
        ids [T, top_k] int32 and gates [T, top_k] fp32 that add up to one.
    """
    load = shares(experts, std, torch.Generator().manual_seed(seed)).to(device, torch.float32)
    generator = torch.Generator(device).manual_seed(seed + 7919 * (rank + 1))
    noise = -torch.empty(tokens, experts, device=device).exponential_(generator=generator).log()
    ids = (load.clamp_min(1e-30).log() + noise).topk(top_k, dim=1).indices.to(torch.int32)
    gates = torch.rand(tokens, top_k, generator=generator, device=device) + 0.1
    return ids.contiguous(), (gates / gates.sum(dim=1, keepdim=True)).contiguous()
