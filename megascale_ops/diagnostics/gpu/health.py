# SPDX-License-Identifier: Apache-2.0
"""What each GPU tells of itself, without work: lost or not, memory errors, rows, links, versions, who else is on it.

NVML is asked by the agent's own collector and judged by the agent's own table where it has a row; here are beside
them what only a check before a job asks: the width of the PCIe link, errors ever, what differs from the majority.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from megascale_agents.collectors.gpu_values import Gpu, parse
from megascale_agents.collectors.nvml import NoDriverError, Nvml
from megascale_agents.hardware.findings import of_gpus

from megascale_ops.diagnostics.check import Check, Reading, Task, UnmeasuredError, doing
from megascale_ops.diagnostics.report import CheckFinding, Fact, Figure

CHECK = Check("gpu_health", "what GPUs tell of themselves", quick_s=10.0, full_s=20.0)

Library: TypeAlias = Any  # it ships no types

_APART_S = 0.2
_AGGREGATE, _UNCORRECTED = 1, 1
_GAUGES = {
    "row_remap_pending": "rows_pending",
    "row_remap_failed": "rows_failed",
    "nvlink_active_links": "nvlinks_active",
}
_SEVERITIES = {"fail": "bad", "warn": "warn"}
_NEXT = "nvidia-smi -q -d ECC,ROW_REMAPPER,PERFORMANCE; the kernel's log; `diagnose --full`"
# Equal on all GPUs of a node, and of a fleet.
_VERSIONS = ("driver", "vbios", "model", "inforom", "ecc_mode", "mig_mode")


def measure(task: Task) -> Reading:
    """Ask NVML twice, a moment apart.

    Raises:
        UnmeasuredError: there is no GPU, or no driver.
    """
    del task
    nvml = Nvml()
    try:
        doing("asking NVML")
        before = nvml.read(time.monotonic())
        time.sleep(_APART_S)
        now = nvml.read(time.monotonic())
    except NoDriverError as error:
        raise UnmeasuredError(str(error)) from error
    earlier = parse(before, None, {})
    gpus = parse(now, before, {})
    own = {gpu.identity.ordinal: gpu for gpu in earlier}
    most = {gpu.identity.ordinal: gpu.links for gpu in gpus}
    told = of_gpus(gpus, own, _APART_S, {})
    facts = [Fact("gpu_lost", f"GPU {gpu.identity.ordinal}", gpu.lost) for gpu in gpus if gpu.lost]
    by_uuid = {gpu.identity.uuid: f"GPU {gpu.identity.ordinal}" for gpu in gpus}
    facts += [
        Fact(f"told_{one.severity}", by_uuid.get(one.gpu, "node"), one.text) for one in told if one.severity != "note"
    ]
    figures: list[Figure] = []
    with contextlib.closing(nvml):
        for gpu in gpus:
            figures += _figures(gpu, most[gpu.identity.ordinal])
            facts += _facts(gpu)
            if not gpu.lost:
                more_figures, more_facts = _asked(gpu)
                figures += more_figures
                facts += more_facts
    return Reading(tuple(figures), tuple(facts))


def _figures(gpu: Gpu, links: int) -> Iterator[Figure]:
    label = f"GPU {gpu.identity.ordinal}"
    for name, ours in _GAUGES.items():
        if name in gpu.gauges:
            yield Figure(ours, label, gpu.gauges[name])
    if links:
        yield Figure("nvlinks", label, links)
    for kind, value in gpu.ecc.items():
        yield Figure(f"ecc_{kind}", label, value)
    for kind, value in gpu.remapped.items():
        yield Figure(f"rows_remapped_{kind}", label, value)
    yield Figure("gpu_processes", label, len(gpu.pids))


def _facts(gpu: Gpu) -> Iterator[Fact]:
    label, identity = f"GPU {gpu.identity.ordinal}", gpu.identity
    yield Fact("uuid", label, identity.uuid)
    yield Fact("pci", label, identity.pci)
    for name in ("model", "driver", "vbios"):
        if value := getattr(identity, name):
            yield Fact(name, label, value, peers="" if name == "uuid" else "GPU")


def _asked(gpu: Gpu) -> tuple[list[Figure], list[Fact]]:
    """Ask what the agent's collector does not; what the GPU does not know is left out."""
    import pynvml

    label = f"GPU {gpu.identity.ordinal}"
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu.identity.ordinal)

    def ask(name: str, *arguments: object) -> Any:  # noqa: ANN401  the library ships no types
        with contextlib.suppress(pynvml.NVMLError, AttributeError):
            return getattr(pynvml, name)(handle, *arguments)
        return None

    figures = [
        Figure(ours, label, float(value))
        for ours, value in (
            ("ecc_uncorrected_ever", ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _AGGREGATE)),
            ("pcie_width", ask("nvmlDeviceGetCurrPcieLinkWidth")),
            ("pcie_width_most", ask("nvmlDeviceGetMaxPcieLinkWidth")),
        )
        if value is not None
    ]
    ecc, mig, inforom = (
        ask("nvmlDeviceGetEccMode"),
        ask("nvmlDeviceGetMigMode"),
        ask("nvmlDeviceGetInforomImageVersion"),
    )
    modes = (("ecc_mode", ecc[0] if ecc else None), ("mig_mode", mig[0] if mig else None), ("inforom", inforom))
    facts = [Fact(name, label, str(value), peers="GPU") for name, value in modes if value is not None]
    return figures, facts


