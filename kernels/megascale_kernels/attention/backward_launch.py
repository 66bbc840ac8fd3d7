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

from megascale_kernels.ag_gemm.launch import channel_arguments
from megascale_kernels.attention import partial_sums
from megascale_kernels.attention.backward_kernels import (
    ATTENTION_BACKWARD,
    key_gradients_kernel,
    query_gradients_kernel,
    row_sums_kernel,
)
from megascale_kernels.attention.launch import LOG2_E, Gather, Operands, block_of, by_parts, compiler_options
from megascale_kernels.attention.problem import AttentionConfig, Problem
from megascale_kernels.attention.walk import key_order, query_order
from megascale_kernels.device.layout import SLOTS, signature
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
        parts = problem.world_size * problem.halves
        key_tiles = problem.batch * problem.kv_heads * parts * -(-problem.chunk // config.keys_block)
        query_tiles = problem.batch * problem.q_heads * problem.halves * -(-problem.chunk // config.queries_block)
        self.key_grid = (min(processors(workspace.device), key_tiles),)
        self.query_grid = (query_tiles,)
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
        key_gradients_kernel[self.key_grid](*arguments, **self._key_options())
        if self.travels:
            workspace.join_copies()
        return slot, partials

    def query_gradients(self, given: Given, slot: int) -> Tensor:
        """Launch the second pass: the gradient of q, [rows, Hq * D]."""
        dq = torch.empty_like(given.operands.q)
        arguments = self._query_arguments(given, dq, slot)
        query_gradients_kernel[self.query_grid](*arguments, **self._query_options())
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
        return {
            "BLOCK_M": config.keys_step, "BLOCK_N": config.keys_block, "AWAIT": self.travels,
            "OPERATOR": ATTENTION_BACKWARD, "PROGRESS": workspace.progress, "TRACE": workspace.trace, **self._shared(),
            **compiler_options(config.warps, STAGES),
        }  # fmt: skip

    def _query_options(self) -> dict[str, Any]:
        return {
            "BLOCK_M": self.config.queries_block, "BLOCK_N": self.config.queries_step, **self._shared(),
            "num_warps": self.config.warps, "num_stages": STAGES,
        }  # fmt: skip

    def _shared(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "HEAD_DIM": problem.head_dim, "HALVES": problem.halves, "CAUSAL": problem.causal, "VARLEN": problem.varlen,
            "enable_fp_fusion": True,
        }  # fmt: skip

    def _tensors(self, given: Given, slot: int, queries: int, keys: int) -> tuple[Any, ...]:
        """Descriptors that both passes load from, in blocks of so many queries and keys."""
        problem, operands = self.problem, given.operands
        gathered = self.gather.gathered(slot, operands.k)
        blocks = ((operands.q, queries), (given.dout, queries), (operands.k, keys), (operands.v, keys))
        return (
            *(block_of(by_parts(rows, problem), block, problem.head_dim) for rows, block in blocks),
            *(block_of(parts, keys, problem.head_dim) for parts in gathered),
        )

    def _key_arguments(self, given: Given, partials: Tensor, slot: int, *, counted: bool) -> tuple[Any, ...]:
        problem, config = self.problem, self.config
        parts = partials.view(-1, problem.chunk, problem.kv_columns)
        return (
            *self._tensors(given, slot, config.keys_step, config.keys_block),
            block_of(parts, config.keys_block, problem.head_dim), given.lse, given.delta,
            self._orders(given)[0], given.operands.bounds.begin, given.operands.bounds.end,
            *channel_arguments(self.workspace, slot, self.stamp), self.variant, int(counted), problem.batch,
            problem.chunk, problem.q_heads, problem.group, self.gather.unit_rows, problem.scale,
            problem.scale * LOG2_E,
        )  # fmt: skip

    def _query_arguments(self, given: Given, dq: Tensor, slot: int) -> tuple[Any, ...]:
        problem, config = self.problem, self.config
        return (
            *self._tensors(given, slot, config.queries_block, config.queries_step),
            block_of(by_parts(dq, problem), config.queries_block, problem.head_dim), given.lse, given.delta,
            self._orders(given)[1], given.operands.bounds.begin, given.operands.bounds.end, self.workspace.rank,
            problem.world_size, problem.batch, problem.chunk, problem.q_heads, problem.group, problem.scale,
            problem.scale * LOG2_E,
        )  # fmt: skip

    def _orders(self, given: Given) -> tuple[Tensor, Tensor]:
        """Tiles of keys and of queries in the order in which they are walked."""
        bounds = given.operands.bounds
        if self.orders is None or self.problem.varlen:
            rank, config = self.workspace.rank, self.config
            self.orders = (
                key_order(self.problem, rank, config.keys_block, bounds),
                query_order(self.problem, rank, config.queries_block, bounds),
            )
        return self.orders

    def _warmer(self, given: Given, partials: Tensor) -> Callable[[], None]:
        def warm() -> None:
            for slot in range(SLOTS):
                keys = self._key_arguments(given, partials, slot, counted=False)
                key_gradients_kernel.warmup(*keys, grid=self.key_grid, **self._key_options())
                queries = self._query_arguments(given, given.operands.q, slot)
                query_gradients_kernel.warmup(*queries, grid=self.query_grid, **self._query_options())
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
