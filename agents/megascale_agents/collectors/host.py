# SPDX-License-Identifier: Apache-2.0
"""The host as a whole: processors, memory, swap, and the disks that a training run fills.

Read once a second, not at every look: of /proc/stat and /proc/meminfo only the few numbers that are reported (60 us;
psutil parses both whole, and /proc/vmstat for its swap: 250 us). Source: proc_stat(5), proc_meminfo(5).
"""

import os
import re
from typing import NamedTuple

from megascale_agents.collectors.short_files import beginning
from megascale_ops.schema.health import HostReading

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# The first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal; guest time is inside user time.
_COUNTED = 8
_IDLE = slice(3, 5)  # idle, and idle with somebody waiting for a disk
_MEMORY = re.compile(rb"^(MemTotal|MemFree|MemAvailable|SwapTotal|SwapFree): +(\d+) kB$", re.MULTILINE)
# 4 KiB: all of /proc/meminfo, and the line that counts of /proc/stat.
_FIRST_BYTES = 4096


class HostSample(NamedTuple):
    """What the kernel counts, before it is turned into shares."""

    cpu_total_s: float  # summed over all cores since boot
    cpu_idle_s: float
    load_1m: float
    memory_total_bytes: int
    memory_available_bytes: int
    swap_total_bytes: int
    swap_used_bytes: int
    shm_free_bytes: int | None  # None: it is not known
    disk_free_bytes: int | None
    cores: int


def _free_bytes(folder: str) -> int | None:
    """Free space of the file system of ``folder`` for an ordinary user; None when the folder is not there (yet)."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return None
    return space.f_bavail * space.f_frsize


def parse_times(data: bytes) -> tuple[float, float]:
    """Return the seconds of all cores since boot, and how many of them were idle, out of ``/proc/stat``.

    Raises:
        ValueError: when it does not begin as expected.
    """
    name, *words = data.partition(b"\n")[0].split()
    if name != b"cpu" or len(words) < _COUNTED:
        raise ValueError(f"not the beginning of /proc/stat: {data[:80]!r}")
    ticks = [int(word) for word in words[:_COUNTED]]
    return sum(ticks) / _TICKS_PER_S, sum(ticks[_IDLE]) / _TICKS_PER_S


def parse_memory(data: bytes) -> dict[bytes, int]:
    """Return the bytes of ``/proc/meminfo`` by name; a container may have no swap lines."""
    return {name: int(kib) * 1024 for name, kib in _MEMORY.findall(data)}


def read(box_root: str, run_dir: str) -> HostSample:
    """Sample the host now.

    Args:
        box_root: Where the black boxes are (shared memory).
        run_dir: A run folder on the disk that matters; "" when no job runs.

    Raises:
        OSError: /proc can't be read.
        ValueError: a line of it is not as expected.
        KeyError: it has no line for memory.
    """
    total_s, idle_s = parse_times(beginning("/proc/stat", _FIRST_BYTES))
    memory = parse_memory(beginning("/proc/meminfo", _FIRST_BYTES))
    swap = memory.get(b"SwapTotal", 0)
    return HostSample(
        cpu_total_s=total_s,
        cpu_idle_s=idle_s,
        load_1m=os.getloadavg()[0],
        memory_total_bytes=memory[b"MemTotal"],
        memory_available_bytes=memory.get(b"MemAvailable", memory[b"MemFree"]),
        swap_total_bytes=swap,
        swap_used_bytes=max(0, swap - memory.get(b"SwapFree", swap)),
        shm_free_bytes=_free_bytes(box_root),
        disk_free_bytes=_free_bytes(run_dir) if run_dir else None,
        cores=os.cpu_count() or 1,
    )


def parse(now: HostSample, before: HostSample | None) -> HostReading:
    """Turn two samples into shares of the time between them; without a sample before, of the time since boot."""
    total_s = now.cpu_total_s - (before.cpu_total_s if before else 0.0)
    idle_s = now.cpu_idle_s - (before.cpu_idle_s if before else 0.0)
    return HostReading(
        cpu_busy=round(min(1.0, max(0.0, 1.0 - idle_s / total_s)), 3) if total_s > 0 else 0.0,
        load_1m=round(now.load_1m, 2),
        memory_used=_share(now.memory_total_bytes - now.memory_available_bytes, now.memory_total_bytes),
        memory_available_bytes=now.memory_available_bytes,
        swap_used=_share(now.swap_used_bytes, now.swap_total_bytes),
        shm_free_bytes=now.shm_free_bytes or 0,
        disk_free_bytes=now.disk_free_bytes or 0,
        cores=now.cores,
        has_shm=now.shm_free_bytes is not None,
        has_disk=now.disk_free_bytes is not None,
    )


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole > 0 else 0.0
