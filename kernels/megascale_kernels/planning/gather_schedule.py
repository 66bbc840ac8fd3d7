# SPDX-License-Identifier: Apache-2.0
"""In which order, and in what pieces, the warp-specialised all-gather + GEMM does its tiles: a timetable, played.

Every program takes its units of work in ascending order, and a unit begins when the program is free and its rows have
arrived. So the time of a launch can be played through in integers and sums, unit by unit; the best of a few plans is
taken. Three things are decided:

    lead    the column blocks that are walked shard by shard, our own rows first, until the others' have arrived. The
            rest is walked with all shards as one tall matrix (`tile_order.gather_stretch`)
    whole   the tiles that stay in one piece
    split   the parts along K into which each of the others is cut. Programs that wait for rows, or have no tile, then
            do a part of what comes late; in long launches only the last, partial wave is cut, or dealt out evenly

A plan is a function of the shape alone: the same shape always sums in the same order. The five constants of a launch
were fitted to all 79 launches of at most eight waves in the tables for two and four H200, 45 us to 1.2 ms, walked shard
by shard with the last wave cut: 2.2 % root mean square, 7 % at most. Sixteen rows of ag_gemm_tuned_4gpu, six of them
with nothing cut, were not used and come out within 5 %. Plans that cut more than the last wave, or walk all shards
together, were measured afterwards on two H200: over 60 shapes 3.6 % root mean square, at the worst 43 us where 38 were
foretold. Among four and eight such plans have been rehearsed on one GPU (`benchmarks/rehearse.py`): 0.91 to 1.13 of
what was foretold, the most in launches of less than 100 us.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

LAUNCH_S = 3e-6  # before the first tile and after the last, with what peers cost each other
COPY_S = 9e-6  # one copy with its announcement, before its first byte
LINK_BYTES_PER_S = 370e9
FIXED_S = 2.2e-6  # prologue and epilogue of a 128 x 256 tile that nothing hides
# What a part beyond the first costs, in K blocks: it leaves its sums in memory, and another takes them up.
SEAM_BLOCKS = 11
# The other ranks may be this much later than we think before the remote stretches have to wait for their rows.
LEAD_MARGIN = 1.25
# A wave of tiles in a flat walk reads more: at the full rate of memory it takes the share `r` of the wave's time, and
# the wave takes 1 + 0.22 r^2 times as long (13 % at two row blocks, 3 % at four, K 8192).
MEMORY_BYTES_PER_S = 4e12
FLAT_COST = 0.22
# More tiles than these many waves are not played through: arrival no longer matters, nor is it cheap (1 us a unit).
MOST_WAVES = 8
MOST_PARTS = 6
EARLY_PARTS = 3  # cutting more than the last wave has never been best in more parts
# A workspace has flags for so many parts of cut tiles, of one consumer.
MOST_PARTIALS = 768


class Launch(NamedTuple):
    """What is to be planned.

    Attributes:
        m_shard: rows of one rank.
        blocks_n: column blocks.
        blocks_k: K blocks.
        world_size: ranks.
        programs: multiprocessors.
        block_m: rows of a tile.
        block_n: columns of a tile.
        group_m: row blocks walked together.
        splits: units in which a shard's rows are announced.
        k_block_s: seconds of one K block of a tile.
        fixed_s: seconds of a tile's prologue and epilogue.
        row_bytes: bytes of a row.
    """

    m_shard: int
    blocks_n: int
    blocks_k: int
    world_size: int
    programs: int
    block_m: int
    block_n: int
    group_m: int
    splits: int
    k_block_s: float
    fixed_s: float
    row_bytes: int

    @property
    def blocks_m(self) -> int:
        """Row blocks of a shard."""
        return -(-self.m_shard // self.block_m)

    @property
    def tiles(self) -> int:
        """Tiles of all shards."""
        return self.blocks_m * self.blocks_n * self.world_size

    def height(self, lead: int) -> int:
        """Row blocks that the last tiles are walked together: of all shards where they are walked as one matrix."""
        return min(self.group_m, self.blocks_m * (self.world_size if lead < self.blocks_n else 1))

    @property
    def unit_blocks(self) -> int:
        """Row blocks that one flag announces."""
        rows = -(-self.m_shard // self.splits)
        return -(-rows // self.block_m)

    @property
    def tile_s(self) -> float:
        """Seconds of a whole tile."""
        return self.blocks_k * self.k_block_s + self.fixed_s


class Plan(NamedTuple):
    """What was decided, and the time it is expected to take.

    Attributes:
        lead: column blocks walked shard by shard.
        whole: tiles in one piece.
        split: parts of each of the others.
        time_s: of the launch; 0 when it was not played through.
    """

    lead: int
    whole: int
    split: int
    time_s: float


@lru_cache(maxsize=4096)  # a server whose M takes every value must not grow for ever
def plan(launch: Launch, split: int | None = None, lead: int | None = None) -> Plan:
    """The plan of a launch.

    Args:
        launch: what.
        split: cut the last wave into so many parts instead; 1 cuts nothing.
        lead: take this one.
    """
    from megascale_kernels.planning.tile_order import lead_columns
    from megascale_kernels.planning.tiling import cut_last_wave

    leads = [launch.blocks_n, lead_of(launch)] if lead is None else [lead_columns(launch.blocks_n, lead)]
    plans = []
    for columns in dict.fromkeys(leads):
        last_wave = cut_last_wave(
            launch.tiles, launch.programs, launch.blocks_k, split, columns=launch.block_n, height=launch.height(columns)
        )
        if launch.tiles > MOST_WAVES * launch.programs:
            plans = [Plan(columns, *last_wave, 0.0)]
            continue
        cuts = list(likely_cuts(launch, columns)) if split is None and launch.world_size > 1 else [last_wave]
        ready_s, flat_s = arrivals(launch, columns), flat_cost(launch, columns)
        plans += [Plan(columns, *cut, play(launch, ready_s, *cut) + flat_s) for cut in cuts]
    return min(plans, key=lambda one: one.time_s)


def lead_of(launch: Launch) -> int:
    """So many columns that a shard's copy takes no longer than the whole waves of our own rows in them.

    Shards of a whole group of row blocks are not flat: they are walked one after the other.
    """
    if launch.world_size == 1 or launch.blocks_m >= launch.group_m:
        return launch.blocks_n
    copy_s = COPY_S + launch.m_shard * launch.row_bytes / LINK_BYTES_PER_S
    waves = -(-LEAD_MARGIN * copy_s // launch.tile_s)
    return min(launch.blocks_n, int(-(-waves * launch.programs // launch.blocks_m)))


def flat_cost(launch: Launch, lead: int) -> float:
    """Seconds that the walk loses because its waves read more than square ones would."""
    cost_s = 0.0
    for height, columns in ((launch.blocks_m, lead), (launch.blocks_m * launch.world_size, launch.blocks_n - lead)):
        rows = min(height, launch.group_m, launch.programs)
        read = (rows * launch.block_m + launch.programs / rows * launch.block_n) * launch.row_bytes
        waves = launch.blocks_m * launch.world_size * columns / launch.programs
        cost_s += waves * launch.tile_s * FLAT_COST * (read / MEMORY_BYTES_PER_S / launch.tile_s) ** 2
    return cost_s


def likely_cuts(launch: Launch, lead: int) -> Iterator[tuple[int, int]]:
    """Whole tiles and parts of the rest: nothing cut, the last wave, what comes late, or everything in short launches.

    The last wave may also be dealt out evenly. Yields the simplest first: of equally fast plans it is taken.
    """
    from megascale_kernels.planning.tiling import EVEN, LastWave

    yield launch.tiles, 1
    per_shard = launch.tiles // launch.world_size
    last_wave = launch.tiles - launch.tiles % launch.programs
    early = {per_shard * shards for shards in (1, launch.world_size - 1)}
    if launch.tiles < 2 * launch.programs:
        early.add(0)
    for whole in sorted({last_wave, *early}, reverse=True):
        for split in range(2, min(launch.blocks_k, MOST_PARTS if whole == last_wave else EARLY_PARTS) + 1):
            if whole < launch.tiles and (launch.tiles - whole) * (split - 1) <= MOST_PARTIALS:
                yield whole, split
    wave = LastWave(launch.tiles - last_wave, launch.programs, launch.blocks_k, launch.block_n, launch.height(lead))
    if wave.is_worth_sharing():
        yield last_wave, EVEN


def arrivals(launch: Launch, lead: int) -> list[float]:
    """When the rows of each tile are there, in seconds from the beginning, in the order of tiles."""
    from megascale_kernels.planning import tile_order

    stretch_of, grouped = tile_order.python(tile_order.gather_stretch), tile_order.python(tile_order.grouped)
    units = -(-launch.blocks_m // launch.unit_blocks)
    ready_s = []
    for tile in range(launch.tiles):
        above, height, _, width, inner = stretch_of(tile, launch.blocks_m, launch.blocks_n, lead, launch.world_size)
        step, block = divmod(above + grouped(inner, height, width, launch.group_m)[0], launch.blocks_m)
        unit = block // launch.unit_blocks
        rows = min(launch.m_shard, (unit + 1) * launch.unit_blocks * launch.block_m) + (step - 1) * launch.m_shard
        copies = (step - 1) * units + unit + 1
        ready_s.append(copies * COPY_S + rows * launch.row_bytes / LINK_BYTES_PER_S if step else 0.0)
    return ready_s


def play(launch: Launch, ready_s: Sequence[float], whole: int, split: int) -> float:
    """Seconds of a launch whose tiles from `whole` on are cut into `split` parts."""
    from megascale_kernels.planning.tiling import EVEN

    programs, tile_s = launch.programs, launch.tile_s
    free_s = [0.0] * programs
    for tile in range(whole):
        program = tile % programs
        free_s[program] = max(free_s[program], ready_s[tile]) + tile_s
    if split == EVEN:
        return play_shares(launch, ready_s, whole, free_s)
    part_s = launch.blocks_k * launch.k_block_s / split
    half_seam_s = SEAM_BLOCKS * launch.k_block_s / 2
    unit = whole
    for tile in range(whole, launch.tiles):
        partial_s = 0.0
        for _ in range(split - 1):
            program = unit % programs
            free_s[program] = max(free_s[program], ready_s[tile]) + part_s + half_seam_s
            partial_s = max(partial_s, free_s[program])
            unit += 1
        program = unit % programs
        multiplied_s = max(free_s[program], ready_s[tile]) + part_s
        free_s[program] = max(multiplied_s, partial_s) + (split - 1) * half_seam_s + launch.fixed_s
        unit += 1
    return max(free_s) + LAUNCH_S


def play_shares(launch: Launch, ready_s: Sequence[float], whole: int, free_s: list[float]) -> float:
    """Seconds of a launch whose tiles from `whole` on are dealt out evenly to programs that are free at `free_s`."""
    from megascale_kernels.planning import tile_order
    from megascale_kernels.planning.tiling import EVEN_BLOCKS, EVEN_HELP, WORTH_CUTTING

    share_of, turns_of = tile_order.python(tile_order.share_of), tile_order.python(tile_order.turns_of_share)
    programs, tiles, blocks_k = launch.programs, launch.tiles - whole, launch.blocks_k
    half_seam_s = EVEN_BLOCKS * launch.k_block_s / 2
    partial_s = [0.0] * programs
    for turn in range(2):  # a share is less than a tile: it lies in two at most, and what others wait for comes first
        for program in range(programs):
            if turn >= turns_of(program, programs, programs, tiles, blocks_k):
                continue
            tile, first, last, before = share_of(program, turn, programs, programs, tiles, blocks_k)
            multiplied_s = max(free_s[program], ready_s[whole + tile]) + (last - first) * launch.k_block_s
            if last < blocks_k:
                free_s[program] = partial_s[program] = multiplied_s + half_seam_s
            else:
                there_s = max([multiplied_s, *partial_s[program - before : program]])
                free_s[program] = there_s + (half_seam_s if before else 0.0) + launch.fixed_s
    slower = (1 - EVEN_HELP) * (1 - tiles / programs) + 1 - WORTH_CUTTING
    return max(free_s) + slower * blocks_k * launch.k_block_s + LAUNCH_S
