# SPDX-License-Identifier: Apache-2.0
"""Look for garbage when memory has grown, not by the clock: everything waits for a look, heartbeats too.

What a heartbeat leaves behind is freed as it is replaced, since nothing of it is part of a cycle. So in a cluster that
goes on there is nothing to find, and yet Python looks through all objects whenever a quarter of them is new: with
100,000 ranks that takes a second. Here a look comes when the process has twice the memory that it had after the last
one, which a cluster that joins makes four times and one that goes on never; whatever cycles come to be (a request that
failed, a connection that was reset) are freed before they fill as much as all the rest.
"""

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Iterator

import psutil

log = logging.getLogger(__name__)

MEASURED_EACH_S = 1.0
GROWN = 2.0
# 64 MB: what a controller has to begin with.
LEAST_GROWTH = 64 << 20
# 0.5 s: half a heartbeat; whoever asks why an answer took so long finds it in the log.
WORTH_TELLING_S = 0.5


def is_due(bytes_now: int, bytes_after_last: int) -> bool:
    """Say whether memory has grown enough since the last look."""
    return bytes_now >= max(GROWN * bytes_after_last, bytes_after_last + LEAST_GROWTH)


async def collect() -> None:
    """Look whenever it is due, until cancelled; nobody else looks meanwhile."""
    process = psutil.Process()
    with _by_hand():
        after_last = process.memory_info().rss
        while True:
            await asyncio.sleep(MEASURED_EACH_S)
            if is_due(process.memory_info().rss, after_last):
                began_s = time.monotonic()
                freed = gc.collect()
                took_s = time.monotonic() - began_s
                after_last = process.memory_info().rss
                if took_s > WORTH_TELLING_S:
                    log.info(
                        "looked for garbage for %.1f s: %d objects freed, %d MB left", took_s, freed, after_last >> 20
                    )


@contextlib.contextmanager
def _by_hand() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
