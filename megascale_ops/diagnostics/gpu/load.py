# SPDX-License-Identifier: Apache-2.0
"""What NVML tells of GPUs while they work: clock, power, temperature, for how long they were held back and by what."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, TypeAlias

from megascale_agents.collectors.gpu_values import REASONS

from megascale_ops.diagnostics.gpu.devices import Device
from megascale_ops.diagnostics.report import Fact, Figure

Handle: TypeAlias = Any  # the library ships no types

# 50 ms: the driver renews power and clocks about as often.
_EVERY_S = 0.05
# A GPU at full load runs at its power limit: that is no fault (NVML: "SW Power Cap").
HELD_BACK = ("hw_thermal", "sw_thermal", "power_brake")
_GAUGES = (("gpu_clock", 1e6), ("gpu_power", 1e-3), ("gpu_temperature", 1.0))


class LoadWatch:
    """Samples GPUs in a thread between ``begin`` and ``end``; where NVML does not answer it has nothing to tell."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="load", daemon=True)
        self._gauges: dict[tuple[str, str], list[float]] = {}
        self._reasons: dict[str, Counter[str]] = {device.label: Counter() for device in devices}
        self._looks = 0

    def begin(self) -> None:
        """Start to look."""
        self._thread.start()

    def end(self) -> None:
        """Stop looking."""
        self._stop.set()
        self._thread.join(2.0)

    def _watch(self) -> None:
        with contextlib.suppress(Exception):  # NVML's own kinds; what was seen until then is told
            import pynvml

            pynvml.nvmlInit()
            handles = {one.label: _handle(pynvml, one.uuid) for one in self._devices}
            while not self._stop.is_set():
                for label, handle in handles.items():
                    self._look(pynvml, label, handle)
                self._looks += 1
                time.sleep(_EVERY_S)

    def _look(self, lib: Any, label: str, handle: Handle) -> None:  # noqa: ANN401  the library ships no types
        values = (
            lib.nvmlDeviceGetClockInfo(handle, 1),
            lib.nvmlDeviceGetPowerUsage(handle),
            lib.nvmlDeviceGetTemperature(handle, 0),
        )
        for (name, factor), value in zip(_GAUGES, values, strict=True):
            self._gauges.setdefault((name, label), []).append(value * factor)
        now = lib.nvmlDeviceGetCurrentClocksEventReasons(handle)
        self._reasons[label].update(name for name, bit in REASONS.items() if now & bit)

    def figures(self) -> Iterator[Figure]:
        """Yield what was seen of each GPU."""
        for (name, label), values in self._gauges.items():
            yield Figure(name, label, max(values) if name == "gpu_temperature" else median(values))
        for label, reasons in self._reasons.items():
            if self._looks:
                yield Figure("throttled", label, min(1.0, max([0, *(reasons[one] for one in HELD_BACK)]) / self._looks))

    def facts(self) -> Iterator[Fact]:
        """Yield what held each GPU back, the most frequent first."""
        for label, reasons in self._reasons.items():
            told = [f"{name} {count / max(1, self._looks):.0%}" for name, count in reasons.most_common()]
            yield Fact("clock_reasons", label, ", ".join(told) or "none")


def _handle(lib: Any, uuid: str) -> Handle:  # noqa: ANN401  the library ships no types
    return lib.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
