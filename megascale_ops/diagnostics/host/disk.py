# SPDX-License-Identifier: Apache-2.0
"""How fast a folder's disk takes and gives bytes, how soon a small write is safe, and whether the same comes back.

The file has no name where the file system can do that, and loses it at once otherwise: nothing is left behind, whatever
ends the check. Caches are passed by (``O_DIRECT``), or where a file system can't do that, all is synced and dropped
from the cache before it is read. Each block carries its place and random bytes, so that no device shortens the work by
compression, and a block that comes from elsewhere is seen.
"""

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import psutil

from megascale_ops.diagnostics.check import Check, Reading, Task, UnmeasuredError, doing
from megascale_ops.diagnostics.report import CheckFinding, Fact, Figure

CHECK = Check("disk", "a disk", quick_s=10.0, full_s=90.0, alone=True, a_path=True)

_BLOCK_BYTES = 4 << 20
_SMALL_BYTES = 4096
# 5 %: a disk that is nearly full must not be filled by its check.
_SHARE_OF_FREE = 0.05
_LEAST_BYTES = 16 << 20
# 100 MB/s: a node's 100 GB of a sharded checkpoint would take 17 min, longer than what is trained between two.
_SLOW_BYTES_S = 100e6
# 1 s: what syncs a hundred small files (markers, indexes, manifests) is then held for minutes.
_SLOW_SYNC_S = 1.0


class Amount(NamedTuple):
    """How much is done, whatever comes first: so many bytes or so many seconds each way, and so many small writes."""

    bytes_most: int
    seconds: float
    syncs: int


_QUICK = Amount(256 << 20, 2.0, 60)
_FULL = Amount(4 << 30, 20.0, 500)


def measure(task: Task) -> Reading:
    """Write, sync and read in the folder ``task.paths[0]``.

    Raises:
        UnmeasuredError: there is no such folder, no right to write there, or no room.
    """
    folder = task.paths[0]
    amount = _FULL if task.thorough else _QUICK
    doing(f"asking {folder} for its free space")
    free = _free_bytes(folder)
    size = int(min(amount.bytes_most, free * _SHARE_OF_FREE)) // _BLOCK_BYTES * _BLOCK_BYTES
    if size < _LEAST_BYTES:
        raise UnmeasuredError(f"{folder} has {free >> 20} MiB free, too little to measure its disk")
    doing(f"opening a file in {folder}")
    handle, is_direct = _open(folder)
    try:
        figures = tuple(_figures(folder, handle, amount, size, is_direct=is_direct))
    finally:
        os.close(handle)
    kind = _kind_of(folder)
    how = "O_DIRECT" if is_direct else "synced, then dropped from the cache"
    return Reading(figures, (Fact("file_system", folder, kind), Fact("disk_mode", folder, how)))


def _free_bytes(folder: str) -> int:
    try:
        room = os.statvfs(folder)
    except OSError as error:
        raise UnmeasuredError(f"{folder}: {error.strerror}, so its disk is not measured") from error
    return room.f_bavail * room.f_frsize


def _open(folder: str) -> tuple[int, bool]:
    """Return a file without a name, and whether caches are passed by."""
    direct = getattr(os, "O_DIRECT", 0)
    for flags, is_direct in ((direct, bool(direct)), (0, False)):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600), is_direct
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                raise UnmeasuredError(
                    f"{folder} can't be written to ({error.strerror}): its disk is not measured"
                ) from None
            if error.errno in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
                raise UnmeasuredError(f"{folder}: {error.strerror}, so its disk is not measured") from None
            if error.errno == errno.ENOTDIR:
                raise UnmeasuredError(f"{folder} is no folder: its disk is not measured") from None
        name = Path(folder, f".diagnose-{os.getpid()}-{os.urandom(4).hex()}")
        with contextlib.suppress(OSError):
            handle = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
            name.unlink()
            return handle, is_direct
    raise OSError(errno.EIO, "no file can be made there", folder)


