# SPDX-License-Identifier: Apache-2.0
"""One rank's process as the kernel sees it: ``/proc/<pid>/stat``.

The file stays open between looks: a ``pread`` of it takes 3 us, opening it each time 11 us (torch, 8 ranks, ten
looks a second: 0.03 % of a core). An open file also names the process for good: when it is gone, the read fails with
ESRCH, even if its pid has been given to another process.

Two things show sooner here than by ``waitpid`` or a closed socket. A stopped process has state ``T`` at once, while it
answers nothing and no timeout of its peers has passed yet. A dying process carries ``PF_EXITING`` after 0.3 ms, while
its memory is still being freed (64 ms for each touched GB). Source: proc_pid_stat(5), include/linux/sched.h.

``/proc/<pid>/schedstat`` has for how long the main thread could have run and got no processor
(Documentation/scheduler/sched-stats.rst): that alone distinguishes a starved process from one that sleeps.
"""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from megascale_agents.ownership.processes import may_be_read
from megascale_ops.schema.progress import ProcessReading

_PF_EXITING = 0x4
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# 0.9 s: CPU time is counted in ticks of 10 ms, so that a share over one heartbeat is good to one percent;
# a heartbeat sent at once in between must not shorten the window to noise.
_BUSY_WINDOW_S = 0.9
# 5 %: a process that sleeps and wakes waits briefly for a core each time; that is normal.
_STARVED = 0.05


class Stat(NamedTuple):
    """The fields of ``/proc/<pid>/stat`` that matter; ``state`` is "" for a process that is dying or dead."""

    state: str
    start_ticks: int
    cpu_s: float
    rss_bytes: int
    threads: int
    group: int


_NO_HEAD = b"\0"  # no line begins so
GONE = Stat("", 0, 0.0, 0, 0, 0)


def state_of(data: bytes) -> tuple[str, bytes]:
    """Read the state alone of a stat line; return it with all that stands before and in the fields that hold it.

    Raises:
        ValueError: when it is not a stat line.
    """
    fields = data[data.rindex(b")") + 2 :].split(None, 7)
    if len(fields) < 8:
        raise ValueError(f"not a line of /proc/PID/stat: {data[:80]!r}")
    state = fields[0].decode("ascii")
    is_gone = int(fields[6]) & _PF_EXITING or state in "ZXx"
    return "" if is_gone else state, data[: -len(fields[7])]


def parse(data: bytes) -> Stat:
    """Read one stat line; fields are counted from the last ``)`` because a process may have any name.

    Raises:
        ValueError: when it is not a stat line.
    """
    fields = data[data.rindex(b")") + 2 :].split(None, 23)
    if len(fields) < 22:
        raise ValueError(f"not a line of /proc/PID/stat: {data[:80]!r}")
    return Stat(
        state=state_of(data)[0],
        start_ticks=int(fields[19]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
        threads=int(fields[17]),
        group=int(fields[2]),
    )


def read_once(pid: int) -> Stat:
    """Look at a process once; ``GONE`` when there is none."""
    try:
        return parse(Path(f"/proc/{pid}/stat").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return GONE


def below(pid: int, most: int) -> list[int]:
    """Return the processes below one, whichever thread started them: its children, theirs, and so on.

    Those of its own user, and what these started: a program of another user is not a user's to look into.
    """
    found: list[int] = []
    try:
        uid = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116  as below
    except OSError:
        return found
    parents = [pid]
    while parents and len(found) < most:
        parent = parents.pop(0)
        try:
            threads = os.listdir(f"/proc/{parent}/task")  # noqa: PTH208  ten times cheaper than Path objects
        except OSError:
            continue
        for thread in threads:
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{parent}/task/{thread}/children").read_text(encoding="ascii")
                children = [int(child) for child in text.split() if may_be_read(int(child), uid)]
                found += children
                parents += children
    return found[:most]


class ProcessCollector:
    """Looks at one process again and again.

    Args:
        pid: The process.
        start_ticks: When it started; a process with this pid but another start is another one, so ours is gone.
            0: whatever has this pid now.
        uid: The user it has to belong to, or it is another one; 0: any.

    Attributes:
        state: As of the last look; "" for a process that is dying or dead.
    """

    def __init__(self, pid: int, start_ticks: int = 0, uid: int = 0) -> None:
        self.pid = pid
        self.start_ticks = start_ticks
        self.state = ""
        self._stat = GONE
        self._unread = b""  # the newest line, of which the state alone was read
        self._head = _NO_HEAD  # prefix of a line with the same state
        self._fd = -1
        self._stopped_since_s = 0.0
        self._busy = 0.0
        self._starved = 0.0
        self._busy_from: tuple[float, float, float] | None = None  # (when, CPU seconds then, seconds without CPU then)
        try:
            self._fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            return
        self.poll_process(0.0)
        self._head = _NO_HEAD  # one that is stopped already counts as stopped from the first look that gets the time
        if (start_ticks and self.stat.start_ticks != start_ticks) or not may_be_read(pid, uid):
            self.close()
            self.state, self._stat = "", GONE
        else:
            self.start_ticks = self.stat.start_ticks

    @property
    def stat(self) -> Stat:
        """The last look; the last CPU time and memory are kept when the process has gone."""
        if self._unread:
            self._stat, self._unread = parse(self._unread), b""
        return self._stat if self._stat.state == self.state else self._stat._replace(state=self.state)

    def poll_process(self, now_s: float) -> bool:
        """Look now; return whether the process was stopped, resumed or went away since the last call."""
        if self._fd < 0:
            return False
        try:
            line = os.pread(self._fd, 1024, 0)
        except ProcessLookupError:
            after = ""
        else:
            self._unread = line
            if line.startswith(self._head):  # the usual case: one comparison
                return False
            after, self._head = state_of(line)
        before, self.state = self.state, after
        self._stopped_since_s = (self._stopped_since_s or now_s) if after == "T" else 0.0
        if not after:
            self.close()
        return before != after and ("T" in (before, after) or not after)

    def reading(self, now_s: float) -> ProcessReading:
        """Put the last look into the form that travels."""
        stat = self.stat
        if self._busy_from is None:
            self._busy_from = (now_s, stat.cpu_s, self._without_cpu_s())
        passed_s = now_s - self._busy_from[0]
        if passed_s >= _BUSY_WINDOW_S:
            without_s = self._without_cpu_s()
            self._busy = max(0.0, round((stat.cpu_s - self._busy_from[1]) / passed_s, 3))
            starved = round((without_s - self._busy_from[2]) / passed_s, 2)
            self._starved = min(1.0, starved) if starved >= _STARVED else 0.0
            self._busy_from = (now_s, stat.cpu_s, without_s)
        return ProcessReading(
            state=stat.state,
            stopped_since_mono_s=self._stopped_since_s,
            cpu_s=stat.cpu_s,
            cpu_busy=self._busy if stat.state else 0.0,
            rss_bytes=stat.rss_bytes if stat.state else 0,
            threads=stat.threads if stat.state else 0,
            starved=self._starved if stat.state else 0.0,
        )

    def _without_cpu_s(self) -> float:
        """Return for how long the main thread has waited for a processor; 0 where the kernel does not count it."""
        if self._fd < 0:
            return 0.0
        try:
            # Once a second: 11 us. The pid is still the rank's: the file that names it was read just before.
            return int(Path(f"/proc/{self.pid}/schedstat").read_bytes().split()[1]) * 1e-9
        except (OSError, ValueError, IndexError):
            return 0.0

    def close(self) -> None:
        """Let go of the file; the last look stays."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
