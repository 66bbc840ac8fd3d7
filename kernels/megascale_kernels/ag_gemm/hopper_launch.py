# SPDX-License-Identifier: Apache-2.0
"""Launch the warp-specialised all-gather + GEMM: the grid and the arguments of `hopper.py`.

The same contract as `launch.prepare`, which `launch.launch` leaves for this when `config.kernel` is "hopper".
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megascale_kernels.ag_gemm.hopper import BY_MATRIX, BY_SHARD, BY_THREADS, GRADIENTS, SWIGLU, SWIGLU_AND_WIDE
from megascale_kernels.ag_gemm.triton_kernel import AG_GEMM
from megascale_kernels.device.layout import signature
from megascale_kernels.memory.hopper_descriptors import (
    ROOM_FOR_ANNOUNCEMENTS,
    common_arguments,
    halves_descriptor,
    out_descriptor,
    partials_of,
    rows_descriptor,
    shards_descriptor,
    split_descriptor,
    weight_descriptor,
)
from megascale_kernels.memory.operands import Weight, processors, tma_can_read
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config
from megascale_kernels.planning.stream_k import cut_gather, tiling_of
from megascale_kernels.planning.tiling import Tiling


def prepare_ag_gemm(
    x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, workspace: Workspace, config: Config, unit_rows: int,
    wide: Tensor | None = None, *, activates: bool = False,
) -> tuple[tuple[int], Callable[[int, int], tuple[Any, ...]], dict[str, Any]]:  # fmt: skip
    """The grid, a function from slot and `counted` to arguments, and compile-time constants.

    With `wide`, [M, 2 N], the product is the gradient of swiglu(wide), and `out` that of wide. If it `activates`,
    `out`, [M, N / 2], is swiglu of the product, which is stored in `wide`, [M, N], if that is given.
    """
    m_shard, k_size = x.shape
    tiling = tiling_of(config, is_nk=weight.is_nk)
    programs = processors(x.device)
    columns = 2 * whole_halves(weight.n_size // 2, tiling) if activates else weight.n_size
    work, lead = cut_gather(tiling, m_shard, columns, k_size, workspace.world_size, programs, config)
    if activates:
        store = (SWIGLU if wide is None else SWIGLU_AND_WIDE).value
    else:
        store = way_to_store(out, m_shard, tiling) if wide is None else GRADIENTS.value
    pitch = work.blocks_m * tiling.block_m
    stamp = signature(AG_GEMM, m_shard, weight.n_size, k_size, config.code)
    partials = partials_of(workspace, tiling, work)
    constants = {
        "CFG": tiling, "CUT": work.way, "TALL": lead < work.blocks_n, "HAS_BIAS": bias is not None,
        "STORE": store, "OPERATOR": AG_GEMM, "PROGRESS": workspace.progress, "TRACE": workspace.trace,
        "enable_fp_fusion": True, "num_warps": 4, "maxnreg": ROOM_FOR_ANNOUNCEMENTS,
    }  # fmt: skip

    def output(out: Tensor) -> Any:  # noqa: ANN401 - a descriptor of Triton's, which have no types, or the tensor
        if store == GRADIENTS.value:
            return halves_descriptor(out, workspace.world_size, tiling)
        if store == BY_SHARD.value or activates:
            return shards_descriptor(out, workspace.world_size, tiling)
        return out_descriptor(out, tiling) if store == BY_MATRIX.value else out

    def arguments(slot: int, counted: int) -> tuple[Any, ...]:
        gathered = workspace.local(slot, (workspace.world_size * pitch, k_size)) if workspace.world_size > 1 else x
        return (
            rows_descriptor(x, tiling), rows_descriptor(gathered, tiling),
            weight_descriptor(weight, tiling, by_halves=activates), split_descriptor(partials, tiling, work),
            None if wide is None else halves_descriptor(wide, workspace.world_size, tiling), output(out), out,
            bias if bias is not None else out, *common_arguments(workspace, slot, partials, stamp),
            config.code, counted,
            m_shard, weight.n_size, k_size, unit_rows,
            work.blocks_m, work.blocks_n, work.blocks_k, config.group_m, work.whole_tiles, work.parts, work.units, lead,
        )  # fmt: skip

    return (work.grid,), arguments, constants


def whole_halves(columns: int, tiling: Tiling) -> int:
    """Columns that whole tiles have of which each takes half of its width, the other half from their values."""
    half = tiling.block_n // 2
    return -(-columns // half) * half


def way_to_store(out: Tensor, m_shard: int, tiling: Tiling) -> int:
    """How the tiles of an output are stored: by TMA where it can write the output's rows."""
    way = BY_SHARD if m_shard % tiling.block_m else BY_MATRIX
    return int((way if tma_can_read(out) else BY_THREADS).value)
