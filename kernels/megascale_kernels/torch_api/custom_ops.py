# SPDX-License-Identifier: Apache-2.0
"""The operators as torch sees them while it compiles: opaque, with known shapes and gradients.

`torch.compile` cannot look into a launch that talks to other ranks, and need not: a custom operator declares the shapes
of the results (the fake implementation). Gradients are those of functions that torch looks into while it compiles, so
that a graph of the forward and one of the backward hold nothing but operators; gradients registered with an operator
would be looked for at each call, which takes the host longer than the launch. A graph holds no Python objects, so the
workspace travels by its name and the configuration as a text. Eager code does not come through here.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megascale_kernels.dispatch import dispatch, gated
from megascale_kernels.errors import KernelError
from megascale_kernels.memory.workspace import LIVE, Workspace
from megascale_kernels.planning.config import Config
from megascale_kernels.swiglu import silu_times_value
from megascale_kernels.torch_api import autograd

LIBRARY = "megascale_kernels"


def pack(config: Config | None) -> str:
    """A configuration as a text; none is the empty one."""
    return "" if config is None else ",".join([str(value) for value in config])


@cache
def unpack(text: str) -> Config | None:
    """The configuration that `pack` wrote down."""
    constants = {"True": True, "False": False, "None": None}
    values: list[Any] = [
        constants[word] if word in constants else int(word) if word.isdigit() else word for word in text.split(",")
    ]
    return Config(*values) if text else None


def workspace_named(name: str) -> Workspace:
    """The workspace that a compiled graph means.

    Raises:
        KernelError: it is gone.
    """
    workspace = LIVE.get(name)
    if workspace is None:
        raise KernelError(f"{name} no longer exists: keep the Workspace as long as functions compiled with it")
    return workspace


# --- the operators -------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library(LIBRARY, "DEF")  # type: ignore[no-untyped-call]  # torch gives it no types


def _operator(function: Callable[..., Any]) -> Any:
    """Define an operator by the function that runs it, on any device.

    `torch.library.custom_op` would put some ten microseconds of checks and wrappers around each call.
    """
    name = function.__name__.removeprefix("_")
    schema = torch.library.infer_schema(function, mutates_args=())
    library: Any = _LIBRARY
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, function, "CompositeExplicitAutograd")
    return getattr(getattr(torch.ops, LIBRARY), name).default


def _shapes_of(operator: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Tell torch the shapes of an operator's results."""
    return torch.library.register_fake(operator.name(), lib=_LIBRARY)  # type: ignore[no-any-return]  # a decorator


@_operator
def _ag_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, workspace: str, world_size: int, config: str, fresh: bool, save: bool
) -> tuple[Tensor, Tensor]:
    out, gathered = dispatch.ag_gemm(x, w, workspace_named(workspace), bias, unpack(config), gathered=fresh or save)
    return out, gathered if gathered is not None else x.new_empty((0, x.shape[1]))


@_shapes_of(_ag_gemm)
def _(
    x: Tensor, w: Tensor, bias: Tensor | None, workspace: str, world_size: int, config: str, fresh: bool, save: bool
) -> tuple[Tensor, Tensor]:
    rows = x.shape[0] * world_size
    return x.new_empty((rows, w.shape[1])), x.new_empty((rows if fresh or save else 0, x.shape[1]))


