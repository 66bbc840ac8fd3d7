# SPDX-License-Identifier: Apache-2.0
"""Launch the forward: copies of K and V to every peer, and the kernel that begins before they have arrived."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megascale_kernels.ag_gemm.triton_kernel import AG_GEMM
from megascale_kernels.attention.hopper_launch import box_of, hopper_constants, tiling_for
from megascale_kernels.attention.problem import AttentionConfig, Problem
from megascale_kernels.attention.tile_walk import Bounds, query_order
from megascale_kernels.attention.triton_kernel import ATTENTION, attention_kernel
from megascale_kernels.device.announce import announce_kernel
from megascale_kernels.device.layout import SLOTS, signature
from megascale_kernels.device.primitives import rank_copy_data
from megascale_kernels.launching.ready import Copy, ready
from megascale_kernels.memory.channel_arguments import channel_arguments
from megascale_kernels.memory.operands import processors
from megascale_kernels.memory.workspace import Workspace

LOG2_E = 1.4426950408889634
EIGHT_WARPS = 240  # registers a thread, of the 255 that there are
SMALL = {"num_warps": 1, "enable_fp_fusion": True}


# The addresses of a call, in this order.
Q, K, V, OUT, LSE, ORDER, BEGIN, END = range(8)
SOURCES = {
    "q_desc": Q, "k_desc": K, "v_desc": V, "out_desc": OUT, "lse_ptr": LSE, "order_ptr": ORDER, "begin_ptr": BEGIN,
    "end_ptr": END,
}  # fmt: skip


class Operands(NamedTuple):
    """What one rank brings, contiguous: q [rows, Hq * D], k and v [rows, Hkv * D], and where sequences lie."""

    q: Tensor
    k: Tensor
    v: Tensor
    bounds: Bounds


class Gather:
    """How K and V of one problem travel: pieces, room and flags.

    Args:
        problem: what is computed.
        workspace: whose slots take the peers' K and V.
        splits: pieces of a rank's tokens.

    Raises:
        WorkspaceTooSmall: the gathered K and V do not fit.
    """

    def __init__(self, problem: Problem, workspace: Workspace, splits: int) -> None:
        self.problem, self.workspace = problem, workspace
        self.unit_rows = -(-problem.rows // splits)
        self.units = -(-problem.rows // self.unit_rows)
        self.elements = problem.world_size * problem.rows * problem.kv_columns  # of all ranks' K
        if problem.world_size > 1:
            workspace.need(
                2 * self.elements * workspace.dtype.itemsize, self.units,
                f"attention over {problem.world_size} x {problem.rows} tokens, {2 * problem.kv_columns} elements of k "
                f"and v each (max_rows={problem.world_size * problem.rows}, max_gather_cols={2 * problem.kv_columns})",
            )  # fmt: skip

    def warm(self, stamp: int) -> None:
        """Compile what announces copies in captured graphs."""
        workspace = self.workspace
        for last in (False, True):
            announce_kernel.warmup(
                *channel_arguments(workspace, 0, stamp), 0, 0, LAST=last, OPERATOR=AG_GEMM,
                PROGRESS=workspace.progress, TRACE=False, grid=(1,), **SMALL,
            )  # fmt: skip

    def push(self, k: Tensor, v: Tensor, slot: int, stamp: int, *, counted: bool) -> None:
        """Copy this rank's K and V to every peer on the copy stream, the nearest reader first, piece by piece.

        Args:
            k: [rows, Hkv * D].
            v: the same.
            slot: of this launch.
            stamp: the signature of the launch.
            counted: the device knows the launch number, and the host does not.
        """
        workspace, problem = self.workspace, self.problem
        rank, world_size, columns = workspace.rank, workspace.world_size, problem.kv_columns
        with workspace.copying():
            for step in range(1, world_size):
                peer = (rank - step) % world_size
                for unit, first in enumerate(range(0, problem.rows, self.unit_rows)):
                    for which, matrix in enumerate((k, v)):
                        rows = matrix[first : first + self.unit_rows]
                        at = which * self.elements + (rank * problem.rows + first) * columns
                        rank_copy_data(workspace.peer(peer, slot, rows.shape, at), rows)
                    if not counted:
                        workspace.announce(peer, slot, unit, stamp)
                        continue
                    announce_kernel[(1,)](
                        *channel_arguments(workspace, slot, stamp), peer, unit,
                        LAST=step == world_size - 1 and unit == self.units - 1, OPERATOR=AG_GEMM,
                        PROGRESS=workspace.progress, TRACE=False, **SMALL,
                    )  # fmt: skip

    def copies(self, slot: int) -> list[Copy]:
        """What `push` copies and announces, in numbers: K is a call's address `K`, V its address `V`."""
        workspace, problem = self.workspace, self.problem
        rank, world_size, bytes_each = workspace.rank, workspace.world_size, workspace.dtype.itemsize
        found: list[Copy] = []
        for step in range(1, world_size):
            peer = (rank - step) % world_size
            base = workspace.data_address(peer, slot)
            for unit, first in enumerate(range(0, problem.rows, self.unit_rows)):
                at = first * problem.kv_columns * bytes_each
                size = min(self.unit_rows, problem.rows - first) * problem.kv_columns * bytes_each
                target = base + rank * problem.rows * problem.kv_columns * bytes_each + at
                found.append((at, size, target, 0, K))
                flag = workspace.flag_address(peer, slot, unit)
                found.append((at, size, target + self.elements * bytes_each, flag, V))
        return found

    def gathered(self, slot: int, own: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of all ranks in a slot, our own missing: [W * B * halves, chunk, Hkv * D] each."""
        problem = self.problem
        if problem.world_size == 1:
            return by_parts(own, problem), by_parts(own, problem)
        parts = problem.world_size * problem.batch * problem.halves
        both = self.workspace.local(slot, (2, parts, problem.chunk, problem.kv_columns))
        return both[0], both[1]


def by_parts(rows: Tensor, problem: Problem) -> Tensor:
    """Tokens of one rank by chunks: [rows, columns] to [B * halves, chunk, columns]."""
    return rows.view(problem.batch * problem.halves, problem.chunk, rows.shape[-1])


def block_of(parts: Tensor, block: int, head_dim: int) -> TensorDescriptor:
    """A descriptor of blocks of tokens of one head; what lies behind a part's last token reads 0 and is not written."""
    return TensorDescriptor.from_tensor(parts, [1, block, head_dim])


def compiler_options(warps: int, stages: int) -> dict[str, int]:
    """How a kernel of plain Triton is compiled that waits for peers.

    As with the warp-specialised ones, 1,024 registers a quarter of the register file stay free: a captured graph
    announces copies by a kernel of one warp, which must be resident beside the one that waits.
    """
    options = {"num_warps": warps, "num_stages": stages}
    return options | ({"maxnreg": EIGHT_WARPS} if warps == 8 else {})


class AttentionLaunch:
    """All that is the same in every forward of one problem: made once, kept by the workspace.

    Args:
        problem: what is computed.
        workspace: whose launches they are.
        config: how to run.
        gather: False reads the slot as it is and waits for no peer, for measurements of the kernel alone.

    Raises:
        WorkspaceTooSmall: the gathered K and V do not fit.
    """

    def __init__(self, problem: Problem, workspace: Workspace, config: AttentionConfig, *, gather: bool = True) -> None:
        self.problem, self.workspace, self.config = problem, workspace, config
        self.gather = Gather(problem, workspace, config.splits)
        self.travels = gather and problem.world_size > 1
        self.stamp = signature(
            ATTENTION, problem.rows, problem.q_heads * problem.head_dim, problem.kv_columns, self.variant
        )
        self.tiling = tiling_for(problem, config)
        self.block_m = config.block_m if self.tiling is None else self.tiling.block_m
        self.kernel: Any = attention_kernel
        if self.tiling is not None:
            from megascale_kernels.attention.hopper import hopper_attention_kernel

            self.kernel = hopper_attention_kernel
        blocks = -(-problem.chunk // self.block_m)
        self.tiles = problem.batch * problem.q_heads * problem.halves * blocks
        self.grid = (min(processors(workspace.device), self.tiles),)
        self.order: Tensor | None = None
        self.ready: list[object | None] | None = None
        self.key = ("attention", self.options()["AWAIT"], config, problem.halves, problem.causal, problem.varlen,
                    problem.head_dim)  # fmt: skip

    @property
    def variant(self) -> int:
        """What ranks must agree on beside sizes."""
        return self.problem.variant << 8 | self.gather.units

    def options(self) -> dict[str, Any]:
        """Compile-time constants and options of the kernel."""
        problem, config, workspace = self.problem, self.config, self.workspace
        common = {
            "AWAIT": self.travels, "OPERATOR": ATTENTION, "PROGRESS": workspace.progress, "TRACE": workspace.trace,
            "enable_fp_fusion": True,
        }  # fmt: skip
        if self.tiling is not None:
            return {**common, **hopper_constants(self.tiling, problem)}
        return {
            **common, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "HEAD_DIM": problem.head_dim,
            "HALVES": problem.halves, "CAUSAL": problem.causal, "VARLEN": problem.varlen,
            **compiler_options(config.warps, config.stages),
        }  # fmt: skip

    def _arguments(
        self, given: Operands, out: Tensor, lse: Tensor, order: Tensor, slot: int, *, counted: bool
    ) -> tuple[Any, ...]:
        problem, config, workspace = self.problem, self.config, self.workspace
        gathered = self.gather.gathered(slot, given.k)
        parts = [by_parts(rows, problem) for rows in (given.q, given.k, given.v)] + [*gathered, by_parts(out, problem)]
        queries = self.block_m if self.tiling is None else self.tiling.rows
        sizes = (queries, *[config.block_n] * 4, queries)
        bounds: tuple[Tensor, ...] = ()
        if self.tiling is None:
            blocks = [block_of(part, size, problem.head_dim) for part, size in zip(parts, sizes, strict=True)]
            bounds = given.bounds
        else:
            blocks = [box_of(part, size, self.tiling) for part, size in zip(parts, sizes, strict=True)]
        return (
            *blocks, lse, order, *bounds, *channel_arguments(workspace, slot, self.stamp), self.variant,
            int(counted), problem.batch, problem.chunk, problem.q_heads, problem.group, self.gather.unit_rows,
            problem.scale * LOG2_E,
        )  # fmt: skip

    def run(self, given: Operands, out: Tensor, lse: Tensor) -> int:
        """Launch on the current stream; returns the slot in which the peers' K and V are.

        Args:
            given: this rank's operands.
            out: [rows, Hq * D].
            lse: fp32 [Hq, rows].

        Raises:
            TileTimeout, RankMismatch: an earlier launch failed.
        """
        workspace = self.workspace
        order = self._order(given.bounds)
        made = self._made(given, out, lse, order)
        if made is not None:
            slot = workspace.next_slot()
            bounds = given.bounds
            tensors = (given.q, given.k, given.v, out, lse, order, bounds.begin, bounds.end)
            addresses = [tensor.data_ptr() for tensor in tensors]
            workspace.launch_at(made, self.stamp, *addresses, join=self.travels)
            return slot
        slot = workspace.begin(self.key, self._warmer(given, out, lse, order))
        counted = self.travels and workspace.counts_on_device()
        if self.travels:
            self.gather.push(given.k, given.v, slot, self.stamp, counted=counted)
        self.kernel[self.grid](*self._arguments(given, out, lse, order, slot, counted=counted), **self.options())
        if self.travels:
            workspace.join_copies()
        return slot

    def _made(self, given: Operands, out: Tensor, lse: Tensor, order: Tensor) -> object | None:
        """The launch for the next slot by the driver alone, None where Triton has to launch."""
        workspace = self.workspace
        native = workspace.native
        if native is None or workspace.counts_on_device():
            return None
        if self.ready is None:
            workspace.compile(self.key, self._warmer(given, out, lse, order))
            self.ready = [
                ready(
                    native, self.kernel, self._arguments(given, out, lse, order, slot, counted=False), self.options(),
                    self.grid, SOURCES, self.gather.copies(slot) if self.travels else (),
                )
                for slot in range(SLOTS)
            ]  # fmt: skip
        return self.ready[workspace.slot ^ 1]

    def _order(self, bounds: Bounds) -> Tensor:
        """In which order queries are walked; one that a graph computes when it is replayed is not kept."""
        if self.order is not None:
            return self.order
        order = query_order(self.problem, self.workspace.rank, self.block_m, bounds)
        if not self.problem.varlen and not self.workspace.is_capturing():
            self.order = order
        return order

    def _warmer(self, given: Operands, out: Tensor, lse: Tensor, order: Tensor) -> Callable[[], None]:
        def warm() -> None:
            for slot in range(SLOTS):
                arguments = self._arguments(given, out, lse, order, slot, counted=False)
                self.kernel.warmup(*arguments, grid=self.grid, **self.options())
            if self.travels:
                self.gather.warm(self.stamp)

        return warm


def forward(given: Operands, problem: Problem, workspace: Workspace, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Out [rows, Hq * D] and the base-2 logarithms of the rows' sums, fp32 [Hq, rows]; on the current stream.

    Raises:
        WorkspaceTooSmall: the gathered K and V do not fit.
        TileTimeout, RankMismatch: an earlier launch failed.
    """
    key = ("attention", problem, config, workspace.deadline_s)
    plan = workspace.plan(key, lambda: AttentionLaunch(problem, workspace, config))
    out = torch.empty_like(given.q)
    lse = torch.empty(problem.q_heads, problem.rows, dtype=torch.float32, device=given.q.device)
    plan.run(given, out, lse)
    return out, lse
