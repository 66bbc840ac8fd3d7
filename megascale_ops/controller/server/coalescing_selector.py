# SPDX-License-Identifier: Apache-2.0
"""Under load, wait two milliseconds for more before what has come is looked at: fewer wake-ups, each with more to do.

At 1,536 heartbeats a second an event loop wakes for each of them alone, and a seventh of the controller's work was
waking up and falling asleep. Nothing waits for a heartbeat's answer, so a busy loop gathers; one with little to do
answers at once, as ever.
"""

import asyncio
import selectors
import time
from collections.abc import Callable

# 2 ms: three heartbeats of 1,536 a second; a fifth of the 10 ms that an answer may take.
GATHER_S = 0.002
# 500 a second: below, there is mostly one to be gathered, and gathering it saves nothing.
BUSY_PER_S = 500.0
# 8: so many are worth a wake-up by themselves.
ENOUGH = 8
_WINDOW_S = 0.25

Ready = list[tuple[selectors.SelectorKey, int]]


class GatheringSelector(selectors.DefaultSelector):
    """What an event loop waits with.

    Args:
        clock: monotonic seconds.
        pause: sleeps for so many seconds.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, pause: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__()
        self._clock = clock
        self._pause = pause
        self._is_busy = False
        self._came = 0  # since the window began
        self._window_s = clock()

    def select(self, timeout: float | None = None) -> Ready:
        """Return what is ready, after ``timeout`` seconds at the latest (None: whenever it comes)."""
        ready: Ready = super().select(timeout)
        # With a timeout of 0 the loop has something else to do, which must not wait.
        if self._is_busy and 0 < len(ready) < ENOUGH and (timeout is None or timeout > GATHER_S):
            self._pause(GATHER_S)
            ready = super().select(0)
        self._count(len(ready))
        return ready

    def _count(self, came: int) -> None:
        self._came += came
        now_s = self._clock()
        if now_s - self._window_s >= _WINDOW_S:
            self._is_busy = self._came >= BUSY_PER_S * (now_s - self._window_s)
            self._came, self._window_s = 0, now_s


def event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that gathers."""
    return asyncio.SelectorEventLoop(GatheringSelector())
