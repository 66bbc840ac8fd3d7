# SPDX-License-Identifier: Apache-2.0
"""NUMA nodes: their processors and memory, what this process is bound to, and where GPUs and adapters hang.

A module of memory that is gone shows as a node with less than its equals; a processor that the firmware has taken out,
as present and not online.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from megascale_ops.diagnostics.check import Check, Reading, Task
from megascale_ops.diagnostics.report import CheckFinding, Fact, Figure

CHECK = Check("numa", "NUMA nodes and binding", quick_s=5.0, full_s=10.0, severity="warn")

_SYS = Path("/sys/devices/system")
_PCI = Path("/sys/bus/pci/devices")
# Display controllers and 3D controllers of NVIDIA; network and InfiniBand controllers of Mellanox.
_DEVICES = {("0x10de", "0x03"): "GPU", ("0x15b3", "0x02"): "adapter"}


def numa_nodes(root: Path = _SYS) -> dict[int, set[int]]:
    """Return the processors of each NUMA node; empty where the kernel knows none."""
    found = {}
    for path in root.glob("node/node[0-9]*/cpulist"):
        found[int(path.parent.name.removeprefix("node"))] = cpus_of(_line(path))
    return dict(sorted(found.items()))


def cpus_of(text: str) -> set[int]:
    """Return the processors of a list as the kernel writes it: ``0-3,8``; sysfs documents it in cputopology."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            found.update(range(int(first), int(last or first) + 1))
    return found


def measure(task: Task) -> Reading:
    """Read what the kernel tells of them."""
    del task
    return Reading(tuple(_figures(_SYS, len(os.sched_getaffinity(0)))), tuple(_facts(_SYS, _PCI)))


def _figures(root: Path, allowed: int) -> Iterator[Figure]:
    for path in root.glob("node/node[0-9]*/meminfo"):
        total = re.search(r"MemTotal:\s+(\d+) kB", path.read_text(encoding="ascii", errors="replace"))
        if total is not None and int(total[1]):
            node = path.parent.name.removeprefix("node")
            yield Figure("memory_size", f"NUMA node {node}", int(total[1]) * 1024.0, peers="with memory")
    yield Figure("cpus_allowed", "node", allowed)
    for name in ("online", "present"):
        if cpus := cpus_of(_line(root / "cpu" / name)):
            yield Figure(f"cpus_{name}", "node", len(cpus), peers=name)


def _facts(root: Path, pci: Path) -> Iterator[Fact]:
    for node, cpus in numa_nodes(root).items():
        yield Fact("numa_cpus", f"NUMA node {node}", _line(root / f"node/node{node}/cpulist") if cpus else "none")
    for device in sorted(pci.glob("*")) if pci.is_dir() else ():
        kind = _DEVICES.get((_line(device / "vendor"), _line(device / "class")[:4]))
        if kind is not None:
            yield Fact("numa_place", f"{kind} at {device.name}", _line(device / "numa_node"))


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def judge(reading: Reading) -> list[CheckFinding]:
    """Find processors that are out, and devices whose place no one knows although there is more than one."""
    found = []
    present, online = (reading.values(name).get("node", 0) for name in ("cpus_present", "cpus_online"))
    if online < present:
        text = f"{present - online:.0f} of {present:.0f} processors are not online"
        following = "lscpu -e names them; the firmware takes out what failed, an administrator what is not wanted"
        found.append(CheckFinding("warn", "node", text, following))
    nodes = len(reading.texts("numa_cpus"))
    lost = [of for of, place in reading.texts("numa_place").items() if place == "-1"]
    if nodes > 1 and lost:
        text = f"{', '.join(lost)}: on which of {nodes} NUMA nodes is not told, so ranks can't be bound beside it"
        found.append(CheckFinding("note", lost[0], text, "look for the firmware's setting of NUMA (ACPI SLIT, SRAT)"))
    return found
