# SPDX-License-Identifier: Apache-2.0
"""The writer process of one rank: it makes a checkpoint of what lies in the host buffer. Loads no torch.

Started by ``writer_process``, with the numbers of two inherited file descriptors and the training process's pid. It is
a process of its own so that a training loop which holds Python's lock does not slow it, nor it that loop, and so that
neither takes the other along when it dies.

When the training process ends in the middle of a save, the copy is complete and nothing of it is missing: so the save
is finished, within ``ORPHAN_S``, and a restart waits for it (``unfinished``). Signals that are meant for the job are
ignored for the same reason; SIGKILL leaves a folder that is not sealed, which the next save clears away.
"""

import contextlib
import mmap
import os
import select
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megascale_ops.checkpoint.background import messages, shares
from megascale_ops.checkpoint.background.messages import (
    Abandon,
    Alive,
    Failed,
    Job,
    LocalFailed,
    LocalWritten,
    Order,
    Report,
    Sealed,
    Written,
)
from megascale_ops.checkpoint.background.shared_save import SharedSave
from megascale_ops.checkpoint.background.written_file import write_file
from megascale_ops.checkpoint.manifest import FileEntry
from megascale_ops.checkpoint.ranks import EchoError, cause_of
from megascale_ops.errors import CheckpointError, UsageError

# 1 s: how soon the end of the training process is noticed where a forked child of it keeps the socket open.
_LOOK_S = 1.0
# 10: behind the training process and its data loaders where cores are few.
_NICE = 10
# 1 s: how often the training process is shown that the files on the node grow.
_SHOWN_S = 1.0


class _AbandonedError(CheckpointError):
    """The training process has taken the save back."""


class Writer:
    """The process. ``run`` returns when the training process has ended and nothing is left to do."""

    def __init__(self, end: socket.socket, memory: int, parent: int) -> None:
        self._end = end
        self._memory = memory
        self._parent = parent
        self._waiting: Order | None = None  # an order that came while another was carried out
        self._orphaned_s: float | None = None

    def run(self) -> None:
        """Carry out orders."""
        while (order := self._next()) is not None:
            if isinstance(order, Job):
                self._report(self._carry_out(order))

    def hear(self, wait_s: float) -> None:
        """Let time pass, and take an order that comes.

        Raises:
            CheckpointError: the save is to be given up.
        """
        self._listen(wait_s)
        if isinstance(self._waiting, Abandon):
            reason, self._waiting = self._waiting.reason, None
            raise _AbandonedError(reason)
        if self.is_orphaned() and time.monotonic() - (self._orphaned_s or 0.0) > shares.ORPHAN_S:
            raise CheckpointError(f"the training process has ended {shares.ORPHAN_S:.0f} s ago")

    def show_progress(self, token: str) -> None:
        """Tell the training process that the save goes on."""
        self._report(Alive(token))

    def is_orphaned(self) -> bool:
        """Whether the training process has ended."""
        if self._orphaned_s is None and os.getppid() != self._parent:
            self._become_orphan()
        return self._orphaned_s is not None

    def has_gone_on(self) -> bool:
        """Whether the training process has sent the next job: then it knows how this one ended."""
        return isinstance(self._waiting, Job)

    def needs_no_outcome(self) -> bool:
        """Whether the training process knows how a save ended without this one, or is no more."""
        return self._waiting is not None or self.is_orphaned()

    def _next(self) -> Order | None:
        while self._waiting is None:
            if self.is_orphaned():
                return None
            self._listen(_LOOK_S)
        order, self._waiting = self._waiting, None
        return order

    def _carry_out(self, job: Job) -> Report | None:
        """A save from beginning to end; None: nothing is left to be said."""
        data = _mapped(self._memory, job.buffer_bytes)
        if job.local:
            try:
                self._report(LocalWritten(job.token, tuple(self._write_locally(job, data))))
            except _AbandonedError as exc:
                return Failed(job.token, str(exc))
            except (OSError, CheckpointError) as exc:
                self._report(LocalFailed(job.token, cause_of(exc)))
        return self._share(job, data) if job.root else None

    def _share(self, job: Job, data: memoryview) -> Report | None:
        """The part of a save that goes to the shared storage."""
        try:
            save = SharedSave(job, self)
        except UsageError as exc:  # a package for the URL that only the training process finds
            return Failed(job.token, str(exc))
        try:
            self._report(Written(job.token, save.write(data)))
            is_sealed = save.seal() if job.leads else save.await_seal()
        except Exception as exc:  # noqa: BLE001  whatever it is, the training process must hear of it
            is_echo = isinstance(exc, EchoError) or (isinstance(exc, FileNotFoundError) and save.was_given_up())
            reason = "another rank's part of it failed" if is_echo and isinstance(exc, OSError) else cause_of(exc)
            save.give_up(reason)
            return Failed(job.token, reason, is_echo)
        return Sealed(job.token) if is_sealed else None

    def _write_locally(self, job: Job, data: memoryview) -> list[FileEntry]:
        """Write this rank's files into its node's folder. The set is sealed by the training processes.

        Raises:
            CheckpointError: the save is to be given up, or none would seal it.
            OSError: the file system refuses.
        """
        shown_s = time.monotonic()

        def heard() -> None:
            nonlocal shown_s
            self.hear(0.0)
            if self.is_orphaned():
                raise CheckpointError("the training process has ended")
            if time.monotonic() - shown_s > _SHOWN_S:
                shown_s = time.monotonic()
                self.show_progress(job.token)

        with ThreadPoolExecutor(1) as pool:
            return [
                write_file(
                    Path(job.local, each.name), data[each.start : each.start + each.length], job.algorithm, pool, heard
                )
                for each in job.files
            ]

    def _listen(self, wait_s: float) -> None:
        """Wait for an order, or let time pass: after the end of the training process none comes."""
        if self._orphaned_s is not None or self._waiting is not None:
            time.sleep(wait_s)
        elif select.select([self._end], [], [], wait_s)[0]:
            self._waiting = messages.receive_order(self._end)
            if self._waiting is None:
                self._become_orphan()

    def _become_orphan(self) -> None:
        """Let go of the job's output: a launcher may wait until no process has it open."""
        self._orphaned_s = time.monotonic()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)

    def _report(self, report: Report | None) -> None:
        if report is not None:
            with contextlib.suppress(OSError):  # the training process has ended: only the folder matters now
                messages.send(self._end, report)


def _mapped(memory: int, size: int) -> memoryview:
    """The host buffer, to read; given back when the last part of it is. An empty one can't be mapped."""
    return memoryview(mmap.mmap(memory, size, prot=mmap.PROT_READ) if size else b"")


def main() -> None:
    """Serve one training process."""
    end, memory, parent = map(int, sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the job; this process ends with it, see above
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    with socket.socket(fileno=end) as connected:
        Writer(connected, memory, parent).run()
