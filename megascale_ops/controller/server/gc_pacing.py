# SPDX-License-Identifier: Apache-2.0
"""Look for garbage when there are many more objects, not by the clock: everything waits for a look, heartbeats too.

What a heartbeat leaves behind is freed as it is replaced, since nothing of it is part of a cycle. So in a cluster that
goes on there is nothing to find, and yet Python looks through all objects whenever a quarter of them is new: with
100,000 ranks that takes a second. Here a look comes when there are twice as many objects as after the last one, which a
cluster that joins makes once or twice and one that goes on never; whatever cycles come to be (a request that failed, a
connection that was reset) are freed before they are as many as all the rest. A history that fills makes memory grow and
no objects, so memory alone is a reason only when there is four times as much: of garbage in few large pieces.
"""

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

import psutil

log = logging.getLogger(__name__)

MEASURED_EACH_S = 1.0
MORE_OBJECTS, LEAST_MORE_OBJECTS = 2.0, 100_000
# 64 MB: what a controller has to begin with.
MORE_BYTES, LEAST_MORE_BYTES = 4.0, 64 << 20
# 0.5 s: half a heartbeat; the log then explains a slow answer.
WORTH_TELLING_S = 0.5


class Size(NamedTuple):
    """How much there is."""

    objects: int  # that may be part of a cycle
    bytes: int  # of memory


def is_due(now: Size, after_last: Size) -> bool:
    """Return whether so much has come since the last look that another one is worth its time."""
    return now.objects >= max(
        MORE_OBJECTS * after_last.objects, after_last.objects + LEAST_MORE_OBJECTS
    ) or now.bytes >= max(MORE_BYTES * after_last.bytes, after_last.bytes + LEAST_MORE_BYTES)


async def collect() -> None:
    """Collect garbage whenever it is due, until cancelled; automatic collection is off meanwhile."""
    process = psutil.Process()
    with _by_hand():
        after_last = Size(len(gc.get_objects()), _bytes(process, 0))
        while True:
            await asyncio.sleep(MEASURED_EACH_S)
            # Python counts what came and was not freed; with the collector off nothing but a look begins anew.
            now = Size(after_last.objects + gc.get_count()[0], _bytes(process, after_last.bytes))
            if is_due(now, after_last):
                began_s = time.monotonic()
                freed = gc.collect()
                took_s = time.monotonic() - began_s
                after_last = Size(len(gc.get_objects()), _bytes(process, now.bytes))
                if took_s > WORTH_TELLING_S:
                    log.info(
                        "looked for garbage for %.1f s: %d objects freed, %d left in %d MB",
                        *(took_s, freed, after_last.objects, after_last.bytes >> 20),
                    )


def _bytes(process: psutil.Process, otherwise: int) -> int:
    """Return our memory; ``otherwise`` where /proc can't be read, as when no file may be opened any more."""
    try:
        return int(process.memory_info().rss)
    except (OSError, psutil.Error):
        return otherwise


@contextlib.contextmanager
def _by_hand() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
