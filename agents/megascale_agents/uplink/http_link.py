# SPDX-License-Identifier: Apache-2.0
"""The agent's link to its controller: the same requests over ``http.client``, which is loaded in a few milliseconds.

An agent sends one request a second to one host. For that aiohttp costs 0.2 to 0.4 s of its start (it loads certificates
when it is imported) and 13 MB for as long as it lives. Each request is made in a thread of asyncio's pool and has a
deadline. ``https://`` trusts the system's certificates, or SSL_CERT_FILE.
"""

import asyncio
import base64
import contextlib
import http.client
import socket
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlencode, urlsplit

from megascale_ops.link import Link

if TYPE_CHECKING:
    import ssl

# 4 MB: what comes back are orders, a few KB of them.
_MOST_BYTES = 4_000_000


class LightLink(Link):
    """A link over plain HTTP; arguments and errors are those of ``Link``."""

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 5.0) -> None:
        super().__init__(url, token, timeout_s)
        parts = urlsplit(self.url)
        self._host = parts.hostname or ""
        self._certificates = _trusted() if parts.scheme == "https" else None
        self._port = parts.port or (80 if self._certificates is None else 443)
        if parts.username is not None and not token:
            name_and_password = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(name_and_password.encode()).decode()}"
        self._root = quote(parts.path, safe="/%")
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: set[http.client.HTTPConnection] = set()

    async def close(self) -> None:
        """Close the connections, those in use too; a later request opens new ones."""
        idle, self._idle = self._idle, []
        for connection in (*idle, *self._busy):
            _cut(connection)
        await super().close()

    async def _send(
        self, method: str, path: str, query: dict[str, str] | None, data: bytes | None, wait_s: float
    ) -> tuple[int, bytes]:
        target = f"{self._root}{path}" + (f"?{urlencode(query)}" if query else "")
        patience_s = self._timeout_s + wait_s
        connection = self._idle.pop() if self._idle else self._new()
        self._busy.add(connection)
        try:
            async with asyncio.timeout(patience_s):  # of the whole; the socket's counts from byte to byte
                status, body, stays = await asyncio.to_thread(
                    _exchange, connection, (method, target, data or b""), self._headers, patience_s
                )
        except BaseException:  # also when time is up: the thread ends, and nothing late answers the next request
            _cut(connection)
            raise
        finally:
            self._busy.discard(connection)
        if stays:
            self._idle.append(connection)
        else:
            connection.close()
        return status, body

    def _new(self) -> http.client.HTTPConnection:
        if self._certificates is None:
            return http.client.HTTPConnection(self._host, self._port)
        return http.client.HTTPSConnection(self._host, self._port, context=self._certificates)


def _trusted() -> "ssl.SSLContext":
    import ssl  # 4 MB that plain HTTP does without

    return ssl.create_default_context()


def _exchange(
    connection: http.client.HTTPConnection, request: tuple[str, str, bytes], headers: dict[str, str], timeout_s: float
) -> tuple[int, bytes, bool]:
    """Ask in a thread; return the status, the body, and whether the connection may be used again.

    Raises:
        OSError: no listener, time is up, or what came was no response.
    """
    method, target, data = request
    connection.timeout = timeout_s
    if connection.sock is not None:
        connection.sock.settimeout(timeout_s)
    try:
        connection.request(method, target, data, headers)
        response = connection.getresponse()
        body = response.read(_MOST_BYTES + 1)
    except http.client.HTTPException as error:
        if isinstance(error, OSError):  # RemoteDisconnected: asking again is worth it
            raise
        raise ConnectionError(f"it does not speak HTTP as it should: {error}") from error
    if len(body) > _MOST_BYTES:
        raise ConnectionError(f"its answer is longer than {_MOST_BYTES} bytes")
    return response.status, body, not response.will_close


def _cut(connection: http.client.HTTPConnection) -> None:
    """Close a connection that a thread may be waiting on: that ends its wait."""
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
