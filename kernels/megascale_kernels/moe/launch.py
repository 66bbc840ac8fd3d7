# SPDX-License-Identifier: Apache-2.0
"""Launch a MoE layer: route, dispatch + grouped GEMM + SwiGLU, grouped GEMM + reduce + combine.

Three launches of a workspace, prepared once for each number of tokens. They share tables and buffers of the largest
size, so that the host never asks how the routing came out, and a captured graph replays with any routing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megascale_kernels.launching.ready import BIAS, OUT, W, X
from megascale_kernels.memory.operands import processors
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe import plain_launch
from megascale_kernels.moe.kernels.combine_kernel import MOE_COMBINE
from megascale_kernels.moe.kernels.dispatch_kernel import MOE_DISPATCH
from megascale_kernels.moe.kernels.routing import MOE_ROUTE, route_kernel
from megascale_kernels.moe.layer_steps import Step, Steps
from megascale_kernels.moe.moe_config import MoeConfig
from megascale_kernels.moe.tables import HEADER_WORDS, Routing, Sizes, make_routing

# Pairs that a routing program looks at together, times experts; and it compares each with each.
ROUTE_CELLS, MOST_PAIRS = 4096, 64


class Buffers:
    """Memory of one rank for layers of one size, used by one layer after the other.

    Attributes:
        routing: the tables.
        tables: the same as one tensor of words.
        h: [rows, I] what lies between the two products.
        y: [rows, H] a row for each pair.
    """

    def __init__(self, sizes: Sizes, workspace: Workspace) -> None:
        device = workspace.memory.device
        self.routing: Routing
        self.routing, self.tables = make_routing(sizes, device)
        self.h = torch.zeros(sizes.rows, sizes.inner, dtype=workspace.dtype, device=device)
        self.y = torch.zeros(sizes.rows, sizes.hidden, dtype=workspace.dtype, device=device)


def ways(config: MoeConfig) -> Any:  # noqa: ANN401 - a module
    """Where the two products' kernels are prepared."""
    if config.kernel == "hopper":
        from megascale_kernels.moe import hopper_launch

        return hopper_launch
    return plain_launch


