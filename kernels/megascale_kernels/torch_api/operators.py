# SPDX-License-Identifier: Apache-2.0
"""The operators that people call. Each is a product of matrices and a collective that hide each other.

Shapes: M rows of the whole input, K and N as this rank sees them, W ranks. Leading dimensions of x count as rows, the
first of them outermost: sequence-parallel tensors are [sequence, batch, features], cut along the sequence.

Whether the kernels or the serial path run a call, `dispatch.py` decides; the logger `megascale_kernels` gives the
reason at debug level. All are differentiable once, run under `torch.compile` as one node each, and can be
captured in CUDA graphs after a first call outside (which compiles). Autocast changes none of them: they take their
operands as they are (the layers cast theirs, as `nn.Linear` does). A graph cannot raise: ask `workspace.check()` after
replays.
"""

import math
from typing import Literal, overload

import torch
from torch import Tensor

from megascale_kernels.errors import Unsupported
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config
from megascale_kernels.torch_api import autograd, custom_ops


@overload
def ag_gemm(
    x: Tensor, w: Tensor, workspace: Workspace, *, bias: Tensor | None = None, config: Config | None = None,
    return_gathered: Literal[False] = False, save_gathered: bool = False,
) -> Tensor: ...  # fmt: skip


@overload
def ag_gemm(
    x: Tensor, w: Tensor, workspace: Workspace, *, bias: Tensor | None = None, config: Config | None = None,
    return_gathered: Literal[True], save_gathered: bool = False,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def ag_gemm(
    x: Tensor,
    w: Tensor,
    workspace: Workspace,
    *,
    bias: Tensor | None = None,
    config: Config | None = None,
    return_gathered: bool = False,
    save_gathered: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """All-gather + GEMM: gather(x) @ w + bias, where every rank holds M / W rows of x.

    Args:
        x: [M / W, K], contiguous, of the workspace's type and device; or [rows, ..., K].
        w: [K, N], contiguous or the transpose of a contiguous [N, K] (`linear.weight.T`).
        workspace: made for at least M rows of K elements.
        bias: [N].
        config: how to run; None lets the tuner decide. All ranks must pass the same.
        return_gathered: also return all rows of x, in memory of their own.
        save_gathered: keep the gathered rows for the gradient of w rather than gather them again in backward.

    Returns:
        [M, N], or [W * rows, ..., N]; with `return_gathered` a pair of that and gather(x).

    Raises:
        Unsupported: wrong shape, type, device or strides; the message names what to do.
        WorkspaceTooSmall: the message names the size that is needed.
        RankMismatch: ranks called different things.
        TileTimeout: a peer did not come; later calls raise it as well, until all ranks have called `workspace.reset`.
    """
    rows = x if x.ndim == 2 else _as_rows(x, "ag_gemm")
    room = custom_ops if torch.compiler.is_compiling() else autograd
    out, gathered = room.ag_gemm(rows, w, bias, workspace, config, fresh=return_gathered, save=save_gathered)
    if rows is x:  # two dimensions, as the kernels have them: even a view costs the host a microsecond
        return out if gathered is None else (out, gathered)
    leading = (x.shape[0] * workspace.world_size, *x.shape[1:-1])
    out = out.view(*leading, w.shape[1])
    return out if gathered is None else (out, gathered.view(*leading, x.shape[-1]))


def gemm_rs(
    x: Tensor, w: Tensor, workspace: Workspace, *, bias: Tensor | None = None, config: Config | None = None
) -> Tensor:
    """GEMM + reduce-scatter: this rank's rows of the sum over ranks of x @ w, plus bias.

    The kernels add in fp32 in the order of ranks, so the result is the same from run to run.

    Args:
        x: [M, K], contiguous, of the workspace's type and device, M a multiple of W; or [rows, ..., K], rows likewise.
        w: [K, N], contiguous or the transpose of a contiguous [N, K].
        workspace: made for at least M rows of N elements.
        bias: [N], added once, not once per rank. Its gradient is that of this rank's rows.
        config: how to run; None lets the tuner decide. All ranks must pass the same.

    Returns:
        [M / W, N], or [rows / W, ..., N].

    Raises:
        Unsupported, WorkspaceTooSmall, RankMismatch, TileTimeout: as `ag_gemm`.
    """
    rows = x if x.ndim == 2 else _as_rows(x, "gemm_rs")
    world_size = workspace.world_size
    if x.shape[0] % world_size:
        raise Unsupported(
            f"gemm_rs: the first dimension of x, {x.shape[0]} of {tuple(x.shape)}, cannot be dealt out to {world_size} "
            f"ranks: pad it to a multiple of {world_size}"
        )
    room = custom_ops if torch.compiler.is_compiling() else autograd
    out: Tensor = room.gemm_rs(rows, w, bias, workspace, config)
    return out if rows is x else out.view(x.shape[0] // world_size, *x.shape[1:-1], w.shape[1])


def swiglu_gemm_rs(
    wide: Tensor, w: Tensor, workspace: Workspace, *, bias: Tensor | None = None, config: Config | None = None
) -> Tensor:
    """`gemm_rs` of swiglu(wide): what lies behind the wide product of a gated MLP, as one operator.

    In backward SwiGLU's gradient is taken while the product is in registers, before it is stored, where that is faster.
    swiglu(wide) is kept for the gradient of w.

    Args:
        wide: [M, 2 K], contiguous, gates in the first half of the columns, values in the second; or [rows, ..., 2 K].
        w: [K, N], contiguous or the transpose of a contiguous [N, K].
        workspace: made for at least M rows of N elements, scattered and, in backward, gathered.
        bias: [N], as `gemm_rs` takes it.
        config: how the product runs; None lets the tuner decide. All ranks must pass the same.

    Returns:
        [M / W, N], or [rows / W, ..., N].

    Raises:
        Unsupported, WorkspaceTooSmall, RankMismatch, TileTimeout: as `ag_gemm`.
    """
    rows = wide if wide.ndim == 2 else _as_rows(wide, "swiglu_gemm_rs")
    world_size = workspace.world_size
    if wide.shape[-1] != 2 * w.shape[0]:
        raise Unsupported(
            f"swiglu_gemm_rs: wide must be [..., {2 * w.shape[0]}], gates and values side by side for a w of "
            f"{tuple(w.shape)}, got {tuple(wide.shape)}"
        )
    if wide.shape[0] % world_size:
        raise Unsupported(
            f"swiglu_gemm_rs: the first dimension of wide, {wide.shape[0]} of {tuple(wide.shape)}, cannot be dealt out "
            f"to {world_size} ranks: pad it to a multiple of {world_size}"
        )
    room = custom_ops if torch.compiler.is_compiling() else autograd
    out: Tensor = room.swiglu_gemm_rs(rows, w, bias, workspace, config)
    return out if rows is wide else out.view(wide.shape[0] // world_size, *wide.shape[1:-1], w.shape[1])


def gated_mlp(
    x: Tensor, w_up: Tensor, w_down: Tensor, workspace: Workspace, *, bias_up: Tensor | None = None,
    bias_down: Tensor | None = None, save_gathered: bool = False,
) -> Tensor:  # fmt: skip
    """A gated MLP: `gemm_rs` of swiglu(gather(x) @ w_up + bias_up) with w_down, as one operator.

    SwiGLU is taken while the first product is in registers, forward and backward, where that is faster. Gates, values
    and swiglu of them are kept for backward; without gradients to come, gates and values are not even stored.

    Args:
        x: [M / W, K], contiguous, of the workspace's type and device; or [rows, ..., K].
        w_up: [K, 2 F], columns of this rank's gates, then of its values; contiguous or the transpose of a contiguous
            [2 F, K].
        w_down: [F, N], likewise.
        workspace: made for at least M rows of K and of N elements, gathered and scattered.
        bias_up: [2 F].
        bias_down: [N], as `gemm_rs` takes it.
        save_gathered: keep the gathered rows for the gradient of w_up rather than gather them again in backward.

    Returns:
        [M / W, N], or [rows, ..., N].

    Raises:
        Unsupported, WorkspaceTooSmall, RankMismatch, TileTimeout: as `ag_gemm`.
    """
    rows = x if x.ndim == 2 else _as_rows(x, "gated_mlp")
    if w_up.ndim != 2 or w_down.ndim != 2 or w_up.shape[1] != 2 * w_down.shape[0]:
        raise Unsupported(
            "gated_mlp: w_up must be [K, 2 F], gates and values, and w_down [F, N]; got "
            f"{tuple(w_up.shape)} and {tuple(w_down.shape)}"
        )
    room = custom_ops if torch.compiler.is_compiling() else autograd
    out: Tensor = room.gated_mlp(rows, w_up, bias_up, w_down, bias_down, workspace, save=save_gathered)
    return out if rows is x else out.view(*x.shape[:-1], w_down.shape[1])


def gemm_ar(
    x: Tensor, w: Tensor, workspace: Workspace, *, bias: Tensor | None = None, config: Config | None = None
) -> Tensor:
    """GEMM + all-reduce: the sum over ranks of x @ w on every rank, plus bias once; for few rows.

    Args:
        x: [M, K], contiguous, of the workspace's type and device; or [..., K].
        w: [K, N], contiguous or the transpose of a contiguous [N, K].
        workspace: the kernel needs room for W * M rows of N elements, else the serial path is taken.
        bias: [N], added once.
        config: how to run; None lets the tuner decide. All ranks must pass the same.

    Returns:
        [M, N], or [..., N]; in backward every rank must bring the same gradient of it.

    Raises:
        Unsupported, RankMismatch, TileTimeout: as `ag_gemm`.
    """
    rows = x if x.ndim == 2 else _as_rows(x, "gemm_ar")
    room = custom_ops if torch.compiler.is_compiling() else autograd
    out: Tensor = room.gemm_ar(rows, w, bias, workspace, config)
    return out if rows is x else out.view(*x.shape[:-1], w.shape[1])


def _as_rows(x: Tensor, what: str) -> Tensor:
    """Leading dimensions flattened, without a copy.

    Raises:
        Unsupported: fewer than two dimensions, or not contiguous.
    """
    if x.ndim < 2:
        raise Unsupported(f"{what}: x must be [rows, K] or [rows, ..., K], got shape {tuple(x.shape)}")
    if not torch.compiler.is_compiling() and not x.is_contiguous():
        raise Unsupported(f"{what}: x of shape {tuple(x.shape)} has strides {x.stride()}: call .contiguous()")
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
