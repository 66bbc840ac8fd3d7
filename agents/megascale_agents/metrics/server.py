# SPDX-License-Identifier: Apache-2.0
"""``/metrics`` and ``/healthz`` over the standard library's HTTP server: one request a connection, each in a thread.

A connection whose request has arrived (``arrivals``) is handed to a thread, so nothing waits or polls between two
scrapes, and a silent client holds no thread. The thread speaks HTTP and writes the page; what stands in it is gathered
in the loop, for there is everything that it shows, and an agent whose loop stands still shall not look healthy. At most
MOST_AT_ONCE are served at a time, and others wait their turn; a probe does not, or scrapers could have an agent
restarted. Each has DEADLINE_S to be answered. http.client and this cost 2 MB of memory, aiohttp 13.
"""

import asyncio
import contextlib
import json
import logging
import socket
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, urlsplit

from megascale_agents.metrics.arrivals import Arrivals
from megascale_agents.metrics.page import PARTS, AgentCollector
from megascale_ops import __version__
from megascale_ops.exposition import encoded

log = logging.getLogger(__name__)

# Two Prometheus servers that request two parts each, and a person.
MOST_AT_ONCE = 8
# 4 threads more for probes; 32 requests may wait their turn, each for a few milliseconds.
_MORE_PROBES, MOST_WAITING = 4, 32
_PROBE = b"GET /healthz "
# 10 s: Prometheus' own timeout.
DEADLINE_S = 10.0
# 5 s: without a byte from the client, and for the loop to gather a page, which takes it 2 ms.
_SILENCE_S = 5.0
# A request in progress when the agent ends has 0.2 s, then its connection is cut, which ends its thread.
_GOODBYE_S = 0.2
_CUT_S = 1.0
_TEXT = "text/plain; charset=utf-8"
T = TypeVar("T")


class _Answer(NamedTuple):
    status: int
    body: bytes
    kind: str = "application/json; charset=utf-8"


def _sentence(status: int, text: str) -> _Answer:
    return _Answer(status, json.dumps({"error": text}).encode())


_WELL = _Answer(200, b'{"status": "ok"}')
_LATE = _sentence(503, f"the agent is busy: it has not looked at this request for {_SILENCE_S:g} s")
_NOTHING = _Answer(404, b"404: Not Found", _TEXT)
_READ_ONLY = _Answer(405, b"405: Method Not Allowed", _TEXT)


