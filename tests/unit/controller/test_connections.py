# SPDX-License-Identifier: Apache-2.0
"""What a connection to the controller may do, and for how long: real sockets against the real server."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from megascale_agents.uplink.http_link import LightLink

from megascale_ops.controller.server import event_loop as event_loops
from megascale_ops.controller.server.api import Api
from megascale_ops.controller.server.connections import MOST_HEAD_BYTES, Connections, Patience
from megascale_ops.controller.server.event_loop import event_loop
from megascale_ops.controller.server.listen import OneLine, listening
from megascale_ops.schema.messages import MAX_BODY_BYTES, ErrorReply, Evidence, Heartbeat
from tests.fakes.certificates import make_certificate, serving_with
from tests.fakes.served_controller import Served, serve_controller

HEAD = b"POST /v1/heartbeat HTTP/1.1\r\nHost: localhost\r\n"
ASK = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
QUICK = Patience(first_byte_s=0.05, request_s=0.05, idle_s=60.0)


def request(body: bytes, *lines: bytes) -> bytes:
    """Return a heartbeat as it comes over the wire."""
    return HEAD + b"".join(line + b"\r\n" for line in (*lines, b"Content-Length: %d" % len(body))) + b"\r\n" + body


def heartbeat(seq: int, version: int = 1) -> bytes:
    """Return a heartbeat's body."""
    return msgspec.json.encode(Heartbeat(node="a", agent_id="x", seq=seq, mono_s=1.0, wall_s=1.0, version=version))


class Wire:
    """The other side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def say(self, data: bytes, piece: int = 1 << 20) -> None:
        """Send bytes in pieces, as far as the server takes them."""
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(data), piece):
                self._writer.write(data[at : at + piece])
                await self._writer.drain()
                await asyncio.sleep(0)

    async def say_until_answered(self, data: bytes, piece: int) -> tuple[int, bytes]:
        """Send bytes in pieces until there is an answer: more would have the system throw the answer away."""
        answer = asyncio.create_task(self.answer())
        for at in range(0, len(data), piece):
            self._writer.write(data[at : at + piece])
            for _ in range(6):  # the server takes the piece, and answers
                await asyncio.sleep(0)
            if answer.done():
                break
        return await answer

    async def answer(self) -> tuple[int, bytes]:
        """Return status and body of the next answer."""
        async with asyncio.timeout(30):
            first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).rstrip().split(b"\r\n")
            headers = dict(line.lower().split(b": ", 1) for line in lines)
            assert headers[b"content-type"].startswith(b"application/json")
            return int(first.split()[1]), await self._reader.readexactly(int(headers[b"content-length"]))

    async def rest(self) -> bytes:
        """Return what comes until the server ends the connection."""
        async with asyncio.timeout(30):
            try:
                return await self._reader.read()
            except ConnectionResetError:  # there was more to read when it ended
                return b""

    async def close(self) -> None:
        """End the connection."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


Connect = Callable[[], Awaitable[Wire]]


@contextlib.asynccontextmanager
async def connecting(url: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[Connect]:
    """Yield what connects to a server; the connections end with the block."""
    wires: list[Wire] = []

    async def connect() -> Wire:
        wires.append(Wire(*await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), ssl=tls)))
        return wires[-1]

    try:
        yield connect
    finally:
        for wire in wires:
            await wire.close()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A controller without a token."""
    async with serve_controller(tmp_path) as one:
        yield one


@pytest.fixture
async def connect(served: Served) -> AsyncIterator[Connect]:
    """What connects to it."""
    async with connecting(served.url) as one:
        yield one


@contextlib.asynccontextmanager
async def impatient(served: Served, patience: Patience) -> AsyncIterator[Connect]:
    """Another port of the same controller, whose patience is short."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with listening(Api(served.loop, served.store, ""), listener, patience=patience), connecting(url) as one:
        yield one


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
async def test_however_the_bytes_are_cut_every_request_is_answered_once_and_in_order(
    served: Served, connect: Connect, piece: int
) -> None:
    """Pieces of any size, several requests in one, another question between heartbeats: on one connection."""
    wire = await connect()

    await wire.say(request(heartbeat(1)) + request(b"{") + ASK + request(heartbeat(2)), piece)
    answers = [await wire.answer() for _ in range(4)]

    assert [status for status, _body in answers] == [200, 400, 200, 200]
    assert b'"journal":"ok"' in answers[2][1]
    assert served.loop.heartbeats == 2


