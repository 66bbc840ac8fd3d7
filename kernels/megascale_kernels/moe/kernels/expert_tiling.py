# SPDX-License-Identifier: Apache-2.0
"""The tile of the warp-specialised kernels of a MoE layer: 128 rows, 256 columns of the weight, 64 of K."""

from dataclasses import dataclass, replace
from functools import cached_property

from triton.experimental.gluon.language import NVMMASharedLayout

from megascale_kernels.planning.tiling import Tiling, swizzled


@dataclass(frozen=True)
class ExpertTiling(Tiling):
    """A `Tiling` whose B is an expert's weight, [N, K], or gate and up of the same columns side by side.

    With `b_is_nk` False it is read the other way round, [K, N], for gradients.

    Attributes:
        halves: 2 where layer 0 makes one column of two (SwiGLU of gate and up), 1 where it stores all.
    """

    halves: int = 2

    @cached_property
    def out_columns(self) -> int:
        """Columns that a tile of layer 0 stores."""
        return self.columns // self.halves

    @cached_property
    def operand_layout(self) -> NVMMASharedLayout:
        """How A and B lie in a slot."""
        return swizzled(self.block_k)

    @cached_property
    def pair_layout(self) -> NVMMASharedLayout:
        """The same bytes of B as a box of three axes: gate and up, columns, K."""
        return swizzled(self.block_k, rank=3)

    @cached_property
    def b_layout(self) -> NVMMASharedLayout:
        """How B lies in a slot, whichever way it is read."""
        return self.operand_layout if self.b_is_nk else swizzled(self.columns)

    @cached_property
    def matrix_layout(self) -> NVMMASharedLayout:
        """The same bytes of a B that is [K, N] as a box of three axes, one expert deep."""
        return swizzled(self.columns, rank=3)


# The producer of layer 0 is a warpgroup that holds the addresses of eight rows a thread, so it keeps more registers; in
# layer 1 the warps beside the producer keep as many as the rows of eight experts need that they add up.
DISPATCH = ExpertTiling(consumer_registers=208, producer_registers=56)
COMBINE = replace(DISPATCH, slots=4, consumer_registers=176, producer_registers=128)
DISPATCH_BACKWARD = replace(DISPATCH, b_is_nk=False, halves=1)
COMBINE_BACKWARD = replace(COMBINE, b_is_nk=False)
# Rows of a token on a rank up to which a warp adds up more columns of them at once.
FEW_ROWS = 3


def columns_at_once(most_here: int) -> dict[str, int]:
    """How many columns a warp of layer 1 adds up at once, in the reducers and in the consumers.

    16 bytes a thread of each row, and twice that in the consumers, which then have nothing else to do. A warp waits for
    memory with so many bytes on their way, so where a token has few rows it takes twice as many columns of them. With
    more rows that made layers 2 % slower to 1 % faster.

    Args:
        most_here: rows that a token may have on a rank.
    """
    wider = 2 if most_here <= FEW_ROWS else 1
    return {"REDUCER_COLS": 256 * wider, "CONSUMER_COLS": 512 * wider}
