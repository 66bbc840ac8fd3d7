# SPDX-License-Identifier: Apache-2.0
"""What aiohttp's reading of HTTP owes a controller on a shared node: deadlines, a bound of a head, one kind of answer.

aiohttp reads and answers every request. It lets a connection wait for the keep-alive time, whatever it has said, and a
head may have 128 long lines. So a connection that says nothing is closed here after 5 s, a request whose head does not
end is refused after 20 s or 16 KiB, and what can't be read is answered as every other mistake: one sentence as JSON.
Bodies have their deadline where they are read (``api``).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple

import msgspec
from aiohttp import http_exceptions, web

from megascale_ops.schema.messages import ErrorReply
from megascale_ops.schema.version import MARK_HEADER, MESSAGE_VERSION
from megascale_ops.schema.wording import printable

# 16 KiB: a browser's cookies for other services of the same host (8 KiB at most, as servers take them) and a token.
MOST_HEAD_BYTES = 16 * 1024
# 2 s: the rest of an unread body is read for so long before the connection ends.
LINGER_S = 2.0
HEARTBEAT = "/v1/heartbeat"
_MARK = str(MESSAGE_VERSION)
_END = b"\r\n\r\n"
_TOO_LONG = f"the head of this request is too long: at most {MOST_HEAD_BYTES} bytes are taken"
_NO_REQUEST = "this is no request: METHOD PATH HTTP/1.1 was expected"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Patience(NamedTuple):
    """How long a connection may be silent, seconds."""

    first_byte_s: float = 5.0  # a client sends once connected; over the longest route it is there in one
    request_s: float = 20.0  # from a request's first byte to the end of its head
    idle_s: float = 75.0  # between two requests; the slowest agents send every 8 s


class Connection(web.RequestHandler):
    """One connection, from its first byte to its last.

    Args:
        server: aiohttp's, with the handlers.
        connections: all that are open.
        log: where aiohttp tells what it could not read.

    Attributes:
        heard_s: when the present request began to come, or the last one was answered.
        has_spoken: a request was answered.
        is_busy: a request is being answered.
    """

    __slots__ = ("_connections", "_head_bytes", "_is_in_head", "_tail", "has_spoken", "heard_s", "is_busy")

    def __init__(self, server: web.Server, connections: "Connections", log: logging.Logger) -> None:
        super().__init__(
            server,
            loop=connections.events,
            keepalive_timeout=connections.patience.idle_s,
            lingering_time=LINGER_S,
            access_log=None,  # type: ignore[arg-type]  # none is written, as by `web.AppRunner(access_log=None)`
            logger=log,
        )
        self._connections = connections
        self.heard_s = connections.events.time()
        self.has_spoken = False
        self.is_busy = False
        self._is_in_head = True  # the next byte belongs to a head
        self._head_bytes = 0  # of the present head
        self._tail = b""  # its last three bytes: the end of a head may come in pieces

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Listen, for a first byte at first."""
        super().connection_made(transport)
        self._connections.open.add(self)
        self._connections.silent.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection."""
        self._connections.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Hand on what came, as long as a head stays within its bound."""
        if self._is_in_head and data:
            if not self._head_bytes:
                self.heard_s = self._connections.begins(self)
            seen = self._tail + data
            end = seen.find(_END)
            if 0 <= end < MOST_HEAD_BYTES - self._head_bytes:
                self._is_in_head = False
            else:
                self._head_bytes += len(data)
                self._tail = seen[-len(_END) + 1 :]
                if self._head_bytes >= MOST_HEAD_BYTES:
                    self.refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LONG)
                    return
        try:
            super().data_received(data)
        except ValueError:  # aiohttp 3.11 lets one through for an address such as http://[/
            self.refuse(HTTPStatus.BAD_REQUEST, _NO_REQUEST)

    def asked(self) -> None:
        """Say that a request's head is whole, and that its answer is begun: it owes no more words."""
        self._is_in_head, self.is_busy = False, True
        self._connections.late.discard(self)

    def answered(self, *, goes_on: bool) -> None:
        """Say that the answer is made; ``goes_on``: another head may follow it."""
        self.is_busy, self.has_spoken = False, True
        self._is_in_head, self._head_bytes, self._tail = goes_on, 0, b""
        self.heard_s = self._connections.events.time()

    def refuse(self, status: HTTPStatus, sentence: str) -> None:
        """Answer what can't be taken, and end the connection: what follows can't be separated from it."""
        self._is_in_head = False
        self._connections.late.discard(self)
        if self.transport is not None:
            body = encode_error(sentence)
            self.transport.write(
                b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
                % (status, status.phrase.encode(), len(body), body)
            )
        self.force_close()

    def abort(self) -> None:
        """End the connection at once, whatever is still to be sent: its descriptor is wanted."""
        self._connections.forget(self)
        if self.transport is not None:
            self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return one sentence as JSON, where aiohttp has plain text; who sends noise leaves no line in the log.

        Raises:
            ConnectionError: an answer was begun already.
        """
        self._is_in_head = False
        self._connections.late.discard(self)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.log_exception("a request failed", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun already")
        told, sentence = _told(status, exc, message)
        response = web.Response(status=told, body=encode_error(sentence), content_type="application/json")
        response.headers[MARK_HEADER] = _MARK
        response.force_close()
        return response


class Connections:
    """All that are open, and the deadlines of those that owe words; made inside a running loop.

    Attributes:
        open: every connection.
        silent: those that have not said a thing yet.
        late: those whose request has begun, and whose head is not whole.
    """

    def __init__(self, patience: Patience) -> None:
        self.events = asyncio.get_running_loop()
        self.patience = patience
        self.open: set[Connection] = set()
        self.silent = Deadline(patience.first_byte_s, Connection.force_close)
        self.late = Deadline(patience.request_s, self._too_late)

    def begins(self, connection: Connection) -> float:
        """Note that a request begins, and return when."""
        self.silent.discard(connection)
        return self.late.add(connection)

    def forget(self, connection: Connection) -> None:
        """Note that a connection is over."""
        self.open.discard(connection)
        self.silent.discard(connection)
        self.late.discard(connection)

    def close(self) -> None:
        """Let no deadline pass any more."""
        self.silent.close()
        self.late.close()

    def _too_late(self, connection: Connection) -> None:
        connection.refuse(HTTPStatus.REQUEST_TIMEOUT, f"this request did not end within {self.patience.request_s:g} s")


class Deadline:
    """Connections that owe something within one and the same time, the first to owe first: one timer serves them all.

    Args:
        limit_s: how long each of them has.
        passed: called with each that took longer.
    """

    def __init__(self, limit_s: float, passed: Callable[[Connection], None]) -> None:
        self._events = asyncio.get_running_loop()
        self._limit_s = limit_s
        self._passed = passed
        self._since_s: dict[Connection, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: Connection) -> float:
        """Let a connection's time begin, and return when it does."""
        now_s = self._events.time()
        self._since_s.pop(connection, None)
        self._since_s[connection] = now_s
        if self._timer is None:
            self._timer = self._events.call_later(self._limit_s, self._look)
        return now_s

    def discard(self, connection: Connection) -> None:
        """Let a connection go, if it is here; the timer fires once more and finds no connection."""
        self._since_s.pop(connection, None)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        now_s = self._events.time()
        while self._since_s:
            connection, since_s = next(iter(self._since_s.items()))
            left_s = since_s + self._limit_s - now_s
            if left_s > 0:
                self._timer = self._events.call_later(left_s, self._look)
                return
            del self._since_s[connection]
            self._passed(connection)


