# SPDX-License-Identifier: Apache-2.0
"""A pseudo terminal with a program in it: what is on its screen, what keys do, how it is left behind."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import Any

_HOME = b"\x1b[H"
_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SCREEN_TAKEN, SCREEN_GIVEN_BACK, CURSOR_SHOWN = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"
# The terminal that Ctrl-C comes from is the one that a session has taken.
_IN_A_SESSION = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from megascale_ops.cli.main import main
sys.exit(main())
"""


class Terminal:
    """Runs ``megascale-ops`` in a session of its own on a pseudo terminal.

    Attributes:
        raw: all that was written to the terminal.
    """

    def __init__(self, env: dict[str, str], *arguments: str, size: tuple[int, int] = (110, 32)) -> None:
        self._ours, self._theirs = pty.openpty()
        self.resize(*size)
        self._before = termios.tcgetattr(self._theirs)
        self.raw = b""
        # A size in the environment, as pytest-xdist gives its workers one, would be believed more than the terminal's.
        plain = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
        self.program = subprocess.Popen(
            [sys.executable, "-c", _IN_A_SESSION, *arguments],
            stdin=self._theirs, stdout=self._theirs, stderr=self._theirs, env=plain | {"TERM": "xterm-256color"},
            start_new_session=True,
        )  # fmt: skip

    @property
    def is_as_before(self) -> bool:
        """Whether modes, screen and cursor are as they were before the program."""
        modes: list[Any] = termios.tcgetattr(self._theirs)
        taken, given_back = self.raw.rfind(SCREEN_TAKEN), self.raw.rfind(SCREEN_GIVEN_BACK)
        return modes == self._before and given_back > taken and self.raw.rfind(CURSOR_SHOWN) > taken

    def resize(self, columns: int, rows: int) -> None:
        """Change the window's size."""
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._ours, keys.encode())

    def screen(self) -> str:
        """Return what was painted last, without colours: each painting begins in the upper left corner."""
        self._read(0.0)
        painted = self.raw.split(_HOME)
        return _SEQUENCES.sub("", painted[-1].decode(errors="replace")).replace("\r", "")

    def until(self, condition: Callable[[str], object], what: str, deadline_s: float = 60.0) -> str:
        """Return the screen as soon as it fulfils a condition; fail the test when it never does."""
        end_s = time.monotonic() + deadline_s
        while time.monotonic() < end_s:
            self._read(0.05)
            shown = self.screen()
            if condition(shown):
                return shown
        raise AssertionError(f"waited {deadline_s} s in vain: {what}; on the screen:\n{self.screen()}")

    def wait(self, deadline_s: float = 60.0) -> int:
        """Return the exit code."""
        code = self.program.wait(deadline_s)
        self._read(0.1)
        return code

    def close(self) -> None:
        """End whatever still runs."""
        if self.program.poll() is None:
            self.program.kill()
            self.program.wait(10)
        os.close(self._ours)
        os.close(self._theirs)

    def _read(self, wait_s: float) -> None:
        while select.select([self._ours], [], [], wait_s)[0]:
            self.raw += os.read(self._ours, 1 << 16)
            wait_s = 0.0
