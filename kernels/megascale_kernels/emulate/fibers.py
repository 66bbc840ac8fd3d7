# SPDX-License-Identifier: Apache-2.0
"""A program as the scheduler sees it: a stack of its own, that runs only while it holds the baton."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from greenlet import greenlet


class Stopped(BaseException):
    """Raised inside programs when the run ends before they do; no error, so no `except Exception` may keep it."""


class Fiber:
    """A program as the scheduler sees it.

    Attributes:
        rank: its rank (for stragglers).
        number: in order of creation.
        waits: it polls inside a wait (a bare poll loop is recognised by itself).
        stack: once it has begun.
    """

    def __init__(self, rank: int, number: int, body: Callable[[], None], pace: float) -> None:
        self.rank = rank
        self.number = number
        self.waits = False
        self.body = body
        self.pace = pace
        self.stack: greenlet | None = None
        self.done = False
        self.version = 0
        self.nap: tuple[int, int] | None = None
        self.moves_seen = 0
        self.idle_steps = 0

    @property
    def idle(self) -> bool:
        """It does nothing but wait."""
        return self.waits or self.nap is not None
