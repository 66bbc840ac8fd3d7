# SPDX-License-Identifier: Apache-2.0
"""Which way SwiGLU behind a gathered product goes, forward and backward, and going it.

Forward, the product gather(x) @ w is gates and values, and our kernel can store silu(gate) * value from its sums
(`ag_gemm/hopper_swiglu`). In the backward of swiglu(wide) @ w the product gather(dy) @ w^T is the gradient of swiglu's
result, which our kernel can turn into that of wide before it is stored (`ag_gemm/hopper_gated`). Else a kernel does so
behind the product, whichever way that goes. Which is faster, the first calls of a shape find out as they do for any
operator.
"""

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from megascale_kernels.dispatch import dispatch, serial
from megascale_kernels.dispatch.dispatch import BORROWED, NONE, OWN, Contested, Route
from megascale_kernels.errors import Unsupported
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config
from megascale_kernels.swiglu import gradient_of_wide, silu_times_value

if TYPE_CHECKING:
    from megascale_kernels.autotune import Contest


class Way(NamedTuple):
    """One way to SwiGLU or its gradient.

    Attributes:
        config: how the product runs, not by the serial path.
        is_fused: it is taken before the product is stored.
    """

    config: Config
    is_fused: bool


class Gated(NamedTuple):
    """How calls with tensors of one kind run; decided at the first of them, kept by the workspace.

    Attributes:
        route: that of the product.
        way: how it runs; None is the serial path and a kernel behind it.
        contest: what finds out `way` by the first calls, None where it is known.
    """

    route: Route
    way: Way | None
    contest: "Contest[Way] | None"

    def begin(self) -> "tuple[Way | None, Contest[Way] | None]":
        """The way of the next call, and the contest that it is a turn of."""
        if self.contest is None:
            return self.way, None
        if self.contest.decided:
            return self.contest.best, None
        return self.contest.begin(), self.contest


class Activated(NamedTuple):
    """What becomes of a product of gates and values.

    Attributes:
        act: silu(gate) * value, [M, F].
        wide: gates and values, [M, 2 F]; None where they were not to be kept.
        rows: the gathered rows, in memory of their own; None likewise.
    """

    act: Tensor
    wide: Tensor | None
    rows: Tensor | None


def product_and_swiglu(
    x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, *, keeps_wide: bool, gathered: bool
) -> Activated:
    """swiglu(gather(x) @ w + bias).

    Args:
        x: this rank's rows, [M / W, K].
        w: [K, 2 F], columns of gates and then of values.
        bias: [2 F].
        workspace: made for M rows of K elements.
        keeps_wide: gates and values are wanted too.
        gathered: the gathered rows are.

    Raises:
        Unsupported: arguments that make no sense.
        WorkspaceTooSmall: the workspace was made for less.
        TileTimeout, RankMismatch: an earlier call failed.
    """
    key = ("ag_gemm, swiglu", x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device,
           None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device), keeps_wide,
           gathered)  # fmt: skip
    made = workspace.plan(key, lambda: _first_product(x, w, bias, workspace, keeps_wide=keeps_wide, gathered=gathered))
    way, contest = made.begin()
    route, rows = made.route, OWN if gathered else NONE
    if way is not None and way.is_fused:
        found = _fused_product(route, way.config, x, w, bias, workspace, keeps_wide=keeps_wide, gathered=gathered)
    else:
        if way is None:
            wide, came = route.serial(x, w, bias, workspace)
        else:
            wide, came = dispatch.gather_and_multiply(route, way.config, x, w, bias, workspace, rows)
        found = Activated(silu_times_value(wide), wide if keeps_wide else None, came if gathered else None)
    if contest is not None:
        contest.end()
    return found


