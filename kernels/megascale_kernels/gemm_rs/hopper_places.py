# SPDX-License-Identifier: Apache-2.0
"""Where the tiles of the warp-specialised GEMM + reduce-scatter lie: in whose rows, and which flags are theirs.

Where tiles fill the shards each has one owner. Where they don't (STRADDLES) they are laid over the matrix of all rows,
and one with rows of two shards has two owners. It is sent to both, each time where that shard begins within the tile or
ends there: TMA clips what lies before or behind the shard, so its row there may be below zero.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megascale_kernels.planning.tile_order import (
    blocks_of_shard,
    channel_of_tile,
    grouped,
    scatter_owner,
    scatter_step,
    scatter_stretch,
    shards_of_block,
    straddling_scatter,
)


@gluon.jit
def place_of(work, channel, tile, m_shard, CFG: gl.constexpr, STRADDLES: gl.constexpr):
    """Whose rows a tile holds, and where it lies.

    Returns:
        (step, owner, last_owner, block_m, block_n): in which step of the scatter the tile is; the first and the last
        shard of which it has rows; its block within that shard, or of all rows where tiles straddle shards.
    """
    if not STRADDLES:
        tall = work.blocks_m * channel.world_size
        above, height, inner = scatter_stretch(tile, tall, work.blocks_m, work.blocks_n, work.group_m)
        block, block_n = grouped(inner, height, work.blocks_n, work.group_m)
        block += above
        step = block // work.blocks_m
        owner = scatter_owner(step, channel.rank, channel.world_size)
        return step, owner, owner, block % work.blocks_m, block_n
    else:  # noqa: RET505 - Triton decides at compile time which branch exists
        first, own = blocks_of_shard(channel.rank, m_shard, CFG.block_m)
        above, height, inner = scatter_stretch(tile, work.blocks_m, own, work.blocks_n, work.group_m)
        block, block_n = grouped(inner, height, work.blocks_n, work.group_m)
        block = straddling_scatter(above + block, first, own, work.blocks_m)
        owner, last_owner = shards_of_block(block, m_shard, CFG.block_m, channel.world_size)
        return scatter_step(owner, channel.rank, channel.world_size), owner, last_owner, block, block_n


@gluon.jit
def row_at(block_m, owner, m_shard, CFG: gl.constexpr, STRADDLES: gl.constexpr):
    """The row of an owner's shard at which a tile begins; below zero where the shard begins within the tile."""
    row = block_m * CFG.block_m
    if STRADDLES:
        row -= owner * m_shard
    return row


@gluon.jit
def flag_at(block_m, block_n, owner, work, m_shard, CFG: gl.constexpr, STRADDLES: gl.constexpr):
    """The flag of a tile among those of an owner."""
    if STRADDLES:
        block_m -= owner * m_shard // CFG.block_m
    return channel_of_tile(block_m, block_n, work.blocks_n)


@gluon.jit
def is_sent(channel, owner, last_owner, STRADDLES: gl.constexpr):
    """Whether a tile has rows of others."""
    others = owner != channel.rank
    if STRADDLES:
        others = others | (last_owner != channel.rank)
    return others


@gluon.jit
def us_or_first(channel, owner, last_owner, STRADDLES: gl.constexpr):
    """Of a tile's owners ourselves, if we are one, or the first."""
    if STRADDLES:
        owner = gl.where(last_owner == channel.rank, last_owner, owner)
    return owner
