# SPDX-License-Identifier: Apache-2.0
"""The shape of a Hopper matrix multiplication: how tiles lie over warpgroups and shared memory, and the last wave.

`Tiling` is a compile-time constant of the kernels in both `hopper.py`. `cut_last_wave` decides, from
the shape alone, how the last, partial wave of tiles is filled.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from triton.experimental.gluon.language import (
    DistributedLinearLayout,
    NVMMADistributedLayout,
    NVMMASharedLayout,
)

# What becomes of the tiles of the last wave: they stay whole, each is cut into parts along K, or every program gets an
# even share of their K blocks.
WHOLE, SPLIT_K, STREAM_K = range(3)
# A partial accumulator is stored in so many pieces, which are quarters of its columns, as rows of so many fp32.
PARTIAL_PIECES, PARTIAL_WIDTH = 4, 128
# Split 0 selects stream-K.
EVEN = 0

# What a block may own on compute capability 9.0, in bytes (227 KB).
SHARED_MEMORY_LIMIT = 232448
# One wgmma warpgroup multiplies 64 rows; more rows are several instructions.
WARPGROUP_ROWS = 64
# What the last wave costs, in tiles' times, when it is cut; fitted to launches on H200: 180 shapes of one rank, 100
# rehearsed of two and four (`benchmarks/last_wave.py`). The programs that would have no tile help less than their
# number suggests, for memory and power are shared; each part beyond the first leaves 128 KB of fp32 for another. Cut
# by split-K: (HELP, cost of a part in K blocks); by stream-K: (HELP, cost in K blocks), and one more
# for each program that shares a tile.
PARTS_HELP, PART_BLOCKS = 0.8, 7
EVEN_HELP, EVEN_BLOCKS = 0.75, 9
# More programs than these on one tile are better off with split-K: its last one has much to add up.
MOST_SHARING = 3
# Below so many row blocks the columns that programs read alone cost more than stream-K wins.
FEWEST_ROW_BLOCKS = 4
# In a reduce-scatter the program with the last part adds up the peers' partials too (in K blocks, for each peer).
PEER_BLOCKS = 5
# Uncut, a partial wave costs one tile's time; a cut must promise so much less.
WORTH_CUTTING = 0.94
# More parts than this cost more workspace traffic than the last wave can win back.
MAX_SPLIT = 6


@dataclass(frozen=True)
class Tiling:
    """How a tile is laid out over the warpgroups and the shared memory.

    Attributes:
        consumers: warpgroups that multiply, always 2; each has its own accumulator. A third was up to 25 % slower: it
            leaves 128 registers a thread at the start, too few for a wgmma of 256 columns.
        across_m: how many of them lie side by side along M; the others lie along N.
        rows: rows of C per consumer, a multiple of 64.
        columns: columns of C per consumer, a power of two up to 256.
        block_k: depth of one slot; 64 elements of two bytes are one 128-byte swizzle row.
        slots: depth of the ring.
        store_columns: columns per staging buffer on the way out.
        store_buffers: staging buffers per consumer.
        b_is_nk: B lies in memory as [N, K] (a linear layer's weight) and not as [K, N].
        fills_slots: the partials of several peers share a slot of the ring (reduce-scatter).
        pairs_quarters: two quarters of a lone peer's partial share one (reduce-scatter between two ranks).
        consumer_registers: per thread, for the consumers after the first; the first gets what is left.
        producer_registers: per thread of the producer.
    """

    consumers: int = 2
    across_m: int = 2
    rows: int = 64
    columns: int = 256
    block_k: int = 64
    slots: int = 4
    store_columns: int = 64
    store_buffers: int = 2
    b_is_nk: bool = True
    fills_slots: bool = False
    pairs_quarters: bool = False
    consumer_registers: int = 224
    producer_registers: int = 32

    def __post_init__(self) -> None:
        if self.consumers != 2:
            raise ValueError(f"two consumers, not {self.consumers}")
        if self.consumers % self.across_m:
            raise ValueError(f"{self.consumers} consumers cannot lie {self.across_m} abreast along M")
        if self.rows % WARPGROUP_ROWS:
            raise ValueError(f"a consumer takes a multiple of {WARPGROUP_ROWS} rows, not {self.rows}")
        if self.fills_slots and self.pairs_quarters:
            raise ValueError("a slot holds the partials of several peers, or two quarters of a lone peer's, not both")
        if self.pairs_quarters and (self.columns % (2 * self.store_columns) or self.slot_bytes < 2 * self.box_bytes):
            raise ValueError(
                f"{self.columns} columns cannot come {self.store_columns} and {self.store_columns} a slot: {self}"
            )
        if self.shared_bytes > SHARED_MEMORY_LIMIT:
            raise ValueError(
                f"{self.shared_bytes} bytes of shared memory, a block may own {SHARED_MEMORY_LIMIT}: {self}"
            )

    @cached_property
    def across_n(self) -> int:
        """Consumers side by side along N."""
        return self.consumers // self.across_m

    @cached_property
    def block_m(self) -> int:
        """Rows of a tile."""
        return self.rows * self.across_m

    @cached_property
    def block_n(self) -> int:
        """Columns of a tile."""
        return self.columns * self.across_n

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes that TMA delivers into one slot; both types we take have two bytes an element."""
        return (self.block_m + self.block_n) * self.block_k * 2

    @cached_property
    def shared_bytes(self) -> int:
        """Shared memory of a program, in bytes: the ring, the staging buffers, two mbarriers a slot."""
        staging = self.consumers * self.store_buffers * self.rows * self.store_columns * 2
        return self.slots * (self.slot_bytes + 16) + staging

    @cached_property
    def box_bytes(self) -> int:
        """Bytes of `store_columns` columns of a tile: what comes of a peer's partial at a time."""
        return self.block_m * self.store_columns * 2

    @cached_property
    def partials_a_slot(self) -> int:
        """How many peers' partials share one slot of the ring, `store_columns` of a tile of each."""
        return self.slot_bytes // self.box_bytes if self.fills_slots else 1

    @cached_property
    def quarters_a_slot(self) -> int:
        """How many quarters (`store_columns`) of a lone peer's partial share one slot of the ring."""
        return 2 if self.pairs_quarters else 1

    @cached_property
    def acc_layout(self) -> NVMMADistributedLayout:
        """How a consumer's accumulator lies in the registers of its four warps."""
        return NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, self.columns, 16])

    @cached_property
    def partial_rows(self) -> int:
        """Rows of a quarter of a consumer's accumulator as a stored partial, in rows of `PARTIAL_WIDTH`."""
        return self.rows * self.columns // PARTIAL_WIDTH // PARTIAL_PIECES

    @cached_property
    def partial_bytes(self) -> int:
        """Bytes of what a slot brings of partials: a quarter of each consumer's."""
        return self.consumers * self.partial_rows * PARTIAL_WIDTH * 4

    @cached_property
    def partial_layout(self) -> DistributedLinearLayout:
        """How an accumulator, or a quarter of it, lies in the registers when it is stored, as [rows, `PARTIAL_WIDTH`].

        A thread has what it has in `acc_layout`: of a column's number the lowest bit, the two above and the fourth give
        register, lane and register; of a row's the lowest three, the fourth and the others lane, register, warp.
        """
        more = [[8 << bit, 0] for bit in range((self.columns // 16).bit_length() - 1)]
        return DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [1, 0], *more],
            lane_bases=[[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
            warp_bases=[[2, 0], [4, 0]], block_bases=[], shape=[8 << len(more), PARTIAL_WIDTH],
        )  # fmt: skip

    @cached_property
    def partial_shared_layout(self) -> NVMMASharedLayout:
        """How a quarter of a consumer's partial lies in shared memory: in rows, as in memory."""
        return NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)

    @cached_property
    def store_layout(self) -> NVMMASharedLayout:
        """How a staging buffer of the output lies in shared memory."""
        return swizzled(self.store_columns)

    @cached_property
    def store_layout_of_shard(self) -> NVMMASharedLayout:
        """The same bytes as a box of three axes, one shard deep."""
        return swizzled(self.store_columns, rank=3)

    @cached_property
    def store_layout_of_half(self) -> NVMMASharedLayout:
        """The same bytes as a box of four axes, one shard and one half of the columns deep."""
        return swizzled(self.store_columns, rank=4)

    @cached_property
    def boxes_in_a(self) -> int:
        """How many boxes of `store_columns` of a consumer's rows fit over A in a slot."""
        return self.block_m * self.block_k // (self.rows * self.store_columns)

    @cached_property
    def boxes_in_b(self) -> int:
        """How many of them fit over B."""
        return self.block_n * self.block_k // (self.rows * self.store_columns)

    @cached_property
    def b_block(self) -> list[int]:
        """Shape of one consumer's piece of B in a slot, as it lies in memory."""
        return [self.columns, self.block_k] if self.b_is_nk else [self.block_k, self.columns]

    @cached_property
    def half_b_block(self) -> list[int]:
        """Shape of half of its columns: where B's columns come in pairs, one box has the first of each."""
        half = self.columns // 2
        return [half, self.block_k] if self.b_is_nk else [self.block_k, half]


def swizzled(columns: int, rank: int = 2) -> NVMMASharedLayout:
    """Return the shared-memory layout of rows of `columns` two-byte elements, swizzled as widely as they allow."""
    return NVMMASharedLayout(swizzle_byte_width=min(128, columns * 2), element_bitwidth=16, rank=rank)


def team_size(tiles: int, programs: int, height: int) -> int:
    """How many programs form a team (`tile_order.share_of`): those of a column of tiles, or each alone.

    Alone, each reads its tile's columns by itself, and deep columns do not stay in L2 (12288 x 24576 of four row
    blocks: 1.09 times as long). Teams of less than a column were up to 0.6 % slower than none.
    """
    return height if tiles % height == programs % height == 0 else 1


class LastWave(NamedTuple):
    """The tiles that are left after full waves.

    Attributes:
        tiles: how many, less than programs.
        programs: programs that run at a time.
        k_blocks: K blocks of a tile.
        columns: of a tile.
        height: row blocks that they are walked together.
        peers: whose partials each of them adds up.
    """

    tiles: int
    programs: int
    k_blocks: int
    columns: int = 256
    height: int = 16
    peers: int = 0

    def cost(self, split: int) -> float:
        """Its cost, in tiles' times, under split-K by `split` (`EVEN`: stream-K)."""
        if split == 1:
            return 1.0 if self.tiles else 0.0
        share = self.tiles / self.programs
        if split == EVEN:
            idle, extra = EVEN_HELP * (1 - share), EVEN_BLOCKS + 1 / share
        else:
            rounds = -(-self.tiles * split // self.programs)
            idle, extra = PARTS_HELP * (1 - rounds / split), PART_BLOCKS * (split - 1)
        return 1 - idle + (extra + PEER_BLOCKS * self.peers) / self.k_blocks

    def can_be_shared(self) -> bool:
        """Whether there is a K block for every program."""
        return self.tiles * self.k_blocks >= self.programs

    def is_worth_sharing(self) -> bool:
        """Whether stream-K was ever best on a wave like this. In narrow tiles it was not."""
        some = self.tiles * MOST_SHARING >= self.programs and self.height >= FEWEST_ROW_BLOCKS
        return some and self.columns == 256 and self.can_be_shared()

    def split(self) -> int:
        """The cheapest split-K factor; 1 unless another is cheap enough."""
        likely: list[int] = [
            1,
            *range(2, min(MAX_SPLIT, self.k_blocks) + 1),
            *([EVEN] if self.is_worth_sharing() else []),
        ]
        costs = {split: WORTH_CUTTING if split == 1 else self.cost(split) for split in likely}
        return min(likely, key=costs.__getitem__)


def cut_last_wave(tiles: int, programs: int, k_blocks: int, split: int | None = None, **more: int) -> tuple[int, int]:
    """Decide how many tiles stay whole, and the split-K factor of the others.

    A function of the shape alone: the same shape always sums in the same order.

    Args:
        tiles: tiles of the output.
        programs: programs that run at a time.
        k_blocks: K blocks of a tile; a part has at least one.
        split: take this number of parts instead of the best, at most `MAX_SPLIT`; 1 cuts nothing, `EVEN` deals the K
            blocks out evenly.
        more: of `LastWave`.

    Returns:
        (whole_tiles, split): tiles in one piece, and parts of each of the others.

    Raises:
        ValueError: more parts than a workspace has flags for.
    """
    if split is not None and not EVEN <= split <= MAX_SPLIT:
        raise ValueError(
            f"tail_split={split}: a tile of the last wave is cut into 1 to {MAX_SPLIT} parts, or its K blocks are "
            f"dealt out evenly ({EVEN})"
        )
    wave = LastWave(tiles % programs, programs, k_blocks, **more)
    if wave.tiles == 0:
        return tiles, 1
    if split is None:
        split = wave.split()
    if split == 1 or split > k_blocks or (split == EVEN and not wave.can_be_shared()):
        return tiles, 1
    return tiles - wave.tiles, split
