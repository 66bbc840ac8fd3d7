# SPDX-License-Identifier: Apache-2.0
"""Launch the backward: K and V gathered anew, gradients of all keys, and their sums beside the gradient of q.

    compute   row sums | gradients of all ranks' keys | gradient of our queries           | add what came
    copies    K and V to the peers                    | their keys' gradients to the peers

Scores are computed twice, by keys and by queries: seven products of matrices where a kernel that adds to dq by atomics
takes five. In return no sum depends on who was fast, and the peers' gradients travel while the second pass runs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale_kernels.attention import partial_sums
from megascale_kernels.attention.backward_kernels import (
    ATTENTION_BACKWARD,
    key_gradients_kernel,
    query_gradients_kernel,
    row_sums_kernel,
)
from megascale_kernels.attention.hopper_launch import box_of, hopper_constants, tilings_for
from megascale_kernels.attention.launch import LOG2_E, Gather, Operands, block_of, by_parts, compiler_options
from megascale_kernels.attention.problem import AttentionConfig, Problem
from megascale_kernels.attention.tile_walk import key_order, query_order
from megascale_kernels.attention.tiling_hopper import AttentionTiling
from megascale_kernels.device.layout import SLOTS, signature
from megascale_kernels.memory.channel_arguments import channel_arguments
from megascale_kernels.memory.operands import processors
from megascale_kernels.memory.workspace import Workspace

SUM_ROWS = 64  # of a program of row sums
STAGES = 2  # blocks in shared memory at a time, of each operand; three do not fit beside what stays there


class Given(NamedTuple):
    """What backward starts from.

    Attributes:
        operands: of the forward.
        lse: base-2 logarithms of the rows' sums, fp32 [Hq, rows].
        dout: gradient of the output, [rows, Hq * D].
        delta: row sums of dout * out, fp32 [Hq, rows].
    """

    operands: Operands
    lse: Tensor
    dout: Tensor
    delta: Tensor


class Sizes(NamedTuple):
    """Rows of a block of queries, of keys, and of the output."""

    queries: int
    keys: int
    out: int


class BackwardLaunch:
    """All that is the same in every backward of one problem: made once, kept by the workspace.

    Args:
        problem: what is computed.
        workspace: whose launches they are.
        config: how to run.

    Raises:
        WorkspaceTooSmall: the gathered K and V do not fit.
    """

    def __init__(self, problem: Problem, workspace: Workspace, config: AttentionConfig) -> None:
        self.problem, self.workspace, self.config = problem, workspace, config
        self.gather = Gather(problem, workspace, config.splits)
        self.travels = problem.world_size > 1
        self.variant = problem.variant << 8 | self.gather.units
        self.stamp = signature(
            ATTENTION_BACKWARD, problem.rows, problem.q_heads * problem.head_dim, problem.kv_columns, self.variant
        )
        self.tilings = tilings_for(problem, config)
        self.key_kernel: Any = key_gradients_kernel
        self.query_kernel: Any = query_gradients_kernel
        self.keys_block, self.queries_block = config.keys_block, config.queries_block
        if self.tilings is not None:
            from megascale_kernels.attention.hopper_keys import hopper_key_gradients_kernel
            from megascale_kernels.attention.hopper_queries import hopper_query_gradients_kernel

            self.key_kernel = hopper_key_gradients_kernel
            self.query_kernel = hopper_query_gradients_kernel
            self.keys_block, self.queries_block = (tiling.block_m for tiling in self.tilings)
        parts = problem.world_size * problem.halves
        key_tiles = problem.batch * problem.kv_heads * parts * -(-problem.chunk // self.keys_block)
        query_tiles = problem.batch * problem.q_heads * problem.halves * -(-problem.chunk // self.queries_block)
        programs = processors(workspace.device)
        self.key_grid = (min(programs, key_tiles),)
        self.query_grid = (query_tiles if self.tilings is None else min(programs, query_tiles),)
        self.orders: tuple[Tensor, Tensor] | None = None
        self.key = ("attention_backward", config, problem.halves, problem.causal, problem.varlen, problem.head_dim)

    def key_gradients(self, given: Given) -> tuple[int, Tensor]:
        """Launch the gather and the first pass.

        Returns:
            the slot that holds the peers' K and V until the next launch begins, and [W, 2, rows, Hkv * D]: what our
            queries contribute to the gradients of each rank's k and v.

        Raises:
            TileTimeout, RankMismatch: an earlier launch failed.
        """
        workspace, problem = self.workspace, self.problem
        k = given.operands.k
        partials = torch.empty(problem.world_size, 2, *k.shape, dtype=k.dtype, device=k.device)
        slot = workspace.begin(self.key, self._warmer(given, partials))
        counted = self.travels and workspace.counts_on_device()
        if self.travels:
            self.gather.push(k, given.operands.v, slot, self.stamp, counted=counted)
        arguments = self._key_arguments(given, partials, slot, counted=counted)
        self.key_kernel[self.key_grid](*arguments, **self._key_options())
        if self.travels:
            workspace.join_copies()
        return slot, partials

    def query_gradients(self, given: Given, slot: int) -> Tensor:
        """Launch the second pass: the gradient of q, [rows, Hq * D]."""
        dq = torch.empty_like(given.operands.q)
        arguments = self._query_arguments(given, dq, slot)
        self.query_kernel[self.query_grid](*arguments, **self._query_options())
        return dq

    def run(self, given: Given) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, as rows; on the current stream.

        Raises:
            TileTimeout, RankMismatch: an earlier launch failed.
        """
        slot, partials = self.key_gradients(given)
        if not self.travels:
            return self.query_gradients(given, slot), partials[0, 0], partials[0, 1]
        sent = partial_sums.start(partials.flatten(1), self.workspace.beside(), self.workspace)
        dq = self.query_gradients(given, slot)
        dk, dv = partial_sums.finish(sent).view(2, *given.operands.k.shape)
        return dq, dk, dv

    def _key_options(self) -> dict[str, Any]:
        config, workspace = self.config, self.workspace
        own = {
            "AWAIT": self.travels, "OPERATOR": ATTENTION_BACKWARD, "PROGRESS": workspace.progress,
            "TRACE": workspace.trace, "enable_fp_fusion": True,
        }  # fmt: skip
        if self.tilings is not None:
            return {**own, **hopper_constants(self.tilings[0], self.problem)}
        blocks = {"BLOCK_M": config.keys_step, "BLOCK_N": config.keys_block}
        return {**own, **blocks, **self._masks(), **compiler_options(config.warps, STAGES)}

    def _query_options(self) -> dict[str, Any]:
        config = self.config
        if self.tilings is not None:
            own = {"OPERATOR": ATTENTION_BACKWARD, "enable_fp_fusion": True}
            return {**own, **hopper_constants(self.tilings[1], self.problem)}
        blocks = {"BLOCK_M": config.queries_block, "BLOCK_N": config.queries_step}
        options = {"enable_fp_fusion": True, "num_warps": config.warps, "num_stages": STAGES}
        return {**blocks, **self._masks(), **options}

    def _masks(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "HEAD_DIM": problem.head_dim, "HALVES": problem.halves, "CAUSAL": problem.causal, "VARLEN": problem.varlen,
        }  # fmt: skip

    def _tensors(self, given: Given, slot: int, out: Tensor, sizes: Sizes, tiling: AttentionTiling | None) -> list[Any]:
        """Descriptors that a pass loads from and stores to, in the order of the kernels' parameters."""
        problem, operands = self.problem, given.operands
        queries = [by_parts(rows, problem) for rows in (operands.q, given.dout)]
        keys = [by_parts(rows, problem) for rows in (operands.k, operands.v)]
        keys += self.gather.gathered(slot, operands.k)
        blocks = [(part, sizes.queries) for part in queries] + [(part, sizes.keys) for part in keys]
        blocks.append((out, sizes.out))
        if tiling is not None:
            return [box_of(part, rows, tiling) for part, rows in blocks]
        return [block_of(part, rows, problem.head_dim) for part, rows in blocks]

    def _key_arguments(self, given: Given, partials: Tensor, slot: int, *, counted: bool) -> tuple[Any, ...]:
        config, tiling = self.config, None if self.tilings is None else self.tilings[0]
        sizes = Sizes(config.keys_step, config.keys_block, config.keys_block)
        if tiling is not None:
            sizes = Sizes(tiling.block_n, tiling.rows, tiling.rows)
        parts = partials.view(-1, self.problem.chunk, self.problem.kv_columns)
        bounds = () if tiling is not None else given.operands.bounds
        return (
            *self._tensors(given, slot, parts, sizes, tiling), given.lse, given.delta, self._orders(given)[0], *bounds,
            *self._numbers(slot, counted=counted),
        )  # fmt: skip

    def _query_arguments(self, given: Given, dq: Tensor, slot: int) -> tuple[Any, ...]:
        problem, config = self.problem, self.config
        tiling = None if self.tilings is None else self.tilings[1]
        sizes = Sizes(config.queries_block, config.queries_step, config.queries_block)
        if tiling is not None:
            sizes = Sizes(tiling.rows, tiling.block_n, tiling.rows)
        descriptors = self._tensors(given, slot, by_parts(dq, problem), sizes, tiling)
        sums = (given.lse, given.delta, self._orders(given)[1])
        if tiling is not None:
            return (*descriptors, *sums, *self._numbers(slot, counted=False))
        return (
            *descriptors, *sums, *given.operands.bounds, self.workspace.rank, problem.world_size, problem.batch,
            problem.chunk, problem.q_heads, problem.group, problem.scale, problem.scale * LOG2_E,
        )  # fmt: skip

    def _numbers(self, slot: int, *, counted: bool) -> tuple[Any, ...]:
        problem = self.problem
        return (
            *channel_arguments(self.workspace, slot, self.stamp), self.variant, int(counted), problem.batch,
            problem.chunk, problem.q_heads, problem.group, self.gather.unit_rows, problem.scale,
            problem.scale * LOG2_E,
        )  # fmt: skip

    def _orders(self, given: Given) -> tuple[Tensor, Tensor]:
        """Tiles of keys and of queries in the order in which they are walked."""
        if self.orders is not None:
            return self.orders
        rank, bounds = self.workspace.rank, given.operands.bounds
        orders = (
            key_order(self.problem, rank, self.keys_block, bounds),
            query_order(self.problem, rank, self.queries_block, bounds),
        )
        if not self.problem.varlen and not self.workspace.is_capturing():
            self.orders = orders  # one that a graph computes when it is replayed is not kept
        return orders

    def _warmer(self, given: Given, partials: Tensor) -> Callable[[], None]:
        def warm() -> None:
            for slot in range(SLOTS):
                keys = self._key_arguments(given, partials, slot, counted=False)
                self.key_kernel.warmup(*keys, grid=self.key_grid, **self._key_options())
                queries = self._query_arguments(given, given.operands.q, slot)
                self.query_kernel.warmup(*queries, grid=self.query_grid, **self._query_options())
            if self.travels:
                self.gather.warm(self.stamp)

        return warm


