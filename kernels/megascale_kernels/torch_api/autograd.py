# SPDX-License-Identifier: Apache-2.0
"""Gradients: the backward of each operator is the other, overlapped too.

    out = gather(x) w          dx = scatter(sum over ranks of dout w^T) = gemm_rs(dout, w^T)     dw = gather(x)^T dout
    out = scatter(sum of x w)  dx = gather(dout) w^T                    = ag_gemm(dout, w^T)     dw = x^T gather(dout)
    out = scatter(sum of swiglu(x) w): as the second line, and then SwiGLU's gradient, taken before dx is stored
    out = scatter(sum of swiglu(gather(x) u) w): the third line, and then the first for x and u
    out = sum of x w           dx = dout w^T, dw = x^T dout: every rank has all of dout

The gathered x of the first line is not kept, as one rank's activations would then hold those of all: it is gathered
again by copy engines while `gemm_rs` runs. `save_gathered=True` trades that memory for links. In the second line the
gathered dout comes with `ag_gemm` for nothing.

A gradient is that of the sum of all ranks' losses with respect to this rank's tensor. A bias of `gemm_rs` that is the
same parameter on all ranks therefore still wants its gradients summed: `replicated` does that. `gemm_ar` is meant for
ranks that go on with its result alike and compute one and the same loss, which counts once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megascale_kernels.dispatch import dispatch, gated, serial
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config
from megascale_kernels.reference import matmul
from megascale_kernels.swiglu import silu_times_value


def ag_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, config: Config | None, *, fresh: bool, save: bool
) -> tuple[Tensor, Tensor | None]:
    """`dispatch.ag_gemm`, differentiable; `fresh` returns the gathered rows, `save` keeps them for backward."""
    if not wanted(x, w, bias):
        return dispatch.ag_gemm(x, w, workspace, bias, config, gathered=fresh)
    outputs: tuple[Tensor, Tensor | None] = AgGemm.apply(x, w, bias, workspace, config, fresh, save)  # type: ignore[no-untyped-call]  # torch gives it no types
    return outputs


def gemm_rs(x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, config: Config | None) -> Tensor:
    """`dispatch.gemm_rs`, differentiable."""
    if not wanted(x, w, bias):
        return dispatch.gemm_rs(x, w, workspace, bias, config)
    out: Tensor = GemmRs.apply(x, w, bias, workspace, config)  # type: ignore[no-untyped-call]  # torch gives it no types
    return out


def swiglu_gemm_rs(wide: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, config: Config | None) -> Tensor:
    """`dispatch.gemm_rs` of swiglu(wide), differentiable."""
    if not wanted(wide, w, bias):
        return dispatch.gemm_rs(silu_times_value(wide), w, workspace, bias, config)
    out: Tensor = SwigluGemmRs.apply(wide, w, bias, workspace, config)  # type: ignore[no-untyped-call]  # torch gives it no types
    return out


def gated_mlp(
    x: Tensor, w_up: Tensor, bias_up: Tensor | None, w_down: Tensor, bias_down: Tensor | None, workspace: Workspace, *,
    save: bool,
) -> Tensor:  # fmt: skip
    """`dispatch.gemm_rs` of swiglu of a gathered product, differentiable; `save` keeps the gathered rows."""
    if not (wanted(x, w_up, bias_up) or wanted(x, w_down, bias_down)):
        act = gated.product_and_swiglu(x, w_up, bias_up, workspace, keeps_wide=False, gathered=False).act
        return dispatch.gemm_rs(act, w_down, workspace, bias_down, None)
    out: Tensor = GatedMlp.apply(x, w_up, bias_up, w_down, bias_down, workspace, save)  # type: ignore[no-untyped-call]  # torch gives it no types
    return out


def gemm_ar(x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, config: Config | None) -> Tensor:
    """`dispatch.gemm_ar`, differentiable."""
    if not wanted(x, w, bias):
        return dispatch.gemm_ar(x, w, workspace, bias, config)
    out: Tensor = GemmAr.apply(x, w, bias, workspace, config)  # type: ignore[no-untyped-call]  # torch gives it no types
    return out


def replicated(parameter: Tensor, workspace: Workspace) -> Tensor:
    """The same tensor; its gradient is summed over ranks, since each rank's is that of its own rows."""
    out: Tensor = Replicated.apply(parameter, workspace)  # type: ignore[no-untyped-call]  # torch gives it no types
    return out


