# SPDX-License-Identifier: Apache-2.0
"""The two products of a MoE layer by the kernels in plain Triton: their arguments, as `launch.py` wants them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megascale_kernels.memory.operands import processors
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe.combine_kernel import MOE_COMBINE, combine_kernel
from megascale_kernels.moe.dispatch_kernel import MOE_DISPATCH, dispatch_kernel
from megascale_kernels.moe.moe_config import MoeConfig
from megascale_kernels.moe.tables import Routing, Sizes

MOST_REDUCERS_SHARE = 4  # at most a quarter of the programs only add up

Prepared = tuple[Any, dict[str, Any], Callable[[int, int], tuple[Any, ...]]]
Channel = Callable[[int, int], tuple[Any, ...]]


def _options(workspace: Workspace, config: MoeConfig) -> dict[str, Any]:
    return {
        "BLOCK_K": config.block_k, "PROGRESS": workspace.progress, "TRACE": workspace.trace, "enable_fp_fusion": True,
        "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip


def prepare_dispatch(
    x: Tensor, w_in: Tensor, h: Tensor, routing: Routing, sizes: Sizes, workspace: Workspace, config: MoeConfig,
    channel: Channel, variant: int,
) -> Prepared:  # fmt: skip
    """Layer 0: kernel, compile-time constants, and arguments by slot and `counted`."""
    weight = w_in.view(-1, sizes.hidden)
    # A captured graph announces copies by a kernel of one warp, which must find registers beside this one.
    constants = {"BLOCK_M": sizes.tile_rows, "BLOCK_N": config.block_n, "OPERATOR": MOE_DISPATCH, "maxnreg": 232}

    def arguments(slot: int, counted: int) -> tuple[Any, ...]:
        gathered = workspace.local(slot, (sizes.world_size * sizes.pitch, sizes.hidden))
        return (
            x, gathered, TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
            TensorDescriptor.from_tensor(h, [sizes.tile_rows, config.block_n]), routing.head, routing.rows,
            routing.tiles, *channel(slot, MOE_DISPATCH), variant, counted, sizes.pitch,
            -(-sizes.pitch // config.splits), config.splits, sizes.hidden, sizes.inner, config.group_m,
        )  # fmt: skip

    return dispatch_kernel, constants | _options(workspace, config), arguments


def prepare_combine(
    ids: Tensor, w_out: Tensor, h: Tensor, y: Tensor, out: Tensor, routing: Routing, sizes: Sizes,
    workspace: Workspace, config: MoeConfig, channel: Channel, variant: int,
) -> Prepared:  # fmt: skip
    """Layer 1: the same."""
    weight = w_out.view(-1, sizes.inner)
    blocks_n = -(-sizes.hidden // config.combine_n)
    reducers = min(config.reducers, processors(out.device) // MOST_REDUCERS_SHARE)
    constants = {
        "BLOCK_M": sizes.tile_rows, "BLOCK_N": config.combine_n, "TOP_K": sizes.top_k, "TOKENS": config.job_tokens,
        "COLS": config.job_cols, "OPERATOR": MOE_COMBINE,
    }  # fmt: skip

    def arguments(slot: int, _: int) -> tuple[Any, ...]:
        return (
            TensorDescriptor.from_tensor(h, [sizes.tile_rows, config.block_k]),
            TensorDescriptor.from_tensor(weight, [config.combine_n, config.block_k]),
            TensorDescriptor.from_tensor(y, [sizes.tile_rows, config.combine_n // 4]),
            y, out, ids, routing.head, routing.pair_row, routing.pair_gate, routing.tiles,
            *channel(slot, MOE_COMBINE), workspace.layout.data(slot), variant, sizes.pitch, sizes.experts,
            sizes.hidden, sizes.inner, config.group_m, -(-blocks_n // (config.chunks or 1)), reducers,
        )  # fmt: skip

    return combine_kernel, constants | _options(workspace, config), arguments