@web.middleware
async def watched(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a request, and let its connection know when deadlines end and begin."""
    connection = request.protocol
    if isinstance(connection, Connection):
        connection.asked()
    try:
        response = await handler(request)
    except web.HTTPException as error:  # aiohttp's own: no path of the API begins so, or its Expect is unknown
        response = web.Response(
            status=error.status,
            body=encode_error(f"{request.method} {request.path} can't be answered: {error.reason}"),
            content_type="application/json",
        )
    if not response.prepared:
        response.headers[MARK_HEADER] = _MARK
    # An agent that is refused sends again in a second. Other clients lose their connection then; and where a body was
    # not read, the next head can't be distinguished from it.
    goes_on = request.content.is_eof() and (response.status < HTTPStatus.BAD_REQUEST or request.path == HEARTBEAT)
    if not goes_on:
        response.force_close()
    if isinstance(connection, Connection):
        connection.answered(goes_on=goes_on)
    return response


def encode_error(sentence: str) -> bytes:
    """Return the body of an answer that refuses."""
    return msgspec.json.encode(ErrorReply(sentence))


def _told(status: int, exc: BaseException | None, message: str | None) -> tuple[int, str]:
    """Return status and sentence for what aiohttp could not read or answer."""
    if isinstance(exc, http_exceptions.LineTooLong):
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LONG
    if isinstance(exc, http_exceptions.BadStatusLine | http_exceptions.InvalidURLError):
        return status, _NO_REQUEST
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return status, "the controller met an error of its own; its log has the details"
    first, *_ = (message or "").splitlines() or [""]
    return status, f"this request can't be read: {printable(first)}"
