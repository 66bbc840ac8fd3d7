# SPDX-License-Identifier: Apache-2.0
"""Which tile comes next, which rows it has and whom it waits for: TileLink's dynamic mappings, read from tables.

Kernels, their warp-specialised twins and tests share these functions. A *tile* is a row tile (`tables.py`) and a block
of columns; tiles of a stretch are numbered so that columns of one expert's weight are read by all its row tiles soon
after each other.

A *unit* of work is a tile, or, in the last wave, half the rows of one. Programs take units in *turns*: all programs
together a wave of as many units as there are programs, in the order of units. Which of the wave's units a program takes
may move on by `shift` from wave to wave. Were it always the same place of the wave, then programs would get tiles of
one kind alone wherever the height of stretches divides the number of programs: of experts with four row tiles each the
last of which is half empty every fourth program got all half ones.
"""

import triton
import triton.language as tl

from megascale_kernels.device.primitives import consumer_tile_wait
from megascale_kernels.moe import tables
from megascale_kernels.planning.tile_order import grouped

TILE_WORDS = tl.constexpr(tables.TILE_WORDS)
# Flags of a source rank in both layers: 0 that it has begun the launch, then its units of tokens, or what it has sent.
BEGUN = tl.constexpr(0)
UNITS = tl.constexpr(1)


@triton.jit
def unit_at(turn, program, programs, shift):
    """The unit that a program takes in its `turn`-th turn, from 0, in which it is its own number."""
    return turn * programs + (program + turn * shift) % programs


@triton.jit
def turns_of(program, programs, units, shift):
    """How many turns a program has: one in every whole wave, and in the last one if its place is filled."""
    waves = units // programs
    return waves + ((program + waves * shift) % programs < units % programs).to(tl.int32)


@triton.jit
def whole_tiles(count, programs, cuts):
    """How many of the tiles are one unit each; the others, if any, are two.

    With `cuts` those of the last wave are cut where there is a program for every half of them.
    """
    last = count % programs
    return tl.where((cuts != 0) & (2 * last <= programs), count - last, count)


@triton.jit
def tile_of(unit, count, whole):
    """The tile of a unit: the last one behind the last unit, and 0 where there is none."""
    tile = tl.where(unit < whole, unit, whole + (unit - whole) // 2)
    return tl.maximum(tl.minimum(tile, count - 1), 0)


@triton.jit
def rows_of_unit(unit, whole, begin, end, TILE_ROWS: tl.constexpr):
    """A unit's rows, of a tile that begins at `begin`, of an expert whose rows end at `end`.

    Returns:
        (first row, rows that are not padding). A lower half may have none: there is nothing to do.
    """
    HALF: tl.constexpr = TILE_ROWS // 2
    lower = (unit >= whole) & ((unit - whole) % 2 == 1)
    begin += tl.where(lower, HALF, 0)
    return begin, tl.minimum(end - begin, tl.where(unit < whole, TILE_ROWS, HALF))


@triton.jit
def look_up(tiles, slot):
    """The stretch that a row tile of the list belongs to (`tables.TILE_FIELDS`)."""
    here = tiles + slot * TILE_WORDS
    return tl.load(here), tl.load(here + 1), tl.load(here + 2), tl.load(here + 3), tl.load(here + 4)


@triton.jit
def dispatch_place(tile, blocks_n, group_m, row, end, first, height, TILE_ROWS: tl.constexpr):
    """Layer 0: where a tile lies within the stretch of list entry `tile // blocks_n`.

    Returns:
        (first row, rows that are not padding, block of columns).
    """
    block_m, block_n = grouped(tile - first * blocks_n, height, blocks_n, group_m)
    begin = row + block_m * TILE_ROWS
    return begin, tl.minimum(end - begin, TILE_ROWS), block_n


@triton.jit
def combine_slot(tile, row_tiles, lead_tiles, blocks_n, chunk_blocks):
    """Layer 1: the list entry whose stretch a tile belongs to.

    Columns are cut into chunks of `chunk_blocks` blocks. In each chunk the list is walked from the end of the lead to
    its own end, which is stage 2 * chunk, then the lead, which is stage 2 * chunk + 1.

    Returns:
        (list entry, chunk, blocks of columns of the chunk, the tile's number within the chunk).
    """
    of_chunk = row_tiles * chunk_blocks
    chunk = tile // of_chunk
    width = tl.minimum(blocks_n - chunk * chunk_blocks, chunk_blocks)
    inner = tile - chunk * of_chunk
    return (inner // width + lead_tiles) % row_tiles, chunk, width, inner


@triton.jit
def combine_place(chunk, width, inner, row_tiles, lead_tiles, chunk_blocks, group_m, row, first, height,
                  TILE_ROWS: tl.constexpr):  # fmt: skip
    """Layer 1: where a tile lies within its stretch: (first row, block of columns, stage)."""
    begin = (first + row_tiles - lead_tiles) % row_tiles
    block_m, block_n = grouped(inner - begin * width, height, width, group_m)
    stage = 2 * chunk + (first < lead_tiles).to(tl.int32)
    return row + block_m * TILE_ROWS, chunk * chunk_blocks + block_n, stage


@triton.jit
def tiles_of_stage(stage, row_tiles, lead_tiles, blocks_n, chunk_blocks):
    """How many tiles of layer 1 a stage has."""
    width = tl.minimum(blocks_n - stage // 2 * chunk_blocks, chunk_blocks)
    return tl.where(stage % 2 == 0, row_tiles - lead_tiles, lead_tiles) * width


@triton.jit
def units_of(last, rank, world_size, pitch, unit_tokens, units):
    """How many of the peers' units a row tile needs, counted rank by rank, the one behind us first.

    Rows are in the order of ranks, ours first, then of tokens: the token of the last row tells all. Ranks before its
    rank are waited for whole.
    """
    step = (last // pitch + world_size - rank) % world_size
    return tl.where(step == 0, 0, (step - 1) * units + last % pitch // unit_tokens + 1)


@triton.jit
def await_units(channel, known, needed, units, role, tile):
    """Wait for units up to `needed`; those below `known` have been waited for.

    Returns:
        (why the program must leave or 0, how many are known to be here).
    """
    code = 0
    for index in range(known, needed):
        if code == 0:
            source = (channel.rank + 1 + index // units) % channel.world_size
            code = consumer_tile_wait(channel, UNITS + index % units, source, role, tile)
    return code, tl.maximum(known, needed)
