# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism inside experts: each expert cut along I among the ranks of a tensor-parallel group.

The sum over I falls apart: with w_in and w_out cut along I into S *shards*, an expert's output is its shards' sum,

    w_out silu(w_gate x) * (w_up x) = sum over s of w_out[:, s] silu(w_gate[s] x) * (w_up[s] x),

so a shard is itself an expert of I / S, and a token that chose an expert has chosen all its shards, with one weight.
That turns experts x tensor parallelism into expert parallelism among all ranks, with S times the experts and top k, and
every kernel serves it as it is: what tensor parallelism gathers, the tokens, is the dispatch, once for each rank;
what it scatters, partial sums, are rows that the combine adds in fp32 before it sends them, once for each rank. No
collective is left in between, forward or backward (COMET, 2502.19811, section 3.1 fuses the same two).

Ranks of one tensor-parallel group follow one another: rank r has shard r % S of the experts of group r // S. Their
tokens are their own, as with sequence parallelism.
"""

import torch
from torch import Tensor

from megascale_kernels.errors import Unsupported


def check_shards(shards: int, world_size: int) -> None:
    """Refuse what no mesh is.

    Raises:
        Unsupported: ranks that do not divide into groups.
    """
    if shards < 1 or world_size % shards:
        raise Unsupported(
            f"moe_experts(tensor_parallel={shards}): {world_size} ranks cannot be divided into groups of {shards}; "
            f"take a divisor of {world_size}"
        )


def choose_shards(ids: Tensor, gates: Tensor, experts: int, shards: int) -> tuple[Tensor, Tensor]:
    """The shards that tokens chose with their experts.

    Args:
        ids: experts of each token, [T, top_k]; those below zero were dropped.
        gates: their weights, [T, top_k].
        experts: of one rank, each a shard.
        shards: of each expert.

    Returns:
        ids of shards, [T, top_k * shards] int32, numbered as expert parallelism does, rank by rank, and their weights;
        differentiable in the weights.
    """
    if shards == 1:
        return ids, gates
    group, of_group = ids.long() // experts, ids.long() % experts
    shard = torch.arange(shards, device=ids.device)
    every = (group[..., None] * shards + shard) * experts + of_group[..., None]
    every = torch.where(ids[..., None] >= 0, every, -1)
    return every.flatten(1).to(torch.int32), gates[..., None].expand(*gates.shape, shards).flatten(1)
