# SPDX-License-Identifier: Apache-2.0
"""Attention over a cut sequence: by the kernels, or K and V gathered first and torch's own attention after it.

The path is chosen from what all ranks share, as in `dispatch.py`. The serial one serves the CPU, other GPUs than
Hopper's, one rank, and heads that the kernels have not.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from megascale_kernels.attention import sdpa
from megascale_kernels.attention.problem import (
    HEAD_DIMS,
    AttentionConfig,
    Problem,
    check_attention_config,
    check_tensors,
)
from megascale_kernels.attention.tile_walk import bounds_of
from megascale_kernels.dispatch import serial
from megascale_kernels.errors import WorkspaceTooSmall
from megascale_kernels.memory.workspace import Workspace

LOG = logging.getLogger("megascale_kernels")
HOPPER = 9  # major compute capability whose matrix instructions the kernels are written for
ALIGNED = 16  # bytes; the TMA unit reads from such boundaries


def attend(
    q: Tensor, k: Tensor, v: Tensor, workspace: Workspace, problem: Problem, cu_seqlens: Tensor | None,
    config: AttentionConfig | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """This rank's output, of q's shape, and what backward needs of it: fp32 [Hq, rows]; no autograd.

    Raises:
        Unsupported: a configuration or type that cannot be.
        WorkspaceTooSmall: the workspace was made for less.
        TileTimeout, RankMismatch: an earlier call failed.
    """
    _check(q, workspace, problem, config)
    if _why_serial(problem, workspace, config) is not None:
        whole_k, whole_v = _gathered(k, v, workspace, problem)
        out = sdpa.attend(_batched(q), whole_k, whole_v, problem, workspace.rank, cu_seqlens)
        # In the type of the operands, as the kernels store it; nothing is needed for backward, which gathers again.
        return out.reshape(q.shape), q.new_zeros((problem.q_heads, problem.rows), dtype=torch.float32)
    from megascale_kernels.attention.launch import Operands, forward

    given = Operands(_rows(q), _rows(k), _rows(v), bounds_of(cu_seqlens, problem, q.device))
    out, lse = forward(given, problem, workspace, config or own_choice(problem))
    return out.view(q.shape), lse


def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, workspace: Workspace, problem: Problem,
    cu_seqlens: Tensor | None, config: AttentionConfig | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v; raises what `attend` raises.

    Without a mask torch's own backward is faster than ours, also with what it computes again (two H200, 16,384 tokens,
    heads of 128 elements: ours alone 18 ms); ours runs where the configuration asks for it.
    """
    _check(q, workspace, problem, config)
    if _why_serial(problem, workspace, config) is not None or (config is None and not problem.causal):
        return _serial_gradients(q, k, v, dout, workspace, problem, cu_seqlens)
    from megascale_kernels.attention.backward_launch import backward
    from megascale_kernels.attention.launch import Operands

    given = Operands(_rows(q), _rows(k), _rows(v), bounds_of(cu_seqlens, problem, q.device))
    dq, dk, dv = backward(given, _rows(out), lse, _rows(dout), problem, workspace, config or own_choice(problem))
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _serial_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, workspace: Workspace, problem: Problem, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather again, compute again, and let torch differentiate; gradients of the peers' keys are summed by owners."""
    whole_k, whole_v = _gathered(k, v, workspace, problem)
    leaves = [tensor.detach().requires_grad_() for tensor in (_batched(q), whole_k, whole_v)]
    with torch.enable_grad():
        out = sdpa.attend(leaves[0], leaves[1], leaves[2], problem, workspace.rank, cu_seqlens)
    if out.requires_grad:
        dq, dk, dv = torch.autograd.grad(out, leaves, _batched(dout), materialize_grads=True)
    else:  # no query of this rank sees a key
        dq, dk, dv = (torch.zeros_like(leaf) for leaf in leaves)
    shares = [sdpa.by_ranks(tensor, problem).flatten(3) for tensor in (dk, dv)]
    both = torch.cat(shares, -1).reshape(problem.world_size * problem.rows, 2 * problem.kv_columns)
    summed = serial.reduce_scatter(both.contiguous(), workspace)
    dk, dv = summed[:, : problem.kv_columns], summed[:, problem.kv_columns :]
    return dq.reshape(q.shape), dk.reshape(k.shape).contiguous(), dv.reshape(v.shape).contiguous()


def _gathered(k: Tensor, v: Tensor, workspace: Workspace, problem: Problem) -> tuple[Tensor, Tensor]:
    """K and V of all ranks by position, [B, S, Hkv, D] each; one collective for both."""
    both = torch.cat([_rows(k), _rows(v)], 1)
    shards = serial.all_gather(both, workspace).view(problem.world_size, problem.batch, -1, 2 * problem.kv_columns)
    whole = sdpa.whole_sequence(shards, problem)
    both = whole.view(problem.batch, problem.sequence, 2, problem.kv_heads, problem.head_dim)
    return both[:, :, 0], both[:, :, 1]


def _batched(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 4 else tensor[None]


def _rows(tensor: Tensor) -> Tensor:
    """Tokens as contiguous rows, [rows, heads * head_dim], where the TMA unit can read them."""
    rows = tensor.contiguous().view(-1, tensor.shape[-2] * tensor.shape[-1])
    return rows if rows.data_ptr() % ALIGNED == 0 else rows.clone()


def _check(q: Tensor, workspace: Workspace, problem: Problem, config: AttentionConfig | None) -> None:
    check_tensors(q, workspace)
    if config is not None:
        check_attention_config(config)
    needed = 2 * problem.world_size * problem.rows * problem.kv_columns * workspace.dtype.itemsize
    if needed > workspace.layout.data_bytes:
        raise WorkspaceTooSmall(
            f"sp_attention: k and v of {problem.world_size * problem.rows} tokens take {needed} bytes of the "
            f"workspace, which has room for {workspace.layout.data_bytes}: make it with max_rows="
            f"{problem.world_size * problem.rows}, max_gather_cols={2 * problem.kv_columns}"
        )


def own_choice(problem: Problem) -> AttentionConfig:
    """The configuration of a call that names none: the fastest of those measured (two H200, heads of 128 elements)."""
    return AttentionConfig(stages=2 if problem.head_dim > 64 else 4, kernel="hopper")


def _why_serial(problem: Problem, workspace: Workspace, config: AttentionConfig | None) -> str | None:
    """Why the kernels do not serve a call, or None when they do; the same on all ranks."""
    reason = _reason(problem, workspace)
    if reason is None and config is None and problem.varlen:
        # Two H200, sequences packed at random: the kernels took 5 to 12 times as long.
        reason = "packed sequences are faster there; a configuration runs the kernels"
    if reason is not None:
        _say_once(problem, reason)
    return reason


def _reason(problem: Problem, workspace: Workspace) -> str | None:
    if workspace.device.type != "cuda":
        return f"the tensors are on the {workspace.device.type}"
    if problem.world_size == 1:
        return "one rank has nothing to overlap"
    if problem.rows == 0:
        return "there are no tokens"
    if problem.head_dim not in HEAD_DIMS:
        return f"heads have {problem.head_dim} elements, and the kernels are made for {HEAD_DIMS}"
    major, minor = torch.cuda.get_device_capability(workspace.device)
    if major != HOPPER:
        return f"the device has compute capability {major}.{minor} and the kernels need {HOPPER}.0"
    return None


@cache
def _say_once(problem: Problem, reason: str) -> None:
    LOG.debug("%s: serial path because %s", problem, reason)
