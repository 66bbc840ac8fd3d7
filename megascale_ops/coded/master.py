# SPDX-License-Identifier: Apache-2.0
"""The master of a coded job: hands out tasks, takes answers until they suffice, and notes which workers it did without.

One thread, no wait without a deadline: connections do not block, so a worker that is stopped in the midst of a message
holds nothing up. A worker that owes an answer gets no further task; when it answers, late as it is, it gets the newest
one. So what is kept for each is one message at most, however long it is away. With several messages a worker (`multi`)
most of which come when the sum is there already, a worker is told of the next task at once, and leaves the rest.
"""

import selectors
import socket
import time
from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np

from megascale_ops.coded.code import Combined, GradientCode, Vector
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

# 120 s to meet: processes start in a second, on a machine under full load in thirty.
MEETING_S = 120.0
_CHUNK = 1 << 20


class Gathered(NamedTuple):
    """What a step came to.

    ``combined``: the sum. ``took_s``: from handing out to closing. ``late``: workers that owed an answer and had given
    nothing of it when the step closed; ``owing``: those of them that had not answered an earlier step either, and
    so were not asked. ``behind_s``: by worker of which an answer to an earlier step came in this one, how long after
    that step was handed out.
    """

    combined: Combined
    took_s: float
    late: tuple[int, ...]
    owing: tuple[int, ...]
    behind_s: dict[int, float]


class _Peer:
    """One worker's connection."""

    def __init__(self, connection: socket.socket, most: int) -> None:
        self.connection = connection
        self.inbox = Inbox(most)
        self.out = bytearray()
        self.step = -1  # the newest that it was asked for
        self.left = 0  # messages of that one still to come
        self.has_answered = True  # with one of them at least


class _Step:
    """The step under way."""

    def __init__(self, number: int, task: bytes) -> None:
        self.number = number
        self.task = task
        self.arrived: dict[tuple[int, int], Vector] = {}
        self.behind_s: dict[int, float] = {}


