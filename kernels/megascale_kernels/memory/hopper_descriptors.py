# SPDX-License-Identifier: Apache-2.0
"""Launch the warp-specialised kernels: arguments for `hopper_ag.py` and `hopper_rs.py`.

The same contract as the plain launchers in `ag_gemm.py` and `gemm_rs.py`, which call these when `config.kernel` says
so.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megascale_kernels.device.layout import MAX_RANKS, OPERATORS, signature
from megascale_kernels.errors import Unsupported
from megascale_kernels.memory.operands import Weight, processors, tma_can_read
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config
from megascale_kernels.planning.cost_model import H200, gather_launch
from megascale_kernels.planning.gather_schedule import plan
from megascale_kernels.planning.tile_order import lead_columns, scatter_group, scatter_height
from megascale_kernels.planning.tiling import (
    EVEN,
    LENT_WIDTH,
    PARTS,
    SHARES,
    WHOLE,
    Tiling,
    cut_last_wave,
    swizzled,
    team_size,
)

# Registers per thread at the start. Twelve warps of 168 would own the register file, and the kernel that announces a
# copy (one warp of at most 32 registers) could not run beside them: an all-gather would wait for itself.
ROOM_FOR_ANNOUNCEMENTS = 160

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

AG_GEMM = OPERATORS.index("ag_gemm")
GEMM_RS = OPERATORS.index("gemm_rs")


class Cut(NamedTuple):
    """How the tiles of one launch become units of work (see `hopper.Work`).

    Attributes:
        blocks_m: row blocks of a shard.
        blocks_n: column blocks.
        blocks_k: K blocks of a tile.
        tiles: tiles of all shards.
        whole_tiles: tiles in one piece.
        split: parts of each of the others; `EVEN`: every program has a share of them.
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
        return SHARES if self.split == EVEN else PARTS

    @property
    def units(self) -> int:
        """Units of work: whole tiles and parts; where programs have shares, tiles."""
        return self.whole_tiles + (self.tiles - self.whole_tiles) * max(1, self.split)

    @property
    def parts(self) -> int:
        """What the kernels call `split`."""
        if self.way != SHARES:
            return self.split
        return self.programs // team_size(self.tiles - self.whole_tiles, self.programs, self.height)

    @property
    def grid(self) -> int:
        """Programs of the launch; all of them where each has a share."""
        return self.programs if self.way == SHARES else min(self.programs, self.units)

    @property
    def partial_places(self) -> int:
        """Accumulators that parts of cut tiles leave for each other, per consumer."""
        if self.way == SHARES:
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


def _common(workspace: Workspace, slot: int, partials: Tensor, stamp: int) -> tuple[Any, ...]:
    return (
        workspace.memory, workspace.peers, workspace.status, workspace.board, workspace.trace_words, partials,
        workspace.layout.flags(slot), workspace.layout.channels, slot, workspace.rank, workspace.world_size, stamp,
        int(workspace.deadline_s * 1e6),
    )  # fmt: skip


def _partials(workspace: Workspace, tiling: Tiling, work: Cut) -> Tensor:
    return workspace.scratch(max(1, work.partial_places * tiling.consumers * tiling.rows * tiling.columns))


def _weight_descriptor(weight: Weight, tiling: Tiling) -> Any:
    return TensorDescriptor.from_tensor(weight.matrix, tiling.b_block, swizzled(tiling.b_block[1]))


def _rows_descriptor(rows: Tensor, tiling: Tiling) -> Any:
    return TensorDescriptor.from_tensor(rows, [tiling.rows, tiling.block_k], swizzled(tiling.block_k))


def _lent_descriptor(partials: Tensor, tiling: Tiling, work: Cut) -> Any:
    """Of what parts of cut tiles leave for each other; None where no tile is cut."""
    if work.way == WHOLE:
        return None
    rows = partials.view(-1, LENT_WIDTH)
    return TensorDescriptor.from_tensor(rows, [tiling.lent_rows, LENT_WIDTH], tiling.lent_shared_layout)


def _out_descriptor(out: Tensor, tiling: Tiling) -> Any:
    return TensorDescriptor.from_tensor(out, [tiling.rows, tiling.store_columns], tiling.store_layout)


