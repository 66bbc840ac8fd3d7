# SPDX-License-Identifier: Apache-2.0
"""Launch a MoE layer: route, dispatch + grouped GEMM + SwiGLU, grouped GEMM + reduce + combine.

Three launches of a workspace, prepared once for each number of tokens. They share tables and buffers of the largest
size, so that the host never asks how the routing came out, and a captured graph replays with any routing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megascale_kernels.device.announce import announce_kernel
from megascale_kernels.device.layout import SLOTS, signature
from megascale_kernels.device.primitives import rank_copy_data
from megascale_kernels.launching.ready import OUT, Copy, W, X, ready
from megascale_kernels.memory.channel_arguments import channel_arguments
from megascale_kernels.memory.operands import processors
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe import plain_launch
from megascale_kernels.moe.combine_kernel import MOE_COMBINE
from megascale_kernels.moe.dispatch_kernel import MOE_DISPATCH
from megascale_kernels.moe.moe_config import MoeConfig
from megascale_kernels.moe.routing import MOE_ROUTE, route_kernel
from megascale_kernels.moe.tables import HEADER_WORDS, Routing, Sizes, make_routing
from megascale_kernels.moe.walk import UNITS

# Pairs that a routing program looks at together, times experts; and it compares each with each.
ROUTE_CELLS, MOST_PAIRS = 4096, 64


class Buffers:
    """Memory of one rank for layers of one size, used by one layer after the other.

    Attributes:
        routing: the tables.
        h: [rows, I] what lies between the two products.
        y: [rows, H] a row for each pair.
    """

    def __init__(self, sizes: Sizes, workspace: Workspace) -> None:
        device = workspace.memory.device
        self.routing: Routing = make_routing(sizes, device)
        self.h = torch.zeros(sizes.rows, sizes.inner, dtype=workspace.dtype, device=device)
        self.y = torch.zeros(sizes.rows, sizes.hidden, dtype=workspace.dtype, device=device)


def _compiled_before() -> None:
    """Do nothing: a launch compiles its kernels when it is made."""


class _Step:
    """One of the three launches: its kernel with everything that stays the same."""

    def __init__(
        self, kernel: Any, grid: int, stamp: int, constants: dict[str, Any], sources: dict[str, int], arguments: Any  # noqa: ANN401 - kernels and their arguments
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.stamp = kernel, grid, stamp
        self.constants, self.sources, self.arguments = constants, sources, arguments
        self.ready: list[Any] = [None] * SLOTS


class MoeLaunch:
    """All that is the same in every layer of one size and number of tokens: made once, kept by the workspace.

    Args:
        x: this rank's tokens, [T, H].
        ids: [T, top_k] int32.
        gates: [T, top_k] fp32.
        w_in: gate and up of this rank's experts, [E / W, 2, I, H].
        w_out: [E / W, H, I].
        out: [T, H].
        sizes: what all ranks agree on.
        workspace: whose launches they are.
        config: how to run, `MoeConfig.resolved`.

    Raises:
        WorkspaceTooSmall: tokens, partial results or flags do not fit.
    """

    def __init__(
        self, x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, out: Tensor, sizes: Sizes,
        workspace: Workspace, config: MoeConfig,
    ) -> None:  # fmt: skip
        self.workspace, self.sizes, self.config = workspace, sizes, config
        self.tokens = x.shape[0]
        self.unit_tokens = -(-sizes.pitch // config.splits)
        self.counted = 0
        self._check_room()
        self.buffers: Buffers = workspace.plan(("moe buffers", sizes), lambda: Buffers(sizes, workspace))
        self.route = self._route_step(ids, gates)
        self.dispatch = self._dispatch_step(x, w_in)
        self.combine = self._combine_step(ids, w_out, out)
        self.steps = (self.route, self.dispatch, self.combine)
        self.key = ("moe", config, sizes._replace(pitch=0), sizes.route_tokens, workspace.dtype)
        workspace.compile(self.key, self._warm)
        native = workspace.native
        if native is not None:
            for step in self.steps:
                moves = step is self.dispatch
                copies = [self._copies(slot, x.element_size()) if moves else [] for slot in range(SLOTS)]
                step.ready = [
                    ready(
                        native, step.kernel, step.arguments(slot, 0), step.constants, (step.grid,), step.sources,
                        copies[slot],
                    )
                    for slot in range(SLOTS)
                ]  # fmt: skip
        for step in self.steps:
            step.arguments = None  # no caller's memory is kept

    def _check_room(self) -> None:
        sizes, config, itemsize = self.sizes, self.config, self.workspace.dtype.itemsize
        what = f"a MoE layer of {sizes.world_size} x {sizes.pitch} tokens, H {sizes.hidden}, top {sizes.top_k}"
        self.workspace.need(4 * sizes.world_size * sizes.region_words, 1 + config.route_programs, what)
        tokens = sizes.world_size * sizes.pitch * sizes.hidden * itemsize
        self.workspace.need(tokens, 1 + config.splits, what)
        self.workspace.need(tokens, 1 + (config.chunks or 1) * -(-sizes.pitch // config.job_tokens), what)

    # --- the three steps -----------------------------------------------------------------------------------------

    def _stamp(self, operator: int) -> int:
        sizes = self.sizes
        return signature(operator, sizes.pitch, sizes.hidden, sizes.inner, self.variant)

    @property
    def variant(self) -> int:
        """What flags and tables depend on besides sizes, as a number."""
        return self.config.code + 101 * self.sizes.top_k + 40009 * self.sizes.experts

    def _channel(self, slot: int, operator: int) -> tuple[Any, ...]:
        return channel_arguments(self.workspace, slot, self._stamp(operator))

    def _route_step(self, ids: Tensor, gates: Tensor) -> _Step:
        sizes, workspace, routing = self.sizes, self.workspace, self.buffers.routing
        ctas = min(2 * processors(ids.device), self.config.route_programs, HEADER_WORDS)  # two are resident at a time
        constants = {
            "TOP_K": sizes.top_k, "EXPERTS": sizes.experts, "PADDED": sizes.padded_experts,
            "TILE_ROWS": sizes.tile_rows, "TOKENS": sizes.route_tokens,
            "PAIRS": max(16, min(MOST_PAIRS, ROUTE_CELLS // sizes.padded_experts)), "OPERATOR": MOE_ROUTE,
            "PROGRESS": workspace.progress, "enable_fp_fusion": True, "num_warps": 4, "maxnreg": 248,
        }  # fmt: skip

        def arguments(slot: int, _: int) -> tuple[Any, ...]:
            return (
                ids, gates, *routing, *self._channel(slot, MOE_ROUTE), workspace.layout.data(slot) // 4, self.tokens,
                sizes.pitch, workspace.rank * sizes.experts, self.config.lead_rows,
            )  # fmt: skip

        return _Step(route_kernel, ctas, self._stamp(MOE_ROUTE), constants, {"ids_ptr": X, "gates_ptr": W}, arguments)

    def _dispatch_step(self, x: Tensor, w_in: Tensor) -> _Step:
        sizes, config, buffers = self.sizes, self.config, self.buffers
        kernel, constants, arguments = self._ways().prepare_dispatch(
            x, w_in, buffers.h, buffers.routing, sizes, self.workspace, config, self._channel, self.variant
        )
        grid = min(processors(x.device), sizes.row_tiles * -(-sizes.inner // config.block_n))
        return _Step(kernel, grid, self._stamp(MOE_DISPATCH), constants, {"x_ptr": X, "w_desc": W}, arguments)

    def _combine_step(self, ids: Tensor, w_out: Tensor, out: Tensor) -> _Step:
        buffers = self.buffers
        kernel, constants, arguments = self._ways().prepare_combine(
            ids, w_out, buffers.h, buffers.y, out, buffers.routing, self.sizes, self.workspace, self.config,
            self._channel, self.variant,
        )  # fmt: skip
        sources = {"ids_ptr": X, "w_desc": W, "out_ptr": OUT}
        return _Step(kernel, processors(out.device), self._stamp(MOE_COMBINE), constants, sources, arguments)

    def _ways(self) -> Any:  # noqa: ANN401 - a module
        """Where the two products' kernels are prepared."""
        if self.config.kernel == "hopper":
            from megascale_kernels.moe import hopper_launch

            return hopper_launch
        return plain_launch

    # --- launching -----------------------------------------------------------------------------------------------

    def _warm(self) -> None:
        workspace = self.workspace
        for step in self.steps:
            for slot in range(SLOTS):
                step.kernel.warmup(*step.arguments(slot, 0), grid=(step.grid,), **step.constants)
        for last in (False, True):
            announce_kernel.warmup(
                *self._channel(0, MOE_DISPATCH), 0, 0, LAST=last, OPERATOR=MOE_DISPATCH, PROGRESS=workspace.progress,
                TRACE=False, num_warps=1, enable_fp_fusion=True, grid=(1,),
            )  # fmt: skip

    def _units(self) -> list[tuple[int, int, int]]:
        """(peer, first token, tokens) of every unit, the nearest reader first; a unit may have none."""
        workspace = self.workspace
        units = []
        for step in range(1, workspace.world_size):
            peer = (workspace.rank - step) % workspace.world_size
            for unit in range(self.config.splits):
                first = min(unit * self.unit_tokens, self.tokens)
                units.append((peer, first, min(self.unit_tokens, self.tokens - first)))
        return units

    def _copies(self, slot: int, element_bytes: int) -> list[Copy]:
        workspace, row_bytes = self.workspace, self.sizes.hidden * element_bytes
        return [
            (
                first * row_bytes,
                count * row_bytes,
                workspace.data_address(peer, slot) + (workspace.rank * self.sizes.pitch + first) * row_bytes,
                workspace.flag_address(peer, slot, UNITS.value + index % self.config.splits),
            )
            for index, (peer, first, count) in enumerate(self._units())
        ]

    def run(self, x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, out: Tensor) -> None:
        """Launch on the current stream; tensors like those that the launch was made for.

        Raises:
            TileTimeout, RankMismatch: an earlier launch failed.
        """
        for part in self.parts(x, ids, gates, w_in, w_out, out):
            part()

    def parts(
        self, x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, out: Tensor
    ) -> list[Callable[[], None]]:
        """The three launches, to be made in this order."""
        return [
            lambda: self._launch(self.route, ids, gates, out),
            lambda: self._launch(self.dispatch, x, w_in, out),
            lambda: self._launch(self.combine, ids, w_out, out),
        ]

    def _launch(self, step: _Step, x: Tensor, w: Tensor, out: Tensor) -> None:
        workspace = self.workspace
        made = step.ready[workspace.slot ^ 1]
        copies = step is self.dispatch and workspace.world_size > 1
        if made is not None and not workspace.counts_on_device():
            workspace.next_slot()
            workspace.launch(made, step.stamp, x, w, out, None, join=copies)
            return
        arguments = self._step_with(step, x, w, out)
        slot = workspace.begin(self.key, _compiled_before)
        counted = int(copies and workspace.counts_on_device())
        if copies:
            self._push(x, slot, counted)
        step.kernel[(step.grid,)](*arguments(slot, counted), **step.constants)
        if copies:
            workspace.join_copies()

    def _step_with(self, step: _Step, x: Tensor, w: Tensor, out: Tensor) -> Any:  # noqa: ANN401 - a function
        """The arguments of a step with these tensors in place of those that it was made with."""
        if step is self.route:
            return self._route_step(x, w).arguments
        if step is self.dispatch:
            return self._dispatch_step(x, w).arguments
        return self._combine_step(x, w, out).arguments

    def _push(self, x: Tensor, slot: int, counted: int) -> None:
        """Copy this rank's tokens to every peer on the copy stream, each unit announced, empty ones too."""
        workspace, sizes = self.workspace, self.sizes
        units = self._units()
        with workspace.copying():
            for index, (peer, first, count) in enumerate(units):
                unit = UNITS.value + index % self.config.splits
                if count:
                    place = (workspace.rank * sizes.pitch + first) * sizes.hidden
                    target = workspace.peer(peer, slot, (count, sizes.hidden), place)
                    rank_copy_data(target, x[first : first + count])
                if not counted:
                    workspace.announce(peer, slot, unit, self.dispatch.stamp)
                    continue
                announce_kernel[(1,)](
                    *self._channel(slot, MOE_DISPATCH), peer, unit, LAST=index == len(units) - 1,
                    OPERATOR=MOE_DISPATCH, PROGRESS=workspace.progress, TRACE=False, num_warps=1, enable_fp_fusion=True,
                )  # fmt: skip


def planned(
    x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, out: Tensor, sizes: Sizes,
    workspace: Workspace, config: MoeConfig,
) -> MoeLaunch:  # fmt: skip
    """The launch for this size and number of tokens, made at its first call.

    Raises:
        WorkspaceTooSmall: it does not fit.
    """
    config = config.resolved(sizes)
    key = ("moe", sizes, x.shape[0], config, workspace.deadline_s)
    return workspace.plan(key, lambda: MoeLaunch(x, ids, gates, w_in, w_out, out, sizes, workspace, config))