class MetricsServer(ThreadingHTTPServer):
    """Serves a port that was taken, from when it is made until ``close``; made inside a running loop.

    Args:
        collector: what answers a scrape.
        listening: the port.
        token: required of each scrape; None: none.
    """

    def __init__(self, collector: AgentCollector, listening: socket.socket, token: str | None) -> None:
        super().__init__(listening.getsockname(), _Conversation, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self._collector = collector
        self._token = token
        self._loop = asyncio.get_running_loop()
        self._open: dict[socket.socket, asyncio.TimerHandle] = {}
        self._nobody = asyncio.Event()
        self._nobody.set()
        self._is_closing = False
        self._turn: deque[socket.socket] = deque()  # their requests are there, and all threads are busy
        self._arrivals = Arrivals(listening, self._arrived)

    async def close(self) -> None:
        """Accept no more connections, and end every thread."""
        if self._is_closing:
            return
        self._is_closing = True
        self._arrivals.close()
        self.socket.close()
        while self._turn:
            self._turn.popleft().close()
        for patience_s in (_GOODBYE_S, _CUT_S):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._nobody.wait(), patience_s)
            for connection in self._open:
                _cut(connection)
        for deadline in self._open.values():
            deadline.cancel()

    def answer(self, target: str, authorization: bytes, accept: str) -> _Answer | None:
        """Return what a request for ``target`` gets, None where nothing is; called by the request's thread."""
        parts = urlsplit(target)
        if parts.path == "/healthz":
            return _LATE if self._in_loop(lambda: _WELL) is None else _WELL
        if parts.path != "/metrics":
            return None
        if self._token is not None and not _is_same(authorization, f"Bearer {self._token}".encode()):
            return _sentence(401, "a token is needed: Authorization: Bearer TOKEN")
        part = parse_qs(parts.query).get("part", [""])[0]
        if part not in ("", *PARTS):
            return _sentence(400, f"part {part!r} can't be: {' or '.join(PARTS)}, or none")
        page = self._in_loop(lambda: self._collector.page(part))
        return _LATE if page is None else _Answer(200, *encoded(page, accept))

    def _in_loop(self, work: Callable[[], T]) -> T | None:
        """Return what the daemon's loop makes of ``work``, None when it has no time or has ended."""
        done: Future[T] = Future()

        def begin() -> None:
            if not done.set_running_or_notify_cancel():
                return  # no request waits for it any more
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001  raised in the waiting thread
                done.set_exception(error)

        with contextlib.suppress(RuntimeError, TimeoutError):  # RuntimeError: the loop has ended
            self._loop.call_soon_threadsafe(begin)
            return done.result(_SILENCE_S)
        done.cancel()
        return None

    def _arrived(self, connection: socket.socket, head: bytes) -> None:
        """Answer a request that is there, or let it wait its turn; of too many the longest waiting gives way."""
        is_probe = head.startswith(_PROBE) and len(self._open) < MOST_AT_ONCE + _MORE_PROBES
        if is_probe or len(self._open) < MOST_AT_ONCE:
            self._begin(connection)
            return
        self._turn.append(connection)
        if len(self._turn) > MOST_WAITING:
            self._turn.popleft().close()

    def _begin(self, connection: socket.socket) -> None:
        """Begin a thread for a connection."""
        self._nobody.clear()
        connection.setblocking(True)  # noqa: FBT003  the socket's own signature
        self._open[connection] = self._loop.call_later(DEADLINE_S, _cut, connection)
        self.process_request(connection, None)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401  socketserver's own types
        """Close a connection; called by its thread, as the last thing that it does."""
        super().shutdown_request(request)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._forget, request)

    def _forget(self, connection: socket.socket) -> None:
        if (deadline := self._open.pop(connection, None)) is not None:
            deadline.cancel()
        while self._turn and not self._is_closing and len(self._open) < MOST_AT_ONCE:
            self._begin(self._turn.popleft())
        if not self._open:
            self._nobody.set()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  socketserver's own types
        """Log what failed in a thread, unless the client has gone or was too slow."""
        del request, client_address
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("a request for metrics failed", exc_info=error)


class _Conversation(BaseHTTPRequestHandler):
    """One request and its answer."""

    server: MetricsServer
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # what is no request gets a status line too
    timeout = _SILENCE_S
    wbufsize = -1  # head and body leave together
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d: %(message)s"

    def do_GET(self) -> None:
        """Answer."""
        self._say(self._answer())

    def do_HEAD(self) -> None:
        """Answer with the head alone."""
        self._say(self._answer(), has_body=False)

    def do_POST(self) -> None:
        """Refuse: there is nothing to change here."""
        answer = self._answer()
        self._say(answer if answer == _NOTHING else _READ_ONLY)

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_POST  # noqa: N815  names of http.server

    def _answer(self) -> _Answer:
        try:
            said = self.headers.get("Authorization", "").encode("latin-1")
            return self.server.answer(self.path, said, self.headers.get("Accept", "")) or _NOTHING
        except Exception:  # the scraper gets the error as well as the log
            log.exception("the page of metrics can't be built")
            return _Answer(500, b"500: Internal Server Error", _TEXT)

    def _say(self, answer: _Answer, *, has_body: bool = True) -> None:
        self.close_connection = True
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Connection", "close")
        if answer == _READ_ONLY:
            self.send_header("Allow", "GET,HEAD")
        self.end_headers()
        if has_body:
            self.wfile.write(answer.body)

    def version_string(self) -> str:
        """Return the Server header."""
        return f"megascale-ops/{__version__}"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the library's name
        """Log no requests: there are two a scrape, for ever."""


def _is_same(said: bytes, expected: bytes) -> bool:
    import hmac  # loads OpenSSL: 4 MB that agents on loopback do without

    return hmac.compare_digest(said, expected)


def _cut(connection: socket.socket) -> None:
    """Close a connection that a thread may be waiting on: that ends its wait."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
