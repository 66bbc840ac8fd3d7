# SPDX-License-Identifier: Apache-2.0
"""Virtual time: a clock that stands still until it is told how much has passed, and asyncio on that clock.

Requests of runners wait inside the controller with time-outs of asyncio. So asyncio's own clock is the virtual one; it
never sleeps, for the world that drives it always has something ready. While nothing happens, timers may be left behind:
a long poll then simply stays open, instead of being answered with nothing and sent again every 20 s.
"""

import asyncio
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

# 200,000 new objects, a hundred times as many as usually; 10,000,000 until the oldest are looked at. As in the
# controller's own process: what heartbeats leave is no part of a cycle.
_THRESHOLDS = 200_000, 50, 1000
# Any number will do that no age is mistaken for; the wall clock begins at a day that reads well in journals.
START_S = 10_000.0
START_WALL_S = 1_767_225_600.0  # 2026-01-01 00:00 UTC


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self._passed_s = 0.0
        self._left_behind_s = 0.0

    def advance(self, passed_s: float, *, with_timers: bool) -> None:
        """Let it be so many seconds after the start; without timers, those that are due fire when they are next led."""
        assert passed_s >= self._passed_s
        if not with_timers:
            self._left_behind_s += passed_s - self._passed_s
        else:
            self._left_behind_s = 0.0
        self._passed_s = passed_s

    @property
    def passed_s(self) -> float:
        """Seconds since the start."""
        return self._passed_s

    def mono_s(self) -> float:
        """Return monotonic seconds."""
        return START_S + self._passed_s

    def wall_s(self) -> float:
        """Return wall clock seconds."""
        return START_WALL_S + self._passed_s

    def timers_s(self) -> float:
        """Return the seconds by which timers go."""
        return START_S + self._passed_s - self._left_behind_s


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose time is a ``Clock``'s.

    It must never have nothing to do: it would wait in real time for a timer of virtual time.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._virtual = clock

    def time(self) -> float:
        """Return the seconds by which timers go."""
        return self._virtual.timers_s()


@contextmanager
def on_virtual_time(clock: Clock) -> Iterator[asyncio.Runner]:
    """Return what runs a controller on a clock, looking for garbage seldom.

    Its log stays quiet meanwhile: the times there would be virtual, and every incident is in what is reported.
    """
    log = logging.getLogger("megascale_ops.controller")
    level, thresholds = log.level, gc.get_threshold()
    log.setLevel(logging.CRITICAL)
    gc.set_threshold(*_THRESHOLDS)
    try:
        with asyncio.Runner(loop_factory=lambda: VirtualTime(clock)) as runner:
            yield runner
    finally:
        gc.set_threshold(*thresholds)
        log.setLevel(level)
