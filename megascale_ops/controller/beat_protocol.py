# SPDX-License-Identifier: Apache-2.0
"""The first protocol of every connection: heartbeats are answered in place, everything else is aiohttp's.

A heartbeat is small, comes 1,536 times a second, and is answered without waiting for anything. aiohttp makes a task, a
request, a route and a response of it, which costs more than to judge it. So a request that is a heartbeat in the
plainest form HTTP/1.1 knows (POST, a length, nothing that changes how it is to be read) is cut out of the bytes here
and handed over as headers and body. At the first request that is anything else, or that is not understood, the
connection and the bytes at hand go to aiohttp for good, which takes or refuses it as ever: this file refuses nothing.

Agents send the same head each time but for its length, so a head is understood once and remembered.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

_START = b"POST /v1/heartbeat HTTP/1.1\r\n"
_END = b"\r\n\r\n"
# 2 KB: an agent's head has 200 bytes and a token; a longer one is aiohttp's to take or to refuse.
_MOST_HEAD_BYTES = 2048
_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}):[ \t]*([\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)?[ \t]*")
# A request with one of these is read, answered or ended in a way that is not the plainest.
_NOT_PLAIN = frozenset({"Connection", "Content-Encoding", "Expect", "Te", "Trailer", "Transfer-Encoding", "Upgrade"})
_DIGITS = re.compile(r"[0-9]{1,9}")
# 1,024: the heads of one cluster differ by their Content-Length only, a few hundred numbers; at most 2 MB are kept.
_HEADS_KEPT = 1024
_REASONS = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    409: b"Conflict",
    500: b"Internal Server Error",
}


class Head(NamedTuple):
    """What a plain heartbeat's head says."""

    headers: Mapping[str, str]  # names as in "Content-Length"
    length: int  # bytes of the body


# Headers and body of a heartbeat in, status and JSON out.
Beat = Callable[[Mapping[str, str], bytes], tuple[int, bytes]]


@lru_cache(maxsize=_HEADS_KEPT)
def plain_head(head: bytes) -> Head | None:
    """Return what a head says, without its empty line; None when it is not a heartbeat in the plainest form."""
    first, *lines = head.split(b"\r\n")
    if first + b"\r\n" != _START:
        return None
    headers: dict[str, str] = {}
    for line in lines:
        matched = _LINE.fullmatch(line)
        if matched is None:
            return None
        name = matched[1].decode("ascii").title()
        if name in headers:  # which of the two holds is not for us to say
            return None
        headers[name] = (matched[2] or b"").decode("ascii")
    length = headers.get("Content-Length", "")
    if not _DIGITS.fullmatch(length) or "Host" not in headers or not _NOT_PLAIN.isdisjoint(headers):
        return None
    return Head(headers, int(length))


class BeatProtocol(asyncio.Protocol):
    """One connection, for as long as only plain heartbeats come in.

    Args:
        beat: answers a heartbeat; it never raises.
        others: makes the protocol that takes everything else.
        most_bytes: of a body; a longer one is for ``others`` to refuse.
        idle_s: a connection on which nothing was said for so long is closed.
        open_: the connections that are ours, for who ends the server.
    """

    def __init__(
        self,
        beat: Beat,
        others: Callable[[], asyncio.Protocol],
        *,
        most_bytes: int,
        idle_s: float,
        open_: "set[BeatProtocol]",
    ) -> None:
        self._beat = beat
        self._others = others
        self._most_bytes = most_bytes
        self._idle_s = idle_s
        self._open = open_
        self._events = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._held = bytearray()  # the beginning of a request whose end has not come
        self._whole = 0  # bytes it has when its end has come; 0: not known yet
        self._is_clogged = False  # the other side does not read its answers
        self._heard_s = 0.0
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to listen."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._open.add(self)
        self._heard_s = self._events.time()
        self._idle = self._events.call_later(self._idle_s, self._look_at_silence)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  asyncio's signature
        """Forget the connection."""
        self._let_go()
        self._transport = None

    def pause_writing(self) -> None:
        """Read no more: who does not take its answers is not asked for more questions."""
        self._is_clogged = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on with what was held, then read on."""
        self._is_clogged = False
        if self._transport is not None:
            self._transport.resume_reading()
            self.data_received(b"")

    def eof_received(self) -> bool:
        """The other side has said all: close, as aiohttp does."""
        return False

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Answer every heartbeat that is complete; keep the beginning of one, hand anything else over."""
        self._heard_s = self._events.time()
        if self._held:
            self._held += data
            if len(self._held) < self._whole:  # a body that comes byte by byte is not looked at for each of them
                return
            data = bytes(self._held)
        self._whole = 0
        at = 0  # where the next request begins
        while at < len(data) and not self._is_clogged and self._transport is not None:
            end = data.find(_END, at, at + _MOST_HEAD_BYTES)
            if end < 0:
                if not _may_begin_a_beat(data, at):
                    self._hand_over(data[at:])
                    return
                break
            head = plain_head(data[at:end])
            if head is None or head.length > self._most_bytes:
                self._hand_over(data[at:])
                return
            body_at = end + len(_END)
            body_end = body_at + head.length
            if body_end > len(data):
                self._whole = body_end - at
                break
            self._answer(*self._beat(head.headers, data[body_at:body_end]))
            at = body_end
        self._held = bytearray(data[at:])

    def _answer(self, status: int, body: bytes) -> None:
        assert self._transport is not None
        self._transport.write(
            b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (status, _REASONS[status], len(body), body)
        )

    def _hand_over(self, data: bytes) -> None:
        """Give the connection away, from the first byte of a request on."""
        transport = self._transport
        assert transport is not None
        self._let_go()
        self._held, self._transport = bytearray(), None
        other = self._others()
        transport.set_protocol(other)
        other.connection_made(transport)
        other.data_received(data)

    def _look_at_silence(self) -> None:
        """Close a connection on which nobody speaks; look again when it could be old enough."""
        left_s = self._heard_s + self._idle_s - self._events.time()
        if left_s > 0:
            self._idle = self._events.call_later(left_s, self._look_at_silence)
        else:
            self.close()

    def _let_go(self) -> None:
        self._open.discard(self)
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


def _may_begin_a_beat(data: bytes, at: int) -> bool:
    """Return whether what comes may still turn out to be a plain heartbeat."""
    start = data[at : at + len(_START)]
    return _START.startswith(start) and len(data) - at < _MOST_HEAD_BYTES
