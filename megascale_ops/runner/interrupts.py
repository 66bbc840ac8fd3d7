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


def ignore_signals() -> None:
    """From here on we are leaving; another Ctrl-C must not stop us from tidying (every step has a deadline)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


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
