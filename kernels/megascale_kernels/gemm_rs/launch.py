# SPDX-License-Identifier: Apache-2.0
"""Launch GEMM + reduce-scatter: the grid and the arguments, with our staging slot on every peer.

What runs on the device: `triton_kernel.py`, and `hopper.py` where `config.kernel` is "hopper". Where it is "cublas",
the launch is another (`decomposed.py`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megascale_kernels.device.layout import MAX_RANKS, SLOTS, signature
from megascale_kernels.gemm_rs.triton_kernel import GEMM_RS, gemm_rs_kernel
from megascale_kernels.launching.ready import BIAS, OUT, W, X, ready
from megascale_kernels.memory.operands import Weight, compiled_apart, processors, tma_can_read
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config
from megascale_kernels.planning.tile_order import (
    scatter_group,
)

if TYPE_CHECKING:
    from megascale_kernels.gemm_rs.decomposed import DecomposedScatter


class ScatterLaunch:
    """All that is the same in every launch of one shape: made once, kept by the workspace.

    Args:
        x: [M, K].
        weight: [K, N].
        out: [M / world_size, N].
        bias: [N], or None.
        workspace: whose launches they are.
        config: how to run.

    Raises:
        WorkspaceTooSmall: the partial results do not fit.
    """

    def __init__(
        self, x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, workspace: Workspace, config: Config
    ) -> None:
        m_shard, n_size = out.shape
        self.workspace, self.config = workspace, config
        self.weight = weight._replace(matrix=torch.empty(0))  # no caller's memory is kept
        flags = -(-m_shard // config.block_m) * -(-n_size // config.block_n)
        needed = (workspace.world_size - 1) * m_shard * n_size * x.element_size()
        workspace.need(needed, flags, f"gemm_rs of {tuple(x.shape)} x {n_size}")
        self.kernel: Any = gemm_rs_kernel
        self.prepare: Any = prepare
        if config.kernel == "hopper" and tma_can_read(out):
            from megascale_kernels.gemm_rs.hopper import hopper_gemm_rs_kernel
            from megascale_kernels.gemm_rs.hopper_launch import prepare_gemm_rs

            self.kernel, self.prepare = hopper_gemm_rs_kernel, prepare_gemm_rs
        grid, arguments, constants = self.prepare(x, weight, out, bias, workspace, config)
        self.key = ("gemm_rs", config, *constants.items(), compiled_apart(m_shard, n_size, x.shape[1]))
        workspace.compile(self.key, lambda: self._warm(grid, arguments, constants))
        sources = {"x_desc": X, "w_desc": W, "out_desc": OUT, "out_ptr": OUT}
        sources["bias_ptr"] = OUT if bias is None else BIAS
        native = workspace.native
        self.ready: list[object | None] = [
            None if native is None else ready(native, self.kernel, arguments(slot), constants, grid, sources)
            for slot in range(SLOTS)
        ]

    def _warm(self, grid: tuple[int], arguments: Callable[[int], tuple[Any, ...]], constants: Any) -> None:  # noqa: ANN401 - a dictionary of whatever the kernel takes
        for slot in range(SLOTS):
            self.kernel.warmup(*arguments(slot), grid=grid, **constants)

    def run(self, x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None) -> None:
        """Launch on the current stream.

        Raises:
            TileTimeout, RankMismatch: an earlier launch failed.
        """
        workspace = self.workspace
        made = self.ready[workspace.slot ^ 1]
        if made is not None and not workspace.counts_on_device():
            workspace.next_slot()
            workspace.launch(made, 0, x, matrix, out, bias, join=False)
            return
        weight = self.weight._replace(matrix=matrix)
        grid, arguments, constants = self.prepare(x, weight, out, bias, workspace, self.config)
        slot = workspace.begin(self.key, lambda: self._warm(grid, arguments, constants))
        self.kernel[grid](*arguments(slot), **constants)


def planned(
    x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, workspace: Workspace, config: Config
) -> "ScatterLaunch | DecomposedScatter":
    """The launch of this shape, made at its first call.

    Raises:
        WorkspaceTooSmall: the partial results do not fit.
    """
    key = ("gemm_rs", *x.shape, *weight.matrix.shape, weight.n_size, weight.is_nk, bias is None, tma_can_read(out))
    key += (config, workspace.deadline_s)
    return workspace.plan(key, lambda: _made(x, weight, out, bias, workspace, config))


def _made(
    x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, workspace: Workspace, config: Config
) -> "ScatterLaunch | DecomposedScatter":
    if config.kernel != "cublas":
        return ScatterLaunch(x, weight, out, bias, workspace, config)
    from megascale_kernels.gemm_rs.decomposed import DecomposedScatter

    return DecomposedScatter(x, weight, out, bias, workspace, config)


def launch(x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, workspace: Workspace, config: Config) -> None:
    """Launch on the current stream: x [M, K], w [K, N], out [M / world_size, N].

    Raises:
        WorkspaceTooSmall: the partial results do not fit.
        TileTimeout, RankMismatch: an earlier launch failed.
    """
    planned(x, weight, out, bias, workspace, config).run(x, weight.matrix, out, bias)


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
