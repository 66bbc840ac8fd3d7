# SPDX-License-Identifier: Apache-2.0
"""The same attention in plain torch, on K and V of all ranks: the serial path, and what kernels must equal.

Each interval of queries that see alike goes to `scaled_dot_product_attention` by itself, so no mask of all scores is
ever made on a GPU. Where packed sequences lie is looked at on the host, so the host waits for them.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megascale_kernels.attention.problem import Problem
from megascale_kernels.attention.sharding import chunks_of

HALF_TYPES = (torch.bfloat16, torch.float16)


class Stretch(NamedTuple):
    """Queries of this rank that belong to one sequence, and the keys that they see.

    Attributes:
        row: their first row within one sequence's tokens of this rank.
        rows: how many.
        first: position of the first key.
        last: one behind the last key; with a causal mask that of the last query.
    """

    row: int
    rows: int
    first: int
    last: int


def stretches(problem: Problem, rank: int, ends: list[int] | None) -> list[Stretch]:
    """All queries of a rank that see any key.

    Args:
        problem: what is computed.
        rank: whose queries.
        ends: `cu_seqlens` of packed sequences, None for one.
    """
    found = []
    for half, chunk in enumerate(chunks_of(rank, problem.world_size, problem.halves)):
        start = chunk * problem.chunk
        bounds = ends if ends is not None else [0, problem.sequence]
        for begin, end in pairwise(bounds):
            top, bottom = max(begin, start), min(end, start + problem.chunk)
            if top < bottom:
                row = half * problem.chunk + top - start
                found.append(Stretch(row, bottom - top, begin, bottom if problem.causal else end))
    return found


def whole_sequence(shards: Tensor, problem: Problem) -> Tensor:
    """Tokens of all ranks in the order of positions: [W, B, T, ...] to [B, S, ...]."""
    parts = shards.reshape(*shards.shape[:2], problem.halves, problem.chunk, *shards.shape[3:])
    held = [
        (chunk, source, half)
        for source in range(problem.world_size)
        for half, chunk in enumerate(chunks_of(source, problem.world_size, problem.halves))
    ]
    return torch.cat([parts[source, :, half] for _, source, half in sorted(held)], 1)


def by_ranks(whole: Tensor, problem: Problem) -> Tensor:
    """The inverse of `whole_sequence`: [B, S, ...] to [W, B, T, ...]."""
    chunks = whole.reshape(whole.shape[0], -1, problem.chunk, *whole.shape[2:])
    return torch.stack([
        torch.cat([chunks[:, chunk] for chunk in chunks_of(source, problem.world_size, problem.halves)], 1)
        for source in range(problem.world_size)
    ])  # fmt: skip


def attend(q: Tensor, k: Tensor, v: Tensor, problem: Problem, rank: int, cu_seqlens: Tensor | None) -> Tensor:
    """This rank's output, [B, T, Hq, D]; queries that see no key have 0.

    Args:
        q: this rank's queries, [B, T, Hq, D].
        k: keys of all ranks by position, [B, S, Hkv, D].
        v: values likewise.
        problem: what is computed.
        rank: this rank.
        cu_seqlens: ends of packed sequences.
    """
    ends = None if cu_seqlens is None else [int(end) for end in cu_seqlens.tolist()]
    pieces, at = [], 0
    for stretch in stretches(problem, rank, ends):
        if stretch.row > at:
            pieces.append(torch.zeros_like(q[:, at : stretch.row]))
        at = stretch.row + stretch.rows
        keys = slice(stretch.first, stretch.last)
        pieces.append(attend_stretch(q[:, stretch.row : at], k[:, keys], v[:, keys], problem))
    if at < q.shape[1]:
        pieces.append(torch.zeros_like(q[:, at:]))
    return torch.cat(pieces, 1) if pieces else torch.zeros_like(q)


def attend_stretch(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Queries of one stretch; with a causal mask the last query sees the last key."""
    rows, keys = q.shape[1], k.shape[1]
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    square = not problem.causal or rows == keys
    mask = None
    if not square:
        fast = q.is_cuda and q.dtype in HALF_TYPES
        mask = causal_lower_right(rows, keys) if fast else _lower_right(rows, keys, q.device)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=problem.causal and square, scale=problem.scale, enable_gqa=problem.group > 1
    )
    return out.transpose(1, 2)


def _lower_right(rows: int, keys: int, device: torch.device) -> Tensor:
    """The mask under which the last of `rows` queries sees all keys, and each one before it one less."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)
