# SPDX-License-Identifier: Apache-2.0
"""Warm workers: a pool of spare processes that have imported torch already.

A restart then pays a few milliseconds where it paid a second. The pool is refilled by one thread that lives as long
as the runner: a child dies with the *thread* that started it (PR_SET_PDEATHSIG), so a passing thread won't do.

With ``on_gpu`` each spare has also initialised CUDA and made its context on the GPU of one local rank, which it then
becomes: a restart took 1.7 s instead of 2.3 on two H200, for a context's memory of each GPU all the time. What CUDA was
initialised with can't be changed afterwards, so a rank whose environment says otherwise is started cold. So it is with
NCCL, which a spare uses, too, where nothing is to be loaded into it (``with_nccl``).
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megascale_ops.runner.processes import RankPopen, signal_group, spawn

_STANDBY = Path(__file__).with_name("standby.py")
# For a spare alone: it is gone from the environment of the rank that it becomes. ``standby`` imports nothing of ours.
GPU_OF_SPARE, NCCL_OF_SPARE = "MEGASCALE_GPU_OF_SPARE", "MEGASCALE_NCCL_OF_SPARE"
# 60 s for an import that takes one: a machine under heavy load; after that the spare is given up.
_READY_DEADLINE_S = 60.0
# A killed spare is gone in milliseconds, with a context of CUDA in about a second.
_REAP_DEADLINE_S = 5.0
# Read once, when CUDA is initialised or its allocator begins.
_OF_CUDA = ("CUDA_", "NVIDIA_", "PYTORCH_CUDA_", "PYTORCH_NVML_", "PYTORCH_ALLOC_", "PYTORCH_NO_CUDA_")
# Read when NCCL is used first; what it loads is named by them, too (NCCL_PROFILER_PLUGIN).
_OF_NCCL = ("NCCL_",)


class _Spare:
    def __init__(self, env: dict[str, str], umask: int, local_rank: int) -> None:
        self.local_rank = local_rank
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
        # Its end only begun is not enough: Python would reap it at some later moment, with a warning.
        self.proc.reap(_REAP_DEADLINE_S)


def _own_stdin() -> tuple[int, ...]:
    """Return a second descriptor of the runner's stdin, which ranks read from, too; none where it is closed."""
    if sys.stdin is not None:
        with suppress(OSError, ValueError):
            return (os.dup(sys.stdin.fileno()),)
    return ()


def same_cuda(one: Mapping[str, str], other: Mapping[str, str], *, with_nccl: bool = False) -> bool:
    """Return whether two environments initialise CUDA alike: the same GPUs in the same order, the same settings.

    Args:
        one: An environment.
        other: Another one.
        with_nccl: And NCCL.
    """
    read = (*_OF_CUDA, *_OF_NCCL) if with_nccl else _OF_CUDA
    mine, theirs = ({name: value for name, value in env.items() if name.startswith(read)} for env in (one, other))
    return mine == theirs


class WarmPool:
    """Keeps ``size`` spares ready, from ``delay_s`` after each ``settle()`` on.

    Args:
        size: How many ranks this node has.
        env: What a spare starts with: the variables read at interpreter start and by ``import torch``.
        delay_s: How long a starting round is left the processor for itself.
        umask: Of the spares; -1: the runner's.
        on_gpu: Each makes the CUDA context of its local rank, too.
        with_nccl: With ``on_gpu``: each uses NCCL, too.
    """

    def __init__(
        self,
        size: int,
        env: dict[str, str],
        delay_s: float,
        umask: int = -1,
        *,
        on_gpu: bool = False,
        with_nccl: bool = False,
    ) -> None:
        self._size = size
        self._env = env
        self._delay_s = delay_s
        self._umask = umask
        self._on_gpu = on_gpu
        self._with_nccl = on_gpu and with_nccl
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

    def assign(self, order: dict[str, object], local_rank: int = 0) -> RankPopen | None:
        """Turn a ready spare into the rank that ``order`` describes; None when none is ready that could be it."""
        env = order["env"]
        assert isinstance(env, dict)
        if self._on_gpu and not same_cuda(env, self._env, with_nccl=self._with_nccl):
            return None
        with self._lock:
            ready = next(
                (
                    spare
                    for spare in self._spares
                    if (not self._on_gpu or spare.local_rank == local_rank) and spare.is_ready()
                ),
                None,
            )
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
                signal_group(spare.proc.pid, 9)  # all at once: each discard waits for its end
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
                missing = set(range(self._size)) - {spare.local_rank for spare in self._spares}
                if missing and not self._stopping:  # stop() may have gone through while this thread had no core
                    self._spares.append(_Spare(self._env_of(min(missing)), self._umask, min(missing)))

    def _env_of(self, local_rank: int) -> dict[str, str]:
        """Return what the spare of a local rank starts with."""
        env = dict(self._env)
        if self._on_gpu:
            env[GPU_OF_SPARE] = str(local_rank)
        if self._with_nccl:
            env[NCCL_OF_SPARE] = "1"
        return env

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
