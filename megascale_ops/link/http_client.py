# SPDX-License-Identifier: Apache-2.0
"""One HTTP client for callers without an event loop: the blocking link, the agent's link, questions to Prometheus.

It is urllib3 with a deadline for the whole of a request, where urllib3's own counts from byte to byte and not while a
name is looked up: each request has a thread, its caller stops waiting at the deadline, and the socket is shut, which
ends the thread. Connections are kept open. Answers are bounded, redirects are not followed and no proxy of the
environment is asked, so a token goes to the address that was given and nowhere else.

Works with urllib3 and with urllib3-future, which takes its name where it is installed (grafana-client draws it).
"""

import base64
import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlencode, urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError
from urllib3.exceptions import TimeoutError as Urllib3TimeoutError

from megascale_ops.link.answers import TAKEN, Reply

if TYPE_CHECKING:
    import ssl

# 256 MB: the status of 100,000 ranks has 100 MB; an endless answer must not fill a machine's memory.
MOST_BYTES = 256_000_000
# 64 KiB are read at a time.
_PIECE_BYTES = 1 << 16
# 64 connections are kept for threads that send at once; more are closed after their answer.
_KEPT = 64


class HttpClient:
    """One server, asked over connections that stay open; any number of threads may ask at once.

    Args:
        url: ``http://[NAME:PASSWORD@]HOST[:PORT][/PATH]`` or https; it was checked.
        headers: sent with each request. Name and password of the address are sent where there is no ``Authorization``.
        tls: for https whom to trust; None: whom the system trusts, or SSL_CERT_FILE.
        most_bytes: of an answer.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        tls: "ssl.SSLContext | None" = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        parts = urlsplit(url)
        self._root = quote(parts.path, safe="/%")
        self._headers = dict(headers)
        if parts.username is not None and "Authorization" not in self._headers:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        self._most_bytes = most_bytes
        host = parts.hostname or ""
        if ":" in host:  # urllib3-future leaves the brackets out
            self._headers["Host"] = parts.netloc.rpartition("@")[2]
        self._place = (parts.scheme, host, parts.port, tls)
        self._pool: urllib3.HTTPConnectionPool | None = None
        self._opening = threading.Lock()
        self._exchanges: set[Exchange] = set()

    def close(self) -> None:
        """End the requests that are under way, and close the connections; a later request opens new ones."""
        for exchange in tuple(self._exchanges):
            exchange.cut(ConnectionAbortedError("the connection was closed while waiting"))
        with self._opening:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        patience_s: float,
    ) -> Reply:
        """Ask, and wait for the answer. ``headers`` come on top of those of every request.

        Raises:
            TimeoutError: it was not there within ``patience_s``, name look-up and last byte included.
            ConnectionResetError: the connection had been closed; asking again is worth it.
            OSError: no server is there, or what came was no answer.
        """
        exchange = self.begin(method, path, query=query, body=body, headers=headers, patience_s=patience_s)
        try:
            return exchange.reply.result(patience_s)
        except TimeoutError as error:
            raise TimeoutError(TAKEN if exchange.is_connected else str(error)) from error
        finally:
            exchange.cut(TimeoutError())

    def begin(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        patience_s: float,
    ) -> "Exchange":
        """Ask in a thread; the caller waits for ``reply`` and calls ``cut`` when it waits no more.

        Raises:
            ConnectionError: no thread can be had.
        """
        target = f"{self._root}{path}" + (f"?{urlencode(query)}" if query else "")
        exchange = Exchange()
        self._exchanges.add(exchange)
        exchange.reply.add_done_callback(lambda _reply: self._exchanges.discard(exchange))
        thread = threading.Thread(
            target=self._run,
            args=(exchange, method, target, body, {**self._headers, **(headers or {})}, patience_s),
            name="megascale-http",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as error:
            exchange.cut(error)
            raise ConnectionError(f"no thread can be started to ask it: {error}") from error
        return exchange

    def _run(
        self,
        exchange: "Exchange",
        method: str,
        target: str,
        body: bytes | None,
        headers: dict[str, str],
        patience_s: float,
    ) -> None:
        _mine.exchange = exchange
        try:
            exchange.end(self._exchange(method, target, body, headers, patience_s))
        except HTTPError as error:
            exchange.end(_as_os_error(error))
        except Exception as error:  # noqa: BLE001  it is raised in the thread that waits for the answer
            exchange.end(error)

    def _exchange(
        self, method: str, target: str, body: bytes | None, headers: dict[str, str], patience_s: float
    ) -> Reply:
        with self._opening:
            pool = self._pool = self._pool or _pool(*self._place)
        response = pool.urlopen(
            method,
            target,
            body=body,
            headers=headers,
            retries=False,
            redirect=False,
            assert_same_host=False,  # this one is a path
            timeout=urllib3.Timeout(total=patience_s),
            preload_content=False,
            decode_content=False,
        )
        came = bytearray()
        for piece in response.stream(min(_PIECE_BYTES, self._most_bytes + 1), decode_content=False):
            came += piece
            if len(came) > self._most_bytes:
                response.close()
                raise ConnectionError(f"its answer is longer than {self._most_bytes} bytes")
        response.release_conn()
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Reply(response.status, bytes(came), headers)


class Exchange:
    """One request that is under way.

    Attributes:
        reply: the answer, or what went wrong.
        is_connected: whether the other side took the connection.
    """

    def __init__(self) -> None:
        self.reply: Future[Reply] = Future()
        self._connection: HTTPConnection | None = None
        self._socket: socket.socket | None = None
        self.is_connected = False

    def end(self, outcome: Reply | BaseException) -> None:
        """Give the answer to a caller that still waits for it."""
        if isinstance(outcome, BaseException) and self._socket is not None:
            self._socket.close()  # urllib3-future leaves it to the garbage collector
        self._connection = self._socket = None
        with contextlib.suppress(InvalidStateError):
            if isinstance(outcome, BaseException):
                self.reply.set_exception(outcome)
            else:
                self.reply.set_result(outcome)

    def cut(self, why: BaseException) -> None:
        """End it, unless it has ended: nothing late answers the next request."""
        with contextlib.suppress(InvalidStateError):
            self.reply.set_exception(why)
        sock = self._socket or getattr(self._connection, "sock", None)
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # below TLS, which another thread may be in

    def uses(self, connection: HTTPConnection) -> None:
        """Note what it waits on.

        Raises:
            ConnectionAbortedError: it was cut before.
        """
        # A connection lets go of a socket whose answer ends with it, while its answer is still read.
        self._connection, self._socket = connection, connection.sock
        self.is_connected = connection.sock is not None
        if self.reply.done():
            raise ConnectionAbortedError("nobody waits for the answer any more")


class _Mine(threading.local):
    """What the present thread asks."""

    exchange: Exchange | None = None


_mine = _Mine()


def _uses(connection: HTTPConnection) -> None:
    if _mine.exchange is not None:
        _mine.exchange.uses(connection)


class _Plain(HTTPConnection):
    """Lets its exchange know which socket to shut."""

    def connect(self) -> None:
        _uses(self)
        super().connect()
        _uses(self)

    def request(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  urllib3's, whichever it is
        _uses(self)
        return super().request(*args, **options)


class _Secure(_Plain, HTTPSConnection):
    """The same over TLS."""


class _PlainPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Plain


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _Secure


def _pool(scheme: str, host: str, port: int | None, tls: "ssl.SSLContext | None") -> urllib3.HTTPConnectionPool:
    if scheme == "http":
        return _PlainPool(host, port, maxsize=_KEPT)
    import ssl  # 4 MB that plain HTTP does without

    return _SecurePool(host, port, maxsize=_KEPT, ssl_context=tls or ssl.create_default_context())


def _as_os_error(error: HTTPError) -> OSError:
    """Return what the system, or the other side, said, as our callers know it."""
    for cause in _causes(error):
        if isinstance(cause, OSError):
            return cause
    if isinstance(error, Urllib3TimeoutError):
        return TimeoutError(str(error))
    return ConnectionError(f"it does not speak HTTP as it should: {error}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield what an error was raised for, the nearest first."""
    while error is not None:
        inner = [one for one in error.args if isinstance(one, BaseException)]
        error = inner[0] if inner else error.__cause__ or error.__context__
        if error is not None:
            yield error
