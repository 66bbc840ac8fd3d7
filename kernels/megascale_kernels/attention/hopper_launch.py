# SPDX-License-Identifier: Apache-2.0
"""What the warp-specialised forward is launched with: descriptors with the layouts of its slots, and its constants."""

from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megascale_kernels.attention.problem import AttentionConfig, Problem
from megascale_kernels.attention.tiling_hopper import AttentionTiling
from megascale_kernels.memory.hopper_descriptors import ROOM_FOR_ANNOUNCEMENTS

BACKWARD_SLOTS = 4  # blocks of 64 rows; of heads of 128 elements no more fit


def tiling_for(problem: Problem, config: AttentionConfig) -> AttentionTiling | None:
    """Sizes of the warp-specialised kernel, None where plain Triton's runs.

    Raises:
        Unsupported: a configuration that it cannot run with.
    """
    if config.kernel != "hopper" or problem.varlen:
        return None
    return AttentionTiling(problem.head_dim, config.block_n, config.stages)


def tilings_for(problem: Problem, config: AttentionConfig) -> tuple[AttentionTiling, AttentionTiling] | None:
    """Sizes of the warp-specialised passes over keys and over queries, None where plain Triton's run.

    Raises:
        Unsupported: a configuration that they cannot run with.
    """
    if config.backward != "hopper" or problem.varlen:
        return None
    return (
        AttentionTiling(problem.head_dim, config.keys_step, BACKWARD_SLOTS, kept=2),
        AttentionTiling(problem.head_dim, config.queries_step, BACKWARD_SLOTS, kept=2),
    )


def box_of(parts: Tensor, rows: int, tiling: AttentionTiling) -> TensorDescriptor:
    """A descriptor of blocks of so many tokens of one head."""
    return TensorDescriptor.from_tensor(parts, [1, rows, tiling.head_dim], tiling.boxed)


def hopper_constants(tiling: AttentionTiling, problem: Problem) -> dict[str, Any]:
    """Compile-time constants and options beside those that all kernels take."""
    return {
        "CFG": tiling, "HALVES": problem.halves, "CAUSAL": problem.causal, "num_warps": 4,
        "maxnreg": ROOM_FOR_ANNOUNCEMENTS,
    }  # fmt: skip
