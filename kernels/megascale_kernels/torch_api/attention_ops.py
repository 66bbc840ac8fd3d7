# SPDX-License-Identifier: Apache-2.0
"""Attention as torch sees it: with its gradient in eager code, and as one node each way while torch compiles."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megascale_kernels.attention.problem import AttentionConfig, read_problem
from megascale_kernels.dispatch import attention_path
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.torch_api.custom_ops import _operator, _shapes_of, workspace_named

# causal, zigzag, scale, configuration: what a call has beside tensors and a workspace
How = tuple[bool, bool, float | None, AttentionConfig | None]


def eager(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, workspace: Workspace, how: How) -> Tensor:
    """The operator, differentiable once."""
    if not torch.is_grad_enabled() or not (q.requires_grad or k.requires_grad or v.requires_grad):
        return _forward(q, k, v, cu_seqlens, workspace, how)[0]
    out: Tensor = Attention.apply(q, k, v, cu_seqlens, workspace, how)  # type: ignore[no-untyped-call]  # torch gives it no types
    return out


def compiled(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, workspace: Workspace, how: How) -> Tensor:
    """The operator as nodes of a graph."""
    causal, zigzag, scale, config = how
    out: Tensor = AttentionNode.apply(  # type: ignore[no-untyped-call]  # torch gives it no types
        q, k, v, cu_seqlens, workspace.name, causal, zigzag, scale, pack(config)
    )
    return out


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, workspace: Workspace, how: How
) -> tuple[Tensor, Tensor]:
    causal, zigzag, scale, config = how
    problem = read_problem(q, k, v, workspace.world_size, cu_seqlens, scale, causal=causal, zigzag=zigzag)
    return attention_path.attend(q, k, v, workspace, problem, cu_seqlens, config)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor | None,
    workspace: Workspace, how: How,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    causal, zigzag, scale, config = how
    problem = read_problem(q, k, v, workspace.world_size, cu_seqlens, scale, causal=causal, zigzag=zigzag)
    return attention_path.attend_backward(q, k, v, out, lse, dout, workspace, problem, cu_seqlens, config)


class Attention(torch.autograd.Function):
    """`sp_attention` with its gradients; all three, since the peers wait for those of k and v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, workspace: Workspace,
                how: How) -> Tensor:  # fmt: skip
        """Take q, k and v of this rank; give the output, of q's shape."""
        out, lse = _forward(q, k, v, cu_seqlens, workspace, how)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
        ctx.workspace, ctx.how = workspace, how
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v."""
        q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
        gradients = _backward(dout, q, k, v, out, lse, cu_seqlens, ctx.workspace, ctx.how)
        wanted = [
            gradient if needed else None for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=False)
        ]
        return (*wanted, None, None, None)


# --- while torch compiles -----------------------------------------------------------------------------------------


def pack(config: AttentionConfig | None) -> str:
    """A configuration as a text; none is the empty one."""
    return "" if config is None else ",".join(map(str, config))


@cache
def unpack(text: str) -> AttentionConfig | None:
    """The configuration that `pack` wrote down."""
    return AttentionConfig(*(int(word) if word.isdigit() else word for word in text.split(","))) if text else None  # type: ignore[arg-type]  # fields know their kinds


@_operator
def _sp_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, workspace: str, causal: bool, zigzag: bool,
    scale: float | None, config: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _forward(q, k, v, cu_seqlens, workspace_named(workspace), (causal, zigzag, scale, unpack(config)))


@_shapes_of(_sp_attention)
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, workspace: str, causal: bool, zigzag: bool,
    scale: float | None, config: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = q.shape[0] * q.shape[1] if q.ndim == 4 else q.shape[0]
    return q.new_empty(q.shape), q.new_empty((q.shape[-2], rows), dtype=torch.float32)


@_operator
def _sp_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor | None,
    workspace: str, causal: bool, zigzag: bool, scale: float | None, config: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    how = (causal, zigzag, scale, unpack(config))
    return _backward(dout, q, k, v, out, lse, cu_seqlens, workspace_named(workspace), how)


@_shapes_of(_sp_attention_backward)
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor | None,
    workspace: str, causal: bool, zigzag: bool, scale: float | None, config: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class AttentionNode(torch.autograd.Function):
    """`sp_attention` with its gradients, for torch to look into."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, workspace: str, causal: bool,
        zigzag: bool, scale: float | None, config: str,
    ) -> Tensor:  # fmt: skip
        """Take q, k and v of this rank; give the output, of q's shape."""
        out, lse = _sp_attention(q, k, v, cu_seqlens, workspace, causal, zigzag, scale, config)
        ctx.workspace, ctx.causal, ctx.zigzag, ctx.scale, ctx.config = workspace, causal, zigzag, scale, config
        ctx.packs = cu_seqlens is not None
        if cu_seqlens is not None:
            ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
        else:
            ctx.save_for_backward(q, k, v, out, lse)
        return out  # type: ignore[no-any-return]  # torch gives operators no types

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v."""
        q, k, v, out, lse = ctx.saved_tensors[:5]
        cu_seqlens = ctx.saved_tensors[5] if ctx.packs else None
        dq, dk, dv = _sp_attention_backward(
            dout, q, k, v, out, lse, cu_seqlens, ctx.workspace, ctx.causal, ctx.zigzag, ctx.scale, ctx.config
        )
        return dq, dk, dv, None, None, None, None, None, None
