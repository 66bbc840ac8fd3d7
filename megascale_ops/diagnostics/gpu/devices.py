# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this process as torch counts them, named as NVML counts them, and the time of work on several at once.

``CUDA_VISIBLE_DEVICES`` renumbers GPUs; their UUIDs stay. Torch is imported by the process of a check alone.
"""

from __future__ import annotations

import contextlib
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from megascale_ops.diagnostics.check import UnmeasuredError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

# A tenth above what is asked for: allocations are rounded, and libraries take their workspace.
_MARGIN = 1.1


class Device(NamedTuple):
    """One GPU: its number in torch, what we call it, its model as NVML has it."""

    place: int
    label: str
    model: str
    uuid: str


def devices(needs_bytes: int = 0) -> tuple[list[Device], list[str]]:
    """Return the GPUs with so much free memory, and a sentence for each that has less.

    Raises:
        UnmeasuredError: torch sees no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise UnmeasuredError("torch sees no GPU here (a build for CPUs, or CUDA_VISIBLE_DEVICES hides them)")
    ordinals = _ordinals()
    found, missing = [], []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = str(properties.uuid)
        ordinal = ordinals.get(uuid.removeprefix("GPU-"), index)
        device = Device(index, f"GPU {ordinal}", properties.name, uuid)
        free, _ = torch.cuda.mem_get_info(index)
        if free < needs_bytes * _MARGIN:
            missing.append(f"{device.label} has {free >> 20:,} MiB free, and {needs_bytes >> 20:,} are needed")
        else:
            found.append(device)
    if not found:
        raise UnmeasuredError("; ".join(missing))
    return found, missing


def _ordinals() -> dict[str, int]:
    """Return NVML's number of each GPU by UUID; empty where NVML does not answer."""
    with contextlib.suppress(Exception):  # NVML raises kinds of its own; then torch's numbers are used
        import pynvml

        pynvml.nvmlInit()
        handles = [(at, pynvml.nvmlDeviceGetHandleByIndex(at)) for at in range(pynvml.nvmlDeviceGetCount())]
        return {str(pynvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-"): at for at, handle in handles}
    return {}


def clock_mark() -> torch.cuda.Event:
    """Return an event that notes when the GPU comes to it."""
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types for it


def seconds_of(
    work: Callable[[int], None], indices: Sequence[int], times: int, repetitions: int
) -> dict[int, list[float]]:
    """Run ``work(index)`` on several GPUs at once; return the seconds of each repetition, ``times`` pieces, by GPU.

    A thread for each GPU gives it its work: a GPU's queue holds about a thousand kernels, and who waits for room in the
    queue of a slow one must not keep the others waiting, or all would look as slow. torch lets go of the interpreter
    while it launches.
    """
    import torch

    marks: dict[int, list[torch.cuda.Event]] = {index: [] for index in indices}
    failed: list[Exception] = []

    def fill(index: int) -> None:
        try:
            with torch.cuda.device(index):
                for number in range(repetitions + 1):
                    marks[index].append(clock_mark())
                    marks[index][-1].record()
                    for _ in range(times if number < repetitions else 0):
                        work(index)
                torch.cuda.synchronize(index)
        except Exception as error:  # noqa: BLE001  raised in the thread that waits
            failed.append(error)

    threads = [threading.Thread(target=fill, args=(index,), daemon=True) for index in indices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return {index: [first.elapsed_time(second) * 1e-3 for first, second in pairwise(marks[index])] for index in indices}
