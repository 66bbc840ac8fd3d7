# SPDX-License-Identifier: Apache-2.0
"""Random tensors of one operator and shape, and the calls that tuning and benchmark time on them.

The weight is the transpose of a contiguous [N, K], as `torch.nn.Linear` keeps it, unless another layout is asked for.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale_kernels import reference
from megascale_kernels.memory.operands import read_weight
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config
from megascale_kernels.planning.cost_model import OPERATORS

WEIGHT_SCALE = 0.02  # as models are initialised: outputs are of order one


class Trial(NamedTuple):
    """One operator and shape with its tensors.

    Attributes:
        operator: which.
        x: this rank's input: [M / W, K] for ag_gemm, [M, K] else.
        w: this rank's weight, [K, N], contiguous or the transpose of a contiguous [N, K].
        out: where our kernel writes: [M, N], for gemm_rs [M / W, N].
        gemm: cuBLAS alone on the sizes of the fused kernel.
        comm: NCCL alone.
        serial: NCCL and cuBLAS in series; gives the result.
        ours: our kernel with a configuration, as a call.
    """

    operator: str
    x: Tensor
    w: Tensor
    out: Tensor
    gemm: Callable[[], Tensor]
    comm: Callable[[], Tensor]
    serial: Callable[[], Tensor]
    ours: Callable[[Config], Callable[[], object]]


class Pool:
    """Random memory of which the tensors of many shapes are views, so that a shape costs no allocation and no noise.

    Args:
        workspace: its element type and device.
        seed: of the noise; ranks draw apart.
        x: elements of the largest input.
        w: elements of the largest weight.
        partial: elements of the largest partial result that is scattered.
        out: elements of the largest output.
    """

    def __init__(self, workspace: Workspace, *, seed: int = 1, x: int, w: int, partial: int, out: int) -> None:
        generator = torch.Generator(workspace.device).manual_seed(seed * 1000 + workspace.rank)
        self._memory = {
            name: torch.randn(elements, generator=generator, dtype=workspace.dtype, device=workspace.device)
            for name, elements in (("x", x), ("w", w), ("partial", partial))
        }
        self._memory["w"].mul_(WEIGHT_SCALE)
        self._memory["out"] = torch.empty(out, dtype=workspace.dtype, device=workspace.device)

    def take(self, name: str, *shape: int) -> Tensor:
        """A contiguous tensor at the beginning of one of the four."""
        return self._memory[name][: math.prod(shape)].view(shape)


def pool_for(operator: str, sizes: Sequence[tuple[int, int, int]], workspace: Workspace, *, seed: int = 1) -> Pool:
    """Memory for the largest tensors of some sizes (M, N, K)."""
    is_gather, is_scatter = operator == "ag_gemm", operator == "gemm_rs"
    world_size = workspace.world_size
    return Pool(
        workspace,
        seed=seed,
        x=max((m // world_size if is_gather else m) * k for m, _, k in sizes),
        w=max(n * k for _, n, k in sizes),
        partial=0 if is_gather else max(m * n for m, n, _ in sizes),
        out=max((m // world_size if is_scatter else m) * n for m, n, _ in sizes),
    )


def launcher(operator: str) -> Callable[..., Any]:
    """The launch function of an operator."""
    from megascale_kernels.ag_gemm.launch import launch as ag_gemm
    from megascale_kernels.gemm_ar import launch as gemm_ar
    from megascale_kernels.gemm_rs.launch import launch as gemm_rs

    launchers: dict[str, Callable[..., Any]] = {"ag_gemm": ag_gemm, "gemm_rs": gemm_rs, "gemm_ar": gemm_ar}
    return launchers[operator]


def make(
    operator: str, m: int, n: int, k: int, workspace: Workspace, *, seed: int = 1, is_nk: bool = True,
    pool: Pool | None = None,
) -> Trial:  # fmt: skip
    """Tensors and calls for one shape, M rows of the whole input, N and K as one rank sees them.

    Args:
        operator: which.
        m: rows of the whole input.
        n: columns of the weight on one rank.
        k: rows of the weight on one rank.
        workspace: where ours runs; its group, element type and device.
        seed: of the noise.
        is_nk: the weight is kept [N, K], else [K, N].
        pool: memory to view into; None makes new.

    Raises:
        ValueError: an unknown operator, or rows that do not divide among the ranks.
    """
    if operator not in OPERATORS:
        raise ValueError(f"operator {operator!r}: choose one of {', '.join(OPERATORS)}")
    world_size, group = workspace.world_size, workspace.group
    if operator != "gemm_ar" and m % world_size:
        raise ValueError(f"{operator}: M {m} does not divide among {world_size} ranks: choose a multiple of it")
    pool = pool or pool_for(operator, [(m, n, k)], workspace, seed=seed)
    x = pool.take("x", m // world_size if operator == "ag_gemm" else m, k)
    w = pool.take("w", n, k).T if is_nk else pool.take("w", k, n)
    weight, launch = read_weight(w, x, operator), launcher(operator)
    rows_of_all = reference.all_gather(x, group) if operator == "ag_gemm" else x
    out = pool.take("out", m // world_size if operator == "gemm_rs" else m, n)
    partial = pool.take("partial", 0 if operator == "ag_gemm" else m, n)

    def comm() -> Tensor:
        if operator == "ag_gemm":
            return reference.all_gather(x, group)
        return (
            reference.reduce_scatter(partial, group) if operator == "gemm_rs" else reference.all_reduce(partial, group)
        )

    def serial() -> Tensor:
        if operator == "ag_gemm":
            return reference.ag_gemm(x, w, group)[0]
        return reference.gemm_rs(x, w, group) if operator == "gemm_rs" else reference.gemm_ar(x, w, group)

    def ours(config: Config) -> Callable[[], object]:
        return lambda: launch(x, weight, out, None, workspace, config)

    return Trial(operator, x, w, out, lambda: torch.matmul(rows_of_all, w), comm, serial, ours)
