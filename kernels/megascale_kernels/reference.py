# SPDX-License-Identifier: Apache-2.0
"""What each operator means, in plain torch: the serial path, and the oracle of every test.

Shapes: M rows of the whole input, K and N per rank as each rank sees them, W ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 gave these two collectives new names and warns about the old ones, the only ones in torch 2.11.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
gather_rows, _scatter_sums = getattr(dist, GATHER), getattr(dist, SCATTER)


def all_gather(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Rows of all ranks, in the order of ranks: [M / W, K] to [M, K]."""
    world_size = dist.get_world_size(group)
    gathered = x.new_empty((world_size * x.shape[0], *x.shape[1:]))
    gather_rows(gathered, x.contiguous(), group=group)
    return gathered


def reduce_scatter(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's rows of the sum over ranks: [M, N] to [M / W, N]."""
    out = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    _scatter_sums(out, x.contiguous(), group=group)
    return out


def all_reduce(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum over ranks, on every rank, in place."""
    dist.all_reduce(x, group=group)
    return x


def matmul(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply and add the bias: [M, K] and [K, N] to [M, N], in the type of the operands, as the kernels do.

    Under autocast torch would cast them, and a call would give another type on the serial path than on the kernels'.
    """
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return matmul(x, w, bias)
    return torch.matmul(x, w) if bias is None else torch.addmm(bias, x, w)


def matmul_into(out: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """`matmul` into memory that is there; autocast leaves alone what is told its output."""
    if bias is None:
        torch.mm(x, w, out=out)
    else:
        torch.addmm(bias, x, w, out=out)


def ag_gemm(
    x: Tensor, w: Tensor, group: dist.ProcessGroup | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Product of gather(x) and w: [M / W, K] and [K, N] to [M, N]; also returns the gathered rows, [M, K]."""
    gathered = all_gather(x, group)
    return matmul(gathered, w, bias), gathered


def gemm_rs(x: Tensor, w: Tensor, group: dist.ProcessGroup | None = None, bias: Tensor | None = None) -> Tensor:
    """This rank's rows of the sum over ranks of x @ w: [M, K] and [K, N] to [M / W, N]."""
    out = reduce_scatter(torch.matmul(x, w), group)
    return out if bias is None else out + bias


def gemm_ar(x: Tensor, w: Tensor, group: dist.ProcessGroup | None = None, bias: Tensor | None = None) -> Tensor:
    """The sum over ranks of x @ w, on every rank: [M, K] and [K, N] to [M, N]."""
    out = all_reduce(torch.matmul(x, w), group)
    return out if bias is None else out + bias
