# SPDX-License-Identifier: Apache-2.0
"""Signals to the runner itself: while no code of torch runs they end the run in order; on the way out they hurry it.

torch's engine has handlers of its own from its start to its end. SIGUSR1 and SIGUSR2 are not meant for the runner:
Slurm's ``--signal=USR1@60`` and its like warn the script that its time is nearly over, so they are handed on to ranks
(or, with ``--requeues``, to what asks them for a checkpoint: ``services/time_up.py``).
"""

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_HANDED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class Interrupted(BaseException):
    """A signal arrived before torch's engine had its own handlers in place."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class WayOut:
    """The end of a run: no signal disturbs the tidying (every step has a deadline), but one makes it hurry.

    Attributes:
        hurried: Whether to hurry: the run was ended by a signal, or one came on the way out.
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


@contextmanager
def signals_kept() -> Iterator["queue.SimpleQueue[int]"]:
    """Keep every SIGUSR1 and SIGUSR2 that comes until ``signals_handed_on`` takes them; by default they end a process.

    Python's imports and a controller that comes up take seconds, in which a batch system may well warn of a job's end.
    """
    came: queue.SimpleQueue[int] = queue.SimpleQueue()
    before = {number: signal.signal(number, lambda number, _: came.put(number)) for number in _HANDED_ON}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_handed_on(to: Callable[[int], None], came: "queue.SimpleQueue[int]") -> Iterator[Callable[[int], None]]:
    """Call ``to`` with every signal that ``came`` or comes, in a thread of its own: a handler may not log or wait.

    Args:
        to: is told each signal's number.
        came: of ``signals_kept``, which lasts longer.

    Yields what another handler calls to have its signal handed on likewise.
    """

    def hand_on() -> None:
        while number := came.get():
            to(number)

    thread = threading.Thread(target=hand_on, name="signals", daemon=True)
    thread.start()
    try:
        yield came.put
    finally:
        came.put(0)
        thread.join(1.0)
