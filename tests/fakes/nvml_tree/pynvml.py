# SPDX-License-Identifier: Apache-2.0
"""A stand-in for ``pynvml`` on machines without a GPU: the functions that the agent calls, answered from a file.

To run an agent whose GPUs are those of a file, put this folder first on PYTHONPATH and name the file:

    PYTHONPATH=tests/fakes/nvml_tree MEGASCALE_FAKE_NVML=gpus.json megascale-ops agent --controller ... \
        --sys-root SYS --kernel-log KMSG

``FakeMachine`` of ``tests/fakes/hardware.py`` writes such a file, a tree of adapters for SYS and a log for KMSG, and
changes them while the agent runs: the file is read anew at each call. Its content:

    {"gpus": [{"uuid": "GPU-0", "temperature": 55, ...}, ...], "hang_s": 0, "error": 0}

What a GPU does not name has a healthy value below. ``hang_s`` makes the first call of a look hang, as a sick driver
does; ``error`` is the number of the NVMLError that every call raises; ``"lost": 15`` that of one GPU.
"""
# ruff: noqa: N802, D103  functions are named by the library, and documented there

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

HEALTHY = {
    "uuid": "GPU-0",
    "name": "NVIDIA H200",
    "vbios": "96.00.A5.00.01",
    "bus": "00000000:18:00.0",
    "temperature": 55,
    "power_mw": 650_000,
    "sm_mhz": 1980,
    "memory_mhz": 3201,
    "memory_used": 100 * 2**30,
    "memory_size": 141 * 2**30,
    "busy": 100,
    "reasons": 0,
    "ecc": [0, 0],  # corrected, uncorrected
    "fields": {},  # by number, over those below
    "links": [1] * 18,
    "pids": [],
    "held": {},  # bytes of memory by process, a string as JSON has it
    "shares": [],  # samples of its use: pid, microseconds, per cent of a multiprocessor's time
    "gpm": [80.0, 40.0, 30.0],
    "gpm_supported": True,
    "lost": 0,
    "xids": [],  # all that it ever had; each is reported once, to the event set of that moment
}
FIELDS = {
    83: 5_000_000, 82: 70, 94: 0, 230: 0, 142: 0, 143: 0, 144: 0, 145: 0, 38: 0, 45: 0, 52: 0, 59: 0, 91: 18,
    74: 0, 76: 0, 269: 0, 270: 0, 271: 0, 138: 1000, 139: 2000,
}  # fmt: skip


_samples: dict[int, int] = {}  # taken so far, by GPU
_told: dict[int, int] = {}  # Xids so far, by GPU that is listened to


