# SPDX-License-Identifier: Apache-2.0
"""The file into which SIGUSR1 writes this rank's stacks, and its end where the script takes that signal for itself.

An agent sends the signal only to a rank that holds the file open under its name. A script with a handler of its own
(to save before its time is over, as Slurm's users have it) replaces ours; to the kernel both are a handler, and an
agent that asks for stacks would set the script's off. So the file goes as soon as Python knows of another handler.

Loaded before the script's first line: nothing here needs pathlib.
"""

import faulthandler
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from megascale_ops.schema import environment

if TYPE_CHECKING:
    from pathlib import Path


def answer_sigusr1(rank: int) -> None:
    """Answer SIGUSR1 with the stacks of all threads in ``<box dir>/<rank>.stacks``, also when the GIL is held.

    Raises:
        OSError: the file can't be made.
    """
    folder = os.environ[environment.BOX_DIR]
    _make_private(folder)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        owner = os.fstat(handle).st_uid
        if owner != os.geteuid():
            raise PermissionError(f"{folder} belongs to user {owner}, not to us")
        # The handler writes to the descriptor for as long as the process lives: it is never closed.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(f"{rank}.stacks", flags, 0o600, dir_fd=handle)
    finally:
        os.close(handle)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True, chain=False)


def _make_private(folder: str) -> None:
    """Make ``folder`` and its missing parents with mode 0700."""
    if not os.path.isdir(folder):  # noqa: PTH112  pathlib is not loaded at start-up
        _make_private(os.path.dirname(folder) or "/")  # noqa: PTH120  same
        with suppress(FileExistsError):  # another rank was faster
            os.mkdir(folder, 0o700)  # noqa: PTH102  same


class StackFile:
    """Notice when the script has taken the signal, and remove the file then, once."""

    def __init__(self, box_dir: "Path", rank: int) -> None:
        self._path = box_dir / f"{rank}.stacks"
        self._gone = False

    def check_signal(self) -> None:
        """Remove the file where a function of the script's has the signal; ours is none that Python knows of."""
        if not self._gone and callable(signal.getsignal(signal.SIGUSR1)):
            self._gone = True
            self._path.unlink(missing_ok=True)
