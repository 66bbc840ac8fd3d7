# SPDX-License-Identifier: Apache-2.0
"""Which tokens a rank holds, and which keys a query sees: integer functions that kernels and Python both call.

A sequence of S tokens is cut into `halves * W` chunks of C tokens. With one half rank r holds chunk r. With two (the
*zig-zag*) it holds chunks r and 2W - 1 - r: under a causal mask chunk c has c + 1/2 chunks of keys to see, so every
rank then has the same work. A *part* is one chunk of one rank. Parts are visited rank by rank, the own first, then the
others in the order in which they send.

A query at position p sees the keys [first_key(p), last_key(p)), one interval: its sequence, and under a causal mask
nothing behind itself. Both ends never fall as p grows, so a block of queries is described by its first and its last.
Packed sequences (`cu_seqlens`) give two tables, where the sequence of each position begins and ends; a position behind
the last sequence belongs to none and sees nothing.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


def python(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of integers for Python."""
    plain: Callable[..., Any] = getattr(function, "fn", function)
    return plain


@triton.jit
def chunk_of(rank, half, world_size):
    """The chunk of the sequence that is half `half` of a rank's tokens."""
    return rank + half * (2 * world_size - 1 - 2 * rank)


@triton.jit
def source_of(part, rank, world_size, HALVES: tl.constexpr):
    """The rank that a part belongs to: our own first, then the order of arrival."""
    return (rank + part // HALVES) % world_size


@triton.jit
def first_key(position, begin_ptr, VARLEN: tl.constexpr):
    """The first key that a query sees."""
    first = position * 0
    if VARLEN:
        first = tl.load(begin_ptr + position)
    return first


@triton.jit
def last_key(position, sequence, end_ptr, CAUSAL: tl.constexpr, VARLEN: tl.constexpr):
    """One behind the last key that a query sees."""
    last = position * 0 + sequence
    if VARLEN:
        last = tl.load(end_ptr + position)
    if CAUSAL:
        last = tl.minimum(last, position + 1)
    return last


@triton.jit
def first_query(position, begin_ptr, CAUSAL: tl.constexpr, VARLEN: tl.constexpr):
    """The first query that sees a key."""
    first = position * 0
    if VARLEN:
        first = tl.load(begin_ptr + position)
    if CAUSAL:
        first = tl.maximum(first, position)
    return first


@triton.jit
def last_query(position, sequence, end_ptr, VARLEN: tl.constexpr):
    """One behind the last query that sees a key."""
    last = position * 0 + sequence
    if VARLEN:
        last = tl.load(end_ptr + position)
    return last


@triton.jit
def span_of_blocks(begin, end, all_begin, all_end, start, rows, BLOCK: tl.constexpr):
    """The blocks of one chunk that a tile visits.

    Args:
        begin: first position that some row of the tile sees.
        end: one behind the last such.
        all_begin: first position that every row sees.
        all_end: one behind the last such.
        start: position where the chunk begins.
        rows: its length.
        BLOCK: rows of a block.

    Returns:
        (first, last) block that some row sees, and (full_first, full_last) of those that every row sees whole; last
        ones are one behind. What lies in [first, last) but not in [full_first, full_last) needs a mask.
    """
    begin = tl.minimum(tl.maximum(begin - start, 0), rows)
    end = tl.minimum(tl.maximum(end - start, 0), rows)
    all_begin = tl.minimum(tl.maximum(all_begin - start, 0), rows)
    all_end = tl.minimum(tl.maximum(all_end - start, 0), rows)
    first = begin // BLOCK
    last = tl.where(begin < end, (end + BLOCK - 1) // BLOCK, first)
    full_first = tl.minimum(tl.maximum((all_begin + BLOCK - 1) // BLOCK, first), last)
    full_last = tl.minimum(tl.maximum(all_end // BLOCK, full_first), last)
    return first, last, full_first, full_last


@triton.jit
def to_and_fro(place, programs, tiles):
    """Which tile of the order is taken at a place of the walk: every second round backwards, but for a short last one.

    Tiles are in the order of falling length, and program p takes the places p, p + programs, ...: so who took the
    longest of one round takes the shortest of the next, and the sums come out even.
    """
    start = place // programs * programs
    back = (place // programs % 2) * (start + programs <= tiles)
    return place + back * (2 * start + programs - 1 - 2 * place)


@triton.jit
def place_of_key_tile(tile, blocks, parts, heads):
    """(block, part, head, batch) of a tile of keys of all ranks."""
    rest = tile // blocks
    return tile % blocks, rest % parts, rest // parts % heads, rest // parts // heads


@triton.jit
def place_of_tile(tile, blocks, heads, HALVES: tl.constexpr):
    """(block, half, head, batch) of a tile: the blocks of one head follow each other."""
    block = tile % blocks
    rest = tile // blocks
    half = rest % HALVES
    rest = rest // HALVES
    return block, half, rest % heads, rest // heads
