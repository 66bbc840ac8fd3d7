# SPDX-License-Identifier: Apache-2.0
"""Admission: connections are bounded, and when there are too many the silent ones go first.

Any user of a shared node may connect to a loopback port. Each connection takes a descriptor, and a process without one
can neither open its journal nor read its own /proc. So the soft limit is raised at the start, some descriptors are kept
for ourselves, and at the bound a few dozen connections are closed for each that comes: first those that have never sent
anything, then those that were silent for longest. An agent whose connection was closed opens another one with
its next heartbeat.
"""

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Callable

from megascale_ops.controller.server.connections import Connection

log = logging.getLogger(__name__)

# 524,288: an agent, a runner and room for each of 131,072 nodes; 32 bytes of kernel memory for each that is not used.
MOST_DESCRIPTORS = 524_288
# 128: journal, history files, listener, threads' wake-ups, /proc: 30 in use as a rule.
RESERVED = 128
# 1 in 32 is closed at a time, so that looking for the oldest is done once for many that come.
SHED_SHARE = 32
# 64 connections are taken at one turn of the loop; heartbeats are answered in between.
AT_ONCE = 64
# 0.2 s without accepting when there is no descriptor left: others have time to close theirs.
PAUSE_S = 0.2
# 10 s for TLS to be agreed on; it takes milliseconds.
HANDSHAKE_S = 10.0
# 30 s: a reader that acknowledges nothing of what was sent to it for so long is gone (TCP_USER_TIMEOUT).
UNREAD_S = 30.0
Tls = ssl.SSLContext | Callable[[], ssl.SSLContext | None] | None
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_limit() -> int:
    """Raise the soft limit of open files as far as we may, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(ValueError, OSError):  # a container may forbid it: then there are fewer
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def most_connections(descriptors: int) -> int:
    """Return how many connections there may be with so many descriptors."""
    return max(16, descriptors - RESERVED)


class Admission:
    """Takes connections from a listener until ``close``; made inside a running loop.

    Args:
        listener: bound and listening.
        protocol: makes the protocol of a connection.
        open_: the connections that are open; one that is being answered is not closed for others.
        most: how many there may be.
        tls: returns what the next connection is met with, None for plain HTTP: certificates are renewed meanwhile.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], Connection],
        open_: set[Connection],
        *,
        most: int,
        tls: Tls = None,
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._open = open_
        self._most = most
        self._tls = tls
        self._events = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self.shed = 0  # connections that were closed for others, or not taken
        listener.setblocking(False)  # noqa: FBT003  the socket's own signature
        self._events.add_reader(listener, self._take)

    async def close(self) -> None:
        """Close the port; those that are not through the door are let go."""
        if self._pause is not None:
            self._pause.cancel()
        self._events.remove_reader(self._listener)
        self._listener.close()
        for task in self._beginning:
            task.cancel()
        await asyncio.gather(*self._beginning, return_exceptions=True)

    def _take(self) -> None:
        """Accept the connections that wait at the port."""
        room = self._most - len(self._open) - len(self._beginning)
        for _ in range(AT_ONCE):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._rest(error)
                return
            if room <= 0:
                room += self._make_room()
            if room <= 0:
                self.shed += 1
                connection.close()
                continue
            room -= 1
            task = self._events.create_task(self._begin(connection))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, connection: socket.socket) -> None:
        connection.setblocking(False)  # noqa: FBT003  the socket's own signature
        tls = self._tls() if callable(self._tls) else self._tls
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_S * 1000))
            await self._events.connect_accepted_socket(
                self._protocol,
                connection,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_S if tls is not None else None,
            )
        except (OSError, asyncio.CancelledError) as error:  # ssl.SSLError and TimeoutError are OSErrors
            connection.close()
            log.debug("a connection did not come to be: %s", error)

    def _make_room(self) -> int:
        """Close the longest silent connections, and return how many."""
        idle = (one for one in self._open if not one.is_busy)
        oldest = sorted(idle, key=lambda one: (one.has_spoken, one.heard_s))[: max(1, self._most // SHED_SHARE)]
        for one in oldest:
            one.abort()
        self.shed += len(oldest)
        log.warning(
            "%d connections are open, as many as there may be: %d that said nothing for longest were closed",
            self._most,
            len(oldest),
        )
        return len(oldest)

    def _rest(self, error: OSError) -> None:
        """Accept no connection for a moment when no descriptor is left."""
        if error.errno not in _NO_DESCRIPTOR:
            log.warning("a connection could not be taken: %s", error)
            return
        self._make_room()
        log.warning("no connection can be taken for %.1f s: %s", PAUSE_S, error)
        self._events.remove_reader(self._listener)
        self._pause = self._events.call_later(PAUSE_S, self._events.add_reader, self._listener, self._take)
