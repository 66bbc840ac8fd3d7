# SPDX-License-Identifier: Apache-2.0
"""Connections to the metrics port whose request has not arrived: they cost a descriptor, and no thread.

Any process on the node may connect and send nothing, or a byte a second. So a connection waits here, bounded in number
and time, until the head of its request is there; what has arrived is peeked at. When there are too many the oldest is
closed for the newest.
"""

import asyncio
import contextlib
import re
import select
import socket
from collections.abc import Callable

# 64: a dozen probes and scrapers connect at once at most; of more, some send nothing.
MOST_ARRIVING = 64
# 5 s from connecting to the end of the head; on a network that works it is there in one.
ARRIVE_S = 5.0
# 16 at one turn of the daemon's loop.
_AT_ONCE = 16
# 50 ms until a head that is not whole is looked at again: its bytes stay in the socket and would wake the loop again.
_AGAIN_S = 0.05
# 0.2 s without accepting when there is no file descriptor left.
_REST_S = 0.2
# 16 KiB: a longer head is refused as too long.
_MOST_HEAD_BYTES = 16 * 1024
_FIRST_LINE = re.compile(rb"[A-Z]+ [^ \r\n]+ HTTP/1\.[01]\r?")

# A connection, and the first bytes of its request.
Ready = Callable[[socket.socket, bytes], None]


class Arrivals:
    """Takes connections from a port and hands on those whose request is there; made inside a running loop.

    Args:
        listening: the port.
        ready: gets a connection that can be answered; its bytes are still to be read.
    """

    def __init__(self, listening: socket.socket, ready: Ready) -> None:
        self._listening = listening
        self._ready = ready
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[socket.socket, asyncio.TimerHandle] = {}  # the oldest first
        self._rest: asyncio.TimerHandle | None = None
        listening.setblocking(False)  # noqa: FBT003  the socket's own signature
        self._loop.add_reader(listening, self._take)

    def __len__(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        """Accept no more connections, and close those that wait; the port stays its owner's."""
        if self._rest is not None:
            self._rest.cancel()
        self._loop.remove_reader(self._listening)
        for connection in list(self._waiting):
            self._drop(connection)

    def _take(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _address = self._listening.accept()
            except BlockingIOError:
                return
            except OSError:  # mostly no descriptor left: connections in the port's queue are accepted later
                self._loop.remove_reader(self._listening)
                self._rest = self._loop.call_later(_REST_S, self._loop.add_reader, self._listening, self._take)
                return
            connection.setblocking(False)  # noqa: FBT003  the socket's own signature
            if len(self._waiting) >= MOST_ARRIVING:
                self._drop(next(iter(self._waiting)))
            self._waiting[connection] = self._loop.call_later(ARRIVE_S, self._drop, connection)
            self._loop.add_reader(connection, self._look, connection)

    def _look(self, connection: socket.socket) -> None:
        """Look whether a request is there."""
        try:
            head = connection.recv(_MOST_HEAD_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            head = b""
        if not head:
            self._drop(connection)
        elif is_whole(head) or _has_said_all(connection):
            self._forget(connection)
            self._ready(connection, head)
        else:
            self._loop.remove_reader(connection)
            self._loop.call_later(_AGAIN_S, self._look_again, connection)

    def _look_again(self, connection: socket.socket) -> None:
        if connection in self._waiting:
            self._loop.add_reader(connection, self._look, connection)

    def _forget(self, connection: socket.socket) -> None:
        self._waiting.pop(connection).cancel()
        self._loop.remove_reader(connection)

    def _drop(self, connection: socket.socket) -> None:
        if connection in self._waiting:
            self._forget(connection)
            with contextlib.suppress(OSError):
                connection.close()


def is_whole(head: bytes) -> bool:
    """Return whether a server need not wait to answer: a whole head, one that is too long, or no request at all."""
    if b"\r\n\r\n" in head or b"\n\n" in head or len(head) >= _MOST_HEAD_BYTES:
        return True
    first, newline, _rest = head.partition(b"\n")
    return bool(newline) and not _FIRST_LINE.fullmatch(first)


def _has_said_all(connection: socket.socket) -> bool:
    """Return whether the other side sends nothing more."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))
