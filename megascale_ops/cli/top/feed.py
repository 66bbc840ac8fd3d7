# SPDX-License-Identifier: Apache-2.0
"""What is known of one job while it lives: the live feed followed, and begun anew whenever it breaks off.

A controller that goes away leaves the last frame standing; since when nothing was heard, and why, is known beside it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from megascale_ops.errors import MegascaleError
from megascale_ops.link import Backoff
from megascale_ops.schema.live import Frame, merge


class Source(Protocol):
    """Where frames come from; ``megascale_ops.link.Link`` is one."""

    def live(self, job: str = "") -> AsyncIterator[Frame]:
        """Yield frames, the first one whole."""


class Feed:
    """The newest frame of a job, followed by one task at a time.

    Args:
        source: the controller.
        first: a frame that is there already.

    Attributes:
        frame: all that was heard.
        away: why nothing is heard now; "" while frames come.
    """

    def __init__(self, source: Source, first: Frame) -> None:
        self._source = source
        self._heard_at_s = time.monotonic()
        self.frame = first
        self.away = ""

    @property
    def heard_s(self) -> float:
        """Seconds since the newest frame came."""
        return time.monotonic() - self._heard_at_s

    async def follow(self, job: str, on_news: Callable[[], None]) -> None:
        """Take frames of a job for ever; what goes wrong is kept as ``away`` and tried again.

        Args:
            job: "" for the job that needs a look most.
            on_news: called after each change.
        """
        backoff = Backoff()
        while True:
            known: Frame | None = None
            try:
                async for frame in self._source.live(job):
                    known = merge(known, frame)
                    self.frame, self._heard_at_s, self.away = known, time.monotonic(), ""
                    backoff.reset()
                    on_news()
            except MegascaleError as error:
                self.away = str(error)
                on_news()
            await asyncio.sleep(backoff.next_s())
