# SPDX-License-Identifier: Apache-2.0
"""Tensors as the warp-specialised kernels load and store them, and the arguments that both of them take."""

from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megascale_kernels.memory.operands import Weight
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.stream_k import Cut
from megascale_kernels.planning.tiling import (
    PARTIAL_WIDTH,
    WHOLE,
    Tiling,
    swizzled,
)

# Registers per thread at the start. Twelve warps of 168 would own the register file, and the kernel that announces a
# copy (one warp of at most 32 registers) could not run beside them: an all-gather would wait for itself.
ROOM_FOR_ANNOUNCEMENTS = 160


def common_arguments(workspace: Workspace, slot: int, partials: Tensor, stamp: int) -> tuple[Any, ...]:
    """What both take to build their `Channel`, in the order of their parameters."""
    return (
        workspace.memory, workspace.peers, workspace.status, workspace.board, workspace.trace_words, partials,
        workspace.layout.flags(slot), workspace.layout.channels, slot, workspace.rank, workspace.world_size, stamp,
        int(workspace.deadline_s * 1e6),
    )  # fmt: skip


def partials_of(workspace: Workspace, tiling: Tiling, work: Cut) -> Tensor:
    """Memory of this rank for the partial sums that cut tiles leave."""
    return workspace.scratch(max(1, work.partial_places * tiling.consumers * tiling.rows * tiling.columns))


def weight_descriptor(weight: Weight, tiling: Tiling, *, by_halves: bool = False) -> Any:
    """Of the weight, a K block of a tile's columns at a time; `by_halves`: of one half of them."""
    block = tiling.half_b_block if by_halves else tiling.b_block
    return TensorDescriptor.from_tensor(weight.matrix, block, swizzled(block[1]))


def rows_descriptor(rows: Tensor, tiling: Tiling) -> Any:
    """Of rows of the input, a K block of one consumer's rows at a time."""
    return TensorDescriptor.from_tensor(rows, [tiling.rows, tiling.block_k], swizzled(tiling.block_k))


def split_descriptor(partials: Tensor, tiling: Tiling, work: Cut) -> Any:
    """Of what parts of cut tiles leave for each other; None where no tile is cut."""
    if work.way == WHOLE:
        return None
    rows = partials.view(-1, PARTIAL_WIDTH)
    return TensorDescriptor.from_tensor(rows, [tiling.partial_rows, PARTIAL_WIDTH], tiling.partial_shared_layout)


def out_descriptor(out: Tensor, tiling: Tiling) -> Any:
    """Of an output, or a staging buffer, a slice of one consumer's columns at a time."""
    return TensorDescriptor.from_tensor(out, [tiling.rows, tiling.store_columns], tiling.store_layout)


def shards_descriptor(out: Tensor, shards: int, tiling: Tiling) -> Any:
    """Of an output of as many shards as ranks, whose last rows do not fill a tile: each shard is clipped by itself."""
    shape = [shards, out.shape[0] // shards, out.shape[1]]
    strides = [shape[1] * shape[2], shape[2], 1]
    return TensorDescriptor(out, shape, strides, [1, tiling.rows, tiling.store_columns], tiling.store_layout_of_shard)


def halves_descriptor(wide: Tensor, shards: int, tiling: Tiling) -> Any:
    """Of gates and values side by side, [M, 2 F]: each half of the columns and each shard of the rows by itself."""
    rows, columns = wide.shape[0] // shards, wide.shape[1] // 2
    strides = [rows * 2 * columns, 2 * columns, columns, 1]
    box = [1, tiling.rows, 1, tiling.store_columns]
    return TensorDescriptor(wide, [shards, rows, 2, columns], strides, box, tiling.store_layout_of_half)
