# SPDX-License-Identifier: Apache-2.0
"""The ranks of this node as processes: started, seen dying early, stopped for certain, swept up afterwards.

A failure is seen when the kernel begins it, not when the memory is freed (`exits.early_code`). What is asked of a
living process (is it frozen, where is it blocked, what does it catch) is read from /proc, since of flags, exit status,
signal masks and system calls psutil tells nothing. It lists the processes. Their environments are read whole: where a
title was written over one (setproctitle) NULs stand first, at which psutil stops, and the mark would not be found.
Children are asked for by parent, in 20 us; psutil walks through all processes of the node for them (1.2 ms for 84).
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from megascale_ops.errors import MegascaleError
from megascale_ops.runner import exits
from megascale_ops.schema import environment

# 2 ms: the wait for a dying process is a poll of one small file; at this pace it costs 1 % of a core while it lasts.
_WAIT_POLL_S = 0.002
# 1 s: an exec takes less than a millisecond, and longer where its process has to wait for a core.
_EXEC_S = 1.0


def _stat_of(pid: int) -> str:
    """Return the line /proc/PID/stat; every rank's is read fifty times a second, and pathlib takes three times as long.

    Raises:
        OSError: there is no such process.
    """
    handle = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(handle, 4096).decode("utf-8", "replace")  # 52 numbers and a name of at most 64 bytes
    finally:
        os.close(handle)


def start_ticks(pid: int) -> int:
    """Return when ``pid`` started, in clock ticks since boot: pid and ticks together name a process for good.

    0 when there is no such process.
    """
    try:
        return exits.read_stat(_stat_of(pid))[2]
    except (OSError, ValueError):
        return 0


class RankPopen(subprocess.Popen[bytes]):
    """A ``Popen`` that reports a failure as soon as the kernel has begun it; success only by ``waitpid``.

    Attributes:
        ended_mono_s: When the death was first seen, monotonic seconds; 0 before.
        has_failed: It was stopped because of one of its children: an exit code of 0 is no success.
    """

    ended_mono_s = 0.0
    has_failed = False
    _seen_code: int | None = None

    def poll(self) -> int | None:
        """Return the return code, or None while the process lives; once seen dead, it stays dead."""
        code = self._status()
        if code is None:
            # While another thread fetches the status, ``Popen`` has none and /proc no longer has the process.
            code = self._seen_code
        self._seen_code = code
        if code is not None and not self.ended_mono_s:
            self.ended_mono_s = time.monotonic()
        return 1 if code == 0 and self.has_failed else code

    def _status(self) -> int | None:
        code = super().poll()
        if code is not None:
            return code
        try:
            _, flags, _, status = exits.read_stat(_stat_of(self.pid))
        except (OSError, ValueError):
            return super().poll()
        return exits.early_code(flags, status)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the death to begin.

        Raises:
            subprocess.TimeoutExpired: after ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(_WAIT_POLL_S)
        return code

    def reap(self, timeout_s: float) -> bool:
        """Wait until the kernel has freed all that the dying process held; False when it has not after ``timeout_s``.

        Device memory is freed when the process closes its device files, which is after ``poll`` has seen the death.
        """
        deadline = time.monotonic() + timeout_s
        while super().poll() is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_WAIT_POLL_S)
        return True

    def is_stopped(self) -> bool:
        """Return whether the process is frozen (state T), so that only SIGKILL reaches it."""
        try:
            return exits.read_stat(_stat_of(self.pid))[0] == "T"
        except (OSError, ValueError):
            return False

    def place(self) -> tuple[str, ...] | None:
        """Return where the main thread is blocked; None while it runs, or where that is not known."""
        with suppress(OSError):
            return exits.place_of(Path(f"/proc/{self.pid}/syscall").read_text())
        return None


def handles(pid: int, number: int) -> bool:
    """Return whether a signal would not kill a process: it has a handler, or ignores it."""
    with suppress(OSError):
        return exits.handles(Path(f"/proc/{pid}/status").read_text(), number)
    return False


def session_of(pid: int) -> int:
    """Return a process's session, which is the pid of the rank that started it unless it has left it; 0: it is gone."""
    with suppress(OSError):
        return os.getsid(pid)
    return 0


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started itself and that still run."""
    with suppress(OSError, ValueError):  # ValueError: a thread that has ended since
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def signal_group(pgid: int, number: int) -> None:
    """Signal a process group of ours; one that is gone already is fine."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


class NotStartedError(MegascaleError):
    """The kernel does not start a rank's program."""


def spawn(
    arguments: Iterable[str],
    env: dict[str, str],
    stdout: IO[str] | None,
    stderr: IO[str] | None,
    **more: Any,  # noqa: ANN401  handed on to Popen
) -> RankPopen:
    """Start one process in a session of its own, so that a signal to its group reaches its children too.

    Raises:
        NotStartedError: the kernel starts no such program; one sentence.
    """
    line = list(arguments)
    try:
        return RankPopen(line, env=env, stdout=stdout, stderr=stderr, start_new_session=True, **more)
    except OSError as error:
        raise NotStartedError(f"{line[0]} can't be started: {error.strerror}") from error


def marked_processes(run_id: str, *, before_round: int | None = None, spare: Iterable[int] = ()) -> list[int]:
    """Return the pids of all processes that carry our mark in their environment, however deep they were started.

    Args:
        run_id: The mark: one start of one runner.
        before_round: Only those of rounds before this one.
        spare: Pids to leave out.
    """
    mark = f"{environment.RUN_ID}={run_id}".encode()
    spared = {os.getpid(), *spare}
    end = time.monotonic() + _EXEC_S
    found: list[int] = []
    unsure = [pid for pid in psutil.pids() if pid not in spared]
    while unsure:
        told = {pid: _carries(pid, mark, before_round) for pid in unsure}
        found += [pid for pid in unsure if told[pid]]
        unsure = [pid for pid in unsure if told[pid] is None]
        if unsure and time.monotonic() > end:
            break
        time.sleep(_WAIT_POLL_S if unsure else 0.0)
    return sorted(found)


def _carries(pid: int, mark: bytes, before_round: int | None) -> bool | None:
    """Return whether a process has the mark; None while it is in an exec, where the kernel shows no environment."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
        if not raw and not is_dying(pid):
            _, flags, _, _ = exits.read_stat(_stat_of(pid))
            if exits.is_of_the_kernel(flags):
                return False
            if not Path(f"/proc/{pid}/cmdline").read_bytes():
                return None
            raw = Path(f"/proc/{pid}/environ").read_bytes()  # the exec is over since, or there is none in it
    except (OSError, ValueError):
        return False
    variables = raw.split(b"\0")
    if mark not in variables:
        return False
    if before_round is None:
        return True
    prefix = f"{environment.ROUND}=".encode()
    rounds = [int(v[len(prefix) :]) for v in variables if v.startswith(prefix) and v[len(prefix) :].isdigit()]
    return bool(rounds) and rounds[0] < before_round


def kill_for_certain(pids: Callable[[], list[int]], deadline_s: float = 5.0) -> int:
    """SIGKILL what ``pids()`` names until it names nothing (a process may fork while we look).

    Returns:
        How many processes were killed.
    """
    killed: set[int] = set()
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        living = [pid for pid in pids() if not is_dying(pid)]
        if not living:
            break
        for pid in living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(_WAIT_POLL_S)
    return len(killed)


def is_dying(pid: int) -> bool:
    """Return whether a process has begun to end, or is gone."""
    try:
        state, flags, _, _ = exits.read_stat(_stat_of(pid))
    except (OSError, ValueError):
        return True
    return state in "ZX" or exits.is_exiting(flags)
