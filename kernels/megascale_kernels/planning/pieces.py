# SPDX-License-Identifier: Apache-2.0
"""How an operator is taken apart into products of whole shards: which shards each multiplies, and in which order.

Shards are counted in steps from our own, step s being rank `rank + s`'s: the order in which an all-gather's arrive and
in which a reduce-scatter's are owed. (Decomposition: "Overlap Communication with Dependent Computation via
Decomposition", ASPLOS 2023.)
"""

from itertools import pairwise
from typing import NamedTuple


class Piece(NamedTuple):
    """One piece: shards that are multiplied together.

    Attributes:
        first: the first step.
        last: the step behind its last.
        runs: the same shards in the order of rows, as (first shard, shard behind the last) of rows in one piece: two
            where the steps pass the last rank, each of which is a product.
    """

    first: int
    last: int
    runs: tuple[tuple[int, int], ...]


def pieces_of(rank: int, world_size: int, pieces: int | None) -> tuple[Piece, ...]:
    """Our own shard, then the peers' in pieces as even as they can be; one piece holds all.

    Args:
        rank: this rank.
        world_size: ranks, and shards.
        pieces: how many; None, and any number above `world_size`, takes each shard by itself.
    """
    count = min(pieces or world_size, world_size)
    if count == 1:
        return (Piece(0, world_size, ((0, world_size),)),)
    peers = world_size - 1
    bounds = [0, *(1 + peers * part // (count - 1) for part in range(count))]
    return tuple(Piece(first, last, _runs(rank, world_size, first, last)) for first, last in pairwise(bounds))


def _runs(rank: int, world_size: int, first: int, last: int) -> tuple[tuple[int, int], ...]:
    begin, end = (rank + first) % world_size, (rank + last - 1) % world_size + 1
    return ((begin, end),) if begin < end else ((begin, world_size), (0, end))