def ag_gemm_gradients(
    dout: Tensor | None, dgathered: Tensor | None, x: Tensor, w: Tensor, gathered: Tensor | None, workspace: Workspace,
    *, needs_x: bool, needs_w: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x and w of `ag_gemm`; a gradient that is not needed is None."""
    dx = dw = None
    if dout is not None:
        dout = dout.contiguous()
        gather = dispatch.start_gather(x, workspace) if needs_w and gathered is None else None
        if needs_x:
            dx = dispatch.gemm_rs(dout, w.T, workspace, None, None)
        if needs_w:
            dw = _weight_gradient(gather() if gather is not None else gathered, dout, w)
    if dgathered is not None and needs_x:
        more = serial.reduce_scatter(dgathered.contiguous(), workspace)
        dx = more.clone() if dx is None else dx + more
    return dx, dw


def gemm_rs_gradients(
    dout: Tensor, x: Tensor, w: Tensor, workspace: Workspace, *, needs_x: bool, needs_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and w of `gemm_rs`; a gradient that is not needed is None."""
    dout = dout.contiguous()
    if not needs_x:
        return None, _weight_gradient(x, dispatch.start_gather(dout, workspace)(), w) if needs_w else None
    dx, gathered = dispatch.ag_gemm_in_place(dout, w.T, workspace)
    return dx, _weight_gradient(x, gathered, w) if needs_w else None


def swiglu_gemm_rs_gradients(
    dout: Tensor, wide: Tensor, x: Tensor, w: Tensor, workspace: Workspace, *, needs_wide: bool, needs_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of wide and w of `swiglu_gemm_rs`, x = swiglu(wide); a gradient that is not needed is None."""
    if not needs_wide:
        return gemm_rs_gradients(dout, x, w, workspace, needs_x=False, needs_w=needs_w)
    dwide, gathered = gated.gradient_in_place(dout.contiguous(), w.T, wide, workspace)
    return dwide, _weight_gradient(x, gathered, w) if needs_w else None


def gemm_ar_gradients(
    dout: Tensor, x: Tensor, w: Tensor, *, needs_x: bool, needs_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and w of `gemm_ar`; a gradient that is not needed is None."""
    return matmul(dout, w.T) if needs_x else None, _weight_gradient(x, dout, w) if needs_w else None


def _weight_gradient(x: Tensor | None, dout: Tensor, w: Tensor) -> Tensor:
    """x^T dout, laid out in memory as w is, so that the gradient of a parameter comes out contiguous."""
    assert x is not None
    return matmul(x.T, dout) if w.is_contiguous() else matmul(dout.T, x).T


def wanted(x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """Whether a gradient of any of them is wanted."""
    return torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or (bias is not None and bias.requires_grad))


class AgGemm(torch.autograd.Function):
    """`ag_gemm` with its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, config: Config | None,
                fresh: bool, save: bool) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Take x [M / W, K] and w [K, N]; give [M, N] and, when `fresh`, [M, K]."""
        save = save and w.requires_grad
        out, gathered = dispatch.ag_gemm(x, w, workspace, bias, config, gathered=fresh or save)
        ctx.workspace = workspace
        ctx.save_for_backward(x, w, gathered if save else None)
        ctx.set_materialize_grads(False)
        return out, gathered if fresh else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dgathered: Tensor | None) -> tuple[Tensor | None, ...]:
        """[M, N] and [M, K] to gradients of x, w and bias."""
        x, w, gathered = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        dx, dw = ag_gemm_gradients(dout, dgathered, x, w, gathered, ctx.workspace, needs_x=needs_x, needs_w=needs_w)
        dbias = dout.sum(0) if needs_bias and dout is not None else None
        return dx, dw, dbias, None, None, None, None


class GemmRs(torch.autograd.Function):
    """`gemm_rs` with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, config: Config | None
    ) -> Tensor:
        """Take x [M, K] and w [K, N]; give [M / W, N]."""
        ctx.workspace = workspace
        ctx.save_for_backward(x, w)
        return dispatch.gemm_rs(x, w, workspace, bias, config)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """[M / W, N] to gradients of x, w and bias."""
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        dx, dw = gemm_rs_gradients(dout, x, w, ctx.workspace, needs_x=needs_x, needs_w=needs_w)
        return dx, dw, dout.sum(0) if needs_bias else None, None, None


class SwigluGemmRs(torch.autograd.Function):
    """`swiglu_gemm_rs` with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, wide: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, config: Config | None
    ) -> Tensor:
        """Take wide [M, 2 K] and w [K, N]; give [M / W, N]."""
        ctx.workspace = workspace
        x = silu_times_value(wide)
        ctx.save_for_backward(wide, x, w)
        return dispatch.gemm_rs(x, w, workspace, bias, config)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """[M / W, N] to gradients of wide, w and bias."""
        wide, x, w = ctx.saved_tensors
        needs_wide, needs_w, needs_bias = ctx.needs_input_grad[:3]
        dwide, dw = swiglu_gemm_rs_gradients(dout, wide, x, w, ctx.workspace, needs_wide=needs_wide, needs_w=needs_w)
        return dwide, dw, dout.sum(0) if needs_bias else None, None, None