def judge(reading: Reading) -> list[CheckFinding]:
    """Say what the agent's table says, and what differs from the GPU's own best or from the majority."""
    found = [
        CheckFinding("bad" if severity == "fail" else "warn", of, f"{of}: {text}", _NEXT)
        for severity in ("fail", "warn")
        for of, text in _of(reading.facts, f"told_{severity}")
    ]
    widest = reading.values("pcie_width_most")
    for gpu, width in reading.values("pcie_width").items():
        if width < widest.get(gpu, width):
            text = f"{gpu}: its PCIe link has {width:.0f} of {widest[gpu]:.0f} lanes"
            found.append(
                CheckFinding("bad", gpu, text, "reseat it, or its riser; lspci -vv shows LnkSta against LnkCap")
            )
    links, up = reading.values("nvlinks"), reading.values("nvlinks_active")
    common = Counter(up.values()).most_common(1)
    for gpu, count in up.items():
        if common and count < common[0][0]:
            text = f"{gpu}: {count:.0f} of {links.get(gpu, 0):.0f} NVLinks are up, {common[0][0]:.0f} on the others"
            found.append(
                CheckFinding("bad", gpu, text, "nvidia-smi nvlink -s; the fabric manager's log; reset the GPU")
            )
    for gpu, count in reading.values("gpu_processes").items():
        if count:
            what = "1 process is" if count == 1 else f"{count:.0f} processes are"
            found.append(CheckFinding("note", gpu, f"{gpu}: {what} on it, and may slow what is measured"))
    return found + drifted(reading.facts)


def _of(facts: Sequence[Fact], name: str) -> list[tuple[str, str]]:
    return [(one.of, one.value) for one in facts if one.name == name]


def drifted(facts: Sequence[Fact]) -> list[CheckFinding]:
    """Return a warning for each version that is not the majority's; of one node, or of a fleet."""
    found = []
    for name in _VERSIONS:
        values = {one.of: one.value for one in facts if one.name == name and one.peers}
        counts = Counter(values.values()).most_common()
        if len(counts) < 2:
            continue
        usual, votes = counts[0]
        for of, value in values.items():
            if value != usual:
                what = name.replace("_", " ")
                text = f"{of}: {what} {value}, where {votes} of {len(values)} have {usual}"
                found.append(
                    CheckFinding("warn", of, text, f"give it the {what} of the others, or all of them a newer one")
                )
    return found