def row_sums(out: Tensor, dout: Tensor, problem: Problem) -> Tensor:
    """Row sums of dout * out of each head, fp32 [Hq, rows]."""
    delta = torch.empty(problem.q_heads, problem.rows, dtype=torch.float32, device=out.device)
    row_sums_kernel[(-(-problem.rows // SUM_ROWS), problem.q_heads)](
        out, dout, delta, problem.rows, out.shape[1], BLOCK=SUM_ROWS, HEAD_DIM=problem.head_dim, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return delta


def backward(
    operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, problem: Problem, workspace: Workspace,
    config: AttentionConfig,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q [rows, Hq * D], k and v [rows, Hkv * D]; on the current stream.

    Args:
        operands: of the forward.
        out: what the forward returned.
        lse: likewise.
        dout: the gradient of out.
        problem: as in the forward.
        workspace: as in the forward.
        config: how to run.

    Raises:
        WorkspaceTooSmall: the gathered K and V do not fit.
        TileTimeout, RankMismatch: an earlier launch failed.
    """
    key = ("attention_backward", problem, config, workspace.deadline_s)
    plan = workspace.plan(key, lambda: BackwardLaunch(problem, workspace, config))
    return plan.run(Given(operands, lse, dout, row_sums(out, dout, problem)))
