# SPDX-License-Identifier: Apache-2.0
"""Ask a collector that may never answer, without waiting for it.

A driver or a file system that hangs holds its caller in the kernel for ever. So each such collector has a thread of its
own, and a deadline after which its answer is not waited for: then the check's status is "unknown", the time-out is
counted, and nothing more is asked until the thread comes back. A hung thread is never joined, and there is never a
second one. An answer that comes after the deadline is thrown away: it is out of date.

The cost of a look is watched too: the pause grows until the looks take no more than their share of a core.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

from megascale_agents.collectors.collector import NotHereError, Pace

T = TypeVar("T")

log = logging.getLogger(__name__)


class Status(IntEnum):
    """A check's status, as Prometheus shows it."""

    OK = 0
    WARN = 1
    FAIL = 2
    UNKNOWN = 3


# 60 s: a driver that is loaded later is found, and looking for it costs nothing.
_ABSENT_S = 60.0


class _Outcome(NamedTuple, Generic[T]):
    value: T | None
    error: Exception | None
    began_s: float
    took_s: float
    cpu_s: float


class Check(Generic[T]):
    """One collector's thread, from the caller's side. All methods but the collector run in the caller's thread.

    Args:
        name: Of the check, in metrics and logs.
        look: The collector; may raise anything, ``NotHereError`` when there is nothing to look at.
        pace: How often and how long.
        clock: Monotonic clock.
        cpu_clock: CPU time of the thread that asks for it.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[], T],
        pace: Pace,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.name = name
        self.pace = pace
        self.hung_since_s: float | None = None  # None: it does not hang
        self.timeouts = 0
        self.took_s = 0.0  # of the last look that ended
        self.answered = False  # at least once
        self.is_failing = False  # the last look raised
        self.absent = ""  # why the check has no subject
        self.rests_until_s = 0.0  # until then it is neither due nor has a result
        self._look = look
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._due_s = 0.0
        self._asked_s: float | None = None  # None: no request is pending
        self._questions: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[_Outcome[T]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def poll(self, now_s: float) -> T | None:
        """Take an answer that has come, note a passed deadline, ask again when it is time. Never waits."""
        value = self._hear(now_s, self._asked_s) if self._asked_s is not None else None
        if self._asked_s is None and now_s >= self._due_s:
            self._ask(now_s)
        return value

    def _hear(self, now_s: float, asked_s: float) -> T | None:
        """Take the answer to a question if it has come."""
        if not self._answers.empty():
            return self._take(self._answers.get_nowait(), now_s)
        waits_s = now_s - asked_s
        if self.hung_since_s is None and waits_s > self.pace.deadline_s:
            self.hung_since_s, self.is_failing = asked_s, False
            self.timeouts += 1
            log.warning("check %s has not answered for %.1f s; the others go on", self.name, waits_s)
        return None

    def _take(self, outcome: _Outcome[T], now_s: float) -> T | None:
        self._asked_s = None
        value = self._judge(outcome, now_s)
        self.rests_until_s = self._due_s
        return value

    def _judge(self, outcome: _Outcome[T], now_s: float) -> T | None:
        if self.hung_since_s is not None:
            log.warning("check %s answers again after %.1f s", self.name, now_s - self.hung_since_s)
            self.hung_since_s, self._due_s = None, now_s
            return None
        self.took_s = outcome.took_s
        # The first look opens a library (0.15 s of CPU for NVML): that happens once, and would cause a pause of 39 s.
        pause_s = outcome.cpu_s / self.pace.share if self.answered else 0.0
        self._due_s = max(outcome.began_s + self.pace.every_s, now_s + pause_s)
        if isinstance(outcome.error, NotHereError):
            if not self.absent:
                log.info("check %s is off: %s", self.name, outcome.error)
            self.absent, self.is_failing = str(outcome.error), False
            self._due_s = now_s + _ABSENT_S
            return None
        self.absent, self.answered = "", True
        self._error, self.is_failing = outcome.error, outcome.error is not None
        return outcome.value

    def take_error(self) -> Exception | None:
        """Return what the last look raised, once."""
        error, self._error = self._error, None
        return error

    def refuse(self, error: Exception) -> None:
        """Count the last reading as a failed one: it makes no sense."""
        self._error, self.is_failing = error, True

    @property
    def is_known(self) -> bool:
        """Whether there is something to report: it has looked or hangs, and what it looks at exists."""
        return (self.answered and not self.absent) or self.hung_since_s is not None

    def close(self) -> None:
        """Ask nothing any more; a thread that hangs dies with the process."""
        self._questions.put("")

    def _ask(self, now_s: float) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"check-{self.name}", daemon=True)
            self._thread.start()
        self._asked_s, self.rests_until_s = now_s, 0.0
        self._questions.put("look")

    def _work(self) -> None:
        while self._questions.get():
            began_s, cpu_s = self._clock(), self._cpu_clock()
            value: T | None = None
            error: Exception | None = None
            try:
                value = self._look()
            except Exception as raised:  # noqa: BLE001  returned to the caller, which counts and logs it
                error = raised
            took_s, cpu_s = self._clock() - began_s, self._cpu_clock() - cpu_s
            self._answers.put(_Outcome(value, error, began_s, took_s, cpu_s))
