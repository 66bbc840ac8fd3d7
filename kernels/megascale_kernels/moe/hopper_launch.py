# SPDX-License-Identifier: Apache-2.0
"""The two products of a MoE layer by the warp-specialised kernels: their arguments, as `launch.py` wants them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megascale_kernels.memory.hopper_descriptors import ROOM_FOR_ANNOUNCEMENTS
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe.combine_kernel import MOE_COMBINE
from megascale_kernels.moe.dispatch_kernel import MOE_DISPATCH
from megascale_kernels.moe.expert_tiling import COMBINE, DISPATCH
from megascale_kernels.moe.hopper_combine import hopper_combine_kernel
from megascale_kernels.moe.hopper_dispatch import hopper_dispatch_kernel
from megascale_kernels.moe.moe_config import MoeConfig
from megascale_kernels.moe.tables import Routing, Sizes
from megascale_kernels.planning.tiling import swizzled

Prepared = tuple[Any, dict[str, Any], Callable[[int, int], tuple[Any, ...]]]
Channel = Callable[[int, int], tuple[Any, ...]]


def _options(workspace: Workspace) -> dict[str, Any]:
    return {
        "PROGRESS": workspace.progress, "TRACE": workspace.trace, "enable_fp_fusion": True, "num_warps": 4,
        "maxnreg": ROOM_FOR_ANNOUNCEMENTS,
    }  # fmt: skip


def _rows(matrix: Tensor, rows: int, columns: int) -> Any:  # noqa: ANN401 - a descriptor of Triton's, which have no types
    return TensorDescriptor.from_tensor(matrix, [rows, columns], swizzled(columns))


def prepare_dispatch(
    x: Tensor, w_in: Tensor, h: Tensor, routing: Routing, sizes: Sizes, workspace: Workspace, config: MoeConfig,
    channel: Channel, variant: int,
) -> Prepared:  # fmt: skip
    """Layer 0: kernel, compile-time constants, and arguments by slot and `counted`."""
    constants = {"CFG": DISPATCH, "OPERATOR": MOE_DISPATCH, **_options(workspace)}
    pairs = w_in.view(-1, sizes.inner, sizes.hidden)
    box = [2, DISPATCH.columns // 2, DISPATCH.block_k]

    def arguments(slot: int, counted: int) -> tuple[Any, ...]:
        gathered = workspace.local(slot, (sizes.world_size * sizes.pitch, sizes.hidden))
        return (
            x, gathered, TensorDescriptor.from_tensor(pairs, box, DISPATCH.pair_layout),
            _rows(h, DISPATCH.rows, DISPATCH.store_columns), routing.head, routing.rows, routing.tiles,
            *channel(slot, MOE_DISPATCH), variant, counted, sizes.pitch, -(-sizes.pitch // config.splits),
            config.splits, sizes.hidden, sizes.inner, config.group_m,
        )  # fmt: skip

    return hopper_dispatch_kernel, constants, arguments


def prepare_combine(
    ids: Tensor, w_out: Tensor, h: Tensor, y: Tensor, out: Tensor, routing: Routing, sizes: Sizes,
    workspace: Workspace, config: MoeConfig, channel: Channel, variant: int,
) -> Prepared:  # fmt: skip
    """Layer 1: the same."""
    constants = {"CFG": COMBINE, "TOP_K": sizes.top_k, "OPERATOR": MOE_COMBINE, **_options(workspace)}
    weight = w_out.view(-1, sizes.inner)
    blocks_n = -(-sizes.hidden // COMBINE.block_n)

    def arguments(slot: int, _: int) -> tuple[Any, ...]:
        return (
            _rows(h, COMBINE.rows, COMBINE.block_k), _rows(weight, COMBINE.columns, COMBINE.block_k),
            _rows(y, COMBINE.rows, COMBINE.store_columns), y, out, ids,
            routing.head, routing.pair_row, routing.pair_gate, routing.tiles, *channel(slot, MOE_COMBINE),
            workspace.layout.data(slot), variant, sizes.pitch, sizes.experts, sizes.hidden, sizes.inner,
            config.group_m, -(-blocks_n // (config.chunks or 1)),
        )  # fmt: skip

    return hopper_combine_kernel, constants, arguments
