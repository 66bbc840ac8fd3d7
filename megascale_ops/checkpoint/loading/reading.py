# SPDX-License-Identifier: Apache-2.0
"""Threads that read files, and how long a restore waits for them.

A read that hangs in the kernel can't be ended, and may still write to the memory that it was given. So nothing waits
for such a thread, neither the restore nor the interpreter's end, and what it was reading into is used no more.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

# 600 s without a byte of any file: slower storage is broken storage. As long as a save in the background has.
PATIENCE_S = 600.0
# 5 s: a thread that has nothing to do ends at once.
_ENDS_S = 5.0


class LateError(Exception):
    """Nothing was read for so long."""


class ReadingThreads:
    """Some threads, begun as they are needed.

    Args:
        most: how many.
    """

    def __init__(self, most: int) -> None:
        self.patience_s = PATIENCE_S
        self._most = most
        self._moved_s = time.monotonic()
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_late = False

    def submit(self, work: Callable[..., T], *given: Any) -> "Future[T]":  # noqa: ANN401  what the work takes
        """Let a thread do some work; its value, or what it raises, is the future's."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work(*given))
            except BaseException as exc:  # noqa: BLE001  raised again where the future is asked
                future.set_exception(exc)

        self._work.put(run)
        if len(self._threads) < self._most:
            thread = threading.Thread(target=self._run, name="checkpoint-read", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def moved(self) -> None:
        """A thread has read something."""
        self._moved_s = time.monotonic()

    def await_read(self, get: Callable[[float], T]) -> T:
        """Wait for what a thread gives, as long as any of them goes on.

        Args:
            get: waits for so many seconds; raises TimeoutError or Empty when they are over.

        Raises:
            LateError: nothing was read any more.
        """
        began_s = time.monotonic()
        while True:
            left_s = max(began_s, self._moved_s) + self.patience_s - time.monotonic()
            if left_s <= 0 or self._is_late:
                self._is_late = True
                raise LateError
            try:
                return get(left_s)
            except (TimeoutError, Empty):
                continue

    def close(self) -> None:
        """End the threads; one that hangs is left to itself."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(0.0 if self._is_late else _ENDS_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
