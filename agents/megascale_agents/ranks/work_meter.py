# SPDX-License-Identifier: Apache-2.0
"""What a rank got done since it was last looked at: CPU time, bytes read, written, sent and received, files that grow.

Doing something is not hanging. A rank that waits for `aws s3 cp`, an HTTP answer or a slow file system shows one stack
for minutes, like one that is stuck. The kernel counts on: for the process, for every living process below it, and, in
the parent's own counters, for those that have ended. So counters are read at every look and compared with those of the
look before; none of it asks the process, or waits for its memory map.

Counters of the look before count only if the rank has not moved since: otherwise its training would be taken for work.

Bytes are psutil's (27 us a process; by hand 17). The rest is read by hand, for what psutil tells otherwise: starts to
the whole second of the boot's wall clock, states as words, command lines with characters that no JSON carries, bare
names out of command lines, and children by a walk through all processes of the node (1.2 ms for 84; by hand 20 us).

Sources: proc_pid_stat(5), sock_diag(7), include/uapi/linux/tcp.h.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple, TypeVar

import psutil

from megascale_agents.collectors import process, sockets
from megascale_ops.schema.work import MOST_CHILDREN_TOLD, MOST_COMMAND, ChildWork, ProcessWork

# 64 processes below a rank, as `standing` looks at: data loader workers, and programs that it has started.
MOST_CHILDREN = 64
# 256 open files and 64 connections of a tree are compared: more would cost more than 10 ms a look.
MOST_FILES, MOST_CONNECTIONS = 256, 64
# 120 s: what was counted before that belongs to another silence.
OLDEST_S = 120.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_Key = TypeVar("_Key")
_STDERR = 2  # what a rank prints grows its logs, whatever it does


class Below(NamedTuple):
    """A process below the rank."""

    pid: int
    state: str
    cpu_s: float  # its own and that of its children that have ended
    started_mono_s: float


class Counters(NamedTuple):
    """All counters of a rank's processes at one moment."""

    mono_s: float
    own_cpu_s: float = 0.0
    child_cpu_s: float = 0.0
    io_bytes: int = 0
    by_socket: Mapping[int, int] = {}  # inode -> bytes acknowledged and received
    by_file: Mapping[tuple[int, int], int] = {}  # (device, inode) -> size
    below: tuple[Below, ...] = ()


class WorkMeter:
    """Compares one rank's counters from look to look."""

    def __init__(self) -> None:
        self._pid = 0
        self._before: Counters | None = None

    def begin(self, pid: int, now_s: float, moved_s: float) -> None:
        """Make sure that there is something to compare with: counters of this process from since the rank moved.

        Args:
            pid: The rank's process.
            now_s: Monotonic clock now.
            moved_s: When the rank last moved, on the same clock.
        """
        before = self._before
        if before is None or pid != self._pid or before.mono_s < moved_s or now_s - before.mono_s > OLDEST_S:
            self._pid, self._before = pid, read(pid, now_s)

    def end(self, now_s: float, moved_s: float, *, is_running: bool) -> ProcessWork | None:
        """Return what was done since the counters that ``begin`` has made sure of; they are replaced."""
        before, self._before = self._before, read(self._pid, now_s)
        if before is None:
            return None
        return compare(before, self._before, moved_s, is_running=is_running)


def read(pid: int, now_s: float) -> Counters:
    """Read the counters of a process and of all below it."""
    own, reaped = _cpu(pid)
    below = tuple(_below(pid))
    pids = (pid, *(child.pid for child in below))
    inodes: set[int] = set()
    files: dict[tuple[int, int], int] = {}
    for each in pids:
        _scan_files(each, inodes, files)
    return Counters(
        mono_s=now_s,
        own_cpu_s=own,
        child_cpu_s=reaped + sum(child.cpu_s for child in below),
        io_bytes=sum(_io_bytes(each) for each in pids),
        by_socket=_moved_bytes(pid, inodes),
        by_file=files,
        below=below,
    )


def compare(before: Counters, now: Counters, moved_s: float, *, is_running: bool) -> ProcessWork:
    """Return what was done between two readings; counters that went away count as nothing, never as less."""
    used = {child.pid: child.cpu_s for child in before.below}
    by_cpu = sorted(now.below, key=lambda one: (one.started_mono_s <= moved_s, used.get(one.pid, 0.0) - one.cpu_s))
    told = tuple(
        ChildWork(one.pid, command_of(one.pid, one.state), one.state, is_new=one.started_mono_s > moved_s)
        for one in by_cpu[:MOST_CHILDREN_TOLD]
    )
    return ProcessWork(
        mono_s=now.mono_s,
        over_s=max(1e-3, now.mono_s - before.mono_s),
        own_cpu_s=max(0.0, now.own_cpu_s - before.own_cpu_s),
        child_cpu_s=max(0.0, now.child_cpu_s - before.child_cpu_s),
        io_bytes=max(0, now.io_bytes - before.io_bytes),
        socket_bytes=_grown(before.by_socket, now.by_socket),
        grown_bytes=_grown(before.by_file, now.by_file),
        is_running=is_running,
        children=told,
    )