def prepare_ag_gemm(
    x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, workspace: Workspace, config: Config, unit_rows: int
) -> tuple[tuple[int], Callable[[int, int], tuple[Any, ...]], dict[str, Any]]:
    """The grid, a function from slot and `counted` to arguments, and compile-time constants."""
    m_shard, k_size = x.shape
    tiling = tiling_of(config, is_nk=weight.is_nk)
    programs = processors(x.device)
    work, lead = cut_gather(tiling, m_shard, weight.n_size, k_size, workspace.world_size, programs, config)
    store_tma = m_shard % tiling.block_m == 0 and tma_can_read(out)
    pitch = work.blocks_m * tiling.block_m
    stamp = signature(AG_GEMM, m_shard, weight.n_size, k_size, config.code)
    partials = _partials(workspace, tiling, work)
    constants = {
        "CFG": tiling, "CUT": work.way, "TALL": lead < work.blocks_n, "HAS_BIAS": bias is not None,
        "STORE_TMA": store_tma, "OPERATOR": AG_GEMM, "PROGRESS": workspace.progress, "TRACE": workspace.trace,
        "num_warps": 4, "maxnreg": ROOM_FOR_ANNOUNCEMENTS,
    }  # fmt: skip

    def arguments(slot: int, counted: int) -> tuple[Any, ...]:
        gathered = workspace.local(slot, (workspace.world_size * pitch, k_size)) if workspace.world_size > 1 else x
        return (
            _rows_descriptor(x, tiling), _rows_descriptor(gathered, tiling), _weight_descriptor(weight, tiling),
            _lent_descriptor(partials, tiling, work), _out_descriptor(out, tiling) if store_tma else out, out,
            bias if bias is not None else out, *_common(workspace, slot, partials, stamp), config.code, counted,
            m_shard, weight.n_size, k_size, unit_rows,
            work.blocks_m, work.blocks_n, work.blocks_k, config.group_m, work.whole_tiles, work.parts, work.units, lead,
        )  # fmt: skip

    return (work.grid,), arguments, constants


def pairs_quarters(world_size: int) -> bool:
    """Whether two quarters of a partial share a slot: they are a lone peer's."""
    return world_size == 2


def prepare_gemm_rs(
    x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, workspace: Workspace, config: Config
) -> tuple[tuple[int], Callable[[int], tuple[Any, ...]], dict[str, Any]]:
    """The grid, a function from slot to arguments, and compile-time constants."""
    m_shard, n_size = out.shape
    k_size, world_size, rank = x.shape[1], workspace.world_size, workspace.rank
    programs = processors(x.device)
    tiles = -(-m_shard // config.block_m) * -(-n_size // config.block_n) * world_size
    pairs = pairs_quarters(world_size)
    fills_slots = not pairs and k_size >= DEEP_K and tiles >= MANY_WAVES * programs
    tiling = tiling_of(config, is_nk=weight.is_nk, keeps_tiles=True, fills_slots=fills_slots, pairs_quarters=pairs)
    blocks_m = -(-m_shard // tiling.block_m)
    group_m = scatter_group(blocks_m, world_size, config.group_m, config.mixed)
    height = scatter_height(blocks_m, world_size, config.group_m, config.mixed)
    walk = Walk(world_size, height, world_size - 1)
    work = cut(tiling, m_shard, n_size, k_size, walk, programs, config.tail_split)
    stamp = signature(GEMM_RS, m_shard, n_size, k_size, config.code)
    partials = _partials(workspace, tiling, work)
    busy = work.units >= FEW_WAVES * programs
    pace_ns = work.blocks_k * NANOSECONDS_PER_K_BLOCK // tiling.store_buffers if busy else 0
    constants = {
        "CFG": tiling, "CUT": work.way, "HAS_BIAS": bias is not None, "OPERATOR": GEMM_RS,
        "PROGRESS": workspace.progress, "TRACE": workspace.trace, "num_warps": 4, "maxnreg": ROOM_FOR_ANNOUNCEMENTS,
    }  # fmt: skip

    def staged(owner: int, slot: int) -> Tensor:
        """Our slot of a peer's staging buffer."""
        return workspace.peer(owner, slot, (m_shard, n_size), (rank - owner - 1) % world_size * m_shard * n_size)

    def descriptors(slot: int) -> tuple[Any, ...]:
        """Our staging buffer, the output, and our slots on the peers in the order in which tiles are sent."""
        output = _out_descriptor(out, tiling)
        if world_size == 1:
            return (output, output, output, *[None] * (MAX_RANKS - 2))
        owners = [(rank + step) % world_size for step in range(1, world_size)]
        peers = [_out_descriptor(staged(owner, slot), tiling) for owner in owners]
        partial = _out_descriptor(workspace.local(slot, ((world_size - 1) * m_shard, n_size)), tiling)
        return (partial, output, *peers, *[None] * (MAX_RANKS - 1 - len(peers)))

    def arguments(slot: int) -> tuple[Any, ...]:
        return (
            _rows_descriptor(x, tiling), _weight_descriptor(weight, tiling), _lent_descriptor(partials, tiling, work),
            *descriptors(slot),
            bias if bias is not None else out, *_common(workspace, slot, partials, stamp), config.code, pace_ns,
            m_shard, n_size, k_size, work.blocks_m, work.blocks_n, work.blocks_k, group_m, work.whole_tiles, work.parts,
            work.units,
        )  # fmt: skip

    return (work.grid,), arguments, constants
