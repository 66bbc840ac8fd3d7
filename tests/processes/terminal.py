# SPDX-License-Identifier: Apache-2.0
"""A pseudo terminal with a program in it: what is on its screen, what keys do, how it is left behind."""

import codecs
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

_TOKEN = re.compile(r"\x1b\[([0-9;?<=>]*)[ -/]*([@-~])|[\r\n]|[^\x1b\r\n]+|\x1b[^\[]")
SCREEN_TAKEN, SCREEN_GIVEN_BACK, CURSOR_SHOWN = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"
_END = b"\0the program has ended\0"
# The terminal that Ctrl-C comes from is the one that a session has taken.
_IN_A_SESSION = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from megascale_ops.cli.main import main
sys.exit(main())
"""


class Painted:
    """What stands on a terminal: text, and where the cursor moves to; colours are passed over."""

    def __init__(self, columns: int, rows: int) -> None:
        self._size = (columns, rows)
        self._cells: dict[tuple[int, int], str] = {}
        self._row = self._column = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def resize(self, columns: int, rows: int) -> None:
        """Cut off what has no place any more."""
        self._size = (columns, rows)
        self._cells = {at: sign for at, sign in self._cells.items() if at[0] < rows and at[1] < columns}

    def feed(self, raw: bytes) -> None:
        """Paint what was written."""
        text = self._rest + self._decoder.decode(raw)
        at = 0
        while at < len(text) and (token := _TOKEN.match(text, at)) is not None:
            at = token.end()
            if token[2] is not None:
                self._move(token[1], token[2])
            elif token[0] == "\r":
                self._column = 0
            elif token[0] == "\n":
                self._row += 1
            elif not token[0].startswith("\x1b"):
                for sign in token[0]:
                    self._cells[self._row, self._column] = sign
                    self._column += 1
        self._rest = text[at:]

    def lines(self) -> list[str]:
        """Return all rows."""
        columns, rows = self._size
        return ["".join(self._cells.get((y, x), " ") for x in range(columns)).rstrip() for y in range(rows)]

    def _move(self, numbers: str, what: str) -> None:
        if what == "H":
            row, _, column = numbers.partition(";")
            self._row, self._column = int(row or 1) - 1, int(column or 1) - 1
        elif what == "K":
            self._cells = {at: sign for at, sign in self._cells.items() if at[0] != self._row or at[1] < self._column}
        elif (numbers, what) in (("?1049", "h"), ("?1049", "l"), ("2", "J")):
            self._cells = {}


class Terminal:
    """Runs ``megascale-ops`` in a session of its own on a pseudo terminal.

    Attributes:
        raw: all that was written to the terminal.
    """

    def __init__(self, env: dict[str, str], *arguments: str, size: tuple[int, int] = (110, 32)) -> None:
        self._ours, self._theirs = pty.openpty()
        self._painted = Painted(*size)
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
        self._painted.resize(columns, rows)
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._ours, keys.encode())

    def screen(self) -> str:
        """Return what stands on the screen; of a program that never took it, all that was written, without colours."""
        self._read(0.0)
        if SCREEN_TAKEN in self.raw:
            return "\n".join(self._painted.lines())
        return _TOKEN.sub(
            lambda token: token[0] if token[2] is None else "", self.raw.decode(errors="replace")
        ).replace("\r", "")

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
        # What was written comes through the kernel's own queues, in its order: so it is all there before this.
        os.write(self._theirs, _END)
        end_s = time.monotonic() + deadline_s
        while _END not in self.raw:
            assert time.monotonic() < end_s, self.raw[-1000:]
            self._read(0.05)
        self.raw = self.raw.replace(_END, b"")
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
            written = os.read(self._ours, 1 << 16)
            self.raw += written
            self._painted.feed(written)
            wait_s = 0.0
