# SPDX-License-Identifier: Apache-2.0
"""Work that may wait long, each in a thread of its own.

asyncio's pool has six threads on two cores, and heartbeats go out by it: eight ranks that do not answer would hold them
all. These threads are daemons, so an agent that stops waits for none of them.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def run(work: Callable[[], T], name: str) -> T:
    """Return what ``work`` returns, or raise what it raises; cancelling leaves the thread to its own deadline."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def begin() -> None:
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001  raised in the waiting task
            done.set_exception(error)

    threading.Thread(target=begin, name=name, daemon=True).start()
    return await asyncio.wrap_future(done)
