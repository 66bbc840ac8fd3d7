# SPDX-License-Identifier: Apache-2.0
"""What Ctrl-C does, at whatever moment it comes.

Python turns SIGINT into an exception wherever the main thread happens to be. That place may be the callback of a weak
reference, where the exception is printed and lost, so that the program goes on: 3 of 3,000 interrupts of a polling
loop went that way. Or it is half of a constructor, whose clean-up then fails aloud. And a program that a script started
with ``&`` has SIGINT ignored from the beginning, so that no Ctrl-C and no ``kill -INT`` ever ends it.

So no verb waits for that exception. One that leaves nothing behind is ended on the spot (``ctrl_c_ends``); one that has
to tidy up polls a flag (``ctrl_c_noted``); ``controller``, ``agent`` and ``run`` take SIGINT for themselves
once they have something to tidy up. All of them take it also where it was ignored.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# 20 ms: a terminal sends the signal first and then discards pending output, also what was written since.
KEY_S = 0.02
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as every shell reports it


@contextmanager
def ctrl_c_ends(code: int, last_words: str = "") -> Iterator[None]:
    """End the process at once, with ``code``, when Ctrl-C comes; nothing is closed, flushed or waited for.

    Args:
        code: the exit code.
        last_words: written to stdout first; a terminal may need them.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        try:
            if last_words:
                time.sleep(KEY_S)
            # Past Python's buffer: the signal may have come in the midst of a write to it.
            os.write(1, last_words.encode())
        finally:
            os._exit(code)

    with _taken(end):
        yield


class CtrlC:
    """Whether Ctrl-C has come."""

    def __init__(self) -> None:
        self._came = False

    def note(self, _number: int, _frame: FrameType | None) -> None:
        """Be the signal's handler."""
        self._came = True

    def check(self) -> None:
        """Raise KeyboardInterrupt when Ctrl-C has come."""
        if self._came:
            raise KeyboardInterrupt


@contextmanager
def ctrl_c_noted() -> Iterator[CtrlC]:
    """Only note Ctrl-C, for work that checks often and tidies up: a second one does not disturb the tidying."""
    ctrl_c = CtrlC()
    with _taken(ctrl_c.note):
        yield ctrl_c


@contextmanager
def _taken(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
