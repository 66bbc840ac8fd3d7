# SPDX-License-Identifier: Apache-2.0
"""Launch the backward of a MoE layer, overlapped: the gradient of a combine is a dispatch and the other way round.

    tables     of the forward's routing, which it kept: a copy
    dispatch   gradients of outputs to the ranks of the experts, once a rank; u = w_out^T g while they arrive
    SwiGLU     its gradient, gates' gradients, weight * h; no communication
    w_out      its gradient, (weight * h) against rows of g; no communication
    combine    gradients of gate and up times w_in; a token's rows added in fp32, sent once a rank while others multiply
    gates      their gradients home
    gather     tokens to the experts once more, written in the order of experts while they arrive
    w_in       its gradient; no communication

Where gate and up were not kept (`MoeConfig(keep=False)`) the forward's dispatch is launched again instead of the
gather. The tables, the buffers and the two products' kernels are the forward's, and so are their promises: no wait of
the host, every wait with a deadline, sums in a fixed order.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale_kernels.device.layout import MAX_CTAS
from megascale_kernels.launching.ready import OUT, W, X
from megascale_kernels.memory.operands import processors
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe.kernels.combine_kernel import MOE_COMBINE_BACKWARD
from megascale_kernels.moe.kernels.dispatch_kernel import MOE_DISPATCH_BACKWARD
from megascale_kernels.moe.kernels.gradient_kernels import (
    MOE_GATES,
    MOE_GATHER,
    clear_empty_kernel,
    gates_kernel,
    gather_kernel,
    swiglu_backward_kernel,
    take_rows_kernel,
    weight_gradient_kernel,
)
from megascale_kernels.moe.launch import LayerSteps, halves_of, ways
from megascale_kernels.moe.layer_steps import Step
from megascale_kernels.moe.moe_config import MoeConfig
from megascale_kernels.moe.tables import Sizes

ROWS, COLS = 8, 512  # that a program moves at once
PROGRAMS_EACH = 4  # of kernels that only move, for a multiprocessor
GATHERING_EACH = 2  # of the kernel that waits for tokens as well
GATES_PROGRAMS, GATES_TOKENS, GATES_PAIRS = 32, 32, 128
WEIGHT_TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}
SMALL_WEIGHT_TILE = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 16}
CLEARING_PARTS, CLEARING_COLS = 16, 1024
MOVING = {"enable_fp_fusion": True, "num_warps": 4}


WEIGHTS = ("w_in", "w_out")


class BackwardBuffers:
    """Memory of one rank for the backward of layers of one size, used by one layer after the other.

    Attributes:
        dpre: [rows, 2 I] gradients of gate and up.
        dgates: fp32, of every pair that is ours, by rank and token.
        ends: [experts] int32, where the rows of each expert end.
        ones: fp32, gates of one.
    """

    def __init__(self, sizes: Sizes, workspace: Workspace) -> None:
        device = workspace.memory.device
        self.dpre = torch.zeros(sizes.rows, 2 * sizes.inner, dtype=workspace.dtype, device=device)
        self.dgates = torch.zeros(sizes.pairs, dtype=torch.float32, device=device)
        self.ends = torch.zeros(sizes.experts, dtype=torch.int32, device=device)
        self.ones = torch.ones(sizes.pairs, dtype=torch.float32, device=device)


class Given(NamedTuple):
    """What a backward starts from: the forward's operands and the gradient of its output, [T, H]."""

    x: Tensor
    ids: Tensor
    gates: Tensor
    w_in: Tensor
    w_out: Tensor
    grad: Tensor