class Master:
    """One end of a coded job; the workers connect to it.

    Args:
        code: shared with the workers.
        size: numbers of a gradient.
        address: where to listen; by default at a name of this host that the launcher's environment gives.
        name: of the job, which workers have to know.
        deadline_s: for all workers to connect, in ``meet``.
        clock: seconds that only grow.

    Attributes:
        address: where it listens, for workers to be told.

    Raises:
        CodedError: it can't listen there.
    """

    def __init__(
        self,
        code: GradientCode,
        size: int,
        *,
        address: str = "",
        name: str = "",
        deadline_s: float = MEETING_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.code, self.size = code, size
        self._clock = clock
        self._name = name or meeting_name()
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        self._asked_s: dict[int, float] = {}
        self._step = _Step(-1, b"")
        self._is_over = False
        family, where = parse_address(address or f"local:{self._name}")
        self._door = socket.socket(family)
        try:
            if family != socket.AF_UNIX:
                self._door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._door.bind(where)
            self._door.listen(code.workers)
        except OSError as error:
            self.close()
            raise CodedError(f"the master of the coded ranks can't listen at {address or where}: {error}") from error
        self.address = _address_of(self._door, address or f"local:{self._name}")
        self._until_s = clock() + deadline_s
        self._deadline_s = deadline_s

    def meet(self) -> None:
        """Wait until every worker is connected.

        Raises:
            CodedError: one is missing at the deadline; all are named.
        """
        self._door.settimeout(0)
        self._selector.register(self._door, selectors.EVENT_READ, None)
        strangers: list[_Peer] = []
        while len(self._peers) < self.code.workers:
            left_s = self._until_s - self._clock()
            if left_s <= 0:
                missing = sorted(set(range(self.code.workers)) - self._peers.keys())
                raise CodedError(
                    f"workers {', '.join(map(str, missing))} of {self.code.workers} have not connected to the master "
                    f"at {self.address} within {self._deadline_s:g} s"
                )
            for key, _ in self._selector.select(min(left_s, 1.0)):
                if key.data is None:
                    self._open(strangers)
                else:
                    self._read(key.data)
        self._selector.unregister(self._door)
        self._door.close()
        for peer in strangers:
            if peer not in self._peers.values():
                self._drop(peer)

    def ask(self, step: int, vector: Vector) -> None:
        """Hand a task out to every worker that owes no answer.

        Args:
            step: its number, larger than the last one's.
            vector: what the workers need to know, as the parameters: at most as many numbers as a gradient has.
        """
        if vector.size > self.size:
            raise CodedError(f"a task of {vector.size} numbers can't be handed out: workers take up to {self.size}")
        self._asked_s[step] = self._clock()
        self._step = _Step(step, packed(Frame(TASK, -1, step, 0, vector)))
        for peer in self._peers.values():
            if not peer.left or (self.code.messages > 1 and not peer.out):
                self._hand_out(peer)

    def gather(
        self, *, deadline_s: float = 600.0, grace_s: float = 0.0, grace_share: float = 0.25, approximate: bool = False
    ) -> Gathered:
        """Take answers until the sum follows from them, and then a little longer.

        Args:
            deadline_s: when to stop in any case.
            grace_s: how long to wait for the other workers that were asked once the sum follows.
            grace_share: the same as a share of the time that it took until then; the longer of both holds. Without
                any, the slowest of equals would be left out in each step.
            approximate: take the nearest sum at the deadline, instead of failing.

        Raises:
            TooFewAnswersError: too many workers are absent at the deadline.
        """
        began_s = self._asked_s[self._step.number]
        until_s, enough = began_s + deadline_s, False
        while True:
            now_s = self._clock()
            if not enough and self.code.suffices(list(self._step.arrived)):
                enough = True
                until_s = min(until_s, now_s + max(grace_s, grace_share * (now_s - began_s)))
            if now_s >= until_s or (enough and not self._waits_for()):
                break
            self._turn(until_s - now_s)
        combined = self.code.combine(self._step.arrived, self.size, approximate=approximate)
        late = tuple(sorted(worker for worker, peer in self._peers.items() if self._is_late(peer)))
        owing = tuple(worker for worker in late if self._peers[worker].step != self._step.number)
        for step in [one for one in self._asked_s if one < min(peer.step for peer in self._peers.values())]:
            del self._asked_s[step]
        return Gathered(combined, self._clock() - began_s, late, owing, self._step.behind_s)

    def close(self, deadline_s: float = 30.0) -> None:
        """Tell the workers that it is over, and wait until they have let go: a slow one is still computing.

        Args:
            deadline_s: for all of them; who comes later finds the connection closed.
        """
        if self._is_over:
            return
        self._is_over = True
        for peer in self._peers.values():
            peer.out += packed(Frame(END, -1, self._step.number, 0, np.zeros(0)))
        until_s = self._clock() + deadline_s
        while peers := self._living():
            for peer in peers:
                self._write(peer)
            if (left_s := until_s - self._clock()) <= 0:
                break
            self._turn(left_s)
        for peer in self._living():
            peer.connection.close()
        self._door.close()
        self._selector.close()

    def __enter__(self) -> Self:
        try:
            self.meet()
        except BaseException:
            self.close(0.0)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _living(self) -> list[_Peer]:
        """Return the workers whose connection stands."""
        return [peer for peer in self._peers.values() if peer.connection.fileno() >= 0]

    def _waits_for(self) -> bool:
        """Return whether a worker that was asked for this step has not answered in full."""
        return any(self._is_late(peer) and peer.step == self._step.number for peer in self._peers.values())

    def _is_late(self, peer: _Peer) -> bool:
        """Return whether a worker owes all of its answer, or where there is one message each, it."""
        return not peer.has_answered or (peer.step != self._step.number and peer.left > 0)

    def _hand_out(self, peer: _Peer) -> None:
        peer.step, peer.left, peer.has_answered = self._step.number, self.code.messages, False
        peer.out += self._step.task
        self._write(peer)

    def _turn(self, left_s: float) -> None:
        """Send what can be sent and take what has come, waiting for at most so long."""
        for peer in self._living():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
            self._selector.modify(peer.connection, wanted, peer)
        for key, events in self._selector.select(max(0.0, left_s)):
            if events & selectors.EVENT_WRITE:
                self._write(key.data)
            if events & selectors.EVENT_READ:
                self._read(key.data)

    def _write(self, peer: _Peer) -> None:
        try:
            while peer.out:
                del peer.out[: peer.connection.send(memoryview(peer.out)[:_CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self._lose(peer)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(peer)
            return
        try:
            frames = peer.inbox.take(data)
        except CodedError:
            if peer in self._peers.values():
                raise
            self._drop(peer)
            return
        for frame in frames:
            self._take(peer, frame)

    def _take(self, peer: _Peer, frame: Frame) -> None:
        """Take one message of a worker."""
        worker = frame.worker
        if frame.kind == HELLO:
            is_ours = np.array_equal(frame.vector, token_of(self._name))
            if is_ours and 0 <= worker < self.code.workers and worker not in self._peers:
                self._peers[worker] = peer
            else:
                self._drop(peer)
        elif frame.kind == ANSWER and self._peers.get(worker) is peer and frame.step == peer.step and peer.left:
            if not 0 <= frame.message < self.code.messages or frame.vector.size != self.code.length(self.size):
                raise CodedError(
                    f"worker {worker} answered with {frame.vector.size} numbers as message {frame.message}: this code "
                    f"has {self.code.messages} messages of {self.code.length(self.size)}; are its arguments the same?"
                )
            peer.left -= 1
            peer.has_answered = True
            if frame.step == self._step.number:
                self._step.arrived[worker, frame.message] = frame.vector
            elif not peer.left:
                self._step.behind_s[worker] = self._clock() - self._asked_s[frame.step]
                self._hand_out(peer)

    def _open(self, strangers: list[_Peer]) -> None:
        try:
            connection, _ = self._door.accept()
        except OSError:
            return
        connection.settimeout(0)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = _Peer(connection, max(self.code.length(self.size), 16))
        strangers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _drop(self, peer: _Peer) -> None:
        if peer.connection.fileno() >= 0:
            self._selector.unregister(peer.connection)
            peer.connection.close()

    def _lose(self, peer: _Peer) -> None:
        """A connection has ended; a worker's end is the launcher's to notice, here it is a peer's."""
        lost = [worker for worker, one in self._peers.items() if one is peer]
        if not lost or self._is_over:
            self._drop(peer)
            peer.out.clear()
            return
        raise CodedError(f"worker {lost[0]} has closed its connection to the master: its process has ended")


def _address_of(door: socket.socket, wanted: str) -> str:
    """Return where workers connect: what was asked for, with the port that was given where any was."""
    if door.family == socket.AF_UNIX:
        return wanted
    host, port = door.getsockname()[:2]
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"
