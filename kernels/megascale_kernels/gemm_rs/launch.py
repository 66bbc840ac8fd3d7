# SPDX-License-Identifier: Apache-2.0
"""Launch GEMM + reduce-scatter: the grid and the arguments, with our staging slot on every peer.

What runs on the device: `triton_kernel.py`, and `hopper.py` where `config.kernel` is "hopper".
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megascale_kernels.device.layout import MAX_RANKS, SLOTS, signature
from megascale_kernels.gemm_rs.triton_kernel import GEMM_RS, gemm_rs_kernel
from megascale_kernels.memory.operands import Weight, compiled_apart, processors, tma_can_read
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config
from megascale_kernels.planning.tile_order import (
    scatter_group,
)


def launch(x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, workspace: Workspace, config: Config) -> None:
    """Launch on the current stream: x [M, K], w [K, N], out [M / world_size, N].

    Raises:
        WorkspaceTooSmall: the partial results do not fit.
        TileTimeout, RankMismatch: an earlier launch failed.
    """
    m_shard, n_size = out.shape
    flags = -(-m_shard // config.block_m) * -(-n_size // config.block_n)
    workspace.need(
        (workspace.world_size - 1) * m_shard * n_size * x.element_size(),
        flags,
        f"gemm_rs of {tuple(x.shape)} x {n_size}",
    )
    kernel: Any = gemm_rs_kernel
    if config.kernel == "hopper" and tma_can_read(out):
        from megascale_kernels.gemm_rs.hopper import hopper_gemm_rs_kernel as kernel
        from megascale_kernels.gemm_rs.hopper_launch import prepare_gemm_rs

        grid, arguments, constants = prepare_gemm_rs(x, weight, out, bias, workspace, config)
    else:
        grid, arguments, constants = prepare(x, weight, out, bias, workspace, config)

    def warm() -> None:
        for slot in range(SLOTS):
            kernel.warmup(*arguments(slot), grid=grid, **constants)

    slot = workspace.begin(("gemm_rs", config, *constants.items(), compiled_apart(m_shard, n_size, x.shape[1])), warm)
    kernel[grid](*arguments(slot), **constants)


def prepare(
    x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, workspace: Workspace, config: Config
) -> tuple[tuple[int], Callable[[int], tuple[Any, ...]], dict[str, Any]]:
    """The grid, a function from slot to arguments, and compile-time constants of `gemm_rs_kernel`."""
    m_shard, n_size = out.shape
    tiles = -(-m_shard // config.block_m) * -(-n_size // config.block_n) * workspace.world_size
    part = [config.block_m, config.block_n // 4]
    blocks_m = -(-m_shard // config.block_m)
    group_m = scatter_group(blocks_m, workspace.world_size, config.group_m, config.mixed)
    store_tma = tma_can_read(out)
    weight_block = [config.block_n, config.block_k] if weight.is_nk else [config.block_k, config.block_n]
    constants = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "W_IS_NK": weight.is_nk, "HAS_BIAS": bias is not None, "STORE_TMA": store_tma,
        "PUSH_TMA": config.push_tma and tma_can_read(out), "OPERATOR": GEMM_RS, "PROGRESS": workspace.progress,
        "TRACE": workspace.trace, "enable_fp_fusion": True, "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip

    push_tma = config.push_tma and tma_can_read(out)

    def peer_descriptors(slot: int) -> tuple[Any, ...]:
        """Our staging slot on every peer, in the order in which tiles are sent."""
        owners = [(workspace.rank + step) % workspace.world_size for step in range(1, workspace.world_size)]
        offsets = [(workspace.rank - owner - 1) % workspace.world_size * m_shard * n_size for owner in owners]
        slots = [workspace.peer(o, slot, (m_shard, n_size), at) for o, at in zip(owners, offsets, strict=True)]
        staged = [TensorDescriptor.from_tensor(staging, part) if push_tma else staging for staging in slots or [out]]
        return (*staged, *[None] * (MAX_RANKS - 1 - len(staged)))

    def arguments(slot: int) -> tuple[Any, ...]:
        return (
            TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
            TensorDescriptor.from_tensor(weight.matrix, weight_block),
            TensorDescriptor.from_tensor(out, part) if store_tma else out,
            *peer_descriptors(slot), out, bias if bias is not None else out,
            workspace.memory, workspace.peers, workspace.status, workspace.board, workspace.trace_words,
            workspace.layout.flags(slot), workspace.layout.channels, slot, workspace.rank, workspace.world_size,
            signature(GEMM_RS, m_shard, n_size, x.shape[1], config.code), int(workspace.deadline_s * 1e6),
            workspace.layout.data(slot), config.code, m_shard, n_size, x.shape[1], group_m,
        )  # fmt: skip

    return (min(processors(x.device), tiles),), arguments, constants
