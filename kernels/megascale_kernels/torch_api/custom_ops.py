# SPDX-License-Identifier: Apache-2.0
"""The operators as torch sees them while it compiles: opaque, with known shapes and gradients.

`torch.compile` cannot look into a launch that talks to other ranks, and need not: a custom operator declares the shapes
of the results (the fake implementation) and the operators of the backward. A graph holds no Python objects, so the
workspace travels by its name and the configuration as a text. Eager code does not come through here: the dispatcher
would add some twenty microseconds to each call.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megascale_kernels.dispatch import dispatch
from megascale_kernels.errors import KernelError
from megascale_kernels.memory.workspace import LIVE, Workspace
from megascale_kernels.planning.config import Config
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


# --- what is called while compiling --------------------------------------------------------------------------------


def ag_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, config: Config | None, *, fresh: bool, save: bool
) -> tuple[Tensor, Tensor | None]:
    """`autograd.ag_gemm` as one node of a graph."""
    out, gathered = _ag_gemm(x, w, bias, workspace.name, workspace.world_size, pack(config), fresh, save)
    return out, gathered if fresh else None


def gemm_rs(x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, config: Config | None) -> Tensor:
    """`autograd.gemm_rs` as one node of a graph."""
    out: Tensor = _gemm_rs(x, w, bias, workspace.name, workspace.world_size, pack(config))
    return out


def gemm_ar(x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, config: Config | None) -> Tensor:
    """`autograd.gemm_ar` as one node of a graph."""
    out: Tensor = _gemm_ar(x, w, bias, workspace.name, pack(config))
    return out


def replicated(parameter: Tensor, workspace: Workspace) -> Tensor:
    """`autograd.replicated` as one node of a graph."""
    out: Tensor = _replicated(parameter, workspace.name)
    return out


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


def _differentiate(operator: Any, gradients: Callable[..., Any], keep: Callable[..., Any]) -> None:
    """Tell torch an operator's gradients, and what of a call they need."""
    torch.library.register_autograd(operator.name(), gradients, setup_context=keep, lib=_LIBRARY)


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
def _gemm_ar(x: Tensor, w: Tensor, bias: Tensor | None, workspace: str, config: str) -> Tensor:
    return dispatch.gemm_ar(x, w, workspace_named(workspace), bias, unpack(config))


@_shapes_of(_gemm_ar)
def _(x: Tensor, w: Tensor, bias: Tensor | None, workspace: str, config: str) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[1]))


@_operator
def _replicated(parameter: Tensor, workspace: str) -> Tensor:
    return parameter.clone()


@_shapes_of(_replicated)
def _(parameter: Tensor, workspace: str) -> Tensor:
    return torch.empty_like(parameter)


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


# --- gradients -----------------------------------------------------------------------------------------------------


def _keep_ag_gemm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, _, ctx.workspace, _, _, ctx.fresh, save = inputs
    ctx.save_for_backward(x, w, output[1] if save else None)
    ctx.set_materialize_grads(False)


def _ag_gemm_gradients(ctx: Any, dout: Tensor | None, dgathered: Tensor | None) -> tuple[Tensor | None, ...]:
    x, w, gathered = ctx.saved_tensors
    needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
    # Rows that were not asked for are no result, though an operator must return something: they have no gradient.
    dgathered = dgathered if ctx.fresh else None
    dx, dw = _ag_gemm_backward(dout, dgathered, x, w, gathered, ctx.workspace, needs_x, needs_w)
    dbias = dout.sum(0) if needs_bias and dout is not None else None
    return dx if needs_x else None, dw if needs_w else None, dbias, None, None, None, None, None


def _keep_gemm_rs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, ctx.workspace, _, _ = inputs
    ctx.save_for_backward(x, w)


def _gemm_rs_gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
    dx, dw = _gemm_rs_backward(dout, x, w, ctx.workspace, needs_x, needs_w)
    dbias = dout.sum(0) if needs_bias else None
    return dx if needs_x else None, dw if needs_w else None, dbias, None, None, None


def _keep_gemm_ar(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _gemm_ar_gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
    dx, dw = autograd.gemm_ar_gradients(dout, x, w, needs_x=needs_x, needs_w=needs_w)
    return dx, dw, dout.sum(0) if needs_bias else None, None, None


def _keep_replicated(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.workspace = inputs[1]


def _replicated_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return _summed(gradient, ctx.workspace), None


_differentiate(_ag_gemm, _ag_gemm_gradients, _keep_ag_gemm)
_differentiate(_gemm_rs, _gemm_rs_gradients, _keep_gemm_rs)
_differentiate(_gemm_ar, _gemm_ar_gradients, _keep_gemm_ar)
_differentiate(_replicated, _replicated_gradients, _keep_replicated)
