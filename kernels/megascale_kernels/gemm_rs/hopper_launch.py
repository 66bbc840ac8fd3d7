# SPDX-License-Identifier: Apache-2.0
"""Launch the warp-specialised GEMM + reduce-scatter: the grid and the arguments of `hopper.py`.

The same contract as `launch.prepare`, which `launch.launch` leaves for this when `config.kernel` is "hopper".
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megascale_kernels.device.layout import MAX_RANKS, signature
from megascale_kernels.gemm_rs.triton_kernel import GEMM_RS
from megascale_kernels.memory.hopper_descriptors import (
    ROOM_FOR_ANNOUNCEMENTS,
    common_arguments,
    out_descriptor,
    partials_of,
    rows_descriptor,
    split_descriptor,
    weight_descriptor,
)
from megascale_kernels.memory.operands import Weight, processors
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config
from megascale_kernels.planning.stream_k import (
    DEEP_K,
    FEW_WAVES,
    MANY_WAVES,
    NANOSECONDS_PER_K_BLOCK,
    Walk,
    cut,
    pairs_quarters,
    tiling_of,
)
from megascale_kernels.planning.tile_order import scatter_group, scatter_height


def prepare_gemm_rs(
    x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, workspace: Workspace, config: Config
) -> tuple[tuple[int], Callable[[int], tuple[Any, ...]], dict[str, Any]]:
    """The grid, a function from slot to arguments, and compile-time constants."""
    m_shard, n_size = out.shape
    k_size, world_size, rank = x.shape[1], workspace.world_size, workspace.rank
    programs = processors(x.device)
    tiles = -(-m_shard // config.block_m) * -(-n_size // config.block_n) * world_size
    pairs = pairs_quarters(world_size)
    fills_slots = not pairs and k_size >= DEEP_K and tiles >= MANY_WAVES * programs
    tiling = tiling_of(config, is_nk=weight.is_nk, keeps_tiles=True, fills_slots=fills_slots, pairs_quarters=pairs)
    blocks_m = -(-m_shard // tiling.block_m)
    group_m = scatter_group(blocks_m, world_size, config.group_m, config.mixed)
    height = scatter_height(blocks_m, world_size, config.group_m, config.mixed)
    walk = Walk(world_size, height, world_size - 1)
    work = cut(tiling, m_shard, n_size, k_size, walk, programs, config.tail_split)
    stamp = signature(GEMM_RS, m_shard, n_size, k_size, config.code)
    partials = partials_of(workspace, tiling, work)
    busy = work.units >= FEW_WAVES * programs
    pace_ns = work.blocks_k * NANOSECONDS_PER_K_BLOCK // tiling.store_buffers if busy else 0
    constants = {
        "CFG": tiling, "CUT": work.way, "HAS_BIAS": bias is not None, "OPERATOR": GEMM_RS,
        "PROGRESS": workspace.progress, "TRACE": workspace.trace, "num_warps": 4, "maxnreg": ROOM_FOR_ANNOUNCEMENTS,
        "enable_fp_fusion": True,
    }  # fmt: skip

    def staged(owner: int, slot: int) -> Tensor:
        """Our slot of a peer's staging buffer."""
        return workspace.peer(owner, slot, (m_shard, n_size), (rank - owner - 1) % world_size * m_shard * n_size)

    def descriptors(slot: int) -> tuple[Any, ...]:
        """Our staging buffer, the output, and our slots on the peers in the order in which tiles are sent."""
        output = out_descriptor(out, tiling)
        if world_size == 1:
            return (output, output, output, *[None] * (MAX_RANKS - 2))
        owners = [(rank + step) % world_size for step in range(1, world_size)]
        peers = [out_descriptor(staged(owner, slot), tiling) for owner in owners]
        partial = out_descriptor(workspace.local(slot, ((world_size - 1) * m_shard, n_size)), tiling)
        return (partial, output, *peers, *[None] * (MAX_RANKS - 1 - len(peers)))

    def arguments(slot: int) -> tuple[Any, ...]:
        return (
            rows_descriptor(x, tiling), weight_descriptor(weight, tiling), split_descriptor(partials, tiling, work),
            *descriptors(slot),
            bias if bias is not None else out, *common_arguments(workspace, slot, partials, stamp),
            config.code, pace_ns,
            m_shard, n_size, k_size, work.blocks_m, work.blocks_n, work.blocks_k, group_m, work.whole_tiles, work.parts,
            work.units,
        )  # fmt: skip

    return (work.grid,), arguments, constants
