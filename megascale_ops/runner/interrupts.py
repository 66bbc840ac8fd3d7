# SPDX-License-Identifier: Apache-2.0
"""Signals to the runner itself: while nothing of torch runs they end the run in order, and on the way out nothing does.

torch's engine has handlers of its own from its start to its end.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    """A signal arrived before torch's engine had its own handlers in place."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class WayOut:
    """The end of a run: no signal disturbs the tidying (every step has a deadline), but one makes it hurry.

    Attributes:
        hurried: Whether somebody waits for the end: the run was ended by a signal, or one came on the way out.
    """

    def __init__(self) -> None:
        self.hurried = False

    def is_hurried(self) -> bool:
        """Whether what takes long and can be left out shall be left out."""
        return self.hurried

    def begin(self) -> None:
        """From here on we are leaving; another Ctrl-C must not stop us from tidying."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._hurry)

    def _hurry(self, _number: int, _frame: FrameType | None) -> None:
        self.hurried = True


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Turn SIGTERM, SIGINT and SIGHUP into ``Interrupted`` while no ranks run, and restore the handlers after."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(number)

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)  # `nohup megascale-ops run` outlives the terminal
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
