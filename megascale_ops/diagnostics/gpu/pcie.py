# SPDX-License-Identifier: Apache-2.0
"""Copies between host and each GPU, both ways, from pinned memory beside the GPU; one GPU after the other."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from megascale_ops.diagnostics.check import Check, Reading, Task, doing
from megascale_ops.diagnostics.gpu.devices import Device, devices, seconds_of
from megascale_ops.diagnostics.host.numa import cpus_of
from megascale_ops.diagnostics.report import CheckFinding, Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHECK = Check(
    "pcie", "copies between host and GPUs", ("gpu", "torch"), quick_s=20.0, full_s=60.0, alone=True, process="cuda"
)

_BYTES = 256 << 20
_REPETITIONS = 10
_QUICK_COPIES, _FULL_COPIES = 2, 40
_FIGURES = ("pcie_to_gpu", "pcie_from_gpu")
# 3 %: healthy ones differ by less than one; what is named differs by five at least.
_AGAIN_BELOW = 0.97
# Twice: once was not enough in 1 of 40 trials, where another job copied a checkpoint meanwhile.
_AGAIN_TIMES = 2


def measure(task: Task) -> Reading:
    """Copy to and from each GPU."""
    found, missing = devices(_BYTES)
    copies = _FULL_COPIES if task.thorough else _QUICK_COPIES
    rates: dict[tuple[str, str], tuple[float, ...]] = {}
    allowed = os.sched_getaffinity(0)
    _measure_each(found, copies, allowed, rates)
    for _ in range(_AGAIN_TIMES):
        _measure_each(seem_slow(found, rates), copies, allowed, rates)
    models = {one.label: one.model for one in found}
    figures = [Figure(name, gpu, median(values), values, models[gpu]) for (name, gpu), values in rates.items()]
    return Reading(tuple(figures), (), tuple(missing))


def seem_slow(found: Sequence[Device], rates: Mapping[tuple[str, str], tuple[float, ...]]) -> list[Device]:
    """Return the GPUs that were slower than the fastest of their model in one direction.

    They are measured again, and the best time counts: what another program moves through the host's memory for a
    moment is not theirs, and what a GPU's own link lacks it lacks the third time, too.
    """
    best: dict[tuple[str, str], float] = {}
    for one in found:
        for name in _FIGURES:
            key = name, one.model
            best[key] = max(best.get(key, 0.0), median(rates[name, one.label]))
    return [
        one
        for one in found
        if any(median(rates[name, one.label]) < _AGAIN_BELOW * best[name, one.model] for name in _FIGURES)
    ]


def _measure_each(
    found: Sequence[Device], copies: int, allowed: set[int], rates: dict[tuple[str, str], tuple[float, ...]]
) -> None:
    """Measure one GPU after the other, and keep what is better than what was kept before."""
    import torch

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

            for name, work in zip(_FIGURES, (up, down), strict=True):
                seconds_of(work, [one.place], copies, 1)
                seconds = seconds_of(work, [one.place], copies, _REPETITIONS)[one.place]
                values = tuple(_BYTES * copies / each for each in seconds)
                rates[name, one.label] = max(rates.get((name, one.label), values), values, key=median)


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
