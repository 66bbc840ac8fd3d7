# SPDX-License-Identifier: Apache-2.0
"""The two products of a MoE layer by the warp-specialised kernels: their arguments, as `launch.py` wants them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megascale_kernels.memory.hopper_descriptors import ROOM_FOR_ANNOUNCEMENTS
from megascale_kernels.memory.operands import processors
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe.kernels.combine_kernel import MOE_COMBINE, MOE_COMBINE_BACKWARD
from megascale_kernels.moe.kernels.dispatch_kernel import MOE_DISPATCH, MOE_DISPATCH_BACKWARD
from megascale_kernels.moe.kernels.expert_tiling import (
    COMBINE,
    COMBINE_BACKWARD,
    DISPATCH,
    DISPATCH_BACKWARD,
    columns_at_once,
)
from megascale_kernels.moe.kernels.hopper_combine import hopper_combine_kernel
from megascale_kernels.moe.kernels.hopper_dispatch import hopper_dispatch_kernel
from megascale_kernels.moe.moe_config import MoeConfig
from megascale_kernels.moe.tables import Routing, Sizes
from megascale_kernels.planning.tiling import swizzled

Prepared = tuple[Any, dict[str, Any], Callable[[int, int], tuple[Any, ...]]]
Channel = Callable[[int, int], tuple[Any, ...]]


def _options(workspace: Workspace, config: MoeConfig) -> dict[str, Any]:
    return {
        "FOLLOWS": bool(config.follows),
        "PROGRESS": workspace.progress, "TRACE": workspace.trace, "enable_fp_fusion": True, "num_warps": 4,
        "maxnreg": ROOM_FOR_ANNOUNCEMENTS,
    }  # fmt: skip


def _rows(matrix: Tensor, rows: int, columns: int) -> Any:  # noqa: ANN401 - a descriptor of Triton's, which have no types
    return TensorDescriptor.from_tensor(matrix, [rows, columns], swizzled(columns))


def _pairs(weight: Tensor) -> Any:  # noqa: ANN401 - as above
    """A descriptor of w_in, [experts, 2, I, H]: gate and up of the same columns in one box."""
    matrices = weight.view(-1, *weight.shape[2:])
    return TensorDescriptor.from_tensor(
        matrices, [2, DISPATCH.columns // 2, DISPATCH.block_k], DISPATCH.pair_layout
    )  # fmt: skip


def _experts(weight: Tensor) -> Any:  # noqa: ANN401 - as above
    """A descriptor of a weight that is read the other way round, [experts, K, N]."""
    tiling = DISPATCH_BACKWARD
    return TensorDescriptor.from_tensor(weight, [1, tiling.block_k, tiling.columns], tiling.matrix_layout)


def prepare_dispatch(
    x: Tensor, ids: Tensor, weight: Tensor, h: Tensor, gate: Tensor | None, up: Tensor | None, routing: Routing,
    sizes: Sizes, workspace: Workspace, config: MoeConfig, channel: Channel, variant: int, *, backward: bool = False,
) -> Prepared:  # fmt: skip
    """Layer 0, as `plain_launch.prepare_dispatch`."""
    operator = MOE_DISPATCH_BACKWARD if backward else MOE_DISPATCH
    tiling = DISPATCH_BACKWARD if backward else DISPATCH
    constants = {"CFG": tiling, "SAVES": gate is not None, "OPERATOR": operator, **_options(workspace, config)}
    constants |= {"TOP_K": sizes.top_k, "SELECTIVE": config.selective}

    def stored(matrix: Tensor | None) -> Any:  # noqa: ANN401 - as above
        return None if matrix is None else _rows(matrix, tiling.rows, tiling.store_columns)

    def arguments(slot: int, counted: int) -> tuple[Any, ...]:
        gathered = workspace.local(slot, (sizes.world_size * sizes.pitch, sizes.hidden))
        return (
            x, ids if config.selective else None, gathered, _experts(weight) if backward else _pairs(weight), stored(h),
            stored(gate), stored(up), routing.head, routing.rows, routing.tiles, *channel(slot, operator), variant,
            counted, workspace.layout.data(slot), x.shape[0], sizes.experts, sizes.pitch,
            -(-sizes.pitch // config.units), config.units, sizes.hidden, sizes.inner, config.group_m,
            config.shift(processors(x.device)), int(bool(config.cut)),
        )  # fmt: skip

    return hopper_dispatch_kernel, constants, arguments


def prepare_combine(
    ids: Tensor, weight: Tensor, h: Tensor, y: Tensor, out: Tensor, routing: Routing, sizes: Sizes,
    workspace: Workspace, config: MoeConfig, channel: Channel, variant: int, *, backward: bool = False,
) -> Prepared:  # fmt: skip
    """Layer 1, as `plain_launch.prepare_combine`."""
    operator = MOE_COMBINE_BACKWARD if backward else MOE_COMBINE
    tiling = COMBINE_BACKWARD if backward else COMBINE
    constants = {
        "CFG": tiling,
        "TOP_K": sizes.top_k,
        "MOST_HERE": sizes.most_here,
        "OPERATOR": operator,
        **columns_at_once(sizes.most_here),
        **_options(workspace, config),
    }
    blocks_n = -(-sizes.hidden // COMBINE.block_n)

    def arguments(slot: int, _: int) -> tuple[Any, ...]:
        return (
            _rows(h, COMBINE.rows, COMBINE.block_k),
            _experts(weight.view(sizes.experts, -1, sizes.hidden)) if backward
            else _rows(weight.view(-1, sizes.inner), COMBINE.columns, COMBINE.block_k),
            _rows(y, COMBINE.rows, COMBINE.store_columns), y, out, ids,
            routing.head, routing.pair_row, routing.pair_gate, routing.tiles, *channel(slot, operator),
            workspace.layout.data(slot), variant, sizes.pitch, sizes.experts, sizes.hidden, h.shape[1],
            config.group_m, -(-blocks_n // (config.chunks or 1)), int(bool(config.mixes)),
            config.shift(processors(out.device)),
            int(bool(config.cut)), int(bool(config.staggered)),
        )  # fmt: skip

    return hopper_combine_kernel, constants, arguments