def gradient_in_place(dout: Tensor, w: Tensor, wide: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """The gradient of wide, and the gathered rows of dout, perhaps in the workspace: to be read before the next call.

    Args:
        dout: the gradient of this rank's rows of the result, [M / W, K].
        w: the transpose of what swiglu(wide) was multiplied with, [K, F].
        wide: gates and values side by side, [M, 2 F], contiguous.
        workspace: of the forward.

    Returns:
        [M, 2 F] and [M, K].

    Raises:
        Unsupported: arguments that make no sense.
        WorkspaceTooSmall: the workspace was made for less.
        TileTimeout, RankMismatch: an earlier call failed.
    """
    key = ("ag_gemm, gradient of swiglu", dout.shape, dout.stride(), dout.dtype, dout.device, w.shape, w.stride(),
           w.dtype, w.device, wide.shape, wide.stride(), wide.dtype)  # fmt: skip
    made = workspace.plan(key, lambda: _first(dout, w, wide, workspace))
    way, contest = made.begin()
    if way is not None and way.is_fused:
        found = _fused(made.route, way.config, dout, w, wide, workspace)
    else:
        if way is None:
            product, gathered = made.route.serial(dout, w, None, workspace)
        else:
            product, gathered = dispatch.gather_and_multiply(made.route, way.config, dout, w, None, workspace, BORROWED)
        assert gathered is not None  # they were asked for
        found = gradient_of_wide(wide, product), gathered
    if contest is not None:
        contest.end()
    return found


def _fused(
    route: Route, config: Config, dout: Tensor, w: Tensor, wide: Tensor, workspace: Workspace
) -> tuple[Tensor, Tensor]:
    from megascale_kernels.ag_gemm.launch import planned_gradients

    dwide = wide.new_empty(wide.shape)
    read, wide = dispatch.readable(dout, workspace), dispatch.readable(wide, workspace)
    weight = dispatch.weight_of(w, read, route, workspace)
    plan = planned_gradients(read, weight, dwide, wide, workspace, config)
    slot = plan.run(read, weight.matrix, dwide, None, wide)
    return dwide, dispatch.kept_rows(plan, read, slot, dout, workspace, borrowed=True)


def _fused_product(
    route: Route, config: Config, x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, *,
    keeps_wide: bool, gathered: bool,
) -> Activated:  # fmt: skip
    from megascale_kernels.ag_gemm.launch import planned_swiglu

    m, n = route.call.m, route.call.n
    act, wide = x.new_empty((m, n // 2)), x.new_empty((m, n)) if keeps_wide else None
    read, bias = dispatch.readable(x, workspace), dispatch.aligned_bias(bias)
    weight = dispatch.weight_of(w, read, route, workspace)
    plan = planned_swiglu(read, weight, act, wide, bias, workspace, config, own=gathered)
    slot = plan.run(read, weight.matrix, act, bias, wide)
    rows = dispatch.kept_rows(plan, read, slot, x, workspace) if gathered else None
    return Activated(act, wide, rows)


def _first(dout: Tensor, w: Tensor, wide: Tensor, workspace: Workspace) -> Gated:
    """Check a call of a kind that is new, and decide its ways.

    Raises:
        Unsupported: arguments that make no sense.
    """
    rows, columns = dout.shape[0] * workspace.world_size, w.shape[1]
    if wide.shape != (rows, 2 * columns) or wide.dtype != dout.dtype or not wide.is_contiguous():
        raise Unsupported(
            f"swiglu_gemm_rs: wide must be a contiguous [{rows}, {2 * columns}] of {dout.dtype}, gates and values side "
            f"by side, got {tuple(wide.shape)} of {wide.dtype} with strides {wide.stride()}"
        )
    return _decided(dout, w, None, workspace, BORROWED, "swiglu's gradient", columns)


def _first_product(
    x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, *, keeps_wide: bool, gathered: bool
) -> Gated:
    """As `_first`, of a product that is gates and values."""
    if w.ndim == 2 and w.shape[1] % 2:
        raise Unsupported(
            f"gated_mlp: the first weight must be [K, 2 F], columns of gates and then of values, got {tuple(w.shape)}"
        )
    behind = "swiglu, gates and values kept" if keeps_wide else "swiglu"
    return _decided(x, w, bias, workspace, OWN if gathered else NONE, behind, w.shape[-1] // 2)


def _decided(
    x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, rows: int, behind: str, columns: int
) -> Gated:
    """Check a product, and decide the ways to it and what is `behind`; `columns` are those of gates, or of values."""
    call, weight = dispatch.checked_call("ag_gemm", x, w, bias, workspace, None)
    path = serial.path_of(call, workspace)
    can_fuse = x.device.type == "cuda" and x.dtype.itemsize == 2 and columns % 8 == 0

    def ways(configs: list[Config | None]) -> list[Way | None]:
        return ways_of(configs, can_fuse=can_fuse)

    key = Contested(call, weight.is_nk, rows, behind)
    contest = dispatch.contest_of(key, call, weight, workspace, ways)
    config = None if contest is not None else dispatch.overlapped(call, weight, workspace, None)
    return Gated(Route(call, weight.is_nk, config, path), ways([config])[0], contest)


def ways_of(configs: list[Config | None], *, can_fuse: bool) -> list[Way | None]:
    """The ways of a call whose product may run in these, the model's choice first: ours with what is behind it fused.

    The best of ours is tried without it as well.
    """
    from megascale_kernels.autotune.contest import MOST_WAYS

    ways: list[Way | None] = []
    for config in configs:
        is_ours = can_fuse and config is not None and config.kernel == "hopper"
        ways.append(None if config is None else Way(config, is_fused=is_ours))
    fused = [way for way in ways if way is not None and way.is_fused]
    if fused and len(configs) > 1:
        ways.insert(ways.index(fused[0]) + 1, Way(fused[0].config, is_fused=False))
    return ways[:MOST_WAYS]
