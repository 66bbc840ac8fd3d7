# SPDX-License-Identifier: Apache-2.0
"""Heartbeats go the short way, everything else the long one, and nobody can tell by the answers."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from megascale_agents.uplink.http_link import LightLink

from megascale_ops.controller.server import heartbeat_protocol
from megascale_ops.controller.server.api import Api
from megascale_ops.controller.server.heartbeat_protocol import BeatProtocol, Patience, plain_head
from megascale_ops.controller.server.listen import listening
from megascale_ops.schema.messages import MAX_BODY_BYTES, Evidence, Heartbeat
from tests.fakes.certificates import make_certificate, serving_with
from tests.fakes.served_controller import Served, serve_controller

HEAD = b"POST /v1/heartbeat HTTP/1.1\r\nHost: here\r\n"


def request(body: bytes, *lines: bytes) -> bytes:
    """Return a plain heartbeat as it comes over the wire."""
    return HEAD + b"".join(line + b"\r\n" for line in (*lines, b"Content-Length: %d" % len(body))) + b"\r\n" + body


class Wire(asyncio.Transport):
    """The other side of a connection: keeps what was written and done."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = asyncio.Event()
        self.reading = True
        self.protocol: asyncio.BaseProtocol | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Keep it."""
        self.written += bytes(data)

    def close(self) -> None:
        """Say so."""
        self.closed.set()

    def pause_reading(self) -> None:
        """Say so."""
        self.reading = False

    def resume_reading(self) -> None:
        """Say so."""
        self.reading = True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Say so."""
        self.protocol = protocol


class Other(asyncio.Protocol):
    """Takes what is handed over."""

    def __init__(self) -> None:
        self.taken = b""

    def data_received(self, data: bytes) -> None:
        """Keep it."""
        self.taken += data