class GatedMlp(torch.autograd.Function):
    """`gated_mlp` with its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_up: Tensor, bias_up: Tensor | None, w_down: Tensor, bias_down: Tensor | None,
                workspace: Workspace, save: bool) -> Tensor:  # fmt: skip
        """Take x [M / W, K], w_up [K, 2 F] and w_down [F, N]; give [M / W, N]."""
        ctx.workspace = workspace
        save = save and w_up.requires_grad
        act, wide, rows = gated.product_and_swiglu(x, w_up, bias_up, workspace, keeps_wide=True, gathered=save)
        ctx.save_for_backward(x, w_up, w_down, wide, act, rows)
        return dispatch.gemm_rs(act, w_down, workspace, bias_down, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """[M / W, N] to gradients of x, both weights and both biases."""
        x, w_up, w_down, wide, act, rows = ctx.saved_tensors
        workspace = ctx.workspace
        needs_x, needs_up, needs_bias_up, needs_down, needs_bias_down = ctx.needs_input_grad[:5]
        needs_wide = needs_x or needs_up or needs_bias_up
        dwide, dw_down = swiglu_gemm_rs_gradients(
            dout, wide, act, w_down, workspace, needs_wide=needs_wide, needs_w=needs_down
        )
        dx, dw_up = ag_gemm_gradients(dwide, None, x, w_up, rows, workspace, needs_x=needs_x, needs_w=needs_up)
        dbias_up = dwide.sum(0) if needs_bias_up and dwide is not None else None
        return dx, dw_up, dbias_up, dw_down, dout.sum(0) if needs_bias_down else None, None, None


class GemmAr(torch.autograd.Function):
    """`gemm_ar` with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace, config: Config | None
    ) -> Tensor:
        """Take x [M, K] and w [K, N]; give [M, N]."""
        ctx.save_for_backward(x, w)
        return dispatch.gemm_ar(x, w, workspace, bias, config)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """[M, N] to gradients of x, w and bias."""
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        dx, dw = gemm_ar_gradients(dout, x, w, needs_x=needs_x, needs_w=needs_w)
        return dx, dw, dout.sum(0) if needs_bias else None, None, None


class Replicated(torch.autograd.Function):
    """The identity, whose gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, workspace: Workspace) -> Tensor:
        """The parameter as it is."""
        ctx.workspace = workspace
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The sum of all ranks' gradients."""
        return summed(gradient, ctx.workspace), None


def summed(gradient: Tensor, workspace: Workspace) -> Tensor:
    """The sum over ranks, in a new tensor."""
    return serial.all_reduce(gradient.clone(memory_format=torch.contiguous_format), workspace)
