# SPDX-License-Identifier: Apache-2.0
"""Warm workers: a pool of spare processes that have imported torch already.

A restart then pays a few milliseconds where it paid a second. The pool is refilled by one thread that lives as long
as the runner: a child dies with the *thread* that started it (PR_SET_PDEATHSIG), so a passing thread won't do.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from megascale_ops.runner.processes import RankPopen, signal_group, spawn

_STANDBY = Path(__file__).with_name("standby.py")
# 60 s for an import that takes one: a machine under heavy load; after that the spare is given up.
_READY_DEADLINE_S = 60.0


class _Spare:
    def __init__(self, env: dict[str, str], umask: int) -> None:
        self.ready_fd, write_fd = os.pipe()
        told = (write_fd, *_own_stdin())
        self.proc: RankPopen = spawn(
            [sys.executable, "-u", str(_STANDBY), *map(str, told)],
            env,
            None,
            None,
            stdin=subprocess.PIPE,
            pass_fds=told,
            umask=umask,
        )
        for descriptor in told:
            os.close(descriptor)
        self.started_mono_s = time.monotonic()

    def is_ready(self) -> bool:
        readable, _, _ = select.select([self.ready_fd], [], [], 0)
        return bool(readable) and self.proc.poll() is None

    def become(self, order: dict[str, object]) -> RankPopen:
        assert self.proc.stdin is not None
        self.proc.stdin.write(json.dumps(order).encode() + b"\n")
        self.proc.stdin.close()
        os.close(self.ready_fd)
        return self.proc

    def discard(self) -> None:
        signal_group(self.proc.pid, 9)
        if self.proc.stdin is not None:
            with suppress(OSError):
                self.proc.stdin.close()
        with suppress(OSError):
            os.close(self.ready_fd)
        with suppress(subprocess.TimeoutExpired):
            self.proc.wait(2.0)


def _own_stdin() -> tuple[int, ...]:
    """Return a second descriptor of the runner's stdin, which ranks read from, too; none where it is closed."""
    if sys.stdin is not None:
        with suppress(OSError, ValueError):
            return (os.dup(sys.stdin.fileno()),)
    return ()


class WarmPool:
    """Keeps ``size`` spares ready, from ``delay_s`` after each ``settle()`` on.

    Args:
        size: How many ranks this node has.
        env: What a spare starts with: the variables read at interpreter start and by ``import torch``.
        delay_s: How long a starting round is left the processor for itself.
        umask: Of the spares; -1: the runner's.
    """

    def __init__(self, size: int, env: dict[str, str], delay_s: float, umask: int = -1) -> None:
        self._size = size
        self._env = env
        self._delay_s = delay_s
        self._umask = umask
        self._spares: list[_Spare] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._refill_at = float("inf")
        self._thread = threading.Thread(target=self._run, name="warm-pool", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Note that a round has just started: refill the pool when it has settled."""
        self._refill_at = time.monotonic() + self._delay_s
        self._wake.set()

    def assign(self, order: dict[str, object]) -> RankPopen | None:
        """Turn a ready spare into the rank that ``order`` describes; None when none is ready."""
        with self._lock:
            ready = next((spare for spare in self._spares if spare.is_ready()), None)
            if ready is None:
                return None
            self._spares.remove(ready)
        try:
            return ready.become(order)
        except OSError:
            ready.discard()
            return None

    def stop(self) -> None:
        """End the thread and all spares."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout=5.0)
        with self._lock:
            for spare in self._spares:
                spare.discard()
            self._spares.clear()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(timeout=0.2)
            self._wake.clear()
            if self._stopping or time.monotonic() < self._refill_at:
                continue
            self._drop_dead()
            with self._lock:
                if len(self._spares) < self._size:
                    self._spares.append(_Spare(self._env, self._umask))

    def _drop_dead(self) -> None:
        now = time.monotonic()
        with self._lock:
            for spare in list(self._spares):
                late = now - spare.started_mono_s > _READY_DEADLINE_S and not spare.is_ready()
                if late or spare.proc.poll() is not None:
                    spare.discard()
                    self._spares.remove(spare)
                    # A spare that can't live (no memory, no torch) must not be tried without end.
                    self._refill_at = now + max(self._delay_s, 10.0)
