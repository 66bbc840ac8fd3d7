# SPDX-License-Identifier: Apache-2.0
"""The workload's tensor-parallel layer: a product after a gather and one before a scatter, by the overlapped kernels.

On the CPU the operators take their serial path, which moves data through Gloo and keeps the progress board in the same
words as the kernels do; on a GPU of which each rank has one the same calls are the fused kernels.
"""

import os
import signal
import time
from typing import Any

import torch

from megascale_ops.chaos.misdeeds import FOR_EVER_S

# Rows of a rank's shard and the length of a row: a tenth of a millisecond on a CPU.
ROWS, COLUMNS = 16, 64
_STRUCK_HERE = ("scatter_never_sent", "stopped_in_kernel")


class Layer:
    """One layer of each step.

    Args:
        device: where it computes.
        world: ranks of the job.
        deadline_s: how long the kernels wait for a tile.
    """

    def __init__(self, device: torch.device, world: int, deadline_s: float) -> None:
        from megascale_kernels import Workspace

        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._workspace: Any = Workspace(
            max_rows=ROWS * world, max_gather_cols=COLUMNS, max_scatter_cols=COLUMNS, dtype=dtype, device=device,
            deadline_s=deadline_s,
        )  # fmt: skip
        self._x = torch.ones(ROWS, COLUMNS, dtype=dtype, device=device)
        self._w = torch.eye(COLUMNS, dtype=dtype, device=device)

    def run(self, fault: str) -> None:
        """Gather and multiply, multiply and scatter; ``fault`` is what this rank suffers in between, or ""."""
        from megascale_kernels import ag_gemm, gemm_rs

        with torch.no_grad():
            rows = ag_gemm(self._x, self._w, self._workspace)
            if fault in _STRUCK_HERE:
                _strike(fault)
            gemm_rs(rows, self._w, self._workspace)


def _strike(fault: str) -> None:
    """Stay away from the scatter, or be stopped inside it."""
    if fault == "scatter_never_sent":
        time.sleep(FOR_EVER_S)
        return
    from megascale_kernels import reference

    multiply = reference.matmul

    def stopped(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGSTOP)
        return multiply(x, w, bias)

    reference.matmul = stopped
