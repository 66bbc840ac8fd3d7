# SPDX-License-Identifier: Apache-2.0
"""Bandwidth of each GPU's memory: copies within it, all GPUs at once; bytes read and bytes written are both counted."""

from statistics import median

from megascale_ops.diagnostics.check import Check, Reading, Task, doing
from megascale_ops.diagnostics.gpu.devices import devices, seconds_of
from megascale_ops.diagnostics.report import CheckFinding, Figure

CHECK = Check("hbm", "bandwidth of GPU memory", ("gpu", "torch"), quick_s=15.0, full_s=60.0, alone=True, process="cuda")

# 1 GiB: twenty times the second-level cache of any model.
_BYTES = 1 << 30
_REPETITIONS = 10
_QUICK_COPIES, _FULL_COPIES = 20, 400


def measure(task: Task) -> Reading:
    """Copy within each GPU."""
    import torch

    found, missing = devices(2 * _BYTES)
    copies = _FULL_COPIES if task.thorough else _QUICK_COPIES
    buffers = {}
    for one in found:
        doing(f"allocating on {one.label}")
        buffers[one.place] = [torch.ones(_BYTES, dtype=torch.uint8, device=f"cuda:{one.place}") for _ in range(2)]

    def work(index: int) -> None:
        source, target = buffers[index]
        target.copy_(source)

    doing("copying within all GPUs")
    indices = [one.place for one in found]
    seconds_of(work, indices, copies, 1)
    seconds = seconds_of(work, indices, copies, _REPETITIONS)
    figures = []
    for one in found:
        rates = tuple(2 * _BYTES * copies / each for each in seconds[one.place])
        figures.append(Figure("hbm_copy", one.label, median(rates), rates, one.model))
    return Reading(tuple(figures), (), tuple(missing))


def judge(reading: Reading) -> list[CheckFinding]:
    """Leave it to equals and model."""
    del reading
    return []
