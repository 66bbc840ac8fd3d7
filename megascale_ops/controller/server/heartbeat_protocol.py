# SPDX-License-Identifier: Apache-2.0
"""The first protocol of every connection: heartbeats are answered in place, everything else is aiohttp's.

A heartbeat is small, comes 1,536 times a second, and is answered without waiting for anything. aiohttp makes a task, a
request, a route and a response of it, which costs more than to judge it. So a request that is a heartbeat in the
plainest form HTTP/1.1 knows (POST, a length, nothing that changes how it is to be read) is cut out of the bytes here
and handed over as headers and body. At the first request that is anything else, once its head is whole, the connection
and the bytes at hand go to aiohttp for good: it takes or refuses one request, and the connection ends with the answer.
So every head of every connection comes through here, and has its deadline here; what is no request is refused here.

Agents send the same head each time but for its length, so a head is understood once and remembered.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import msgspec

from megascale_ops.controller.server.heads import MOST_HEAD_BYTES, may_begin_a_request, why_no_request
from megascale_ops.schema.messages import ErrorReply

_START = b"POST /v1/heartbeat HTTP/1.1\r\n"
_END = b"\r\n\r\n"
# 2 KB: an agent's head has 200 bytes and a token; a longer one is aiohttp's to take or to refuse.
_MOST_PLAIN_BYTES = 2048
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
    408: b"Request Timeout",
    409: b"Conflict",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
}


class Patience(NamedTuple):
    """How long a connection may be silent, seconds."""

    first_byte_s: float = 5.0  # whoever connects has something to say; over the longest way it is there in one
    request_s: float = 20.0  # from a request's first byte to its last: 256 KiB at 13 KB a second
    idle_s: float = 75.0  # between two requests; the slowest agents speak every 8 s


class Head(NamedTuple):
    """The head of a plain heartbeat."""

    headers: Mapping[str, str]  # names as in "Content-Length"
    length: int  # bytes of the body


# Headers and body of a heartbeat in, status and JSON out.
Beat = Callable[[Mapping[str, str], bytes], tuple[int, bytes]]


@lru_cache(maxsize=_HEADS_KEPT)
def plain_head(head: bytes) -> Head | None:
    """Return the parsed head, without its empty line; None when it is not a heartbeat in the plainest form."""
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
        beat: answers a heartbeat's request; it never raises.
        others: makes the protocol that takes everything else.
        most_bytes: of a body; a longer one is for ``others`` to refuse.
        patience: a connection that is silent for so long is closed.
        open_: the connections that are ours, for the end of the server.
    """

    def __init__(
        self,
        beat: Beat,
        others: Callable[[], asyncio.Protocol],
        *,
        most_bytes: int,
        patience: Patience,
        open_: "set[BeatProtocol]",
    ) -> None:
        self._beat = beat
        self._others = others
        self._most_bytes = most_bytes
        self._patience = patience
        self._open = open_
        self._events = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._held = bytearray()  # the beginning of a request whose end has not come
        self._whole = 0  # bytes it has when its end has come; 0: not known yet
        self._head_is_cut = False  # what is held has no empty line in it
        self._is_clogged = False  # the other side does not read its answers
        self.heard_s = 0.0  # when the present request began to come, or the last one ended
        self.has_spoken = False  # a heartbeat was answered
        self._limit_s = patience.first_byte_s  # how long after that more must have come
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to listen."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._open.add(self)
        self._wait(self._patience.first_byte_s)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  asyncio's signature
        """Forget the connection."""
        self._let_go()
        self._transport = None

    def pause_writing(self) -> None:
        """Read no more: a client that does not take its answers gets no more requests read."""
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

    def abort(self) -> None:
        """End the connection at once, whatever is still to be sent: its descriptor is wanted."""
        if self._transport is not None:
            self._open.discard(self)
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Answer every heartbeat that is complete; keep the beginning of a request, hand anything else over."""
        if self._held:
            seen = len(self._held)
            self._held += data
            # What comes byte by byte is not looked at for each of them.
            if self._whole and len(self._held) < self._whole:
                return
            is_cut = self._head_is_cut and self._held.find(_END, max(0, seen - 3)) < 0
            if is_cut and len(self._held) < MOST_HEAD_BYTES:
                return
            data = bytes(self._held)
        self._whole, self._head_is_cut = 0, False
        at = 0  # where the next request begins
        while at < len(data) and not self._is_clogged and self._transport is not None:
            end = data.find(_END, at, at + MOST_HEAD_BYTES)
            if end < 0:
                if not self._may_go_on(data, at):
                    return
                self._head_is_cut = True
                break
            head = plain_head(data[at:end]) if end - at <= _MOST_PLAIN_BYTES else None
            if head is None or head.length > self._most_bytes:
                self._refuse_or_hand_over(data, at, end)
                return
            body_at = end + len(_END)
            body_end = body_at + head.length
            if body_end > len(data):
                self._whole = body_end - at
                break
            self._answer(*self._beat(head.headers, data[body_at:body_end]))
            self.has_spoken = True
            at = body_end
        is_new = bool(at) or not self._held
        self._held = bytearray(data[at:])
        if is_new and self._transport is not None:
            self._wait(self._patience.request_s if self._held else self._patience.idle_s)

    def _may_go_on(self, data: bytes, at: int) -> bool:
        """Refuse what has no end or is no request; return whether the rest of it may be waited for."""
        if len(data) - at >= MOST_HEAD_BYTES:
            self._refuse(431, f"the head of this request is too long: at most {MOST_HEAD_BYTES} bytes are taken")
        elif not may_begin_a_request(data[at : at + 32]):
            self._refuse(400, "this is no request: METHOD PATH HTTP/1.1 was expected")
        else:
            return True
        return False

    def _refuse_or_hand_over(self, data: bytes, at: int, end: int) -> None:
        why = why_no_request(data[at:end])
        if why:
            self._refuse(400, why)
        else:
            self._hand_over(data[at:])

    def _refuse(self, status: int, sentence: str) -> None:
        """Answer what can't be taken, and end the connection: what follows can't be separated from it."""
        self._answer(status, encode_error(sentence), b"Connection: close\r\n")
        self._held = bytearray()
        self.close()

    def _answer(self, status: int, body: bytes, more: bytes = b"") -> None:
        assert self._transport is not None
        self._transport.write(
            b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n%b"
            % (status, _REASONS[status], len(body), more, body)
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

    def _wait(self, limit_s: float) -> None:
        """From now on more must come within so many seconds."""
        self.heard_s = self._events.time()
        is_sooner = limit_s < self._limit_s or self._timer is None
        self._limit_s = limit_s
        if is_sooner:  # a timer that comes too early looks again: a heartbeat a second sets none
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._events.call_later(limit_s, self._look_at_silence)

    def _look_at_silence(self) -> None:
        """Close a connection that is too slow; look again when it could be."""
        left_s = self.heard_s + self._limit_s - self._events.time()
        if left_s > 0:
            self._timer = self._events.call_later(left_s, self._look_at_silence)
        elif self._held and not self._is_clogged:
            self._refuse(408, f"this request did not end within {self._patience.request_s:g} s")
        else:
            self.close()

    def _let_go(self) -> None:
        self._open.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def encode_error(sentence: str) -> bytes:
    """Return the body of an answer that refuses."""
    return msgspec.json.encode(ErrorReply(sentence))