@pytest.mark.parametrize(
    ("odd", "status"),
    [
        (b"\x16\x03\x01\x02\x00", 400),  # TLS
        (b"hello\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: [\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX-Folded: a\r\n b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n", 400),
        (b"GET / HTTP/9\r\n\r\n", 400),
        (b"GET /\x1b[31m HTTP/1.1\r\n\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 9_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * (MOST_HEAD_BYTES + 100), 431),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n", 400),
        (HEAD + b"Content-Length: -2\r\n\r\n", 400),
        (HEAD + b"Content-Length: \xd9\xa2\r\n\r\n", 400),  # a digit, but not of ASCII
        (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (HEAD + b"Content-Length : 2\r\n\r\n", 400),
    ],
)
@pytest.mark.parametrize("piece", [1, 1 << 20])
async def test_what_is_no_request_is_refused_in_one_sentence(
    connect: Connect, caplog: pytest.LogCaptureFixture, odd: bytes, status: int, piece: int
) -> None:
    """However it is cut: JSON with one sentence, no line in the log, and the connection ends."""
    wire = await connect()

    told, body = await wire.say_until_answered(odd, max(piece, len(odd) // 100))

    assert told == status
    sentence = msgspec.json.decode(body, type=ErrorReply).error
    assert sentence.isprintable()
    assert await wire.rest() == b""
    assert caplog.text == ""


@pytest.mark.parametrize("said", [b"", HEAD[:1], HEAD, b"GET / HTTP/1.1\r\n", b"\r\n\r\n", ASK + b"G"])
async def test_bytes_that_trickle_extend_no_deadline(served: Served, said: bytes) -> None:
    """From its first byte a head has its time, the second as the first; nothing at all has less."""
    async with impatient(served, QUICK) as connect:
        wire = await connect()

        await wire.say(said, 1)
        everything = await wire.rest()

    assert (b"HTTP/1.1 408 " in everything) == bool(said)
    assert (b"did not end within 0.05 s" in everything) == bool(said)


async def test_a_slow_but_honest_request_is_answered_and_an_idle_agent_stays(served: Served) -> None:
    """The control: others around it are closed meanwhile, and a body of many pieces is no head."""
    body = heartbeat(2)[:-1] + b" " * (2 * MOST_HEAD_BYTES) + b"}"
    async with impatient(served, Patience(first_byte_s=0.05, request_s=60.0, idle_s=60.0)) as connect:
        wire = await connect()
        await wire.say(request(heartbeat(1)))
        first = await wire.answer()
        for piece in (HEAD, b"Content-Le", b"ngth: %d\r\n\r" % len(body), b"\n" + body[:1]):
            await wire.say(piece)
            silent = await connect()
            assert await silent.rest() == b""
        await wire.say(body[1:], 1000)
        second = await wire.answer()

    assert (first[0], second[0]) == (200, 200)
    assert served.loop.heartbeats == 2


async def test_a_connection_on_which_nobody_speaks_again_is_closed(served: Served) -> None:
    """After the time that lies between two requests, not the hour that the library would wait."""
    async with impatient(served, Patience(5.0, 5.0, 0.05)) as connect:
        wire = await connect()
        await wire.say(ASK)

        assert (await wire.answer())[0] == 200
        assert await wire.rest() == b""


@pytest.mark.parametrize(
    ("lines", "body", "status"),
    [
        ((b"Authorization: Bearer secret",), heartbeat(1), 200),
        ((b"Authorization: Bearer secret", b"Connection: keep-alive"), heartbeat(1), 200),
        ((b"Authorization: Bearer secret",), b"{", 400),
        ((b"Authorization: Bearer secret",), heartbeat(1, version=9), 400),
        ((b"Authorization: Bearer secret", b"Origin: http://evil.example"), heartbeat(1), 403),
        ((b"Authorization: Bearer wrong",), heartbeat(1), 401),
        ((), heartbeat(1), 401),
    ],
)
async def test_an_agent_that_is_refused_keeps_its_connection(
    tmp_path: Path, lines: tuple[bytes, ...], body: bytes, status: int
) -> None:
    """It speaks again in a second; each refusal is counted, and says why."""
    async with serve_controller(tmp_path, "secret") as served, connecting(served.url) as connect:
        wire = await connect()
        for _ in range(2):
            await wire.say(request(body, *lines))
            told, said = await wire.answer()
            assert told == status
            assert (b'"error":"' in said) == (status != 200)

    # The same one again is stale; a foreign web page is no agent, and not counted as one.
    refused = sum(served.loop.rejected.values())
    assert refused == {200: 1, 403: 0}.get(status, 2)


async def test_a_body_that_nobody_reads_ends_its_connection(served: Served, connect: Connect) -> None:
    """Too long, or for whom no body is meant: one answer, and what follows is not taken for a head."""
    long = await connect()
    await long.say(request(b" " * (MAX_BODY_BYTES + 1)))
    unasked = await connect()
    await unasked.say(ASK[:-2] + b"Content-Length: 100000\r\n\r\n")
    answers = [await long.answer(), await unasked.answer()]
    await unasked.say(b"x" * 100_000, 10_000)

    assert [status for status, _body in answers] == [413, 200]
    assert await unasked.rest() == b""
    assert served.loop.rejected["oversized"] == 1


async def test_a_bug_of_ours_is_500_and_logged(
    served: Served, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next heartbeat is answered on the same connection."""
    wire = await connect()
    with monkeypatch.context() as patched:
        patched.setattr(served.loop, "heartbeat", lambda _beat, _job: 1 // 0)
        await wire.say(request(heartbeat(1)))
        failed = await wire.answer()

    await wire.say(request(heartbeat(2)))
    after = await wire.answer()

    assert failed[0] == 500
    assert b"its log has the details" in failed[1]
    assert "ZeroDivisionError" in caplog.text
    assert after[0] == 200


async def test_an_agent_says_everything_over_one_connection(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats, evidence, heartbeats again."""
    opened: list[object] = []
    begins = Connections.begins
    monkeypatch.setattr(Connections, "begins", lambda self, one: (opened.append(one), begins(self, one))[1])
    monkeypatch.setattr(served.loop, "evidence", lambda _evidence: None)
    async with LightLink(served.url) as link:
        await link.heartbeat(Heartbeat(node="a", agent_id="x", seq=1, mono_s=1.0, wall_s=1.0))
        await link.evidence(Evidence("a", "x", "job-1", "o"))
        await link.heartbeat(Heartbeat(node="a", agent_id="x", seq=2, mono_s=2.0, wall_s=2.0))

    assert served.loop.heartbeats == 2
    assert len(opened) == 3
    assert len(set(opened)) == 1


async def test_behind_tls_all_is_the_same(tmp_path: Path) -> None:
    """A heartbeat, a question and noise, on one connection."""
    certificate = make_certificate(tmp_path)
    trusted = ssl.create_default_context(cafile=certificate)
    async with (
        serve_controller(tmp_path, tls=serving_with(certificate)) as served,
        connecting(served.url, trusted) as connect,
    ):
        wire = await connect()
        await wire.say(request(heartbeat(1)) + ASK)
        answers = [await wire.answer() for _ in range(2)]
        await wire.say(b"hello\r\n\r\n")
        answers.append(await wire.answer())

    assert [status for status, _body in answers] == [200, 200, 400]
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


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed"), 0),
        (RuntimeError("odd\nand long"), 1),
    ],
)
def test_what_aiohttp_tells_is_one_line_and_none_of_a_client_that_left(error: Exception, lines: int) -> None:
    """A thousand agents that go away at once leave no thousand lines; anything else is told, without its traceback."""
    record = logging.LogRecord("x", logging.ERROR, "f.py", 1, "Unhandled", (), (type(error), error, None))

    kept = OneLine().filter(record)

    assert kept == bool(lines)
    if lines:
        assert record.getMessage() == "a request could not be read: RuntimeError: odd and long"
        assert record.exc_info is None


@pytest.mark.parametrize("fast", [False, True])
def test_either_event_loop_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fast: bool) -> None:
    """With uvloop and without: heartbeats, noise, silence and the end, also behind TLS."""
    if not fast:
        monkeypatch.setattr(event_loops, "find_spec", lambda _name: None)
    elif find_spec("uvloop") is None:
        pytest.skip("uvloop is not installed")
    certificate = make_certificate(tmp_path)

    async def go(tls: ssl.SSLContext | None, trusted: ssl.SSLContext | None) -> list[int]:
        async with (
            serve_controller(tmp_path, tls=tls) as served,
            connecting(served.url, trusted) as connect,
            impatient(served, QUICK) as soon,
        ):
            wire, slow = await connect(), await soon()
            await slow.say(HEAD)
            await wire.say(request(heartbeat(1)))
            answers = [await wire.answer()]
            await wire.say(b"hello\r\n\r\n")
            answers += [await wire.answer(), await slow.answer()]
            return [status for status, _body in answers]

    with asyncio.Runner(loop_factory=event_loop) as runner:
        plain = runner.run(go(None, None))
        behind_tls = runner.run(go(serving_with(certificate), ssl.create_default_context(cafile=certificate)))
        kind = type(runner.get_loop()).__module__

    assert plain == behind_tls == [200, 400, 408]
    assert kind.startswith("uvloop") == fast
