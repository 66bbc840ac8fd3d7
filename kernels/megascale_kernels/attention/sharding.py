# SPDX-License-Identifier: Apache-2.0
"""Cut a sequence over ranks so that a causal mask gives every rank the same work, and put it together again.

The zig-zag: 2W chunks, of which rank r holds numbers r and 2W - 1 - r, in this order.
"""

import torch
from torch import Tensor

from megascale_kernels.attention.ranges import chunk_of, python
from megascale_kernels.errors import Unsupported

_chunk_of = python(chunk_of)


def chunks_of(rank: int, world_size: int, halves: int) -> list[int]:
    """Numbers of the chunks that a rank holds, in the order in which it holds them."""
    return [_chunk_of(rank, half, world_size) for half in range(halves)]


def positions_of(rank: int, world_size: int, sequence: int, *, zigzag: bool = True) -> Tensor:
    """Place in the sequence of each of a rank's tokens, [sequence / W]: what rotary embeddings need.

    Raises:
        Unsupported: the sequence cannot be cut into equal chunks.
    """
    halves = 2 if zigzag else 1
    if sequence % (halves * world_size):
        raise Unsupported(f"{sequence} tokens are not {halves * world_size} equal chunks: pad the sequence")
    chunk = sequence // (halves * world_size)
    return torch.cat([torch.arange(c * chunk, (c + 1) * chunk) for c in chunks_of(rank, world_size, halves)])


def shard_sequence(x: Tensor, rank: int, world_size: int, *, dim: int = 1, zigzag: bool = True) -> Tensor:
    """This rank's tokens of a whole sequence along `dim`.

    Raises:
        Unsupported: the sequence cannot be cut into equal chunks.
    """
    return x.index_select(dim, positions_of(rank, world_size, x.shape[dim], zigzag=zigzag).to(x.device))


def unshard_sequence(shards: Tensor, *, dim: int = 1, zigzag: bool = True) -> Tensor:
    """The whole sequence from the tokens of all ranks, [W, ...], joined along `dim` of one shard."""
    world_size = shards.shape[0]
    sequence = world_size * shards.shape[1 + dim]
    places = [positions_of(rank, world_size, sequence, zigzag=zigzag) for rank in range(world_size)]
    order = torch.cat(places).argsort().to(shards.device)
    return torch.cat(list(shards), dim).index_select(dim, order)
