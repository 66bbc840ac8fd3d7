# SPDX-License-Identifier: Apache-2.0
"""The ranks of this node as processes: started, seen dying early, stopped for certain, swept up afterwards.

Torch's elastic engine asks a ``SubprocessHandler`` for every rank; ours differs in four ways. It sees a failure when
the kernel begins it, not when the memory is freed (`exits.early_code`). It stops a frozen rank with SIGKILL at once,
since a SIGTERM would wait for a SIGCONT that never comes. It gives a healthy rank a bounded time to stop. And it
remembers how each rank ended, for the controller's verdict.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from megascale_ops.runner import exits
from megascale_ops.schema import environment

# 2 ms: the wait for a dying process is a poll of one small file; at this pace it costs 1 % of a core while it lasts.
_WAIT_POLL_S = 0.002


def start_ticks(pid: int) -> int:
    """Return when ``pid`` started, in clock ticks since boot: pid and ticks together name a process for good.

    0 when there is no such process.
    """
    try:
        return exits.read_stat(Path(f"/proc/{pid}/stat").read_text())[2]
    except (OSError, ValueError):
        return 0


class RankPopen(subprocess.Popen[bytes]):
    """A ``Popen`` that reports a failure as soon as the kernel has begun it; success only when ``waitpid`` says so.

    Attributes:
        ended_mono_s: When the death was first seen, monotonic seconds; 0 before.
    """

    ended_mono_s = 0.0

    def poll(self) -> int | None:
        """Return the return code, or None while the process lives."""
        code = self._look()
        if code is not None and not self.ended_mono_s:
            self.ended_mono_s = time.monotonic()
        return code

    def _look(self) -> int | None:
        code = super().poll()
        if code is not None:
            return code
        try:
            _, flags, _, status = exits.read_stat(Path(f"/proc/{self.pid}/stat").read_text())
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
        """Tell whether the process is frozen (state T), so that only SIGKILL reaches it."""
        try:
            return exits.read_stat(Path(f"/proc/{self.pid}/stat").read_text())[0] == "T"
        except (OSError, ValueError):
            return False


class Worker:
    """One rank of the current round: what torch's engine knows as a ``SubprocessHandler``.

    Attributes:
        proc: The process.
        local_rank_id: Local rank, under the name torch's engine reads.
        rank: Global rank.
        stopped_by_us: A signal of ours reached it while it was still alive.
    """

    def __init__(self, proc: RankPopen, local_rank: int, rank: int, paths: tuple[str, str], grace_s: float) -> None:
        self.proc = proc
        self.local_rank_id = local_rank
        self.rank = rank
        self.stdout_path, self.stderr_path = paths
        self.stopped_by_us = False
        self.ticks = start_ticks(proc.pid)
        self._grace_s = grace_s

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Stop the rank: ``death_sig`` (default SIGTERM) now, SIGKILL when the grace has passed or it is frozen."""
        if self.proc.poll() is None:
            self.stopped_by_us = True
        chosen = signal.SIGKILL if self.proc.is_stopped() else (death_sig or signal.SIGTERM)
        signal_group(self.proc.pid, chosen)
        if chosen != signal.SIGKILL:
            timer = threading.Timer(self._grace_s, self._insist)
            timer.daemon = True
            timer.start()

    def _insist(self) -> None:
        if self.proc.poll() is None:
            signal_group(self.proc.pid, signal.SIGKILL)


def signal_group(pgid: int, number: int) -> None:
    """Signal a process group of ours; one that is gone already is fine."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def spawn(
    arguments: Iterable[str],
    env: dict[str, str],
    stdout: IO[str] | None,
    stderr: IO[str] | None,
    **more: Any,  # noqa: ANN401  handed on to Popen
) -> RankPopen:
    """Start one process in a session of its own, so that a signal to its group reaches its children too."""
    return RankPopen(list(arguments), env=env, stdout=stdout, stderr=stderr, start_new_session=True, **more)


def marked_processes(run_id: str, *, before_round: int | None = None, spare: Iterable[int] = ()) -> list[int]:
    """Return the pids of all processes that carry our mark in their environment, however deep they were started.

    Args:
        run_id: The mark: one start of one runner.
        before_round: Only those of rounds before this one.
        spare: Pids to leave out.
    """
    mark = f"{environment.RUN_ID}={run_id}".encode()
    spared = {os.getpid(), *spare}
    return [pid for pid in _pids() if pid not in spared and _carries(pid, mark, before_round)]


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _carries(pid: int, mark: bytes, before_round: int | None) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
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
    """Tell whether a process has begun to end, or is gone."""
    try:
        state, flags, _, _ = exits.read_stat(Path(f"/proc/{pid}/stat").read_text())
    except (OSError, ValueError):
        return True
    return state in "ZX" or exits.is_exiting(flags)
