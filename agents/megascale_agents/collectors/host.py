# SPDX-License-Identifier: Apache-2.0
"""The host as a whole: processors, memory, swap, and the disks that a training run fills.

Read once a second (psutil parses half a dozen files of /proc: 0.4 ms), not at every look.
"""

import os
from typing import NamedTuple

from megascale_ops.schema.health import HostReading


class HostSample(NamedTuple):
    """What the kernel counts, before it is turned into shares."""

    cpu_total_s: float  # summed over all cores since boot
    cpu_idle_s: float
    load_1m: float
    memory_total_bytes: int
    memory_available_bytes: int
    swap_total_bytes: int
    swap_used_bytes: int
    shm_free_bytes: int
    disk_free_bytes: int
    cores: int


def _free_bytes(folder: str) -> int:
    """Free space of the file system of ``folder`` for an ordinary user; 0 when the folder is not there (yet)."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return 0
    return space.f_bavail * space.f_frsize


def read(box_root: str, run_dir: str) -> HostSample:
    """Look at the host now.

    Args:
        box_root: Where the black boxes are (shared memory).
        run_dir: A run folder on the disk that matters; "" when no job runs.
    """
    import psutil  # 30 ms that an agent's start does not wait for

    times = psutil.cpu_times()
    memory = psutil.virtual_memory()
    swap = psutil.swap_memory()
    # Guest time is inside user time already; iowait is idle with somebody waiting.
    total_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return HostSample(
        cpu_total_s=total_s,
        cpu_idle_s=times.idle + getattr(times, "iowait", 0.0),
        load_1m=os.getloadavg()[0],
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        swap_total_bytes=swap.total,
        swap_used_bytes=swap.used,
        shm_free_bytes=_free_bytes(box_root),
        disk_free_bytes=_free_bytes(run_dir) if run_dir else 0,
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
        shm_free_bytes=now.shm_free_bytes,
        disk_free_bytes=now.disk_free_bytes,
        cores=now.cores,
    )


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole > 0 else 0.0
