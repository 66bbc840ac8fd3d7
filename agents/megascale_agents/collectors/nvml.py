# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this node, by NVIDIA's management library (NVML, ``pynvml``).

``read()`` asks the library, ``parse()`` of ``gpu_values.py`` puts the answers into base units. What a GPU does not know
(not supported, no permission) is left out; a lost GPU is marked as lost instead. Every call may block for as long as
the
driver pleases: ``read()`` is to be called in a thread of its own, with a deadline (``checks.py``).

The library reports Xids, too, a few seconds later than the kernel's log and without the process: for nodes whose log
may not be read (containers, mostly).

GPM (Hopper and newer) gives the activity of multiprocessors, tensor cores and memory between two samples, without
DCGM's exclusive lock.

The library keeps the driver's device open: before a GPU is reset the agent has to be stopped.
Source: nvml.h of NVML API reference, field ids and error numbers.
"""

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias

from megascale_agents.collectors.gpu_values import Identity, RawGpu, Sample
from megascale_agents.collectors.kernel_events import pci_key

# The library ships no types.
Library: TypeAlias = Any
Handle: TypeAlias = Any
Answer: TypeAlias = Any

# NVML_ERROR_*: the ones handled here.
_NO_LIBRARY = (9, 12)  # driver not loaded, library not found
_LOST = {15: "lost", 16: "needs a reset"}
_STALE = (1, 18)  # uninitialized, versions differ: handles opened before are invalid
# NVML_FI_DEV_*: read in one call, which costs as much as a single value.
_FIELDS = {
    "energy_mj": 83, "memory_temperature": 82, "pcie_replays": 94, "recovery": 230,
    "remapped_corrected": 142, "remapped_uncorrected": 143, "remap_pending": 144, "remap_failed": 145,
    "crc_flit": 38, "crc_data": 45, "replay": 52, "nvlink_recovery": 59, "links": 91,
    "sw_power_cap": 74, "sync_boost": 76, "sw_thermal": 269, "hw_thermal": 270, "power_brake": 271,
}  # fmt: skip
_TRAFFIC = {"transmitted": 138, "received": 139}  # KiB over all links
_ALL_LINKS = 0xFFFFFFFF
_LINK_STATE = 165
_MOST_LINKS = 18
_GPM = {"sm_active": 2, "tensor_active": 5, "memory_active": 10}
_XID_EVENTS = 8  # NVML_EVENT_TYPE_XID_CRITICAL_ERROR
# 64 between two looks: a GPU that reports more is in a storm, and is named for the first of them.
_MOST_XIDS = 64


class NoDriverError(Exception):
    """There is no NVIDIA driver on this node, or no GPU."""


class Nvml:
    """Keeps the library open between looks. Used by one thread only."""

    def __init__(self) -> None:
        self._lib: Library = None
        self._driver = ""
        self._identities: dict[int, Identity] = {}
        self._gpm: dict[int, tuple[Answer, Answer]] = {}  # index -> older and newer sample
        self._without_gpm: set[int] = set()
        self._shared_until: dict[int, int] = {}  # index -> time of its newest utilization sample, microseconds
        self._events: Answer = None  # where the library puts Xids; None: it is not registered (yet)

    def read(self, now_s: float) -> Sample:
        """Ask every GPU.

        Raises:
            NoDriverError: there is nothing to ask.
            Exception: the library's own error: it does not answer any more; the next look opens it anew.
        """
        lib = self._open()
        try:
            gpus = tuple(self._read_gpu(index) for index in range(lib.nvmlDeviceGetCount()))
            return Sample(now_s, gpus, self._xids(len(gpus)))
        except lib.NVMLError:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the library."""
        lib, self._lib = self._lib, None
        events, self._events = self._events, None
        self._gpm, self._without_gpm, self._shared_until = {}, set(), {}
        if lib is not None:
            with contextlib.suppress(lib.NVMLError):
                if events:
                    lib.nvmlEventSetFree(events)
            with contextlib.suppress(lib.NVMLError):
                lib.nvmlShutdown()

    def _open(self) -> Library:
        if self._lib is None:
            try:
                import pynvml
            except ImportError as error:
                raise NoDriverError("no NVIDIA driver: the package nvidia-ml-py is not installed") from error
            try:
                pynvml.nvmlInit()
                if not pynvml.nvmlDeviceGetCount():
                    raise NoDriverError("no NVIDIA GPU on this node")
            except pynvml.NVMLError as error:
                if _number_of(error) in _NO_LIBRARY:
                    raise NoDriverError("no NVIDIA driver on this node") from error
                raise
            self._lib = pynvml
            self._driver = _text(self._ask(pynvml.nvmlSystemGetDriverVersion))
        return self._lib

    def _read_gpu(self, index: int) -> RawGpu:
        lib = self._lib
        try:
            handle = lib.nvmlDeviceGetHandleByIndex(index)
            known = self._identities.get(index)
            if known is None or known.driver != self._driver:
                known = self._identities[index] = self._identify(index, handle)
            return self._answers_of(known, handle)
        except lib.NVMLError as error:
            if (why := _LOST.get(_number_of(error))) is None:
                raise
            return RawGpu(self._identities.get(index, Identity(index)), why)

    def _answers_of(self, known: Identity, handle: Handle) -> RawGpu:
        values = self._values(handle)
        fields = self._fields(handle, [(number, 0) for number in _FIELDS.values()])
        values |= {name: fields[at] for at, name in enumerate(_FIELDS) if at in fields}
        traffic = self._fields(handle, [(number, _ALL_LINKS) for number in _TRAFFIC.values()])
        values |= {name: traffic[at] for at, name in enumerate(_TRAFFIC) if at in traffic}
        count = min(_MOST_LINKS, int(values.get("links", 0)))
        states = self._fields(handle, [(_LINK_STATE, link) for link in range(count)]) if count else {}
        processes = self._ask(self._lib.nvmlDeviceGetComputeRunningProcesses, handle) or ()
        pids = tuple(process.pid for process in processes)
        return RawGpu(
            known,
            values=values,
            links=tuple(int(states.get(link, 0)) for link in range(count)),
            pids=pids,
            held={process.pid: process.usedGpuMemory or 0 for process in processes},
            shares=self._shares(known.ordinal, handle, pids),
            gpm=self._activity(known.ordinal, handle),
        )

    def _identify(self, index: int, handle: Handle) -> Identity:
        lib = self._lib
        pci = self._ask(lib.nvmlDeviceGetPciInfo, handle)
        return Identity(
            ordinal=index,
            uuid=_text(lib.nvmlDeviceGetUUID(handle)),
            model=_text(self._ask(lib.nvmlDeviceGetName, handle)),
            driver=self._driver,
            vbios=_text(self._ask(lib.nvmlDeviceGetVbiosVersion, handle)),
            pci=pci_key(_text(pci.busId)) if pci is not None else "",
            serial=_text(self._ask(lib.nvmlDeviceGetSerial, handle)),
        )

    def _values(self, handle: Handle) -> dict[str, float]:
        """Ask for what has a call of its own."""
        lib, ask = self._lib, self._ask
        memory = ask(lib.nvmlDeviceGetMemoryInfo, handle)
        rates = ask(lib.nvmlDeviceGetUtilizationRates, handle)
        answers = {
            "temperature": ask(lib.nvmlDeviceGetTemperature, handle, 0),
            "power_mw": ask(lib.nvmlDeviceGetPowerUsage, handle),
            "sm_mhz": ask(lib.nvmlDeviceGetClockInfo, handle, 1),
            "memory_mhz": ask(lib.nvmlDeviceGetClockInfo, handle, 2),
            "memory_used": memory.used if memory is not None else None,
            "memory_size": memory.total if memory is not None else None,
            "busy_percent": rates.gpu if rates is not None else None,
            "reasons": ask(lib.nvmlDeviceGetCurrentClocksEventReasons, handle),
            "ecc_corrected": ask(lib.nvmlDeviceGetTotalEccErrors, handle, 0, 0),
            "ecc_uncorrected": ask(lib.nvmlDeviceGetTotalEccErrors, handle, 1, 0),
        }
        return {name: answer for name, answer in answers.items() if answer is not None}

    def _fields(self, handle: Handle, wanted: list[tuple[int, int]]) -> dict[int, float]:
        """Return the values of fields by their place in ``wanted``; those that are not supported are left out."""
        answers = self._ask(self._lib.nvmlDeviceGetFieldValues, handle, wanted) or ()
        return {place: _value(answer) for place, answer in enumerate(answers) if answer.nvmlReturn == 0}

    def _activity(self, index: int, handle: Handle) -> dict[str, float]:
        """Return percents between this look and the one before; empty at the first."""
        lib = self._lib
        if index in self._without_gpm:
            return {}
        if index not in self._gpm:
            support = self._ask(lib.nvmlGpmQueryDeviceSupport, handle)
            if support is None or not support.isSupportedDevice:
                self._without_gpm.add(index)
                return {}
            samples = lib.nvmlGpmSampleAlloc(), lib.nvmlGpmSampleAlloc()
            if self._ask(lib.nvmlGpmSampleGet, handle, samples[1]) is not None:
                self._gpm[index] = samples
            return {}
        newer, older = self._gpm[index]  # the older of the two is written anew
        if self._ask(lib.nvmlGpmSampleGet, handle, newer) is None:
            return {}
        self._gpm[index] = older, newer
        question = lib.c_nvmlGpmMetricsGet_t()
        question.version, question.numMetrics = 1, len(_GPM)
        question.sample1, question.sample2 = older, newer
        for place, number in enumerate(_GPM.values()):
            question.metrics[place].metricId = number
        if self._ask(lib.nvmlGpmMetricsGet, question) is None:
            return {}
        told = ((name, question.metrics[place]) for place, name in enumerate(_GPM))
        return {name: float(metric.value) for name, metric in told if metric.nvmlReturn == 0}

    def _shares(self, index: int, handle: Handle, pids: tuple[int, ...]) -> dict[int, float]:
        """Return each process's share of the GPU's time since the last call; empty while it has only one process."""
        if len(pids) < 2:
            self._shared_until.pop(index, None)
            return {}
        since_us = self._shared_until.get(index, 0)
        samples = self._ask(self._lib.nvmlDeviceGetProcessUtilization, handle, since_us) or ()
        self._shared_until[index] = max([since_us, *(sample.timeStamp for sample in samples)])
        # The first look would return all that the driver has kept; processes that have ended since no longer matter.
        return {sample.pid: float(sample.smUtil) for sample in samples if since_us and sample.pid in pids}

    def _xids(self, count: int) -> tuple[tuple[int, int], ...]:
        """Return the Xids since the last call; the first call only begins to listen."""
        lib = self._lib
        told: list[tuple[int, int]] = []
        if self._events is None:
            self._events = self._listen(count)
            return ()
        with contextlib.suppress(lib.NVMLError):  # of a lost GPU: what it reported before still counts
            while self._events and len(told) < _MOST_XIDS:
                event = self._ask(lib.nvmlEventSetWait_v2, self._events, 0)
                if event is None:
                    break  # nothing more
                if event.eventType == _XID_EVENTS:
                    told.append((int(lib.nvmlDeviceGetIndex(event.device)), int(event.eventData)))
        return tuple(told)

    def _listen(self, count: int) -> Answer:
        """Register for every GPU's Xids; return the event set, 0 where the library has none."""
        lib = self._lib
        events = self._ask(lib.nvmlEventSetCreate)
        if events is None:
            return 0
        for index in range(count):
            with contextlib.suppress(lib.NVMLError):  # one that is lost already
                lib.nvmlDeviceRegisterEvents(lib.nvmlDeviceGetHandleByIndex(index), _XID_EVENTS, events)
        return events

    def _ask(self, call: Callable[..., Answer], *arguments: Handle) -> Answer:
        """Return the answer; None when this GPU does not know it.

        Raises:
            NVMLError: the GPU is lost, or the library is of no use any more.
        """
        import pynvml

        try:
            return call(*arguments)
        except pynvml.NVMLError as error:
            if _number_of(error) in _STALE or _number_of(error) in _LOST:
                raise
            return None


_VALUE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


def _value(answer: Answer) -> float:
    return float(getattr(answer.value, _VALUE_TYPES[answer.valueType]))


def _text(answer: Answer) -> str:
    return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else str(answer or "")


def _number_of(error: Exception) -> int:
    return int(getattr(error, "value", 999))
