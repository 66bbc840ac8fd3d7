# SPDX-License-Identifier: Apache-2.0
"""Limits of processes: open files, memory that may be locked, room in /dev/shm; and those of the control group.

Each of them ends a job on the one node where it is lower than on the others, at the step where it is reached.
"""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from megascale_ops.diagnostics.check import Check, Reading, Task
from megascale_ops.diagnostics.host import control_group
from megascale_ops.diagnostics.report import CheckFinding, Fact, Figure

CHECK = Check("limits", "limits of processes and of the control group", quick_s=5.0, full_s=10.0, severity="warn")

_GIB = 1 << 30
# 4,096: a runner of eight ranks holds some 200, a data loader of torch hundreds more for each rank.
_ENOUGH_FILES = 4096
# 1 GiB: NCCL's own start fails in Docker's default of 64 MB.
_ENOUGH_SHM = _GIB
# 1 %: one period of 100 ms in ten seconds is 1 %, and a rank that stands still in it holds up all.
_THROTTLED = 0.01
_LOW_MEMORY = 2 * _GIB


def measure(task: Task) -> Reading:
    """Read them."""
    del task
    missing = [] if control_group.ROOT.is_dir() else [f"no control groups at {control_group.ROOT}"]
    figures = [*_of_process(), *of_group(control_group.limits())]
    room = None
    with contextlib.suppress(OSError):
        room = os.statvfs("/dev/shm")  # noqa: S108  it is what is looked at
    if room is not None:
        figures.append(Figure("shm_size", "node", room.f_blocks * room.f_frsize))
        figures.append(Figure("shm_free", "node", room.f_bavail * room.f_frsize))
    else:
        missing.append("there is no /dev/shm")
    has_fabric = any(Path("/sys/class/infiniband").glob("*"))
    facts = (Fact("rdma", "node", "yes" if has_fabric else "no"),)
    return Reading(tuple(figures), facts, tuple(missing))


def _of_process() -> Iterator[Figure]:
    for name, which in (("limit_files", resource.RLIMIT_NOFILE), ("limit_memlock", resource.RLIMIT_MEMLOCK)):
        _, hard = resource.getrlimit(which)
        if hard != resource.RLIM_INFINITY:
            yield Figure(name, "node", hard)


def of_group(found: control_group.Limits) -> Iterator[Figure]:
    """Yield what limits the control group."""
    for name, value in (
        ("cgroup_cpus", found.cpus),
        ("cgroup_throttled", found.throttled),
        ("cgroup_memory", found.memory),
        ("cgroup_memory_free", found.memory_free),
    ):
        if value is not None:
            yield Figure(name, "node", value)


def judge(reading: Reading) -> list[CheckFinding]:
    """Warn of limits that jobs have been ended by."""
    found = []
    values = {one.name: one.value for one in reading.figures}
    if values.get("limit_files", _ENOUGH_FILES) < _ENOUGH_FILES:
        text = (
            f"a process may hold {values['limit_files']:,.0f} files; "
            f"eight ranks with data loaders need {_ENOUGH_FILES:,}"
        )
        found.append(
            CheckFinding("warn", "node", text, "raise nofile: limits.conf, LimitNOFILE=, --ulimit nofile=65536")
        )
    if "limit_memlock" in values and reading.texts("rdma").get("node") == "yes":
        mebibytes = values["limit_memlock"] / (1 << 20)
        text = f"memory that may be locked is limited to {mebibytes:,.0f} MiB, and RDMA locks buffers"
        found.append(
            CheckFinding("warn", "node", text, "memlock unlimited: limits.conf, LimitMEMLOCK=, --ulimit memlock=-1")
        )
    if values.get("shm_size", _ENOUGH_SHM) < _ENOUGH_SHM:
        text = f"the shared memory has {values['shm_size'] / (1 << 20):,.0f} MiB: NCCL may fail to start"
        found.append(CheckFinding("warn", "node", text, "docker run --shm-size=8g, or an emptyDir of medium Memory"))
    if values.get("cgroup_throttled", 0.0) > _THROTTLED:
        text = f"the control group{_of_cpus(values)} was throttled in {values['cgroup_throttled']:.1%} of its periods"
        found.append(
            CheckFinding("warn", "node", text, "raise the limit of processors, or lower the number of threads")
        )
    if values.get("cgroup_memory_free", _LOW_MEMORY) < _LOW_MEMORY:
        text = (
            f"the control group has {values['cgroup_memory_free'] / _GIB:.1f} of "
            f"{values['cgroup_memory'] / _GIB:.1f} GiB of memory left"
        )
        found.append(CheckFinding("warn", "node", text, "raise its limit, or end what else runs in it"))
    return found


def _of_cpus(values: dict[str, float]) -> str:
    return f" ({values['cgroup_cpus']:g} processors)" if "cgroup_cpus" in values else ""