class BackwardLaunch(LayerSteps):
    """All that is the same in every backward of one size and number of tokens.

    Args:
        given: operands like those of later calls.
        dx: [T, H], for the gradient of tokens.
        dgates: fp32 [T, top_k], for that of gates.
        sizes: what all ranks agree on.
        workspace: whose launches they are.
        config: how to run, resolved.

    Raises:
        WorkspaceTooSmall: tokens, partial results or flags do not fit.
    """

    def __init__(
        self, given: Given, dx: Tensor, dgates: Tensor, sizes: Sizes, workspace: Workspace, config: MoeConfig
    ) -> None:  # fmt: skip
        super().__init__(sizes, given.x.shape[0], workspace, config)
        what = f"the backward of a MoE layer of {sizes.world_size} x {sizes.pitch} tokens, top {sizes.top_k}"
        self.workspace.need(4 * sizes.pairs, 1 + GATES_PROGRAMS, what)
        self.extra: BackwardBuffers = workspace.plan(
            ("moe backward buffers", sizes), lambda: BackwardBuffers(sizes, workspace)
        )  # fmt: skip
        self.by_torch = given.x.is_cuda and given.x.dtype == torch.bfloat16 and hasattr(torch, "_grouped_mm")
        self.programs = PROGRAMS_EACH * processors(given.x.device)
        pre = self.extra.dpre
        self.dispatch_gradients = self._dispatch_step(given.grad, given.w_out, None, None, given.ids)
        self.take = self._take_step(given.grad)
        self.swiglu = self._swiglu_step(pre)
        self.combine = self._combine_step(given.ids, given.w_in, dx)
        self.gates = self._gates_step(given.ids, given.ids, dgates)
        self.tokens_again = (
            self.dispatch_step(given.x, given.w_in, *halves_of(pre), given.ids) if not config.keep else None
        )
        self.gather = self._gather_step(given.x, None, None, None, given.ids) if config.keep else None
        self.weights = {
            name: self._weight_step(name, like) for name, like in (("w_in", given.w_in), ("w_out", given.w_out))
        }
        steps = (
            self.dispatch_gradients, self.take, self.swiglu, self.combine, self.gates, self.tokens_again,
            self.gather, *self.weights.values(),
        )  # fmt: skip
        key = ("moe backward", config, sizes._replace(pitch=0), sizes.route_tokens, workspace.dtype)
        self.prepare(key, tuple(step for step in steps if step is not None), given.x.element_size())

    # --- steps ---------------------------------------------------------------------------------------------------

    def _dispatch_step(self, grad: Tensor, w_out: Tensor, _out: object, _more: object, ids: Tensor) -> Step:
        sizes, config, buffers = self.sizes, self.config, self.buffers
        kernel, constants, arguments = ways(config).prepare_dispatch(
            grad, ids, w_out, buffers.h, None, None, buffers.routing, sizes, self.workspace, config, self.channel,
            self.variant, backward=True,
        )  # fmt: skip
        grid = min(processors(grad.device), sizes.row_tiles * -(-sizes.inner // config.block_n))
        return Step(
            kernel, grid, MOE_DISPATCH_BACKWARD, self.stamp(MOE_DISPATCH_BACKWARD), constants,
            {"x_ptr": X, "w_desc": W, **self.chosen}, arguments, self._dispatch_step, moves=not config.selective,
        )  # fmt: skip

    def _combine_step(self, ids: Tensor, w_in: Tensor, dx: Tensor, _: object = None) -> Step:
        buffers = self.buffers
        kernel, constants, arguments = ways(self.config).prepare_combine(
            ids, w_in, self.extra.dpre, buffers.y, dx, buffers.routing._replace(pair_gate=self.extra.ones), self.sizes,
            self.workspace, self.config, self.channel, self.variant, backward=True,
        )  # fmt: skip
        return Step(
            kernel, processors(dx.device), MOE_COMBINE_BACKWARD, self.stamp(MOE_COMBINE_BACKWARD), constants,
            {"ids_ptr": X, "w_desc": W, "out_ptr": OUT}, arguments, self._combine_step,
        )  # fmt: skip

    def _gathered(self, slot: int) -> Tensor:
        sizes = self.sizes
        return self.workspace.local(slot, (sizes.world_size * sizes.pitch, sizes.hidden))

    @property
    def _moving(self) -> dict[str, Any]:
        return {"TILE_ROWS": self.sizes.tile_rows, "ROWS": ROWS, "COLS": COLS, **MOVING}

    def _take_step(self, x: Tensor, *_: object) -> Step:
        sizes, routing = self.sizes, self.buffers.routing

        def arguments(slot: int, _: int) -> tuple[Any, ...]:
            return (
                x, self._gathered(slot), self.buffers.y, routing.head, routing.rows, self.workspace.rank, sizes.pitch,
                sizes.hidden,
            )  # fmt: skip

        return Step(take_rows_kernel, self.programs, 0, 0, self._moving, {"x_ptr": X}, arguments, self._take_step)

    def _gather_step(self, x: Tensor, _w: object, _out: object, _more: object, ids: Tensor) -> Step:
        sizes, routing, workspace = self.sizes, self.buffers.routing, self.workspace

        def arguments(slot: int, counted: int) -> tuple[Any, ...]:
            return (
                x, ids if self.config.selective else None, self._gathered(slot), self.buffers.y, routing.head,
                routing.rows, *self.channel(slot, MOE_GATHER), self.variant, counted, workspace.layout.data(slot),
                x.shape[0], sizes.experts, sizes.pitch, self.unit_tokens, self.config.units, sizes.hidden,
            )  # fmt: skip

        constants = {**self._moving, "OPERATOR": MOE_GATHER, "PROGRESS": workspace.progress}
        constants |= {"TOP_K": sizes.top_k, "SELECTIVE": self.config.selective}
        constants |= {"num_warps": 8, "ROWS": 2 * ROWS}
        grid = min(GATHERING_EACH * processors(x.device), MAX_CTAS)
        return Step(
            gather_kernel, grid, MOE_GATHER, self.stamp(MOE_GATHER), constants, {"x_ptr": X, **self.chosen},
            arguments, self._gather_step, moves=not self.config.selective, fills=True,
        )  # fmt: skip

    def _swiglu_step(self, pre: Tensor, *_: object) -> Step:
        sizes, routing, extra = self.sizes, self.buffers.routing, self.extra

        def arguments(_slot: int, _counted: int) -> tuple[Any, ...]:
            return (
                self.buffers.h, pre, extra.dpre, extra.dgates, extra.ends, routing.head, routing.begins, routing.rows,
                routing.pair_row, routing.pair_gate, sizes.inner,
            )  # fmt: skip

        constants = {**self._moving, "EXPERTS": sizes.experts, "MOST_HERE": sizes.most_here}
        return Step(
            swiglu_backward_kernel, self.programs, 0, 0, constants, {"pre_ptr": X}, arguments, self._swiglu_step
        )  # fmt: skip

    def _gates_step(self, ids: Tensor, _: Tensor, dgates: Tensor, _more: object = None) -> Step:
        sizes, workspace = self.sizes, self.workspace

        def arguments(slot: int, _: int) -> tuple[Any, ...]:
            return (
                ids, self.extra.dgates, dgates, self.buffers.routing.head, *self.channel(slot, MOE_GATES), self.variant,
                sizes.pitch, self.tokens, sizes.experts, workspace.layout.data(slot) // 4,
            )  # fmt: skip

        constants = {
            "TOP_K": sizes.top_k, "MOST_HERE": sizes.most_here, "TOKENS": GATES_TOKENS, "PAIRS": GATES_PAIRS,
            "OPERATOR": MOE_GATES, "PROGRESS": workspace.progress, **MOVING,
        }  # fmt: skip
        grid = min(GATES_PROGRAMS, processors(ids.device))
        return Step(
            gates_kernel, grid, MOE_GATES, self.stamp(MOE_GATES), constants, {"ids_ptr": X, "out_ptr": OUT}, arguments,
            self._gates_step,
        )  # fmt: skip

    def _weight_step(self, name: str, like: Tensor) -> Step:
        """The gradient of one weight; where torch has the product, only zeros for experts without a row."""
        sizes, extra = self.sizes, self.extra
        left, right = self._operands_of(name)
        if self.by_torch:
            constants: dict[str, Any] = {"PARTS": CLEARING_PARTS, "COLS": CLEARING_COLS, **MOVING}
            kernel, grid = clear_empty_kernel, sizes.experts * CLEARING_PARTS
            operands: tuple[Any, ...] = ()
            more: tuple[int, ...] = (like[0].numel(),)
        else:
            tile = (
                WEIGHT_TILE if min(left.shape[1], right.shape[1]) > SMALL_WEIGHT_TILE["BLOCK_M"] else SMALL_WEIGHT_TILE
            )
            constants = {**tile, "BLOCK_K": min(tile["BLOCK_K"], sizes.tile_rows), "num_warps": 8}
            tiles = -(-left.shape[1] // tile["BLOCK_M"]) * -(-right.shape[1] // tile["BLOCK_N"])
            kernel, grid, operands = weight_gradient_kernel, sizes.experts * tiles, (left, right)
            more = (left.shape[1], right.shape[1])

        def remake(out: Tensor, *_: object) -> Step:
            def arguments(_slot: int, _counted: int) -> tuple[Any, ...]:
                return (*operands, out, extra.ends, *more)

            return Step(kernel, grid, 0, 0, constants, {"out_ptr": X}, arguments, remake)

        return remake(like)

    # --- running -------------------------------------------------------------------------------------------------

    def run(
        self, given: Given, tables: Tensor, saved: Tensor | None, dx: Tensor, dgates: Tensor,
        wanted: Collection[str] = WEIGHTS,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Launch on the current stream; tensors like those that the launch was made for.

        Args:
            given: operands.
            tables: of the forward's routing.
            saved: [rows, 2 I] gate and up of the forward; None without `MoeConfig.keep`.
            dx: where the gradient of tokens goes.
            dgates: where that of gates goes.
            wanted: weights whose gradients are; what ranks do together does not depend on it.

        Returns:
            the gradients of the weights that were wanted.

        Raises:
            TileTimeout, RankMismatch: an earlier launch failed.
        """
        x, ids, _, w_in, w_out, grad = given
        pre = self.extra.dpre if saved is None else saved
        found: dict[str, Tensor] = {}
        self.buffers.tables.copy_(tables)
        if self.tokens_again is not None:
            gate, up = halves_of(self.extra.dpre)
            assert gate is not None  # there are halves
            self.launch_local(self.take, self.launch(self.tokens_again, x, w_in, gate, up, ids), x)
        slot = self.launch(self.dispatch_gradients, grad, w_out, grad, None, ids)
        self.launch_local(self.swiglu, 0, pre)
        if self.tokens_again is not None:
            self._weight("w_in", w_in, wanted, found)
        self.launch_local(self.take, slot, grad)
        self._weight("w_out", w_out, wanted, found)
        self.launch(self.combine, ids, w_in, dx)
        self.launch(self.gates, ids, ids, dgates)
        if self.gather is not None:
            self.launch(self.gather, x, x, x, None, ids)
            self._weight("w_in", w_in, wanted, found)
        return found

    def _weight(self, name: str, like: Tensor, wanted: Collection[str], found: dict[str, Tensor]) -> None:
        """Find the gradient of one weight, if it is wanted, while its rows lie where the other's will."""
        if name not in wanted:
            return
        if self.by_torch:
            left, right = self._operands_of(name)
            product = torch._grouped_mm(left.t(), right, offs=self.extra.ends)  # noqa: SLF001 - torch's only name for it
            found[name] = product.view(like.shape)
        else:
            found[name] = torch.empty_like(like)
        self.launch_local(self.weights[name], 0, found[name])

    def _operands_of(self, name: str) -> tuple[Tensor, Tensor]:
        """The two matrices whose product along rows is a weight's gradient."""
        return (self.extra.dpre, self.buffers.y) if name == "w_in" else (self.buffers.y, self.buffers.h)


def planned_backward(
    given: Given, dx: Tensor, dgates: Tensor, sizes: Sizes, workspace: Workspace, config: MoeConfig
) -> BackwardLaunch:
    """The launch for this size and number of tokens, made at its first call.

    Raises:
        WorkspaceTooSmall: it does not fit.
    """
    resolved = config.resolved(sizes)
    key = ("moe backward", sizes, given.x.shape[0], resolved, workspace.deadline_s)
    return workspace.plan(key, lambda: BackwardLaunch(given, dx, dgates, sizes, workspace, resolved))
