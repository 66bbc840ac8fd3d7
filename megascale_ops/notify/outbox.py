# SPDX-License-Identifier: Apache-2.0
"""Send messages beside the controller: a thread with an event loop of its own, a bounded queue for each target.

A target that hangs holds up no other: its attempts have a deadline, its queue is its own, and what does not fit into
that is refused at once. A caller that puts a message in never waits.
"""

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from megascale_ops.notify.config import Target
from megascale_ops.notify.message import Message
from megascale_ops.notify.ways import NotSentError, Way

log = logging.getLogger(__name__)

# 100 messages, each with one incident: a target that is away for long gets the number of the rest.
MOST_WAITING = 100
# 1, 4, 16 s: a server that is being restarted is back by then.
_FIRST_PAUSE_S, _GROWTH = 1.0, 4.0
_START_S = 10.0
# A second to end what is under way after the time for sending is up.
_END_S = 1.0


class Sends(Protocol):
    """Whatever makes one attempt; see ``Way``."""

    @property
    def goes_to(self) -> str:
        """The host or program, for sentences."""

    async def send(self, message: Message) -> None:
        """Make one attempt, or raise NotSentError."""


class Outbox:
    """The messages of one controller on their way.

    Args:
        targets: by name.
        pause_s: before the second attempt; tests want less.

    Raises:
        UsageError: a file with a secret can't be used.
    """

    def __init__(self, targets: Mapping[str, Target], *, pause_s: float = _FIRST_PAUSE_S) -> None:
        self._targets = targets
        self._ways: dict[str, Way] = {name: Way(target) for name, target in targets.items()}
        self._pause_s = pause_s
        self._waiting = Counter(dict.fromkeys(targets, 0))
        self._lock = threading.Lock()
        self._is_ready = threading.Event()
        self._events: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, asyncio.Queue[Message]] = {}
        self._stopping: asyncio.Event | None = None
        self._stop_s = 0.0
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
        self.sent: Counter[str] = Counter()  # by kind of target
        self.failed: Counter[str] = Counter()

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()
        self._is_ready.wait(_START_S)

    def put(self, name: str, message: Message) -> bool:
        """Take a message for a target; say whether there was room for it."""
        with self._lock:
            if self._waiting[name] >= MOST_WAITING:
                return False
            self._waiting[name] += 1
        is_taken = self._tell(lambda: self._queues[name].put_nowait(message))
        if not is_taken:
            self._done(name)
        return is_taken

    def _done(self, name: str) -> None:
        with self._lock:
            self._waiting[name] -= 1

    def stop(self, within_s: float) -> None:
        """Send what waits, but no longer than that; then end."""
        self._stop_s = within_s
        if self._tell(lambda: self._stopping.set() if self._stopping else None):
            self._thread.join(within_s + _END_S)

    def _tell(self, what: Callable[[], None]) -> bool:
        """Let the sending thread do something; say whether it is there."""
        if self._events is None:
            return False
        try:
            self._events.call_soon_threadsafe(what)
        except RuntimeError:
            return False
        return True

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:  # a boundary: a bug must not end the controller, and is logged
            log.exception("no notification is sent any more: the sending thread met an error of its own")
        finally:
            self._is_ready.set()

    async def _serve(self) -> None:
        self._queues = {name: asyncio.Queue() for name in self._targets}
        self._stopping = asyncio.Event()
        self._events = asyncio.get_running_loop()
        self._is_ready.set()
        tasks = [asyncio.create_task(self._deliver(name)) for name in self._targets]
        await self._stopping.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._stop_s):
                await asyncio.gather(*(queue.join() for queue in self._queues.values()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _deliver(self, name: str) -> None:
        """Bring one target its messages, one after the other."""
        queue, kind = self._queues[name], self._targets[name].kind
        while True:
            message = await queue.get()
            try:
                error = await self._attempt(name, message)
            except Exception as bug:  # noqa: BLE001  a boundary: one message must not stop the others; logged below
                error = NotSentError(f"an error of ours, {type(bug).__name__}")
            finally:
                self._done(name)
                queue.task_done()
            if error is None:
                self.sent[kind] += 1
            else:
                self.failed[kind] += 1
                log.warning(
                    "notification target %s (%s) was not told of %s: %s", name, kind, message.incident.id, error
                )

    async def _attempt(self, name: str, message: Message) -> NotSentError | None:
        """Try as often as the target wants; return what went wrong the last time, None when it went."""
        pause_s = self._pause_s
        error = None
        for number in range(self._targets[name].attempts):
            if number:
                await asyncio.sleep(max(pause_s, error.again_s if error else 0.0))
                pause_s *= _GROWTH
            error = await attempt(self._ways[name], message, self._targets[name].timeout_s)
            if error is None or error.is_final:
                break
        return error


async def attempt(way: Sends, message: Message, timeout_s: float) -> NotSentError | None:
    """Make one attempt within a deadline; return what went wrong, None when it went."""
    try:
        async with asyncio.timeout(timeout_s):
            await way.send(message)
    except NotSentError as error:
        return error
    except TimeoutError:
        return NotSentError(f"{way.goes_to} did not answer within {timeout_s:g} s")
    return None
