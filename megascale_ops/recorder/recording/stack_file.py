# SPDX-License-Identifier: Apache-2.0
"""The file into which SIGUSR1 writes this rank's stacks, and its end where the script takes that signal for itself.

An agent sends the signal only to a rank that holds the file open under its name. A script with a handler of its own
(to save before its time is over, as Slurm's users have it) replaces ours; to the kernel both are a handler, and an
agent that asks for stacks would set the script's off. So the file goes as soon as Python knows of another handler.
"""

import signal
from pathlib import Path


class StackFile:
    """Looks whether the script has taken the signal, and removes the file once."""

    def __init__(self, box_dir: Path, rank: int) -> None:
        self._path = box_dir / f"{rank}.stacks"
        self._gone = False

    def look(self) -> None:
        """Remove the file where a function of the script's has the signal; ours is none that Python knows of."""
        if not self._gone and callable(signal.getsignal(signal.SIGUSR1)):
            self._gone = True
            self._path.unlink(missing_ok=True)
