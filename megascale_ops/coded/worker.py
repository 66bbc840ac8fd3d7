# SPDX-License-Identifier: Apache-2.0
"""A worker of a coded job: takes the newest task, answers, and says how long it has waited for the next."""

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Self

from megascale_ops.coded.code import GradientCode, Vector
from megascale_ops.coded.messages import (
    ANSWER,
    END,
    HELLO,
    TASK,
    CodedError,
    Frame,
    Inbox,
    meeting_name,
    packed,
    parse_address,
    token_of,
)

_MEETING_S = 120.0
# As the master's grace: what lies within that of the others is no straggler.
LINGER_SHARE = 0.25
# Half an hour without a task, as torch waits for a collective.
PATIENCE_S = 1800.0


class Task(NamedTuple):
    """What a worker is asked for: the step, and what the master has sent with it."""

    step: int
    vector: Vector


class Worker:
    """One of the other ends of a coded job.

    Args:
        code: shared with the master.
        worker: which this is, 0 to n - 1.
        size: numbers of a gradient.
        address: of the master; by default what the launcher's environment gives.
        name: of the job.
        waited: called with the seconds that were spent waiting for the master, as ``recorder.waited``.
        deadline_s: to reach the master.

    Raises:
        CodedError: the master can't be reached.
    """

    def __init__(
        self,
        code: GradientCode,
        worker: int,
        size: int,
        *,
        address: str = "",
        name: str = "",
        waited: Callable[[float], None] = lambda _: None,
        deadline_s: float = _MEETING_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.code, self.worker, self.size = code, worker, size
        self._waited = waited
        self._patience_s = patience_s
        name = name or meeting_name()
        self._connection = connected(address or f"local:{name}", deadline_s)
        self._connection.settimeout(patience_s)
        self._inbox = Inbox(max(size, 16))
        self._frames: deque[Frame] = deque()
        self._is_over = False
        self._send(Frame(HELLO, worker, -1, 0, token_of(name)))

    def tasks(self) -> Iterator[Task]:
        """Yield tasks until the master ends.

        Raises:
            CodedError: the master has gone, or gives no task for ``patience_s``.
        """
        while not self._is_over and (frame := self._next()).kind != END:
            if frame.kind == TASK and not self._frames:
                yield Task(frame.step, frame.vector)

    def answer(self, step: int, gradient_of: Callable[[int], Vector]) -> None:
        """Compute what this worker has to, and send it: message by message, each as soon as it is there.

        Where another task comes between two messages, the rest is left: the sum was there without it. Before the next
        message is begun, a quarter of what the last one took is waited for that: of equal workers all have answered
        once by then, and what was begun in vain would have to be finished.

        Args:
            step: of the task.
            gradient_of: returns the gradient of a partition, (size,).
        """
        gradients: dict[int, Vector] = {}
        for message in range(self.code.messages):
            began_s = time.monotonic()
            for partition in self.code.needs(self.worker, message):
                if partition not in gradients:
                    gradients[partition] = gradient_of(partition)
            self.send(step, gradients, message)
            if message + 1 < self.code.messages and self._look(LINGER_SHARE * (time.monotonic() - began_s)):
                break

    def send(self, step: int, gradients: Mapping[int, Vector], message: int = 0) -> None:
        """Send one message that is encoded from these gradients."""
        self._send(Frame(ANSWER, self.worker, step, message, self.code.encode(self.worker, gradients, message)))

    def close(self) -> None:
        """Let the connection go."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, frame: Frame) -> None:
        try:
            self._connection.sendall(packed(frame))
        except OSError as error:
            # A master that has ended while this worker was computing has said so before it closed the connection.
            self._is_over = self._has_ended()
            if not self._is_over:
                raise CodedError(f"worker {self.worker} can't send to its master: {error}") from error

    def _look(self, linger_s: float) -> bool:
        """Take what comes within so long; return whether there is a message."""
        while select.select([self._connection], [], [], 0.0 if self._frames else linger_s)[0]:
            data = self._connection.recv(1 << 20)
            if not data:
                break
            self._frames.extend(self._inbox.take(data))
        return bool(self._frames)

    def _has_ended(self) -> bool:
        """Return whether what has come meanwhile says that it is over."""
        with contextlib.suppress(OSError):
            self._connection.settimeout(0.1)
            while data := self._connection.recv(1 << 20):
                self._frames.extend(self._inbox.take(data))
        return any(frame.kind == END for frame in self._frames)

    def _next(self) -> Frame:
        began_s = time.monotonic()
        while not self._frames:
            try:
                data = self._connection.recv(1 << 20)
            except TimeoutError:
                raise CodedError(
                    f"worker {self.worker} has waited {self._patience_s:g} s for a task of its master"
                ) from None
            except OSError as error:
                raise CodedError(f"worker {self.worker} has lost its master: {error}") from error
            if not data:
                raise CodedError(f"worker {self.worker} has lost its master: the connection was closed")
            self._frames.extend(self._inbox.take(data))
        self._waited(time.monotonic() - began_s)
        return self._frames.popleft()


def connected(address: str, deadline_s: float) -> socket.socket:
    """Return a connection as soon as the master listens."""
    family, where = parse_address(address)
    until_s = time.monotonic() + deadline_s
    while True:
        connection = socket.socket(family)
        connection.settimeout(max(0.1, until_s - time.monotonic()))
        try:
            connection.connect(where)
        except OSError as error:
            connection.close()
            if time.monotonic() > until_s:
                raise CodedError(f"the master at {address} was not reached in {deadline_s:g} s: {error}") from error
            time.sleep(0.02)
            continue
        if family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