def _figures(folder: str, handle: int, amount: Amount, size: int, *, is_direct: bool) -> Iterator[Figure]:
    peers = f"{folder}, {_kind_of(folder)}"
    with mmap.mmap(-1, _BLOCK_BYTES) as block, mmap.mmap(-1, _BLOCK_BYTES) as back:
        block[:] = os.urandom(_BLOCK_BYTES)
        doing(f"writing to {folder}")
        rates, count = _write(handle, block, size // _BLOCK_BYTES, amount.seconds, is_direct=is_direct)
        yield Figure("disk_write", folder, median(rates), tuple(rates), peers)
        doing(f"syncing {folder}")
        os.fsync(handle)
        if not is_direct:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        doing(f"reading from {folder}")
        rates, damaged = _read(handle, block, back, count, amount.seconds)
        yield Figure("disk_read", folder, median(rates), tuple(rates), peers)
        yield Figure("disk_damaged", folder, damaged)
        doing(f"syncing small writes to {folder}")
        times = _sync(handle, block, amount.syncs, amount.seconds)
        yield Figure("disk_sync", folder, median(times), tuple(times[:100]), peers)
        yield Figure("disk_sync_p99", folder, quantiles(times, n=100)[-1] if len(times) > 1 else times[0])


def _stamp(block: mmap.mmap, number: int) -> None:
    block[:8] = number.to_bytes(8, "little")


def _write(handle: int, block: mmap.mmap, blocks: int, seconds: float, *, is_direct: bool) -> tuple[list[float], int]:
    """Write blocks; return the rate of each, with its sync where it went into a cache, and how many there were."""
    rates: list[float] = []
    end_s = time.perf_counter() + seconds
    for number in range(blocks):
        _stamp(block, number)
        began_s = time.perf_counter()
        _all_of(os.pwrite(handle, block, number * _BLOCK_BYTES))
        if not is_direct:
            os.fdatasync(handle)
        now_s = time.perf_counter()
        rates.append(_BLOCK_BYTES / max(1e-9, now_s - began_s))
        if now_s > end_s:
            break
    return rates, len(rates)


def _read(handle: int, block: mmap.mmap, back: mmap.mmap, blocks: int, seconds: float) -> tuple[list[float], int]:
    """Read blocks back; return the rate of each, and how many are not what was written."""
    rates: list[float] = []
    damaged = 0
    end_s = time.perf_counter() + seconds
    for number in range(blocks):
        began_s = time.perf_counter()
        _all_of(os.preadv(handle, [back], number * _BLOCK_BYTES))
        now_s = time.perf_counter()
        rates.append(_BLOCK_BYTES / max(1e-9, now_s - began_s))
        _stamp(block, number)
        damaged += block[:] != back[:]
        if now_s > end_s:
            break
    return rates, damaged


def _sync(handle: int, block: mmap.mmap, most: int, seconds: float) -> list[float]:
    """Write 4 KiB and wait until the disk has them, again and again; return the seconds of each."""
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    with memoryview(block) as view:
        for number in range(most):
            began_s = time.perf_counter()
            os.pwrite(handle, view[:_SMALL_BYTES], number * _SMALL_BYTES)
            os.fdatasync(handle)
            now_s = time.perf_counter()
            times.append(now_s - began_s)
            if now_s > end_s:
                break
    return times


def _all_of(count: int) -> None:
    if count != _BLOCK_BYTES:
        raise OSError(errno.EIO, f"{count:,} of {_BLOCK_BYTES:,} bytes were moved")


def _kind_of(folder: str) -> str:
    """Return the type of the file system that a folder is on."""
    place = os.path.realpath(folder)
    mounts = [one for one in psutil.disk_partitions(all=True) if Path(place).is_relative_to(one.mountpoint)]
    return max(mounts, key=lambda one: len(one.mountpoint)).fstype if mounts else "unknown"


def judge(reading: Reading) -> list[CheckFinding]:
    """Find damage, and a disk that no checkpoint goes to in time; how fast it ought to be its equals say."""
    found = []
    for folder, damaged in reading.values("disk_damaged").items():
        if damaged:
            text = f"{folder}: {damaged:.0f} blocks read back differ from what was written"
            found.append(CheckFinding("bad", folder, text, "write nothing there; smartctl -a, the kernel's log, fsck"))
    for folder, rate in reading.values("disk_write").items():
        if rate < _SLOW_BYTES_S:
            text = f"{folder} takes {rate / 1e6:.0f} MB/s: 100 GB of a checkpoint need {100e9 / rate / 60:.0f} min"
            found.append(
                CheckFinding("warn", folder, text, "look at what else writes there (iostat -x 1), or use another")
            )
    for folder, seconds in reading.values("disk_sync_p99").items():
        if seconds > _SLOW_SYNC_S:
            text = f"{folder}: a write of 4 KiB takes up to {seconds:.1f} s until it is on the disk"
            found.append(
                CheckFinding("warn", folder, text, "look at what else writes there (iostat -x 1), or use another")
            )
    return found