class Connection:
    """A connection with its ends in hand."""

    def __init__(self, patience: Patience = Patience()) -> None:  # noqa: B008  frozen
        self.beats: list[bytes] = []
        self.other = Other()
        self.wire = Wire()
        self.open: set[BeatProtocol] = set()
        self.protocol = BeatProtocol(
            self._beat, lambda: self.other, most_bytes=100, patience=patience, open_=self.open
        )  # fmt: skip
        self.protocol.connection_made(self.wire)

    def _beat(self, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        assert headers["Host"] == "here"
        self.beats.append(body)
        return 200, b"<%b>" % body


def _answer(body: bytes) -> bytes:
    body = b"<%b>" % body
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@given(
    st.lists(st.binary(max_size=40), max_size=5),
    st.lists(st.integers(0, 400), max_size=12),
    st.sampled_from([b"", b"GET / HTTP/1.1\r\n\r\n", b"POST /v1/heartbeats HTTP/1.1\r\nHost: x\r\n\r\n\x00\x01"]),
)
def test_however_the_bytes_are_cut_every_heartbeat_is_answered_once_and_in_order(
    bodies: list[bytes], cuts: list[int], rest: bytes
) -> None:
    """Pieces of any size, several requests in one, then something else: that goes on whole, and to somebody else."""
    stream = b"".join(request(body) for body in bodies) + rest

    async def go() -> Connection:
        connection = Connection()
        ends = [*sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
        at = 0
        for end in ends:
            taker = connection.other if connection.wire.protocol else connection.protocol
            taker.data_received(stream[at:end])
            at = end
        connection.protocol.connection_lost(None)
        return connection

    connection = asyncio.run(go())

    assert connection.beats == bodies
    assert connection.wire.written == b"".join(_answer(body) for body in bodies)
    assert connection.other.taken == rest
    assert not connection.open


@pytest.mark.parametrize(
    "odd",
    [
        b"POST /v1/heartbeat HTTP/1.0\r\nHost: here\r\nContent-Length: 2",
        b"PUT /v1/heartbeat HTTP/1.1\r\nHost: here\r\nContent-Length: 2",
        HEAD.rstrip(),  # no length
        HEAD + b"Content-Length: 2\r\nContent-Length: 2",
        HEAD + b"Content-Length: 2\r\ncontent-length: 3",
        HEAD + b"Content-Length: -2",
        HEAD + b"Content-Length: 0x2",
        HEAD + b"Content-Length: \xd9\xa2",  # a digit, but not of ASCII
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked",
        HEAD + b"Content-Length: 2\r\nContent-Encoding: gzip",
        HEAD + b"Content-Length: 2\r\nExpect: 100-continue",
        HEAD + b"Content-Length: 2\r\nConnection: close",
        HEAD + b"Content-Length: 2\r\nUpgrade: websocket",
        HEAD + b"Content-Length: 2\r\nX-Folded: a\r\n b",
        HEAD + b"Content-Length : 2",
        HEAD + b"Content-Length: 2\r\nX: \x00",
        HEAD + b"Content-Length: 2\r\nX: a\nY: b",
        HEAD + b"Content-Length: 2\r\nnonsense",
        b"POST /v1/heartbeat HTTP/1.1\r\nContent-Length: 2",  # no host
        b"POST /v1/heartbeat?x HTTP/1.1\r\nHost: here\r\nContent-Length: 2",
    ],
)
def test_what_is_not_in_the_plainest_form_is_left_to_aiohttp(odd: bytes) -> None:
    """Whatever changes how a request is read, and whatever is not understood: no judgement of ours."""
    assert plain_head(odd) is None


def test_a_plain_head_says_its_headers_and_its_length() -> None:
    """Names in any case, space around values dropped."""
    head = plain_head(HEAD + b"authorization:\t Bearer x \r\ncontent-length: 17\r\nX-Empty:")

    assert head is not None
    assert head.length == 17
    assert head.headers == {
        "Host": "here", "Authorization": "Bearer x", "Content-Length": "17", "X-Empty": "",
    }  # fmt: skip


async def test_a_body_too_long_and_a_long_head_are_left_to_aiohttp() -> None:
    """Before a byte of the body is kept."""
    for bytes_ in (request(b"x" * 101)[:-50], HEAD + b"X: " + b"y" * 9000 + b"\r\n\r\n"):
        connection = Connection()
        connection.protocol.data_received(bytes_)
        assert connection.other.taken == bytes_
        assert connection.beats == []


@pytest.mark.parametrize(
    ("odd", "status"),
    [
        (b"\x16\x03\x01\x02\x00", 400),  # TLS
        (b"hello\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: [\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/9\r\n\r\n", 400),
        (b"GET /\x1b[31m HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 20_000, 431),
    ],
)
@pytest.mark.parametrize("piece", [1, 100_000])
async def test_what_is_no_request_is_refused_in_one_sentence(odd: bytes, status: int, piece: int) -> None:
    """However it is cut, and the connection ends."""
    connection = Connection()

    for at in range(0, len(odd), piece):
        if not connection.wire.closed.is_set():
            connection.protocol.data_received(odd[at : at + piece])

    assert connection.wire.written.startswith(b"HTTP/1.1 %d " % status)
    assert connection.wire.written.count(b'{"error":"') == 1
    assert connection.wire.closed.is_set()
    assert connection.other.taken == b""
    connection.protocol.connection_lost(None)


async def test_a_body_that_comes_byte_by_byte_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a slow sender of 256 KiB would have the controller copy gigabytes."""
    seen: list[bytes] = []
    monkeypatch.setattr(heartbeat_protocol, "plain_head", lambda head: (seen.append(head), plain_head(head))[1])
    connection = Connection()
    whole = request(b"x" * 90)

    connection.protocol.data_received(whole[:-90])
    for byte in whole[-90:]:
        connection.protocol.data_received(bytes([byte]))

    assert connection.beats == [b"x" * 90]
    assert len(seen) == 2  # when the head had come, and when all had
    connection.protocol.connection_lost(None)


async def test_who_does_not_read_its_answers_is_not_read() -> None:
    """Nothing piles up on either side, and nothing is lost when it goes on."""
    connection = Connection()
    connection.protocol.pause_writing()
    connection.protocol.data_received(request(b"1") + request(b"2"))
    before = list(connection.beats)

    connection.protocol.resume_writing()

    assert before == []
    assert connection.beats == [b"1", b"2"]
    assert connection.wire.reading
    connection.protocol.connection_lost(None)


@pytest.mark.parametrize("said", [b"", HEAD, b"GET / HTTP/1.1\r\n", request(b"12345")[:-1]])
async def test_bytes_that_trickle_extend_no_deadline(said: bytes) -> None:
    """From its first byte a request has its time, whoever it is for; nothing at all has less."""
    connection = Connection(Patience(first_byte_s=0.05, request_s=0.05, idle_s=60.0))
    began_s = connection.protocol.heard_s

    for byte in said[:1]:
        connection.protocol.data_received(bytes([byte]))
        began_s = connection.protocol.heard_s
    for byte in said[1:]:
        connection.protocol.data_received(bytes([byte]))
    assert connection.protocol.heard_s == began_s
    async with asyncio.timeout(30):
        await connection.wire.closed.wait()

    assert (b"HTTP/1.1 408 " in connection.wire.written) == bool(said)
    connection.protocol.connection_lost(None)


async def test_a_slow_but_honest_request_is_answered_and_an_idle_agent_stays() -> None:
    """The control: pieces with pauses, within the time that a request has."""
    connection = Connection(Patience(first_byte_s=0.05, request_s=60.0, idle_s=60.0))

    for piece in (HEAD, b"Content-Le", b"ngth: 2\r\n\r", b"\n1", b"2"):
        connection.protocol.data_received(piece)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.wire.closed.wait(), 0.03)

    assert connection.beats == [b"12"]
    connection.protocol.connection_lost(None)


async def test_a_connection_on_which_nobody_speaks_is_closed() -> None:
    """Also one that began a request and went away."""
    connection = Connection(Patience(0.01, 0.01, 0.01))
    connection.protocol.data_received(HEAD)

    async with asyncio.timeout(5):
        await connection.wire.closed.wait()

    connection.protocol.connection_lost(None)
    assert not connection.open


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A controller with a token."""
    async with serve_controller(tmp_path, "secret") as one:
        yield one


async def _raw(served: Served, bytes_: bytes) -> tuple[bytes, dict[bytes, bytes], bytes]:
    """Send bytes, return status line, headers and body of the answer."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(5):
            writer.write(bytes_)
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).rstrip().split(b"\r\n")
            headers = dict(line.lower().split(b": ", 1) for line in lines)
            return first, headers, await reader.readexactly(int(headers[b"content-length"]))
    finally:
        writer.close()
        await writer.wait_closed()


def _heartbeat(seq: int, version: int = 1) -> bytes:
    return msgspec.json.encode(Heartbeat(node="a", agent_id="x", seq=seq, mono_s=1.0, wall_s=1.0, version=version))


@pytest.mark.parametrize(
    ("lines", "body", "status"),
    [
        ((b"Authorization: Bearer secret",), _heartbeat(1), 200),
        ((b"Authorization: Bearer secret",), b"{", 400),
        ((b"Authorization: Bearer secret",), _heartbeat(1, version=9), 400),
        ((b"Authorization: Bearer secret", b"Origin: http://evil.example"), _heartbeat(1), 403),
        ((b"Authorization: Bearer wrong",), _heartbeat(1), 401),
        ((), _heartbeat(1), 401),
        ((b"Authorization: Bearer secret",), b" " * (MAX_BODY_BYTES + 1), 413),
    ],
)
async def test_both_ways_answer_alike(
    served: Served, monkeypatch: pytest.MonkeyPatch, lines: tuple[bytes, ...], body: bytes, status: int
) -> None:
    """Status, type and words are the same, and what is refused is counted the same, whichever way a heartbeat took."""
    short: list[bytes] = []
    beat = BeatProtocol._answer
    monkeypatch.setattr(BeatProtocol, "_answer", lambda self, *told: (short.append(told[1]), beat(self, *told)))
    plain = request(body, *lines)

    first = await _raw(served, plain)
    counted = dict(served.loop.rejected)
    second = await _raw(served, plain.replace(b"\r\nContent-Length", b"\r\nConnection: keep-alive\r\nContent-Length"))

    assert first[0].split()[1] == b"%d" % status
    assert len(short) == (status != 413)
    assert first[0] == second[0]
    assert first[1][b"content-type"] == second[1][b"content-type"]
    if status == 200:
        assert (served.loop.heartbeats, served.loop.rejected["stale"]) == (1, 1)  # the same one again is stale
    else:
        assert first[2] == second[2]
        assert dict(served.loop.rejected) == {reason: 2 * count for reason, count in counted.items()}


async def test_a_bug_of_ours_is_500_and_logged(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next heartbeat is answered on the same connection."""
    monkeypatch.setattr(served.loop, "heartbeat", lambda _beat, _job: 1 // 0)

    answer = await _raw(served, request(_heartbeat(1), b"Authorization: Bearer secret"))

    assert answer[0] == b"HTTP/1.1 500 Internal Server Error"
    assert b"its log has the details" in answer[2]
    assert "ZeroDivisionError" in caplog.text


async def test_an_agents_heartbeats_go_the_short_way_also_after_it_sent_evidence(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evidence goes the long way and ends its connection: a cluster's heartbeats stay cheap after an incident."""
    short: list[bytes] = []
    beat = Api.beat
    monkeypatch.setattr(Api, "beat", lambda self, headers, body: (short.append(body), beat(self, headers, body))[1])
    monkeypatch.setattr(served.loop, "evidence", lambda _evidence: None)
    async with LightLink(served.url, "secret") as link:
        await link.heartbeat(Heartbeat(node="a", agent_id="x", seq=1, mono_s=1.0, wall_s=1.0))
        await link.evidence(Evidence("a", "x", "job-1", "o"))
        await link.heartbeat(Heartbeat(node="a", agent_id="x", seq=2, mono_s=2.0, wall_s=2.0))

    assert served.loop.heartbeats == 2
    assert len(short) == 2


async def test_behind_tls_too_a_connection_begins_the_short_way_and_goes_on_the_long_one(tmp_path: Path) -> None:
    """A heartbeat, then a question for somebody else's handler, on one connection."""
    certificate = make_certificate(tmp_path)
    trusted = ssl.create_default_context(cafile=certificate)
    async with serve_controller(tmp_path, tls=serving_with(certificate)) as served:
        port = int(served.url.rpartition(":")[2])
        beat = request(_heartbeat(1)).replace(b"Host: here", b"Host: 127.0.0.1")
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted)
            writer.write(beat + b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            answers = await reader.read()
            writer.close()
            await writer.wait_closed()

    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert b'"status":"ok"' in answers
    assert served.loop.heartbeats == 1


async def test_where_nobody_can_listen_what_was_begun_is_ended(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket is gone before the server is made: aiohttp's part is cleaned up, and the error is told."""
    ended: list[object] = []
    cleanup = web.AppRunner.cleanup
    monkeypatch.setattr(web.AppRunner, "cleanup", lambda self: (ended.append(self), cleanup(self))[1])
    listener = socket.create_server(("127.0.0.1", 0))
    listener.close()

    with pytest.raises(OSError, match="Bad file descriptor"):
        async with listening(Api(served.loop, served.store, ""), listener):
            pytest.fail("nobody listens")

    assert len(ended) == 1
