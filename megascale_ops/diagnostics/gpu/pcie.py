# SPDX-License-Identifier: Apache-2.0
"""Copies between host and each GPU, both ways, from pinned memory beside the GPU; one GPU after the other."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from statistics import median

from megascale_ops.diagnostics.check import Check, Reading, Task, doing
from megascale_ops.diagnostics.gpu.devices import Device, devices, seconds_of
from megascale_ops.diagnostics.host.numa import cpus_of
from megascale_ops.diagnostics.report import CheckFinding, Figure

CHECK = Check(
    "pcie", "copies between host and GPUs", ("gpu", "torch"), quick_s=20.0, full_s=60.0, alone=True, process="cuda"
)

_BYTES = 256 << 20
_REPETITIONS = 10
_QUICK_COPIES, _FULL_COPIES = 2, 40


def measure(task: Task) -> Reading:
    """Copy to and from each GPU."""
    import torch

    found, missing = devices(_BYTES)
    copies = _FULL_COPIES if task.thorough else _QUICK_COPIES
    figures = []
    allowed = os.sched_getaffinity(0)
    for one in found:
        doing(f"copying to and from {one.label}")
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, _beside(one) & allowed or allowed)
        with torch.cuda.device(one.place):
            # Pinned anew for each: a page lies where the processor was that touched it first.
            host = torch.ones(_BYTES, dtype=torch.uint8).pin_memory()
            there = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")

            def up(_index: int, host: torch.Tensor = host, there: torch.Tensor = there) -> None:
                there.copy_(host, non_blocking=True)

            def down(_index: int, host: torch.Tensor = host, there: torch.Tensor = there) -> None:
                host.copy_(there, non_blocking=True)

            for name, work in (("pcie_to_gpu", up), ("pcie_from_gpu", down)):
                seconds_of(work, [one.place], copies, 1)
                seconds = seconds_of(work, [one.place], copies, _REPETITIONS)[one.place]
                rates = tuple(_BYTES * copies / each for each in seconds)
                figures.append(Figure(name, one.label, median(rates), rates, one.model))
    return Reading(tuple(figures), (), tuple(missing))


def _beside(device: Device) -> set[int]:
    """Return the processors on the GPU's NUMA node; empty where that is not told."""
    with contextlib.suppress(Exception):  # NVML's own kinds, files that are not there: then any processor will do
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{device.uuid.removeprefix('GPU-')}")
        bus = str(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()
        domain, _, rest = bus.partition(":")
        path = Path(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/local_cpulist")
        return cpus_of(path.read_text(encoding="ascii"))
    return set()


def judge(reading: Reading) -> list[CheckFinding]:
    """Leave it to equals and model; the link's width is held against its own by the check of health."""
    del reading
    return []
