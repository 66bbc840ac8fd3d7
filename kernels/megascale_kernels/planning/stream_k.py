# SPDX-License-Identifier: Apache-2.0
"""How the tiles of a warp-specialised launch become units of work, and with which tile and ring.

Tiles that fill whole waves stay whole. Those of the last wave are left whole, cut along K into parts of one size
(split-K), or their K blocks are dealt out evenly to all programs (stream-K after full waves; Osama et al.,
2301.03598). All of it is a function of shape and configuration, so every rank comes to the same by itself.
"""

from functools import lru_cache
from typing import NamedTuple

from megascale_kernels.errors import Unsupported
from megascale_kernels.planning.config import Config
from megascale_kernels.planning.cost_model import H200, gather_launch
from megascale_kernels.planning.gather_schedule import plan
from megascale_kernels.planning.tile_order import lead_columns
from megascale_kernels.planning.tiling import (
    EVEN,
    SPLIT_K,
    STREAM_K,
    WHOLE,
    Tiling,
    cut_last_wave,
    team_size,
)

TILES = ((128, 256, 64), (128, 128, 64))

# Slots of an all-gather's ring by columns of a tile: what fits beside the staging buffers. `stages` below FULL_STAGES
# makes it as much shallower.
FULL_SLOTS = {256: 4, 128: 6}
FULL_STAGES = 4

# A 128 x 256 x 64 block takes 0.65 us; sent a little faster than that, a tile has left before the next is finished.
NANOSECONDS_PER_K_BLOCK = 500
# Partials of several peers in one slot: 4 points of E for GPT-3 (K 12288) at M 4096 and nothing at 8192, but one to two
# points less at K 3584 to 7168, and at M 2048 (six waves). Measured on 4 x H200, three runs in turn with and without.
DEEP_K = 8192
MANY_WAVES = 8
# In fewer waves a peer needs a tile almost as soon as it is finished: it is sent at once.
FEW_WAVES = 3


class Cut(NamedTuple):
    """How the tiles of one launch become units of work (see `hopper_gemm.Work`).

    Attributes:
        blocks_m: row blocks of a shard.
        blocks_n: column blocks.
        blocks_k: K blocks of a tile.
        tiles: tiles of all shards.
        whole_tiles: tiles in one piece.
        split: split-K factor of each of the others; `EVEN` selects stream-K.
        programs: programs that run at a time.
        height: row blocks that the last of the tiles are walked together.
    """

    blocks_m: int
    blocks_n: int
    blocks_k: int
    tiles: int
    whole_tiles: int
    split: int
    programs: int
    height: int

    @property
    def way(self) -> int:
        """What the kernels are compiled for."""
        if self.whole_tiles == self.tiles:
            return WHOLE
        return STREAM_K if self.split == EVEN else SPLIT_K

    @property
    def units(self) -> int:
        """Units of work: whole tiles and split-K parts; under stream-K, tiles."""
        return self.whole_tiles + (self.tiles - self.whole_tiles) * max(1, self.split)

    @property
    def parts(self) -> int:
        """The kernels' `split`: the split-K factor, or under stream-K the number of teams."""
        if self.way != STREAM_K:
            return self.split
        return self.programs // team_size(self.tiles - self.whole_tiles, self.programs, self.height)

    @property
    def grid(self) -> int:
        """Programs of the launch; all of them under stream-K."""
        return self.programs if self.way == STREAM_K else min(self.programs, self.units)

    @property
    def partial_places(self) -> int:
        """fp32 accumulators in the workspace for partials of split tiles, per consumer."""
        if self.way == STREAM_K:
            return self.programs
        return (self.tiles - self.whole_tiles) * (self.split - 1)


@lru_cache(maxsize=64)
def tiling_of(
    config: Config, *, is_nk: bool, keeps_tiles: bool = False, fills_slots: bool = False, pairs_quarters: bool = False
) -> Tiling:
    """The tile layout of a configuration: 128 x 256 or, for few rows or columns, 128 x 128, by two consumers.

    Args:
        config: the configuration.
        is_nk: how the weight lies.
        keeps_tiles: a reduce-scatter keeps a whole finished tile in shared memory, at the price of a slot.
        fills_slots: the partials of several peers share a slot.
        pairs_quarters: two quarters of a lone peer's partial share one.

    Raises:
        Unsupported: a tile that these kernels do not have.
    """
    if (config.block_m, config.block_n, config.block_k) not in TILES or config.carrier != "copy_engine":
        raise Unsupported(
            f"kernel='hopper' has tiles of 128 x 256 x 64 and 128 x 128 x 64, its rows carried by the copy engine; got "
            f"{config.block_m} x {config.block_n} x {config.block_k}, carrier {config.carrier!r}: take kernel='triton'"
        )
    columns = config.block_n
    if keeps_tiles:
        slots = 3 if columns == 256 else 5
        return Tiling(
            columns=columns, slots=slots, store_buffers=columns // 64, b_is_nk=is_nk, fills_slots=fills_slots,
            pairs_quarters=pairs_quarters,
        )  # fmt: skip
    slots = FULL_SLOTS[columns] - max(0, FULL_STAGES - config.stages)
    if slots < 2:
        raise Unsupported(
            f"kernel='hopper' with stages={config.stages} has a ring of {slots} slots, and it turns with two or more: "
            f"take stages={FULL_STAGES} or {FULL_STAGES - 1}"
        )
    return Tiling(columns=columns, slots=slots, b_is_nk=is_nk)


class Walk(NamedTuple):
    """How a launch walks over its tiles.

    Attributes:
        shards: that many stand on top of each other.
        height: row blocks walked together, where it ends.
        peers: whose partials its last tiles add up.
    """

    shards: int
    height: int
    peers: int = 0


@lru_cache(maxsize=4096)  # a server whose M takes every value must not grow for ever
def cut(tiling: Tiling, m_shard: int, n_size: int, k_size: int, walk: Walk, programs: int, split: int | None) -> Cut:
    """Blocks, and how the last wave is filled: a function of the shape alone."""
    blocks_m = -(-m_shard // tiling.block_m)
    blocks_n = -(-n_size // tiling.block_n)
    blocks_k = -(-k_size // tiling.block_k)
    tiles = blocks_m * blocks_n * walk.shards
    more = {"columns": tiling.columns, "height": walk.height, "peers": walk.peers}
    whole, split = cut_last_wave(tiles, programs, blocks_k, split, **more)
    return Cut(blocks_m, blocks_n, blocks_k, tiles, whole, split, programs, walk.height)


@lru_cache(maxsize=4096)
def cut_gather(
    tiling: Tiling, m_shard: int, n_size: int, k_size: int, world_size: int, programs: int, config: Config
) -> tuple[Cut, int]:
    """Blocks, what is cut, and the columns that are walked shard by shard: a function of the shape alone."""
    launch = gather_launch(m_shard, n_size, k_size, world_size, config, H200._replace(processors=programs))
    planned = plan(launch, config.tail_split, config.lead) if config.planned else None
    lead = planned.lead if planned else lead_columns(launch.blocks_n, config.lead)
    walk = Walk(world_size, launch.height(lead))
    work = cut(tiling, m_shard, n_size, k_size, walk, programs, config.tail_split)
    return (work._replace(whole_tiles=planned.whole, split=planned.split) if planned else work), lead


def pairs_quarters(world_size: int) -> bool:
    """Whether two quarters of a partial share a slot: they are a lone peer's."""
    return world_size == 2