class NVMLError(Exception):
    """As the library raises it: ``value`` is the number."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class _Answer:
    def __init__(self, number: int, value: float | None) -> None:
        self.fieldId = number
        self.nvmlReturn = 0 if value is not None else 3
        self.valueType = 3
        self.value = SimpleNamespace(ullVal=value)


class c_nvmlGpmMetricsGet_t:  # noqa: N801  the library's name
    """A question about activity."""

    def __init__(self) -> None:
        self.version = self.numMetrics = 0
        self.sample1 = self.sample2 = None
        self.metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(8)]


def _state() -> dict:
    path = os.environ.get("MEGASCALE_FAKE_NVML", "")
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise NVMLError(12) from error


def _gpu(index: int) -> dict:
    gpu = HEALTHY | _state()["gpus"][index]
    if gpu["lost"]:
        raise NVMLError(gpu["lost"])
    return gpu


def nvmlInit() -> None:
    _state()


def nvmlShutdown() -> None:
    """Nothing to let go of."""


def nvmlSystemGetDriverVersion() -> str:
    return "570.86.15"


def nvmlDeviceGetCount() -> int:
    state = _state()
    if state.get("hang_s"):
        time.sleep(state["hang_s"])
    if state.get("error"):
        raise NVMLError(state["error"])
    return len(state["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    return _gpu(handle)["uuid"]


def nvmlDeviceGetSerial(handle: int) -> str:
    return str(_gpu(handle).get("serial", ""))


def nvmlDeviceGetName(handle: int) -> str:
    return _gpu(handle)["name"]


def nvmlDeviceGetVbiosVersion(handle: int) -> str:
    return _gpu(handle)["vbios"]


def nvmlDeviceGetPciInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(busId=_gpu(handle)["bus"].encode())


def nvmlDeviceGetTemperature(handle: int, _sensor: int) -> int:
    return _gpu(handle)["temperature"]


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    return _gpu(handle)["power_mw"]


def nvmlDeviceGetClockInfo(handle: int, clock: int) -> int:
    return _gpu(handle)[{1: "sm_mhz", 2: "memory_mhz"}[clock]]


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    gpu = _gpu(handle)
    return SimpleNamespace(used=gpu["memory_used"], total=gpu["memory_size"])


def nvmlDeviceGetUtilizationRates(handle: int) -> SimpleNamespace:
    return SimpleNamespace(gpu=_gpu(handle)["busy"])


def nvmlDeviceGetCurrentClocksEventReasons(handle: int) -> int:
    return _gpu(handle)["reasons"]


def nvmlDeviceGetTotalEccErrors(handle: int, kind: int, _counter: int) -> int:
    return _gpu(handle)["ecc"][kind]


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[SimpleNamespace]:
    gpu = _gpu(handle)
    return [SimpleNamespace(pid=pid, usedGpuMemory=gpu["held"].get(str(pid))) for pid in gpu["pids"]]


def nvmlDeviceGetProcessUtilization(handle: int, since_us: int) -> list[SimpleNamespace]:
    newer = [sample for sample in _gpu(handle)["shares"] if sample[1] > since_us]
    if not newer:
        raise NVMLError(6)
    return [SimpleNamespace(pid=pid, timeStamp=at_us, smUtil=percent) for pid, at_us, percent in newer]


def nvmlDeviceGetFieldValues(handle: int, wanted: list[tuple[int, int]]) -> list[_Answer]:
    gpu = _gpu(handle)
    known = FIELDS | {int(number): value for number, value in gpu["fields"].items()}
    links = gpu["links"]
    return [
        _Answer(number, (links[scope] if scope < len(links) else None) if number == 165 else known.get(number))
        for number, scope in wanted
    ]


def nvmlDeviceGetIndex(handle: int) -> int:
    return handle


def nvmlEventSetCreate() -> object:
    if _state().get("deaf"):
        raise NVMLError(3)
    return object()


def nvmlEventSetFree(_events: object) -> None:
    _told.clear()


def nvmlDeviceRegisterEvents(handle: int, _types: int, _events: object) -> None:
    _told[handle] = len(_gpu(handle)["xids"])


def nvmlEventSetWait_v2(_events: object, _timeout_ms: int) -> SimpleNamespace:
    for handle, count in _told.items():
        xids = _gpu(handle)["xids"]
        if len(xids) > count:
            _told[handle] = count + 1
            return SimpleNamespace(device=handle, eventType=8, eventData=xids[count])
    raise NVMLError(10)


def nvmlGpmQueryDeviceSupport(handle: int) -> SimpleNamespace:
    return SimpleNamespace(isSupportedDevice=_gpu(handle)["gpm_supported"])


def nvmlGpmSampleAlloc() -> SimpleNamespace:
    return SimpleNamespace(gpu=None, number=0)


def nvmlGpmSampleGet(handle: int, sample: SimpleNamespace) -> SimpleNamespace:
    _samples[handle] = _samples.get(handle, 0) + 1
    sample.gpu, sample.number = _gpu(handle), _samples[handle]
    return sample


def nvmlGpmMetricsGet(question: c_nvmlGpmMetricsGet_t) -> c_nvmlGpmMetricsGet_t:
    if question.sample2.number != question.sample1.number + 1:
        raise NVMLError(2)  # not the two newest: activity since long ago
    for place in range(question.numMetrics):
        question.metrics[place].value = question.sample2.gpu["gpm"][place]
    return question