@_operator
def _ag_gemm_backward(
    dout: Tensor | None, dgathered: Tensor | None, x: Tensor, w: Tensor, gathered: Tensor | None, workspace: str,
    needs_x: bool, needs_w: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    gradients = autograd.ag_gemm_gradients(
        dout, dgathered, x, w, gathered, workspace_named(workspace), needs_x=needs_x, needs_w=needs_w
    )
    return _filled(gradients, x, w, needs_x=needs_x, needs_w=needs_w)


@_shapes_of(_ag_gemm_backward)
def _(
    dout: Tensor | None, dgathered: Tensor | None, x: Tensor, w: Tensor, gathered: Tensor | None, workspace: str,
    needs_x: bool, needs_w: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _empty_gradients(x, w, needs_x=needs_x, needs_w=needs_w)


@_operator
def _gemm_rs(x: Tensor, w: Tensor, bias: Tensor | None, workspace: str, world_size: int, config: str) -> Tensor:
    return dispatch.gemm_rs(x, w, workspace_named(workspace), bias, unpack(config))


@_shapes_of(_gemm_rs)
def _(x: Tensor, w: Tensor, bias: Tensor | None, workspace: str, world_size: int, config: str) -> Tensor:
    return x.new_empty((x.shape[0] // world_size, w.shape[1]))


@_operator
def _gemm_rs_backward(
    dout: Tensor, x: Tensor, w: Tensor, workspace: str, needs_x: bool, needs_w: bool
) -> tuple[Tensor, Tensor]:
    gradients = autograd.gemm_rs_gradients(dout, x, w, workspace_named(workspace), needs_x=needs_x, needs_w=needs_w)
    return _filled(gradients, x, w, needs_x=needs_x, needs_w=needs_w)


@_shapes_of(_gemm_rs_backward)
def _(dout: Tensor, x: Tensor, w: Tensor, workspace: str, needs_x: bool, needs_w: bool) -> tuple[Tensor, Tensor]:
    return _empty_gradients(x, w, needs_x=needs_x, needs_w=needs_w)


@_operator
def _swiglu_gemm_rs(
    wide: Tensor, w: Tensor, bias: Tensor | None, workspace: str, world_size: int, config: str
) -> tuple[Tensor, Tensor]:
    x = silu_times_value(wide)
    return dispatch.gemm_rs(x, w, workspace_named(workspace), bias, unpack(config)), x


@_shapes_of(_swiglu_gemm_rs)
def _(
    wide: Tensor, w: Tensor, bias: Tensor | None, workspace: str, world_size: int, config: str
) -> tuple[Tensor, Tensor]:
    return wide.new_empty((wide.shape[0] // world_size, w.shape[1])), wide.new_empty((wide.shape[0], w.shape[0]))


@_operator
def _swiglu_gemm_rs_backward(
    dout: Tensor, wide: Tensor, x: Tensor, w: Tensor, workspace: str, needs_wide: bool, needs_w: bool
) -> tuple[Tensor, Tensor]:
    gradients = autograd.swiglu_gemm_rs_gradients(
        dout, wide, x, w, workspace_named(workspace), needs_wide=needs_wide, needs_w=needs_w
    )
    return _filled(gradients, wide, w, needs_x=needs_wide, needs_w=needs_w)


@_shapes_of(_swiglu_gemm_rs_backward)
def _(
    dout: Tensor, wide: Tensor, x: Tensor, w: Tensor, workspace: str, needs_wide: bool, needs_w: bool
) -> tuple[Tensor, Tensor]:
    return _empty_gradients(wide, w, needs_x=needs_wide, needs_w=needs_w)


@_operator
def _ag_gemm_swiglu(
    x: Tensor, w: Tensor, bias: Tensor | None, workspace: str, world_size: int, keeps: bool, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    act, wide, rows = gated.product_and_swiglu(x, w, bias, workspace_named(workspace), keeps_wide=keeps, gathered=save)
    nothing = x.new_empty((0, x.shape[1]))
    return act, x.new_empty((0, w.shape[1])) if wide is None else wide, nothing if rows is None else rows


@_shapes_of(_ag_gemm_swiglu)
def _(
    x: Tensor, w: Tensor, bias: Tensor | None, workspace: str, world_size: int, keeps: bool, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape[0] * world_size, w.shape[1]
    act, wide = x.new_empty((rows, columns // 2)), x.new_empty((rows if keeps else 0, columns))
    return act, wide, x.new_empty((rows if save else 0, x.shape[1]))


@_operator
def _gemm_ar(x: Tensor, w: Tensor, bias: Tensor | None, workspace: str, config: str) -> Tensor:
    return dispatch.gemm_ar(x, w, workspace_named(workspace), bias, unpack(config))


@_shapes_of(_gemm_ar)
def _(x: Tensor, w: Tensor, bias: Tensor | None, workspace: str, config: str) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[1]))


@_operator
def _summed(gradient: Tensor, workspace: str) -> Tensor:
    return autograd.summed(gradient, workspace_named(workspace))


@_shapes_of(_summed)
def _(gradient: Tensor, workspace: str) -> Tensor:
    return torch.empty_like(gradient)


def _empty_gradients(x: Tensor, w: Tensor, *, needs_x: bool, needs_w: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if needs_x else (0,)), torch.empty_like(w) if needs_w else w.new_empty((0,))


def _filled(
    gradients: tuple[Tensor | None, Tensor | None], x: Tensor, w: Tensor, *, needs_x: bool, needs_w: bool
) -> tuple[Tensor, Tensor]:
    """Gradients as tensors, since an operator must return tensors: one that is not needed is empty."""
    dx, dw = gradients
    none_x, none_w = _empty_gradients(x, w, needs_x=needs_x and dx is None, needs_w=needs_w and dw is None)
    return dx if dx is not None else none_x.zero_(), dw if dw is not None else none_w.zero_()


# --- what is called while compiling --------------------------------------------------------------------------------


def ag_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, config: Config | None, *, fresh: bool, save: bool
) -> tuple[Tensor, Tensor | None]:
    """`autograd.ag_gemm` as nodes of a graph."""
    found = AgGemmNode.apply(x, w, bias, workspace.name, workspace.world_size, pack(config), fresh, save)  # type: ignore[no-untyped-call]  # torch gives it no types
    return found if fresh else (found, None)


def gemm_rs(x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, config: Config | None) -> Tensor:
    """`autograd.gemm_rs` as nodes of a graph."""
    out: Tensor = GemmRsNode.apply(x, w, bias, workspace.name, workspace.world_size, pack(config))  # type: ignore[no-untyped-call]  # torch gives it no types
    return out


def swiglu_gemm_rs(wide: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, config: Config | None) -> Tensor:
    """`autograd.swiglu_gemm_rs` as nodes of a graph."""
    out: Tensor = SwigluGemmRsNode.apply(wide, w, bias, workspace.name, workspace.world_size, pack(config))  # type: ignore[no-untyped-call]  # torch gives it no types
    return out


def gated_mlp(
    x: Tensor, w_up: Tensor, bias_up: Tensor | None, w_down: Tensor, bias_down: Tensor | None, workspace: Workspace, *,
    save: bool,
) -> Tensor:  # fmt: skip
    """`autograd.gated_mlp` as nodes of a graph."""
    keeps = autograd.wanted(x, w_up, bias_up) or autograd.wanted(x, w_down, bias_down)
    save = save and keeps and w_up.requires_grad
    out: Tensor = GatedMlpNode.apply(  # type: ignore[no-untyped-call]  # torch gives it no types
        x, w_up, bias_up, w_down, bias_down, workspace.name, workspace.world_size, keeps, save
    )
    return out


def gemm_ar(x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, config: Config | None) -> Tensor:
    """`autograd.gemm_ar` as nodes of a graph."""
    out: Tensor = GemmArNode.apply(x, w, bias, workspace.name, pack(config))  # type: ignore[no-untyped-call]  # torch gives it no types
    return out


def replicated(parameter: Tensor, workspace: Workspace) -> Tensor:
    """`autograd.replicated` as nodes of a graph."""
    out: Tensor = ReplicatedNode.apply(parameter, workspace.name)  # type: ignore[no-untyped-call]  # torch gives it no types
    return out


# --- gradients -----------------------------------------------------------------------------------------------------


class AgGemmNode(torch.autograd.Function):
    """`ag_gemm` with its gradients, for torch to look into."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, workspace: str, world_size: int, config: str, fresh: bool,
        save: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Take x [M / W, K] and w [K, N]; give [M, N], and when `fresh` with it [M, K]."""
        out, gathered = _ag_gemm(x, w, bias, workspace, world_size, config, fresh, save)
        ctx.workspace, ctx.fresh, ctx.save = workspace, fresh, save
        if save:
            ctx.save_for_backward(x, w, gathered)
        else:
            ctx.save_for_backward(x, w)
        return (out, gathered) if fresh else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        """[M, N], and when `fresh` [M, K], to gradients of x, w and bias."""
        x, w = ctx.saved_tensors[:2]
        gathered = ctx.saved_tensors[2] if ctx.save else None
        dgathered = others[0] if ctx.fresh else None
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        dx, dw = _ag_gemm_backward(dout, dgathered, x, w, gathered, ctx.workspace, needs_x, needs_w)
        dbias = dout.sum(0) if needs_bias else None
        return dx if needs_x else None, dw if needs_w else None, dbias, None, None, None, None, None


class GemmRsNode(torch.autograd.Function):
    """`gemm_rs` with its gradients, for torch to look into."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, workspace: str, world_size: int, config: str
    ) -> Tensor:
        """Take x [M, K] and w [K, N]; give [M / W, N]."""
        ctx.workspace = workspace
        ctx.save_for_backward(x, w)
        out: Tensor = _gemm_rs(x, w, bias, workspace, world_size, config)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """[M / W, N] to gradients of x, w and bias."""
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        dx, dw = _gemm_rs_backward(dout, x, w, ctx.workspace, needs_x, needs_w)
        dbias = dout.sum(0) if needs_bias else None
        return dx if needs_x else None, dw if needs_w else None, dbias, None, None, None


class SwigluGemmRsNode(torch.autograd.Function):
    """`swiglu_gemm_rs` with its gradients, for torch to look into."""

    @staticmethod
    def forward(
        ctx: Any, wide: Tensor, w: Tensor, bias: Tensor | None, workspace: str, world_size: int, config: str
    ) -> Tensor:
        """Take wide [M, 2 K] and w [K, N]; give [M / W, N]."""
        ctx.workspace = workspace
        found: tuple[Tensor, Tensor] = _swiglu_gemm_rs(wide, w, bias, workspace, world_size, config)
        out, x = found
        ctx.save_for_backward(wide, x, w)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """[M / W, N] to gradients of wide, w and bias."""
        wide, x, w = ctx.saved_tensors
        needs_wide, needs_w, needs_bias = ctx.needs_input_grad[:3]
        dwide, dw = _swiglu_gemm_rs_backward(dout, wide, x, w, ctx.workspace, needs_wide, needs_w)
        dbias = dout.sum(0) if needs_bias else None
        return dwide if needs_wide else None, dw if needs_w else None, dbias, None, None, None


class GatedMlpNode(torch.autograd.Function):
    """`gated_mlp` with its gradients, for torch to look into."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_up: Tensor, bias_up: Tensor | None, w_down: Tensor, bias_down: Tensor | None,
        workspace: str, world_size: int, keeps: bool, save: bool,
    ) -> Tensor:  # fmt: skip
        """Take x [M / W, K], w_up [K, 2 F] and w_down [F, N]; give [M / W, N]."""
        ctx.workspace, ctx.save = workspace, save
        found: tuple[Tensor, Tensor, Tensor] = _ag_gemm_swiglu(x, w_up, bias_up, workspace, world_size, keeps, save)
        act, wide, rows = found
        if save:
            ctx.save_for_backward(x, w_up, w_down, wide, act, rows)
        else:
            ctx.save_for_backward(x, w_up, w_down, wide, act)
        out: Tensor = _gemm_rs(act, w_down, bias_down, workspace, world_size, pack(None))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """[M / W, N] to gradients of x, both weights and both biases."""
        x, w_up, w_down, wide, act = ctx.saved_tensors[:5]
        rows = ctx.saved_tensors[5] if ctx.save else None
        needs_x, needs_up, needs_bias_up, needs_down, needs_bias_down = ctx.needs_input_grad[:5]
        needs_wide = needs_x or needs_up or needs_bias_up
        dwide, dw_down = _swiglu_gemm_rs_backward(dout, wide, act, w_down, ctx.workspace, needs_wide, needs_down)
        dx = dw_up = None
        if needs_x or needs_up:
            dx, dw_up = _ag_gemm_backward(dwide, None, x, w_up, rows, ctx.workspace, needs_x, needs_up)
        dbias_up = dwide.sum(0) if needs_bias_up else None
        dbias_down = dout.sum(0) if needs_bias_down else None
        gradients = (dx if needs_x else None, dw_up if needs_up else None, dbias_up, dw_down if needs_down else None)
        return *gradients, dbias_down, None, None, None, None


class GemmArNode(torch.autograd.Function):
    """`gemm_ar` with its gradients, for torch to look into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, workspace: str, config: str) -> Tensor:
        """Take x [M, K] and w [K, N]; give [M, N]."""
        ctx.save_for_backward(x, w)
        out: Tensor = _gemm_ar(x, w, bias, workspace, config)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """[M, N] to gradients of x, w and bias."""
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        dx, dw = autograd.gemm_ar_gradients(dout, x, w, needs_x=needs_x, needs_w=needs_w)
        return dx, dw, dout.sum(0) if needs_bias else None, None, None


class ReplicatedNode(torch.autograd.Function):
    """The identity, whose gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, workspace: str) -> Tensor:
        """The parameter as it is."""
        ctx.workspace = workspace
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The sum of all ranks' gradients."""
        return _summed(gradient, ctx.workspace), None