def describe(work: ProcessWork) -> str:
    """Return one line for people."""
    parts = [f"in {work.over_s:.1f} s: {work.own_cpu_s:.2f} s of CPU"]
    if work.children or work.child_cpu_s:
        parts.append(f"{work.child_cpu_s:.2f} s of CPU in children")
    parts.append(f"{work.io_bytes:,} bytes read and written, {work.socket_bytes:,} over TCP")
    if work.grown_bytes:
        parts.append(f"open files grew by {work.grown_bytes:,} bytes")
    children = [f"child {child.pid} ({child.command}): state {child.state}" for child in work.children if child.is_new]
    return "\n".join([", ".join(parts), *children])


def command_of(pid: int, state: str) -> str:
    """Return a process's command line, cut; its bare name where the kernel might have to wait for its memory map."""
    with contextlib.suppress(OSError):
        if state != "D":
            words = Path(f"/proc/{pid}/cmdline").read_bytes()[:4096].split(b"\0")
            line = " ".join(word.decode("utf-8", "replace") for word in words if word)
            if line:
                program, _, rest = line.partition(" ")
                line = f"{program.rpartition('/')[2]} {rest}".strip()
                return line if len(line) <= MOST_COMMAND else line[: MOST_COMMAND - 3] + "..."
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return "?"


def _grown(before: Mapping[_Key, int], now: Mapping[_Key, int]) -> int:
    """Return by how much the counters that both know have grown; what is new has begun anywhere."""
    return sum(max(0, count - before[key]) for key, count in now.items() if key in before)


def _fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on; empty when there is none."""
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
        return data[data.rindex(b")") + 2 :].split()
    except (OSError, ValueError):
        return []


def _cpu(pid: int) -> tuple[float, float]:
    """Return the CPU seconds of a process, and of its children that have ended and were waited for."""
    fields = _fields(pid)
    if len(fields) < 15:
        return 0.0, 0.0
    own, reaped = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    return own / _TICKS_PER_S, reaped / _TICKS_PER_S


def _below(pid: int) -> Iterable[Below]:
    """Look at all living processes below one, by whatever thread they were started."""
    ahead_s = _slept_s()
    for child in process.below(pid, MOST_CHILDREN):
        fields = _fields(child)
        if len(fields) >= 20 and fields[0] not in (b"Z", b"X"):
            cpu_s = sum(int(field) for field in fields[11:15]) / _TICKS_PER_S
            yield Below(child, fields[0].decode("ascii"), cpu_s, int(fields[19]) / _TICKS_PER_S - ahead_s)


def _slept_s() -> float:
    """Return by how much the clock of processes' starts is ahead of the monotonic one: time that was slept through."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()


def _io_bytes(pid: int) -> int:
    """Return the bytes that a process has read and written by system calls; 0 where it may not be asked."""
    try:
        counts = psutil.Process(pid).io_counters()
    except (psutil.Error, OSError, RuntimeError, ValueError):  # gone, another user's, or not counted by the kernel
        return 0
    return int(counts.read_chars) + int(counts.write_chars)


def _scan_files(pid: int, inodes: set[int], files: dict[tuple[int, int], int]) -> None:
    """Add the sockets that a process has open, and the sizes of its regular files but for what it prints to."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            handles = [(entry.name, entry.path) for entry in entries]
    except OSError:
        return
    for name, path in handles:
        with contextlib.suppress(OSError):
            target = os.readlink(path)  # noqa: PTH115  a rank has hundreds; a third of a Path's cost
            if target.startswith("socket:["):
                inodes.add(int(target[8:-1]))
            elif target.startswith("/") and not target.startswith("/dev/") and len(files) < MOST_FILES:
                seen = os.stat(path)  # noqa: PTH116  as above
                if S_ISREG(seen.st_mode) and int(name) > _STDERR:
                    files[seen.st_dev, seen.st_ino] = seen.st_size


def _moved_bytes(pid: int, inodes: set[int]) -> dict[int, int]:
    """Return the bytes that each of these sockets has had acknowledged or has received; empty if unknown."""
    if not inodes:
        return {}
    known = sockets.read(pid)
    own = [(inode, known[inode]) for inode in sorted(inodes & known.keys())][:MOST_CONNECTIONS]
    found: dict[int, int] = {}
    try:
        with contextlib.closing(sockets.Asking()) as asking:
            for inode, one in own:
                found[inode] = asking.moved(one)
    except OSError:
        return {}
    return found
