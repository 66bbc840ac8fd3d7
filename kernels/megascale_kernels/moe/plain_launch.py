# SPDX-License-Identifier: Apache-2.0
"""The two products of a MoE layer by the kernels in plain Triton: their arguments, as `launch.py` wants them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megascale_kernels.memory.operands import processors
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe.kernels.combine_kernel import MOE_COMBINE, MOE_COMBINE_BACKWARD, combine_kernel
from megascale_kernels.moe.kernels.dispatch_kernel import MOE_DISPATCH, MOE_DISPATCH_BACKWARD, dispatch_kernel
from megascale_kernels.moe.moe_config import MoeConfig
from megascale_kernels.moe.tables import Routing, Sizes

MOST_REDUCERS_SHARE = 4  # at most a quarter of the programs only add up

Prepared = tuple[Any, dict[str, Any], Callable[[int, int], tuple[Any, ...]]]
Channel = Callable[[int, int], tuple[Any, ...]]


def _options(workspace: Workspace, config: MoeConfig) -> dict[str, Any]:
    return {
        "BLOCK_K": config.block_k, "PROGRESS": workspace.progress, "TRACE": workspace.trace, "enable_fp_fusion": True,
        "num_warps": config.warps, "num_stages": config.stages, "FOLLOWS": bool(config.follows),
    }  # fmt: skip


def prepare_dispatch(
    x: Tensor, ids: Tensor, weight: Tensor, h: Tensor, gate: Tensor | None, up: Tensor | None, routing: Routing,
    sizes: Sizes, workspace: Workspace, config: MoeConfig, channel: Channel, variant: int, *, backward: bool = False,
) -> Prepared:  # fmt: skip
    """Layer 0: kernel, compile-time constants, and arguments by slot and `counted`.

    Args:
        x: tokens, or the gradients of outputs.
        ids: experts of each token, [T, top_k] int32.
        weight: w_in; w_out in the backward.
        h: [rows, I], what comes out.
        gate: [rows, I] with any stride, where gate is stored as well; None where it is not.
        up: the same of up.
        routing: the tables.
        sizes: what all ranks agree on.
        workspace: whose launch it is.
        config: how to run.
        channel: the arguments of a channel, by slot and operator.
        variant: what ranks compare beside sizes.
        backward: take the weight the other way round, and no SwiGLU.
    """
    operator = MOE_DISPATCH_BACKWARD if backward else MOE_DISPATCH
    box = [config.block_k, config.block_n] if backward else [config.block_n, config.block_k]
    # A captured graph announces copies by a kernel of one warp, which must find registers beside this one.
    constants = {
        "BLOCK_M": sizes.tile_rows, "BLOCK_N": config.block_n, "SAVES": gate is not None, "BACKWARD": backward,
        "TOP_K": sizes.top_k, "SELECTIVE": config.selective,
        "OPERATOR": operator, "maxnreg": 232,
    }  # fmt: skip

    def stored(matrix: Tensor | None) -> Any:  # noqa: ANN401 - a descriptor of Triton's, which have no types
        return None if matrix is None else TensorDescriptor.from_tensor(matrix, [sizes.tile_rows, config.block_n])

    def arguments(slot: int, counted: int) -> tuple[Any, ...]:
        gathered = workspace.local(slot, (sizes.world_size * sizes.pitch, sizes.hidden))
        return (
            x, ids if config.selective else None, gathered,
            TensorDescriptor.from_tensor(weight.view(-1, weight.shape[-1]), box), stored(h), stored(gate), stored(up),
            routing.head, routing.rows, routing.tiles, *channel(slot, operator), variant, counted,
            workspace.layout.data(slot), x.shape[0], sizes.experts, sizes.pitch,
            -(-sizes.pitch // config.units), config.units, sizes.hidden, sizes.inner, config.group_m,
            config.shift(processors(x.device)),
        )  # fmt: skip

    return dispatch_kernel, constants | _options(workspace, config), arguments


def prepare_combine(
    ids: Tensor, weight: Tensor, h: Tensor, y: Tensor, out: Tensor, routing: Routing, sizes: Sizes,
    workspace: Workspace, config: MoeConfig, channel: Channel, variant: int, *, backward: bool = False,
) -> Prepared:  # fmt: skip
    """Layer 1: the same; in the backward h is [rows, 2 I] and the weight w_in."""
    operator = MOE_COMBINE_BACKWARD if backward else MOE_COMBINE
    box = [config.block_k, config.combine_n] if backward else [config.combine_n, config.block_k]
    blocks_n = -(-sizes.hidden // config.combine_n)
    reducers = min(config.reducers, processors(out.device) // MOST_REDUCERS_SHARE)
    constants = {
        "BLOCK_M": sizes.tile_rows, "BLOCK_N": config.combine_n, "TOP_K": sizes.top_k, "MOST_HERE": sizes.most_here,
        "TOKENS": config.job_tokens,
        "COLS": config.job_cols, "BACKWARD": backward, "OPERATOR": operator,
    }  # fmt: skip

    def arguments(slot: int, _: int) -> tuple[Any, ...]:
        return (
            TensorDescriptor.from_tensor(h, [sizes.tile_rows, config.block_k]),
            TensorDescriptor.from_tensor(weight.view(-1, weight.shape[-1]), box),
            TensorDescriptor.from_tensor(y, [sizes.tile_rows, config.combine_n // 4]),
            y, out, ids, routing.head, routing.pair_row, routing.pair_gate, routing.tiles,
            *channel(slot, operator), workspace.layout.data(slot), variant, sizes.pitch, sizes.experts,
            sizes.hidden, h.shape[1], config.group_m, -(-blocks_n // (config.chunks or 1)),
            int(bool(config.mixes)), reducers,
            config.shift(processors(out.device) - reducers),
        )  # fmt: skip

    return combine_kernel, constants | _options(workspace, config), arguments
