# SPDX-License-Identifier: Apache-2.0
"""How the controller is asked: over connections kept open, with a deadline, and with one sentence for every error.

There may be several controllers of which one leads: of the addresses given, the one that answered last is asked. Where
it does not answer, or says that it is a standby, the others are, each once; the leader that it names first. Only
addresses that were given are asked, so that a token goes nowhere else.

Every request may be repeated (heartbeats carry a sequence number, joins a join id, orders are remembered by id), so a
request whose kept-open connection was closed in the meantime is sent once more at once. Anything beyond that is the
caller's patience.
"""

import asyncio
import errno
import logging
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self, TypeVar
from urllib.parse import urlsplit

import msgspec

from megascale_ops.errors import ControllerUnreachableError, RefusedError, StrangerError, UsageError
from megascale_ops.foreign import UNREADABLE
from megascale_ops.link.answers import TAKEN, Reply, is_marked, is_strange, proxy_alone, speaks_otherwise, stranger
from megascale_ops.link.listeners import first_words
from megascale_ops.link.tls import client_tls
from megascale_ops.link.token_files import FileToken, read_token_file
from megascale_ops.schema.messages import ErrorReply
from megascale_ops.schema.ranges import encode

if TYPE_CHECKING:
    import aiohttp  # 0.2 s, since it loads certificates: an agent, with its own requests, does not need it

T = TypeVar("T")

_UNAUTHORISED = 401
_GOOD = range(200, 300)
# An answer without any field: {}
_EMPTY_BYTES = 2
# 1 s: three tries of a port that may be across a network.
HEAR_S = 1.0
_AWAY = (502, 503, 504)  # a proxy's status for a controller that is not there
# 3 fields show where it went wrong; a box full of noise has dozens of them.
_FIELDS_TOLD = 3
# Network errors of the kernel are quoted as they are; a library's own are its classes and the addresses it tried.
_OF_THE_NETWORK = frozenset(
    {
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.ETIMEDOUT,
    }
)
log = logging.getLogger(__name__)