class LayerSteps(Steps):
    """Steps of a layer with the buffers that forward and backward share, and the routing that both begin with.

    Raises:
        WorkspaceTooSmall: tokens, partial results or flags do not fit.
    """

    def __init__(self, sizes: Sizes, tokens: int, workspace: Workspace, config: MoeConfig) -> None:
        super().__init__(sizes, tokens, workspace, config)
        self._check_room()
        self.buffers: Buffers = workspace.plan(("moe buffers", sizes), lambda: Buffers(sizes, workspace))

    def _check_room(self) -> None:
        sizes, config, itemsize = self.sizes, self.config, self.workspace.dtype.itemsize
        what = f"a MoE layer of {sizes.world_size} x {sizes.pitch} tokens, H {sizes.hidden}, top {sizes.top_k}"
        self.workspace.need(4 * sizes.world_size * sizes.region_words, 1 + config.route_programs, what)
        self.room_for_tokens(what)
        tokens = sizes.world_size * sizes.pitch * sizes.hidden * itemsize
        self.workspace.need(tokens, 1 + (config.chunks or 1) * -(-sizes.pitch // config.job_tokens), what)

    def _programs(self, of: Tensor) -> int:
        """Those of layer 0."""
        return min(processors(of.device), self.sizes.row_tiles * -(-self.sizes.inner // self.config.block_n))

    def route_step(self, ids: Tensor, gates: Tensor, *_: object) -> Step:
        """Experts and gates of all tokens to all ranks, and the tables."""
        sizes, workspace, routing = self.sizes, self.workspace, self.buffers.routing
        ctas = min(2 * processors(ids.device), self.config.route_programs, HEADER_WORDS)  # two are resident at a time
        constants = {
            "TOP_K": sizes.top_k, "MOST_HERE": sizes.most_here, "EXPERTS": sizes.experts,
            "PADDED": sizes.padded_experts, "TILE_ROWS": sizes.tile_rows, "TOKENS": sizes.route_tokens,
            "PAIRS": max(16, min(MOST_PAIRS, ROUTE_CELLS // sizes.padded_experts)), "OPERATOR": MOE_ROUTE,
            "PROGRESS": workspace.progress, "enable_fp_fusion": True, "num_warps": 4, "maxnreg": 248,
            "FOLLOWS": bool(self.config.follows),
        }  # fmt: skip

        def arguments(slot: int, _: int) -> tuple[Any, ...]:
            return (
                ids, gates, *routing, *self.channel(slot, MOE_ROUTE), workspace.layout.data(slot) // 4, self.tokens,
                sizes.pitch, workspace.rank * sizes.experts, self.config.lead_rows, self.config.half_rows,
                int(bool(self.config.cut)), -(-sizes.inner // self.config.block_n), self._programs(ids),
            )  # fmt: skip

        return Step(
            route_kernel, ctas, MOE_ROUTE, self.stamp(MOE_ROUTE), constants, {"ids_ptr": X, "gates_ptr": W}, arguments,
            self.route_step, opens=True,
        )  # fmt: skip

    def dispatch_step(
        self, x: Tensor, w_in: Tensor, gate: Tensor | None, up: Tensor | None, ids: Tensor, *, early: bool = False
    ) -> Step:
        """Layer 0; where `gate` and `up` are given, [rows, I] with any stride, it stores these as well.

        `early`: it follows a routing, and its copies begin during that (`Step.early`).
        """
        sizes, config, buffers = self.sizes, self.config, self.buffers
        kernel, constants, arguments = ways(config).prepare_dispatch(
            x, ids, w_in, buffers.h, gate, up, buffers.routing, sizes, self.workspace, config, self.channel,
            self.variant,
        )  # fmt: skip
        grid = self._programs(x)
        sources = {
            "x_ptr": X,
            "w_desc": W,
            **self.chosen,
            **({} if gate is None else {"gate_desc": OUT, "up_desc": BIAS}),
        }

        saves = gate is not None

        def remake(x: Tensor, w_in: Tensor, first: Tensor, second: Tensor | None, ids: Tensor) -> Step:
            return self.dispatch_step(x, w_in, first if saves else None, second if saves else None, ids, early=early)

        return Step(
            kernel, grid, MOE_DISPATCH, self.stamp(MOE_DISPATCH), constants, sources, arguments, remake,
            moves=not config.selective, early=early and self.workspace.world_size > 1 and not config.selective,
        )  # fmt: skip


class MoeLaunch(LayerSteps):
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
        saved: [rows, 2 I], where gate and up of every row are left for a backward; None leaves them nowhere.

    Raises:
        WorkspaceTooSmall: tokens, partial results or flags do not fit.
    """

    def __init__(
        self, x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, out: Tensor, sizes: Sizes,
        workspace: Workspace, config: MoeConfig, saved: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(sizes, x.shape[0], workspace, config)
        self.route = self.route_step(ids, gates)
        self.dispatch = self.dispatch_step(x, w_in, *halves_of(saved), ids, early=bool(config.early))
        self.combine = self._combine_step(ids, w_out, out)
        self.steps = (self.route, self.dispatch, self.combine)
        key = ("moe", config, sizes._replace(pitch=0), sizes.route_tokens, workspace.dtype, saved is not None)
        self.prepare(key, self.steps, x.element_size())

    def _combine_step(self, ids: Tensor, w_out: Tensor, out: Tensor, _: object = None) -> Step:
        buffers = self.buffers
        kernel, constants, arguments = ways(self.config).prepare_combine(
            ids, w_out, buffers.h, buffers.y, out, buffers.routing, self.sizes, self.workspace, self.config,
            self.channel, self.variant,
        )  # fmt: skip
        sources = {"ids_ptr": X, "w_desc": W, "out_ptr": OUT}
        return Step(
            kernel, processors(out.device), MOE_COMBINE, self.stamp(MOE_COMBINE), constants, sources, arguments,
            self._combine_step,
        )  # fmt: skip

    def run(
        self, x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, out: Tensor,
        saved: Tensor | None = None, tables: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Launch on the current stream; tensors like those that the launch was made for.

        `tables`, like `Buffers.tables`, is where the routing is left for a backward.

        Raises:
            TileTimeout, RankMismatch: an earlier launch failed.
        """
        for part in self.parts(x, ids, gates, w_in, w_out, out, saved, tables):
            part()

    def parts(
        self, x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, out: Tensor,
        saved: Tensor | None = None, tables: Tensor | None = None,
    ) -> list[Callable[[], object]]:  # fmt: skip
        """The three launches, to be made in this order."""
        gate, up = halves_of(saved)

        def route() -> None:
            self.launch(self.route, ids, gates, out)
            if tables is not None:
                tables.copy_(self.buffers.tables)

        return [
            route,
            lambda: self.launch(self.dispatch, x, w_in, out if gate is None else gate, up, ids),
            lambda: self.launch(self.combine, ids, w_out, out),
        ]


def halves_of(saved: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Gate and up of [rows, 2 I]."""
    return (None, None) if saved is None else (saved[:, : saved.shape[1] // 2], saved[:, saved.shape[1] // 2 :])


def planned(
    x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, out: Tensor, sizes: Sizes,
    workspace: Workspace, config: MoeConfig, saved: Tensor | None = None,
) -> MoeLaunch:  # fmt: skip
    """The launch for this size and number of tokens, made at its first call.

    Raises:
        WorkspaceTooSmall: it does not fit.
    """
    config = config.resolved(sizes)
    key = ("moe", sizes, x.shape[0], config, workspace.deadline_s, saved is not None)
    return workspace.plan(
        key, lambda: MoeLaunch(x, ids, gates, w_in, w_out, out, sizes, workspace, config, saved)
    )  # fmt: skip
