# SPDX-License-Identifier: Apache-2.0
"""The shape of a Hopper matrix multiplication: how tiles lie over warpgroups and shared memory, and the last wave.

`Tiling` is a compile-time constant of the kernels in `hopper_ag.py` and `hopper_rs.py`. `cut_last_wave` decides, from
the shape alone, how the last, partial wave of tiles is filled.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from triton.experimental.gluon.language import NVMMADistributedLayout, NVMMASharedLayout

# What a block may own on compute capability 9.0, in bytes (227 KB).
SHARED_MEMORY_LIMIT = 232448
# One wgmma warpgroup multiplies 64 rows; more rows are several instructions.
WARPGROUP_ROWS = 64
# Each part beyond the first writes and reads 128 KB of fp32 and a flag. Measured on H200, whole launches: cutting pays
# for last waves up to about 60 % full, which nine K blocks per part describe (448, 1,792, 704 and 3,072 tiles on 132
# multiprocessors gain 4 to 10 %, 896 and 1,024 tiles would lose).
SEAM_COST_BLOCKS = 9
# Uncut, a partial wave costs one tile's time; a cut must promise a tenth less.
WORTH_CUTTING = 0.9
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
    def store_layout(self) -> NVMMASharedLayout:
        """How a staging buffer of the output lies in shared memory."""
        return swizzled(self.store_columns)

    @cached_property
    def b_block(self) -> list[int]:
        """Shape of one consumer's piece of B in a slot, as it lies in memory."""
        return [self.columns, self.block_k] if self.b_is_nk else [self.block_k, self.columns]


def swizzled(columns: int) -> NVMMASharedLayout:
    """Return the shared-memory layout of rows of `columns` two-byte elements, swizzled as widely as they allow."""
    return NVMMASharedLayout(swizzle_byte_width=min(128, columns * 2), element_bitwidth=16, rank=2)


def cut_last_wave(tiles: int, programs: int, k_blocks: int, split: int | None = None) -> tuple[int, int]:
    """Decide how many tiles stay whole and into how many parts each other tile is cut.

    A partial wave of t tiles costs one tile's time. Cut into s parts each, it costs ceil(t s / programs) / s, and the
    seam. A function of the shape alone: the same shape always sums in the same order.

    Args:
        tiles: tiles of the output.
        programs: programs that run at a time.
        k_blocks: K blocks of a tile; a part has at least one.
        split: take this number of parts instead of the best, at most `MAX_SPLIT`; 1 cuts nothing.

    Returns:
        (whole_tiles, split): tiles in one piece, and parts of each of the others.

    Raises:
        ValueError: more parts than a workspace has flags for.
    """
    if split is not None and not 1 <= split <= MAX_SPLIT:
        raise ValueError(f"tail_split={split}: a tile of the last wave is cut into 1 to {MAX_SPLIT} parts")
    rest = tiles % programs
    if rest == 0 or split == 1:
        return tiles, 1
    if split is None:
        cost = {
            parts: math.ceil(rest * parts / programs) / parts + SEAM_COST_BLOCKS * (parts - 1) / k_blocks
            for parts in range(2, min(MAX_SPLIT, k_blocks) + 1)
        }
        cost[1] = WORTH_CUTTING
        split = min(cost, key=lambda parts: (cost[parts], parts))
    if split == 1 or split > k_blocks:
        return tiles, 1
    return tiles - rest, split
