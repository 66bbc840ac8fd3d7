# SPDX-License-Identifier: Apache-2.0
"""The serial path of a MoE layer: index, all-to-all, two grouped products, all-to-all, index back, sum in fp32.

It serves the CPU and tensors that the kernels cannot read; autograd goes through all of it. The host
learns how many rows go where, so it waits for the device once a call.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megascale_kernels.errors import KernelError
from megascale_kernels.memory.workspace import Workspace


class _Exchange(torch.autograd.Function):
    """Rows to all ranks, and their gradients back."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]  # torch gives it no types
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]  # torch gives it no types
        return _exchanged(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def agree(call: str, workspace: Workspace) -> None:
    """Compare what all ranks are about to run: on the CPU before each call, on a GPU before the first of a kind.

    Raises:
        RankMismatch: a rank runs something else.
        TileTimeout: a rank did not come.
    """
    workspace.check(synchronize=False)
    compare = workspace.agreement.compare if workspace.device.type == "cpu" else workspace.agreement.compare_once
    try:
        compare(call, workspace.deadline_s, _nobody_looks)
    except KernelError as error:
        workspace.broken = error
        raise


def _nobody_looks(_: int) -> None:
    """No board shows the serial path's waits."""


def grouped_product(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Rows of each expert times its weight: [rows, K] and [experts, N, K] to [rows, N]."""
    if rows.is_cuda and rows.dtype == torch.bfloat16 and rows.shape[0] and hasattr(torch, "_grouped_mm"):
        ends = torch.tensor(counts, device=rows.device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        out: Tensor = torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)  # noqa: SLF001 - torch's only name for it
        return out
    parts = torch.split(rows, counts)
    return torch.cat([part @ matrix.T for part, matrix in zip(parts, weight, strict=True)])


def experts_of(rows: Tensor, w_in: Tensor, w_out: Tensor, counts: list[int]) -> Tensor:
    """Run every expert on its rows: w_out (silu(gate rows) * up rows)."""
    experts, _, inner, hidden = w_in.shape
    both = grouped_product(rows, w_in.reshape(experts, 2 * inner, hidden), counts)
    gate, up = torch.split(both, inner, dim=1)
    return grouped_product(torch.nn.functional.silu(gate) * up, w_out, counts)


def moe(x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, workspace: Workspace) -> Tensor:
    """The layer: [T, H] to [T, H]; differentiable in x, gates and both weights.

    Args:
        x: this rank's tokens, [T, H].
        ids: experts of each token, [T, top_k]; outside of the experts there are, a pair is dropped.
        gates: their weights, [T, top_k].
        w_in: gate and up of this rank's experts, [E / W, 2, I, H].
        w_out: [E / W, H, I].
        workspace: of the group.
    """
    experts, ranks, top_k = w_in.shape[0], workspace.world_size, ids.shape[1]
    flat = ids.reshape(-1).long()
    kept = (flat >= 0) & (flat < experts * ranks)
    order = torch.where(kept, flat, experts * ranks).argsort(stable=True)
    counts = torch.bincount(torch.where(kept, flat, experts * ranks), minlength=experts * ranks + 1)[:-1]
    theirs = counts.new_empty(counts.shape)
    if ranks > 1:
        dist.all_to_all_single(theirs, counts, group=workspace.group)
    else:
        theirs = counts
    table = torch.stack([counts, theirs]).view(2, ranks, experts).tolist()
    sent, received = ([sum(row) for row in half] for half in table)
    pairs = order[: sum(sent)]
    rows = x[pairs // top_k]
    if ranks > 1:
        rows = _Exchange.apply(rows, sent, received, workspace.group)  # type: ignore[no-untyped-call]  # torch gives it no types
    of_row = torch.arange(experts, device=x.device).repeat(ranks).repeat_interleave(theirs, output_size=sum(received))
    by_expert = of_row.argsort(stable=True)
    rows_of = [sum(row[expert] for row in table[1]) for expert in range(experts)]
    y = experts_of(rows[by_expert], w_in, w_out, rows_of)
    back = torch.empty_like(by_expert)
    back[by_expert] = torch.arange(len(by_expert), device=x.device)
    y = y[back]
    if ranks > 1:
        y = _Exchange.apply(y, received, sent, workspace.group)  # type: ignore[no-untyped-call]  # torch gives it no types
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    weighted = y.to(exact) * gates.reshape(-1)[pairs].to(exact)[:, None]
    return torch.zeros(x.shape, dtype=exact, device=x.device).index_add(0, pairs // top_k, weighted).to(x.dtype)
