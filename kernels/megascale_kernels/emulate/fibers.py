# SPDX-License-Identifier: Apache-2.0
"""A program as the scheduler sees it: a thread that runs only while it holds the baton."""

import threading
from collections.abc import Callable


class Stopped(BaseException):
    """Raised inside programs when the run ends before they do; no error, so no `except Exception` may keep it."""


class Fiber:
    """A program as the scheduler sees it.

    Attributes:
        rank: its rank (for stragglers).
        number: in order of creation.
        waits: it polls inside a wait (a bare poll loop is recognised by itself).
    """

    def __init__(self, rank: int, number: int, body: Callable[[], None], pace: float) -> None:
        self.rank = rank
        self.number = number
        self.waits = False
        self.body = body
        self.pace = pace
        self.baton = threading.Lock()
        self.baton.acquire()
        self.thread: threading.Thread | None = None
        self.done = False
        self.version = 0
        self.nap: tuple[int, int] | None = None
        self.moves_seen = 0
        self.idle_steps = 0

    @property
    def idle(self) -> bool:
        """It does nothing but wait."""
        return self.waits or self.nap is not None
