# SPDX-License-Identifier: Apache-2.0
"""File systems: free space, free inodes, and whether those that are needed can be written to.

A mount that never answers (a file server that is gone) is what this check hangs at, and it says at which.
"""

import contextlib
import os
from collections.abc import Iterable

import psutil

from megascale_ops.diagnostics.check import Check, Reading, Task, doing
from megascale_ops.diagnostics.report import CheckFinding, Fact, Figure

CHECK = Check("file_systems", "file systems", quick_s=5.0, full_s=15.0)

# Those on a disk or a server; what the kernel makes up has no space.
_REAL = frozenset({
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "vfat", "fuse", "fuseblk",
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "weka", "wekafs", "9p", "virtiofs",
})  # fmt: skip
_MOST = 64
_GIB = 1 << 30
# 5 % and 10 GiB: a run's logs, journal and evidence go into that; of a large disk 5 % is plenty.
_LOW_SHARE, _LOW_BYTES = 0.05, 10 * _GIB
# 1 % and 1 GiB: the next write may be the last one.
_FULL_SHARE, _FULL_BYTES = 0.01, _GIB
_LOW_INODES = 0.02
# What every program writes into. Elsewhere a full disk holds another user's data: it keeps no job from running here.
_NEEDED = frozenset({"/", "/tmp", "/var", "/var/tmp", "/dev/shm"})  # noqa: S108  looked at, not written to


def measure(task: Task) -> Reading:
    """Ask each file system for its room."""
    figures: list[Figure] = []
    facts: list[Fact] = []
    missing: list[str] = []
    for place in dict.fromkeys((*task.paths, *_mounted())):
        doing(f"asking the file system at {place}")
        try:
            room = os.statvfs(place)
        except OSError as error:
            if place in task.paths:
                missing.append(f"{place}: {error.strerror}")
            continue
        if not room.f_blocks:
            continue
        figures.append(Figure("space_free", place, room.f_bavail * room.f_frsize))
        figures.append(Figure("space_free_share", place, room.f_bavail / room.f_blocks))
        if room.f_files:
            figures.append(Figure("inodes_free_share", place, room.f_favail / room.f_files))
        if place in task.paths:
            facts.append(Fact("writable", place, _writable(place, room.f_flag)))
    return Reading(tuple(figures), tuple(facts), tuple(missing))


def _mounted() -> Iterable[str]:
    """Return where file systems of a disk or server are mounted, folders only, each device once."""
    seen: set[tuple[str, str]] = set()
    with contextlib.suppress(OSError):
        for one in psutil.disk_partitions(all=True)[: 4 * _MOST]:
            known = one.fstype.split(".")[0] in _REAL and (one.device, one.fstype) not in seen
            if known and len(seen) < _MOST and not one.mountpoint.startswith(("/proc", "/sys", "/run", "/etc")):
                if one.fstype != "tmpfs":
                    seen.add((one.device, one.fstype))
                yield one.mountpoint


def _writable(place: str, flags: int) -> str:
    if flags & os.ST_RDONLY:
        return "read-only"
    return "yes" if os.access(place, os.W_OK) else "no right"


def judge(reading: Reading) -> list[CheckFinding]:
    """Find those that are full, nearly full, or read-only where a run writes."""
    free, shares = reading.values("space_free"), reading.values("space_free_share")
    needed = _NEEDED | reading.texts("writable").keys()
    found = []
    for place, share in shares.items():
        left = f"{free[place] / _GIB:.1f} GiB ({share:.1%})"
        following = f"remove what is not needed (`megascale-ops clean`; du -xh {place} | sort -h)"
        if share < _FULL_SHARE and free[place] < _FULL_BYTES:
            text = f"{place} is full: {left} left"
            found.append(CheckFinding("bad" if place in needed else "warn", place, text, following))
        elif share < _LOW_SHARE and free[place] < _LOW_BYTES:
            found.append(CheckFinding("warn", place, f"{place} is nearly full: {left} left", following))
    for place, share in reading.values("inodes_free_share").items():
        if share < _LOW_INODES:
            text = f"{place} has {share:.1%} of its inodes left: soon no file can be made, whatever space there is"
            found.append(
                CheckFinding("warn", place, text, f"find where the files are: du --inodes -x {place} | sort -n")
            )
    for place, how in reading.texts("writable").items():
        if how == "read-only":
            text = f"{place} is mounted read-only"
            following = "the kernel's log says whether it was remounted for errors; else mount it writable"
            found.append(CheckFinding("bad", place, text, following))
    return found
