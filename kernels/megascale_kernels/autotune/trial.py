# SPDX-License-Identifier: Apache-2.0
"""Random tensors of one operator and shape, and the calls that tuning and benchmark time on them.

The weight is the transpose of a contiguous [N, K], as `torch.nn.Linear` keeps it.
"""

from collections.abc import Callable
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
        w: this rank's weight, [K, N].
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


def launcher(operator: str) -> Callable[..., Any]:
    """The launch function of an operator."""
    from megascale_kernels.ag_gemm.launch import launch as ag_gemm
    from megascale_kernels.gemm_ar import launch as gemm_ar
    from megascale_kernels.gemm_rs.launch import launch as gemm_rs

    launchers: dict[str, Callable[..., Any]] = {"ag_gemm": ag_gemm, "gemm_rs": gemm_rs, "gemm_ar": gemm_ar}
    return launchers[operator]


def make(operator: str, m: int, n: int, k: int, workspace: Workspace, *, seed: int = 1) -> Trial:
    """Tensors and calls for one shape, M rows of the whole input, N and K as one rank sees them.

    Raises:
        ValueError: an unknown operator, or rows that do not divide among the ranks.
    """
    if operator not in OPERATORS:
        raise ValueError(f"operator {operator!r}: choose one of {', '.join(OPERATORS)}")
    world_size, group = workspace.world_size, workspace.group
    if operator != "gemm_ar" and m % world_size:
        raise ValueError(f"{operator}: M {m} does not divide among {world_size} ranks: choose a multiple of it")
    generator = torch.Generator(workspace.device).manual_seed(seed * 1000 + workspace.rank)
    rows = m // world_size if operator == "ag_gemm" else m

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=workspace.dtype, device=workspace.device)

    x, w = noise(rows, k), noise(n, k).mul_(WEIGHT_SCALE).T
    weight, launch = read_weight(w, x, operator), launcher(operator)
    rows_of_all = reference.all_gather(x, group) if operator == "ag_gemm" else x
    out = x.new_empty(m // world_size if operator == "gemm_rs" else m, n)
    partial = noise(0 if operator == "ag_gemm" else m, n)

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
