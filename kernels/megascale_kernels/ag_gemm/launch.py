# SPDX-License-Identifier: Apache-2.0
"""Launch all-gather + GEMM: which CTAs carry the rows, the grid and the arguments, once for each shape.

A launch of a shape that came before writes the addresses of its tensors and goes (`launching/`). Triton launches where
the driver is out of reach, and in captured graphs.

The launch number of flags that a copy engine's stream writes is the host's, and in a captured graph, where the host
does not know it, `announce_kernel`'s. What runs on the device: `triton_kernel.py`, and `hopper.py` where
`config.kernel` is "hopper".
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megascale_kernels.ag_gemm.push import copies_of, own_copy, push_by_copy_engine
from megascale_kernels.ag_gemm.triton_kernel import AG_GEMM, PUSH_COLS, ag_gemm_kernel
from megascale_kernels.device.announce import announce_kernel
from megascale_kernels.device.layout import SLOTS, signature
from megascale_kernels.launching.ready import BIAS, OUT, WIDE, Copy, W, X, ready
from megascale_kernels.memory.channel_arguments import channel_arguments
from megascale_kernels.memory.operands import Weight, compiled_apart, processors, tma_can_read
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config
from megascale_kernels.planning.tile_order import (
    lead_columns,
)

if TYPE_CHECKING:
    from megascale_kernels.ag_gemm.decomposed import DecomposedGather


class GatherLaunch:
    """All that is the same in every launch of one shape: made once, kept by the workspace.

    Args:
        x: this rank's rows, [M / world_size, K].
        weight: [K, N].
        out: [M, N].
        bias: [N], or None.
        workspace: whose launches they are.
        config: how to run.
        own: this rank's rows are copied among the gathered ones too, while it multiplies.
        wide: [M, 2 N], whose gradient is stored in `out` where the product is that of swiglu(wide) ("hopper" only; no
            bias).
        activates: out, [M, N / 2], is swiglu of the product; that is stored in `wide`, [M, N], if it is given ("hopper"
            only).

    Raises:
        WorkspaceTooSmall: the gathered input does not fit.
    """

    def __init__(
        self, x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, workspace: Workspace, config: Config, *,
        own: bool = False, wide: Tensor | None = None, activates: bool = False,
    ) -> None:  # fmt: skip
        m_shard, k_size = x.shape
        world_size = workspace.world_size
        self.workspace, self.config, self.activates = workspace, config, activates
        self.weight = weight._replace(matrix=torch.empty(0))  # no caller's memory is kept
        self.m_shard, self.k_size = m_shard, k_size
        self.pitch = -(-m_shard // config.block_m) * config.block_m
        split_rows = -(-m_shard // config.splits)
        self.unit_rows = -(-split_rows // config.block_m) * config.block_m
        units = -(-m_shard // self.unit_rows)
        needed = world_size * self.pitch * k_size * x.element_size()
        workspace.need(needed, units, f"ag_gemm of {world_size} x {tuple(x.shape)}")
        self.kernel: Any = ag_gemm_kernel
        self.prepare: Any = prepare
        if config.kernel == "hopper":
            from megascale_kernels.ag_gemm.hopper import hopper_ag_gemm_kernel
            from megascale_kernels.ag_gemm.hopper_launch import prepare_ag_gemm

            self.kernel, self.prepare = hopper_ag_gemm_kernel, prepare_ag_gemm
        self.stamp = signature(AG_GEMM, m_shard, weight.n_size, k_size, config.code)
        self.apart = compiled_apart(m_shard, weight.n_size, k_size, self.unit_rows)
        grid, arguments, constants = self._prepared(x, weight, out, bias, wide)
        self.by_copy_engine = world_size > 1 and constants.get("COMM_CTAS", 0) == 0
        self.has_own = own and self.by_copy_engine
        self.key = ("ag_gemm", config, *constants.items(), self.apart)
        workspace.compile(self.key, lambda: self._warm(grid, arguments, constants))
        sources = {"x_desc": X, "x_ptr": X, "w_desc": W, "out_desc": OUT, "out_ptr": OUT}
        sources |= {"bias_ptr": OUT if bias is None else BIAS, "wide_desc": WIDE}
        native = workspace.native
        self.ready: list[object | None] = [None] * SLOTS
        if native is not None:
            copies = [self._copies(slot, x.element_size()) for slot in range(SLOTS)]
            self.ready = [
                ready(native, self.kernel, arguments(slot, 0), constants, grid, sources, copies[slot])
                for slot in range(SLOTS)
            ]

    def _prepared(
        self, x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, wide: Tensor | None
    ) -> tuple[tuple[int], Callable[[int, int], tuple[Any, ...]], dict[str, Any]]:
        given: dict[str, Any] = {} if wide is None else {"wide": wide}
        if self.activates:
            given["activates"] = True
        found: tuple[tuple[int], Callable[[int, int], tuple[Any, ...]], dict[str, Any]] = self.prepare(
            x, weight, out, bias, self.workspace, self.config, self.unit_rows, **given
        )
        return found

    def _warm(self, grid: tuple[int], arguments: Callable[[int, int], tuple[Any, ...]], constants: Any) -> None:  # noqa: ANN401 - a dictionary of whatever the kernel takes
        workspace = self.workspace
        for slot in range(SLOTS):
            self.kernel.warmup(*arguments(slot, 0), grid=grid, **constants)
        for last in (False, True):
            announce_kernel.warmup(
                *channel_arguments(workspace, 0, self.stamp), 0, 0, LAST=last, OPERATOR=AG_GEMM,
                PROGRESS=workspace.progress, TRACE=False, num_warps=1, enable_fp_fusion=True, grid=(1,),
            )  # fmt: skip

    def _copies(self, slot: int, element_bytes: int) -> list[Copy]:
        if not self.by_copy_engine:
            return []
        row_bytes = self.k_size * element_bytes
        copies = copies_of(self.workspace, slot, self.m_shard, self.unit_rows, self.pitch, row_bytes)
        # Behind the peers', who wait for theirs.
        return (
            [*copies, own_copy(self.workspace, slot, self.m_shard, self.pitch, row_bytes)] if self.has_own else copies
        )

    def run(self, x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None, wide: Tensor | None = None) -> int:
        """Launch on the current stream; returns the slot in which the gathered rows are.

        Raises:
            TileTimeout, RankMismatch: an earlier launch failed.
        """
        workspace = self.workspace
        made = self.ready[workspace.slot ^ 1]
        if made is None or workspace.counts_on_device():
            return self._run_by_triton(x, matrix, out, bias, wide)
        slot = workspace.next_slot()
        if wide is None:
            workspace.launch(made, self.stamp, x, matrix, out, bias, join=self.by_copy_engine)
        else:
            tensors = (x, matrix, out, out if bias is None else bias, wide)
            addresses = [tensor.data_ptr() for tensor in tensors]
            workspace.launch_at(made, self.stamp, *addresses, join=self.by_copy_engine)
        return slot

    def _run_by_triton(self, x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None, wide: Tensor | None) -> int:
        """Launch where only the device knows the launch number, or the driver is out of reach."""
        workspace, unit_rows = self.workspace, self.unit_rows
        weight = self.weight._replace(matrix=matrix)
        grid, arguments, constants = self._prepared(x, weight, out, bias, wide)
        by_kernel = self.by_copy_engine and workspace.counts_on_device()
        slot = workspace.begin(self.key, lambda: self._warm(grid, arguments, constants))
        if self.by_copy_engine:
            common = channel_arguments(workspace, slot, self.stamp) if by_kernel else None
            push_by_copy_engine(x, workspace, slot, unit_rows, self.stamp if common is None else common, self.pitch)
            if self.has_own:
                with workspace.copying():
                    self.gathered(x, slot)[workspace.rank].copy_(x, non_blocking=True)
        self.kernel[grid](*arguments(slot, int(by_kernel)), **constants)
        if self.by_copy_engine:
            workspace.join_copies()
        return slot

    def gathered(self, x: Tensor, slot: int) -> Tensor:
        """The gathered rows of the launch that took `slot`, [world_size, M / world_size, K]; ours if `has_own`."""
        workspace = self.workspace
        if workspace.world_size == 1:
            return x.view(1, self.m_shard, self.k_size)
        return workspace.local(slot, (workspace.world_size, self.pitch, self.k_size))[:, : self.m_shard]


def planned(
    x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, workspace: Workspace, config: Config, *,
    own: bool = False,
) -> "GatherLaunch | DecomposedGather":  # fmt: skip
    """The launch of this shape, made at its first call; `own`: this rank's rows come among the gathered ones too.

    Raises:
        WorkspaceTooSmall: the gathered input does not fit.
    """
    key = ("ag_gemm", *x.shape, *weight.matrix.shape, weight.n_size, weight.is_nk, bias is None, config)
    key += (workspace.deadline_s, own)
    return workspace.plan(key, lambda: _made(x, weight, out, bias, workspace, config, own=own))


def planned_gradients(
    x: Tensor, weight: Weight, out: Tensor, wide: Tensor, workspace: Workspace, config: Config
) -> GatherLaunch:
    """As `planned`, of the launch that ends in SwiGLU's gradient: out and wide are [M, 2 N], the rows are kept.

    Raises:
        WorkspaceTooSmall: the gathered input does not fit.
    """
    key = ("ag_gemm, swiglu", *x.shape, *weight.matrix.shape, weight.n_size, weight.is_nk, config, workspace.deadline_s)
    return workspace.plan(key, lambda: GatherLaunch(x, weight, out, None, workspace, config, own=True, wide=wide))


def planned_swiglu(
    x: Tensor, weight: Weight, out: Tensor, wide: Tensor | None, bias: Tensor | None, workspace: Workspace,
    config: Config, *, own: bool,
) -> GatherLaunch:  # fmt: skip
    """As `planned`, of the launch that ends in SwiGLU: out is [M, N / 2], wide, if it is kept, [M, N].

    Raises:
        WorkspaceTooSmall: the gathered input does not fit.
    """
    key = (
        "ag_gemm and swiglu", *x.shape, *weight.matrix.shape, weight.n_size, weight.is_nk, wide is None, bias is None,
    )  # fmt: skip
    key += (config, workspace.deadline_s, own)
    return workspace.plan(
        key, lambda: GatherLaunch(x, weight, out, bias, workspace, config, own=own, wide=wide, activates=True)
    )


def _made(
    x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, workspace: Workspace, config: Config, *, own: bool
) -> "GatherLaunch | DecomposedGather":
    if config.kernel != "cublas":
        return GatherLaunch(x, weight, out, bias, workspace, config, own=own)
    from megascale_kernels.ag_gemm.decomposed import DecomposedGather

    return DecomposedGather(x, weight, workspace, config, has_bias=bias is not None, own=own)


def launch(x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, workspace: Workspace, config: Config) -> Tensor:
    """Launch on the current stream: x [M / world_size, K], w [K, N], out [M, N].

    Returns:
        the gathered rows, [world_size, M / world_size, K], in which this rank's own are missing; they are overwritten
        two launches later.

    Raises:
        WorkspaceTooSmall: the gathered input does not fit.
        TileTimeout, RankMismatch: an earlier launch failed.
    """
    plan = planned(x, weight, out, bias, workspace, config)
    return plan.gathered(x, plan.run(x, weight.matrix, out, bias))


def prepare(
    x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, workspace: Workspace, config: Config, unit_rows: int
) -> tuple[tuple[int], Callable[[int, int], tuple[Any, ...]], dict[str, Any]]:
    """The grid, a function from slot and `counted` to arguments, and compile-time constants of `ag_gemm_kernel`."""
    m_shard, k_size = x.shape
    world_size = workspace.world_size
    pitch = -(-m_shard // config.block_m) * config.block_m
    store_tma = m_shard % config.block_m == 0 and tma_can_read(out)
    weight_block = [config.block_n, config.block_k] if weight.is_nk else [config.block_k, config.block_n]
    comm_ctas = config.comm_ctas if config.carrier == "sm" and world_size > 1 else 0
    constants = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "W_IS_NK": weight.is_nk, "HAS_BIAS": bias is not None, "STORE_TMA": store_tma, "COMM_CTAS": comm_ctas,
        "PUSH_COLS": PUSH_COLS, "OPERATOR": AG_GEMM, "PROGRESS": workspace.progress, "TRACE": workspace.trace,
        "enable_fp_fusion": True, "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip
    blocks_n = -(-weight.n_size // config.block_n)
    tiles = pitch // config.block_m * blocks_n * world_size
    lead = lead_columns(blocks_n, config.lead)
    stamp = signature(AG_GEMM, m_shard, weight.n_size, k_size, config.code)

    def arguments(slot: int, counted: int) -> tuple[Any, ...]:
        gathered = workspace.local(slot, (world_size * pitch, k_size)) if world_size > 1 else x
        return (
            TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
            TensorDescriptor.from_tensor(gathered, [config.block_m, config.block_k]),
            TensorDescriptor.from_tensor(weight.matrix, weight_block),
            TensorDescriptor.from_tensor(out, [config.block_m, config.block_n // 4]) if store_tma else out,
            x, out, bias if bias is not None else out, *channel_arguments(workspace, slot, stamp),
            workspace.layout.data(slot), config.code, counted, m_shard, weight.n_size, k_size, unit_rows, lead,
        )  # fmt: skip

    return (min(processors(x.device), tiles + comm_ctas),), arguments, constants
