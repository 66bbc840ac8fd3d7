# SPDX-License-Identifier: Apache-2.0
"""Sizes of the warp-specialised forward: blocks, slots, registers, and how everything lies in them."""

from dataclasses import dataclass
from functools import cached_property

from triton.experimental.gluon.language import DotOperandLayout, NVMMADistributedLayout, NVMMASharedLayout

from megascale_kernels.errors import Unsupported
from megascale_kernels.planning.tiling import SHARED_MEMORY_LIMIT, swizzled

ELEMENT_BYTES = 2  # both types that the kernels take


@dataclass(frozen=True)
class AttentionTiling:
    """One program: two consumers of 64 rows each, and a producer.

    Rows are queries, and what comes in blocks is K and V; in the backward's pass over keys it is the other way round.

    Attributes:
        head_dim: elements of a head.
        block_n: rows of a block that comes.
        slots: blocks of either operand that comes, in shared memory.
        kept: operands that a tile keeps; the output takes as much as one of them.
        consumers: warpgroups that compute.
        rows: rows of a tile, of each.
        consumer_registers: per thread, for the second consumer; the first gets what is left.
        producer_registers: per thread of the producer.
    """

    head_dim: int
    block_n: int
    slots: int
    kept: int = 1
    consumers: int = 2
    rows: int = 64
    consumer_registers: int = 224
    producer_registers: int = 32

    def __post_init__(self) -> None:
        if self.block_n not in (64, 128, 256) or self.slots < 2:
            raise Unsupported(
                f"sp_attention: config: the warp-specialised kernel has blocks of 64, 128 or 256 keys and two stages "
                f"or more, not {self.block_n} and {self.slots}"
            )
        if self.shared_bytes > SHARED_MEMORY_LIMIT:
            raise Unsupported(
                f"sp_attention: config: {self.shared_bytes} bytes of shared memory, a block may own "
                f"{SHARED_MEMORY_LIMIT}: take fewer stages or a smaller block_n than {self.slots} and {self.block_n}"
            )

    @cached_property
    def block_m(self) -> int:
        """Queries of a tile."""
        return self.consumers * self.rows

    @cached_property
    def block_bytes(self) -> int:
        """Of one block of K or V."""
        return self.block_n * self.head_dim * ELEMENT_BYTES

    @cached_property
    def q_bytes(self) -> int:
        """Of the queries of a tile."""
        return self.block_m * self.head_dim * ELEMENT_BYTES

    @cached_property
    def shared_bytes(self) -> int:
        """Shared memory of a program: queries, output, both rings, four mbarriers a slot."""
        return (1 + self.kept) * self.q_bytes + self.slots * (2 * self.block_bytes + 32) + 64

    @cached_property
    def flat(self) -> NVMMASharedLayout:
        """How a block lies in shared memory, as the matrix instructions read it."""
        return swizzled(self.head_dim)

    @cached_property
    def boxed(self) -> NVMMASharedLayout:
        """The same bytes as a box of three axes, one part deep, as the TMA unit moves it."""
        return swizzled(self.head_dim, rank=3)

    @cached_property
    def scores(self) -> NVMMADistributedLayout:
        """How a consumer's scores lie in the registers of its four warps."""
        return NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, self.block_n, 16])

    @cached_property
    def out(self) -> NVMMADistributedLayout:
        """How its output does."""
        return NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, self.head_dim, 16])

    @cached_property
    def weights(self) -> DotOperandLayout:
        """How its weights do, as the left operand of the second product."""
        return DotOperandLayout(0, self.out, 2)