def reason_of(error: Exception) -> str:
    """Return why nothing was reached, in words that are the same for every client."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if number in _OF_THE_NETWORK else str(error)


class Connection:
    """One controller, asked over a pool of connections that stay open.

    Args:
        url: ``http://HOST:PORT`` or ``https://HOST:PORT``; of several controllers all, between commas.
        token: sent as bearer token when given; it appears in no message and no log. One that was read from a file is
            read again when a controller refuses it: it may have been changed there.
        timeout_s: for connecting and for an answer; a long poll waits ``wait_s`` longer.
        ca_file: certificate authority to trust instead of the system's, for https; else see ``link.tls``.

    Raises:
        UsageError: the address or the certificate file can't be used.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 5.0, ca_file: Path | None = None) -> None:
        self.urls = addresses(url)
        self._at = 0
        self._epoch = 0  # the highest number of a leader that was heard
        self._headers = {"Content-Type": "application/json"}
        self._token = token
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout_s = timeout_s
        self.mended = 0  # values of messages that were beyond what they can be, and were changed
        self._session: aiohttp.ClientSession | None = None
        is_secure = any(one.startswith("https:") for one in self.urls)
        self._client_tls = client_tls(ca_file) if is_secure or ca_file else None
        self._tls = self._client_tls.context if self._client_tls is not None else None

    @property
    def url(self) -> str:
        """The address that is asked."""
        return self.urls[self._at]

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def _ask(
        self,
        method: str,
        path: str,
        reply_type: type[T],
        *,
        query: dict[str, str] | None = None,
        body: msgspec.Struct | None = None,
        wait_s: float = 0.0,
    ) -> T:
        data = None if body is None else self._in_range(path, body)
        deadline_s = time.monotonic() + self._timeout_s + wait_s
        tried: set[str] = set()
        while True:
            asked = self.url
            tried.add(asked)
            try:
                return await self._ask_this(method, path, reply_type, query, data, wait_s)
            except ControllerUnreachableError as error:
                if self.url == asked:  # no other thread has found a better one meanwhile
                    self._turn_from(tried, error)
                if self.url in tried or time.monotonic() >= deadline_s:
                    raise
                log.debug("%s; asking %s instead of %s", error, self.url, asked)

    def _turn_from(self, tried: set[str], error: ControllerUnreachableError) -> None:
        """Choose the address for the next request: the leader that was named, else one that was not tried yet."""
        count = len(self.urls)
        named = [number for number, url in enumerate(self.urls) if url == getattr(error, "leader", "") != self.url]
        others = [(self._at + step) % count for step in range(1, count)]
        fresh = [number for number in (*named, *others) if self.urls[number] not in tried]
        self._at = next(iter((*fresh, *named, *others)), self._at)

    def _newest(self, epoch: int) -> None:
        """Take note of which leader has answered.

        Raises:
            ControllerUnreachableError: it was replaced since: what it says is not taken.
        """
        if epoch and epoch < self._epoch:
            asked = self.url
            self._turn_from({asked}, ControllerUnreachableError())
            raise ControllerUnreachableError(
                f"the controller at {asked} leads no more: it is number {epoch}, and number {self._epoch} was heard"
            )
        self._epoch = max(self._epoch, epoch)

    async def _ask_this(
        self,
        method: str,
        path: str,
        reply_type: type[T],
        query: dict[str, str] | None,
        data: bytes | None,
        wait_s: float,
    ) -> T:
        """Ask the address that is asked now."""
        try:
            try:
                reply = await self._send(method, path, query, data, wait_s)
            except (ConnectionResetError, BrokenPipeError):
                reply = await self._send(method, path, query, data, wait_s)
            if reply.status == _UNAUTHORISED and self._has_new_token():
                reply = await self._send(method, path, query, data, wait_s)
        except TimeoutError as error:
            patience_s = self._timeout_s + wait_s
            raise ControllerUnreachableError(
                f"no answer from the controller at {self.url} in {patience_s:g} s{_mute(error)}"
            ) from error
        except OSError as error:
            if self._client_tls is not None:
                self._client_tls.refresh()
            raise await self._away(self.url, error) from error
        if reply.status not in _GOOD:
            self._refuse(path, reply)
        try:
            found = msgspec.json.decode(reply.body, type=reply_type)
        except UNREADABLE as error:
            raise StrangerError(stranger(self.url, path, reply, str(error))) from error
        known: tuple[str, ...] = getattr(reply_type, "__struct_fields__", ())
        if known and len(reply.body) > _EMPTY_BYTES and found == _default(reply_type) and is_strange(reply, known):
            raise StrangerError(stranger(self.url, path, reply, "none of the fields of an answer is there"))
        return found

    async def _away(self, url: str, error: OSError) -> ControllerUnreachableError:
        """Return why there was no answer in HTTP: no program listens, or one that speaks otherwise."""
        said = None if is_of_the_network(error) else await self._hear(url)
        if said and not (said.startswith(b"HTTP/") and url.startswith("http:")):
            return StrangerError(speaks_otherwise(url, said))
        reason = "what listens there takes the connection and closes it" if said == b"" else reason_of(error)
        return ControllerUnreachableError(f"no controller answers at {url}: {reason}")

    async def _hear(self, url: str) -> bytes | None:
        """Return what the port says first, see ``first_words``."""
        return await asyncio.to_thread(first_words, url, min(HEAR_S, self._timeout_s))

    def _has_new_token(self) -> bool:
        """Read the token's file again; return whether it holds another one."""
        if not isinstance(self._token, FileToken):
            return False
        try:
            token = read_token_file(self._token.path)
        except UsageError as error:
            log.warning("the token that was refused can't be read again: %s", error)
            return False
        if token == self._token:
            return False
        log.info("the token in %s has changed: the new one is used", token.path)
        self._token = token
        self._headers = {**self._headers, "Authorization": f"Bearer {token}"}
        return True

    def _in_range(self, path: str, body: msgspec.Struct) -> bytes:
        """Return a message that is not refused for one number: it may come from memory that was written over."""
        data, changed = encode(body)
        if changed:
            self.mended += len(changed)
            told = ", ".join(changed[:_FIELDS_TOLD]) + (", ..." if len(changed) > _FIELDS_TOLD else "")
            log.warning("what goes to %s had values that can't be, and was brought into range: %s", path, told)
        return data

    def _refuse(self, path: str, reply: Reply) -> NoReturn:
        """Raise what an answer other than a good one means."""
        try:
            told = msgspec.json.decode(reply.body, type=ErrorReply)
        except UNREADABLE as error:
            if reply.status in _AWAY:
                raise ControllerUnreachableError(
                    f"no controller answers at {self.url}: {proxy_alone(reply)}"
                ) from error
            raise StrangerError(stranger(self.url, path, reply)) from error
        if reply.status in _AWAY:
            raise ControllerUnreachableError(f"the controller at {self.url} has no time: {told.error}", told.leader)
        # A controller that is older than the mark has none, and neither has another program with a field of that name.
        unsigned = "" if is_marked(reply) else f" (HTTP {reply.status} from {self.url}: is a controller there?)"
        raise RefusedError(f"{told.error}{unsigned}")

    def _opened(self) -> "aiohttp.ClientSession":
        import aiohttp

        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, ssl=self._tls or True)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    async def _send(
        self, method: str, path: str, query: dict[str, str] | None, data: bytes | None, wait_s: float
    ) -> Reply:
        """Return a response; raises OSError, ConnectionResetError where asking again is worth it."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=self._timeout_s + wait_s, connect=self._timeout_s)
        try:
            async with self._opened().request(
                method,
                self.url + path,
                params=query,
                data=data,
                headers=self._headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                return await reply_of(response)
        except aiohttp.ClientError as error:
            if isinstance(error, OSError):
                raise
            kind = ConnectionResetError if isinstance(error, aiohttp.ServerDisconnectedError) else ConnectionError
            raise kind(str(error)) from error


async def reply_of(response: "aiohttp.ClientResponse") -> Reply:
    """Return what came, whole."""
    return Reply(
        response.status, await response.read(), {name.lower(): value for name, value in response.headers.items()}
    )


def is_of_the_network(error: OSError) -> bool:
    """Return whether the kernel, a name server or a certificate says why nothing was reached."""
    cause: BaseException | None = error
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) else None
        if isinstance(cause, socket.gaierror) or hasattr(cause, "verify_code"):
            return True
        if number in _OF_THE_NETWORK and number != errno.ECONNRESET:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _mute(error: TimeoutError) -> str:
    """Return what is known of a port that says nothing."""
    if str(error) != TAKEN:
        return ""
    return (
        ": what listens there takes connections and says nothing (another program, or a controller that stands still)"
    )


def _default(kind: type[T]) -> T | None:
    """Return an answer without any field, None where it needs one."""
    try:
        return kind()
    except TypeError:
        return None


def addresses(url: str) -> tuple[str, ...]:
    """Return the addresses of controllers that stand between commas, each once.

    Raises:
        UsageError: one of them can't be used.
    """
    given = [one.strip() for one in url.split(",")]
    several = f" in {url!r}" if len(given) > 1 else ""
    for one in given:
        try:
            parts = urlsplit(one)
            good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port)
        except ValueError:
            good = False
        if not good:
            raise UsageError(f"controller address {one!r}{several} can't be used: it looks like http://HOST:PORT")
    return tuple(dict.fromkeys(one.rstrip("/") for one in given))
