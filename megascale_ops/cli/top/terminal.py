# SPDX-License-Identifier: Apache-2.0
"""A terminal taken over for a while and always given back: screen, cursor, keys.

The alternate screen (rich.live) is painted from its upper left corner without being cleared, so nothing flickers. Keys
come one by one and unseen (cbreak); Ctrl-C and Ctrl-Z stay signals. Whatever ends the program but SIGKILL, the
terminal is as it was before; so it is while the program is suspended.
"""

import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterable, Iterator
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

# What keys send. Arrows are three bytes that come together.
_ARROWS = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down"}
_NAMED = {b"\x1b": "escape", b"\r": "enter", b"\n": "enter", b"\x03": "q"}


class Screen:
    """Paints lines, and reads keys where stdin is a terminal. Use it as a context; one owner.

    Args:
        console: on a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False)
        self._keys_fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._modes: list[Any] | None = None

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    @property
    def keys_fd(self) -> int:
        """Where keys are read; -1 where there are none."""
        return self._keys_fd

    def take(self) -> None:
        """Take the terminal over."""
        if self._keys_fd >= 0 and self._modes is None:
            self._modes = termios.tcgetattr(self._keys_fd)
            tty.setcbreak(self._keys_fd, termios.TCSADRAIN)
        try:
            self._live.start()
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        """Leave the terminal as it was; safe to call again. A terminal that is gone needs nothing."""
        with contextlib.suppress(OSError):
            self._live.stop()
        if self._modes is not None:
            modes, self._modes = self._modes, None
            # DRAIN: keys that were typed meanwhile belong to whoever reads next.
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._keys_fd, termios.TCSADRAIN, modes)

    def suspend(self) -> None:
        """Be suspended as Ctrl-Z asks, and take the terminal over again when the program goes on."""
        self.give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.take()

    def size(self) -> tuple[int, int]:
        """Return columns and rows as they are now."""
        return self._console.size.width, self._console.size.height

    def paint(self, lines: Iterable[Text]) -> None:
        """Show these lines."""
        shown = [*lines]
        for line in shown:
            line.no_wrap = True
        self._live.update(Group(*shown), refresh=True)

    def read_keys(self) -> Iterator[str]:
        """Yield the keys that were pressed; "q" where the terminal has gone."""
        try:
            typed = os.read(self._keys_fd, 1024)
        except OSError:
            typed = b""
        if not typed:
            yield "q"
        yield from parse_keys(typed)


def parse_keys(typed: bytes) -> Iterator[str]:
    """Yield what keys are called: a letter, "up", "down", "enter", "escape"; other sequences are passed over."""
    at = 0
    while at < len(typed):
        arrow = _ARROWS.get(typed[at : at + 3])
        if arrow is not None:
            yield arrow
            at += 3
        elif typed[at : at + 2] in (b"\x1b[", b"\x1bO"):  # a key of no use here: up to its last byte
            at += 2
            while at < len(typed) and not 0x40 <= typed[at] <= 0x7E:
                at += 1
            at += 1
        else:
            one = typed[at : at + 1]
            yield _NAMED.get(one) or one.decode("ascii", "replace")
            at += 1
