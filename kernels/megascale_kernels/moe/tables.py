# SPDX-License-Identifier: Apache-2.0
"""What a routing is, in memory of one rank: which rows each expert reads, in which order tiles are walked.

A *pair* is one of the `top_k` experts of one token. The rows of an expert are its pairs of all ranks' tokens, our own
rank's first, then those of the ranks behind us, each in the order of tokens; an expert's rows begin at a multiple of
the tile height, so no tile has rows of two experts, and what lies between is padding.

A *row tile* is one tile height of one expert's rows. Row tiles are listed in the order in which layer 0 walks them:
first those of our own tokens alone, of the first few experts, which cover the time in which the peers' tokens arrive
(*lead*), then all others, expert by expert. Layer 1 walks the others first and the lead last, so that peers' results
travel while the lead is multiplied. Both walk an expert's row tiles, or the lead's of them, as one *stretch*, all its
columns, so that an expert's weight is read once, or twice.

Programs take tiles in turn, so in the last wave of layer 0 some have a tile and others none. A row tile of few rows, a
*half* one, takes less time than a whole one: if there are enough of them to fill the last wave, those come last.

Sizes depend on the largest number of tokens alone, never on the routing: nothing waits for the host.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megascale_kernels.progress.board_format import MAX_RANKS

# Words of `Routing.head`.
ROW_TILES, LEAD_TILES, ARRIVALS = 0, 1, 3
TOKENS_OF = 8  # and further: tokens of each rank
STAGES = 32  # and further: finished tiles of each stage of layer 1
MOST_CHUNKS = 8
JOBS = STAGES + 2 * MOST_CHUNKS  # and further: jobs taken of each chunk of layer 1, the peers' tokens, then our own
SENT_JOBS = JOBS + 2 * MOST_CHUNKS  # and further: finished jobs of each peer's units; whoever is last clears its word
MOST_UNITS = 32
HEAD_WORDS = SENT_JOBS + MAX_RANKS * MOST_UNITS
# Fields of a row tile, all of its stretch: the expert, the stretch's first row, the end of the expert's rows without
# padding, the stretch's place in the list, its row tiles. So one look at the list tells where any of its tiles lies.
TILE_FIELDS = ("expert", "row", "end", "stretch", "height")
TILE_WORDS = 8
# Programs that route, at most; tokens that one of them takes at once.
ROUTE_PROGRAMS = 256
LEAST_ROUTE_TOKENS, MOST_ROUTE_TOKENS = 16, 128
LINE_WORDS = 32  # each table begins on a line of memory
# What one rank sends of its routing: a header with a word for each program that sends, then experts and gates.
HEADER_WORDS = 256


class Sizes(NamedTuple):
    """What all ranks agree on.

    Attributes:
        world_size: ranks, each with the same number of experts.
        pitch: the most tokens of a rank.
        top_k: experts of a token.
        experts: experts of one rank.
        hidden: elements of a token, H.
        inner: elements between an expert's products, I.
        tile_rows: rows of a tile.
        shards: ranks among which each expert is cut (`expert_shards`): of so many pairs of a token each has one.
    """

    world_size: int
    pitch: int
    top_k: int
    experts: int
    hidden: int
    inner: int
    tile_rows: int = 128
    shards: int = 1

    @property
    def most_here(self) -> int:
        """The most pairs of one token whose experts are one rank's."""
        return self.top_k // self.shards

    @property
    def pairs(self) -> int:
        """The most pairs of all ranks' tokens whose experts are one rank's."""
        return self.world_size * self.pitch * self.most_here

    @property
    def row_tiles(self) -> int:
        """The most row tiles: all pairs are ours, and every expert's last tile is all but empty."""
        return self.pairs // self.tile_rows + self.experts

    @property
    def rows(self) -> int:
        """The most rows, padding included."""
        return self.row_tiles * self.tile_rows

    @property
    def route_tokens(self) -> int:
        """Tokens that a routing program takes at once: few enough that every program has some."""
        share = -(-self.world_size * self.pitch // ROUTE_PROGRAMS)
        return min(max(1 << (share - 1).bit_length(), LEAST_ROUTE_TOKENS), MOST_ROUTE_TOKENS)

    @property
    def route_blocks(self) -> int:
        """Blocks of so many tokens, of all ranks."""
        return self.world_size * -(-self.pitch // self.route_tokens)

    @property
    def region_words(self) -> int:
        """Words that a rank sends of its routing."""
        return HEADER_WORDS + 2 * self.pitch * self.top_k

    @property
    def padded_experts(self) -> int:
        """A power of two that holds the experts of a rank."""
        return max(16, 1 << (self.experts - 1).bit_length())


class Routing(NamedTuple):
    """Tables of one rank, as `routing.route_kernel` fills them.

    Attributes:
        head: [`HEAD_WORDS`] how many row tiles and tokens there are, and counters of the launches that follow.
        counts: [token blocks, `Sizes.padded_experts`] pairs of each expert in each block of tokens.
        begins: [token blocks, `Sizes.padded_experts`] the first row of each expert in each block.
        rows: [`Sizes.rows`] the token of each row, as source rank * pitch + token; padding is -1.
        pair_row: [`Sizes.pairs`] by source rank and token the rows of its pairs whose experts are ours, in the order of
            its pairs, then -1; `Sizes.most_here` of a token.
        pair_gate: [`Sizes.pairs`] fp32, their weights.
        tiles: [`Sizes.row_tiles`, `TILE_WORDS`] row tiles in the order of the walk (`TILE_FIELDS`).
    """

    head: Tensor
    counts: Tensor
    begins: Tensor
    rows: Tensor
    pair_row: Tensor
    pair_gate: Tensor
    tiles: Tensor


def make_routing(sizes: Sizes, device: torch.device) -> tuple[Routing, Tensor]:
    """Tables for the largest routing, and all of them as one tensor of words, which a backward keeps."""
    shapes = (
        (HEAD_WORDS,), (sizes.route_blocks, sizes.padded_experts), (sizes.route_blocks, sizes.padded_experts),
        (sizes.rows,), (sizes.pairs,), (sizes.pairs,), (sizes.row_tiles, TILE_WORDS),
    )  # fmt: skip
    lengths = [-(-math.prod(shape) // LINE_WORDS) * LINE_WORDS for shape in shapes]
    words = torch.zeros(sum(lengths), dtype=torch.int32, device=device)
    head, counts, begins, rows, pair_row, pair_gate, tiles = (
        part[: math.prod(shape)].view(shape) for part, shape in zip(torch.split(words, lengths), shapes, strict=True)
    )
    return Routing(head, counts, begins, rows, pair_row, pair_gate.view(torch.float32), tiles), words
