# SPDX-License-Identifier: Apache-2.0
"""In which order tiles are walked, and where packed sequences begin and end: small tables in device memory.

Nothing here looks at a value on the host, so nothing waits for the GPU.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megascale_kernels.attention.problem import Problem
from megascale_kernels.attention.sharding import chunks_of


class Bounds(NamedTuple):
    """Where the sequence of each position begins and ends (one behind), int32 [S]; empty ones where none is packed."""

    begin: Tensor
    end: Tensor


@cache
def no_bounds(device: torch.device) -> Bounds:
    """Where no sequences are packed: memory that kernels take and do not read, the same in every call."""
    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    return Bounds(nothing, nothing)


def bounds_of(cu_seqlens: Tensor | None, problem: Problem, device: torch.device) -> Bounds:
    """Bounds of packed sequences; positions behind the last have none: they begin and end behind it."""
    if cu_seqlens is None:
        return no_bounds(device)
    positions = torch.arange(problem.sequence, dtype=cu_seqlens.dtype, device=device)
    number = torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)
    ends = torch.cat([cu_seqlens[1:], cu_seqlens[-1:]])
    return Bounds(cu_seqlens[number].to(torch.int32), ends[number].to(torch.int32))


def query_order(problem: Problem, rank: int, block: int, bounds: Bounds) -> Tensor:
    """Tiles of queries, those that see most keys first, int32 [B * Hq * halves * blocks].

    A tile's number is ((batch * heads + head) * halves + half) * blocks + block, as `ranges.place_of_tile` has it.
    """
    device = bounds.begin.device
    first, last = _blocks(problem, chunks_of(rank, problem.world_size, problem.halves), block, device)
    low, high = torch.zeros_like(first), torch.full_like(first, problem.sequence)
    if problem.varlen:
        low, high = bounds.begin[first].long(), bounds.end[last].long()
    if problem.causal:
        high = torch.minimum(high, last + 1)
    return _falling((high - low).clamp(min=0), problem.batch * problem.q_heads)


def key_order(problem: Problem, rank: int, block: int, bounds: Bounds) -> Tensor:
    """Tiles of keys of all ranks, our own first, then those that most of our queries see, int32.

    A tile's number is (((batch * kv_heads + head) * W + step) * halves + half) * blocks + block, where step counts
    ranks from our own on.
    """
    device, world_size = bounds.begin.device, problem.world_size
    theirs = [
        chunk
        for step in range(world_size)
        for chunk in chunks_of((rank + step) % world_size, world_size, problem.halves)
    ]
    first, last = _blocks(problem, theirs, block, device)
    low, high = torch.zeros_like(first), torch.full_like(first, problem.sequence)
    if problem.varlen:
        low, high = bounds.begin[first].long(), bounds.end[last].long()
    if problem.causal:
        low = torch.maximum(low, first)
    seen = torch.zeros_like(first)
    for chunk in chunks_of(rank, world_size, problem.halves):
        start = chunk * problem.chunk
        seen += (high.clamp(max=start + problem.chunk) - low.clamp(min=start)).clamp(min=0)
    own = torch.arange(len(first), device=device) < problem.halves * -(-problem.chunk // block)
    return _falling(seen + own * (problem.sequence + 1), problem.batch * problem.kv_heads)


def _blocks(problem: Problem, chunks: list[int], block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and last position of every block of some chunks."""
    size = problem.chunk
    # Made on the device: a tensor of numbers of the host is copied there, for which the host waits for the stream.
    first = torch.cat([torch.arange(chunk * size, (chunk + 1) * size, block, device=device) for chunk in chunks])
    return first, torch.minimum(first + block, (first // size + 1) * size) - 1


def _falling(lengths: Tensor, heads: int) -> Tensor:
    """Numbers of the tiles of all heads by falling length; equal ones as they are numbered."""
    return lengths.repeat(heads).argsort(descending=True, stable=True).to(torch.int32)
