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

# Rows of a rank's shard and the length of a row. On a CPU a tenth of a millisecond; on a GPU enough that the kernels
# serve it, and not the serial path, which shows no board there.
ROWS, COLUMNS = 16, 64
GPU_ROWS, GPU_COLUMNS = 512, 1024
_STRUCK_HERE = ("scatter_never_sent", "stopped_in_kernel")


class Layer:
    """One layer of each step.

    Args:
        device: where it computes.
        world: ranks of the job.
        deadline_s: how long the kernels wait for a tile.
    """

    def __init__(self, device: torch.device, world: int, deadline_s: float) -> None:
        from megascale_kernels import Config, Workspace

        on_cpu = device.type == "cpu"
        rows, columns = (ROWS, COLUMNS) if on_cpu else (GPU_ROWS, GPU_COLUMNS)
        dtype = torch.float32 if on_cpu else torch.bfloat16
        # Small tiles compile in a second or two.
        self._options: dict[str, Any] = {} if on_cpu else {"config": Config(block_n=128, stages=3)}
        self._workspace: Any = Workspace(
            max_rows=rows * world, max_gather_cols=columns, max_scatter_cols=columns, dtype=dtype, device=device,
            deadline_s=deadline_s,
        )  # fmt: skip
        self._x = torch.ones(rows, columns, dtype=dtype, device=device)
        self._w = torch.eye(columns, dtype=dtype, device=device)

    def run(self, fault: str) -> None:
        """Gather and multiply, multiply and scatter; ``fault`` is what this rank suffers in between, or ""."""
        from megascale_kernels import ag_gemm, gemm_rs

        with torch.no_grad():
            rows = ag_gemm(self._x, self._w, self._workspace, **self._options)
            if fault in _STRUCK_HERE:
                _strike(fault)
            gemm_rs(rows, self._w, self._workspace, **self._options)
            if fault == "stopped_in_kernel" and rows.is_cuda:
                os.kill(os.getpid(), signal.SIGSTOP)  # the kernel is launched, and the host stops beside it


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
