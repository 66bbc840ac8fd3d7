# SPDX-License-Identifier: Apache-2.0
"""The training process's hold on its writer process: started, sent to, listened to, ended."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import megascale_ops
from megascale_ops.checkpoint.background import messages
from megascale_ops.checkpoint.background.messages import Abandon, Order, Report

# This very package, wherever a script has found it, and nothing else from that folder.
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import megascale_ops
del sys.path[0]
from megascale_ops.checkpoint.background.writer import main
main()
"""
_HERE = Path(megascale_ops.__file__).parents[1]
# The names of schema.environment. By the mark a runner ends what its ranks leave behind: not what finishes a save.
_NOT_INHERITED = ("MEGASCALE_RUN_ID", "MEGASCALE_BOX_DIR")
_RECORDER = "MEGASCALE_RECORDER"
# 5 s: a process that was killed ends at once, unless the kernel waits for storage with it.
_ENDS_S = 5.0


class WriterProcess:
    """A running writer process.

    Args:
        memory: file descriptor of the host buffer.

    Attributes:
        token: of the save that it carries, or carried last; "": none yet.

    Raises:
        OSError: it can't be started.
    """

    def __init__(self, memory: int) -> None:
        self.token = ""
        self._end, theirs = socket.socketpair()
        self._sending = threading.Lock()
        with theirs:
            handles = (theirs.fileno(), memory)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(_HERE), *map(str, handles), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=handles,
                env=_environment(),
                start_new_session=True,  # an interrupt from the terminal is the job's
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more."""
        return self._process.poll() is not None

    def send(self, order: Order) -> None:
        """Send an order; waits until the process has taken it.

        Raises:
            OSError: the process has ended.
        """
        with self._sending:
            messages.send(self._end, order)

    def abandon(self, token: str, reason: str) -> None:
        """Have it drop a job. Never waits: a process that does not listen is ended by its deadline."""
        if not self._sending.acquire(blocking=False):
            return  # the thread that sends the job looks once more when it has
        try:
            messages.send_at_once(self._end, Abandon(token, reason))
        except OSError:
            return  # it has ended
        finally:
            self._sending.release()

    def receive(self) -> Report | None:
        """Wait for the next report; None when the process has ended."""
        return messages.receive_report(self._end)

    def end_in_words(self) -> str:
        """How it ended, as a person would say it; called after ``receive`` has given None."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_ENDS_S)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            return f"the writer process {self.pid} {how}"
        return f"the writer process {self.pid} answers no more"

    def dismiss(self) -> None:
        """Let it end by itself, which it does when it has nothing left to do; wait for that, and see to it."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._end.close()

    def kill(self) -> None:
        """End it now. One that the kernel holds inside a read or write ends when that does."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_S)


def _environment() -> dict[str, str]:
    """Of this process, but not seen as one of the job's ranks."""
    return {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED} | {_RECORDER: "0"}
