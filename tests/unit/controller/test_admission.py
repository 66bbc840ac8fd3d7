# SPDX-License-Identifier: Apache-2.0
"""Admission under load: many connections that send nothing never shut out those that send."""

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from megascale_ops.controller.server import admission
from megascale_ops.controller.server.admission import Admission, most_connections, raise_limit
from megascale_ops.controller.server.api import Api
from megascale_ops.controller.server.connections import Patience
from megascale_ops.controller.server.listen import listening
from megascale_ops.link import Link
from megascale_ops.schema.messages import Heartbeat
from tests.fakes.certificates import make_certificate, serving_with
from tests.fakes.served_controller import serve_controller

MOST = 64
HEAD = b"POST /v1/heartbeat HTTP/1.1\r\nHost: localhost\r\n"


class Door:
    """A second, narrow port of a served controller."""

    def __init__(self, url: str, taken: Admission) -> None:
        self.url = url
        self.port = int(url.rpartition(":")[2])
        self.taken = taken

    async def ask(self, path: str = "/healthz") -> bytes:
        """Send a request that needs no token."""
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path.encode())
            answer = await reader.read()
            writer.close()
            await writer.wait_closed()
        return answer

    def connect(self, said: bytes = b"") -> socket.socket:
        """Connect, and say something or nothing."""
        one = socket.create_connection(("127.0.0.1", self.port), timeout=5.0)
        one.sendall(said)
        return one


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    """A controller that has room for MOST connections."""
    async with serve_controller(tmp_path) as served:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with listening(Api(served.loop, served.store, ""), listener, most=MOST) as taken:
            yield Door(url, taken)


@pytest.mark.parametrize("said", [b"", HEAD, b"GET / HTTP/1.1\r\n"], ids=["nothing", "half a head", "half a question"])
async def test_ten_times_as_many_as_there_is_room_for_shut_nobody_out(door: Door, said: bytes) -> None:
    """Who asks is answered between them all and after them, and an agent's heartbeats go on."""
    async with Link(door.url) as link, contextlib.AsyncExitStack() as stack:
        for number in range(10 * MOST):
            one = await asyncio.to_thread(door.connect, said)
            stack.callback(one.close)
            if number % MOST == 0:
                await link.heartbeat(_beat(number + 1))
                assert b'"status":"ok"' in await door.ask()
        assert b"200 OK" in await door.ask("/metrics")

    assert door.taken.shed >= 8 * MOST


async def test_who_has_never_said_a_thing_goes_first(door: Door) -> None:
    """An agent that speaks keeps its connection while the silent ones are closed for each other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    silent = []
    for seq in range(1, 4 * MOST):
        body = msgspec.json.encode(_beat(seq))
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await reader.readuntil(b"}")
        silent.append(await asyncio.to_thread(door.connect))

    assert door.taken.shed >= 2 * MOST
    for one in silent:
        one.close()
    writer.close()
    await writer.wait_closed()


async def test_a_thousand_agents_come_in_one_burst(tmp_path: Path) -> None:
    """The control: with room for them all none is closed, and each heartbeat is answered."""
    async with serve_controller(tmp_path) as served:

        async def speak(number: int) -> None:
            async with Link(served.url, timeout_s=60.0) as link:
                for seq in (1, 2):
                    await link.heartbeat(_beat(seq, f"n{number}"))

        await asyncio.gather(*(speak(number) for number in range(1000)))

        assert served.loop.heartbeats == 2000


async def test_a_client_that_never_agrees_on_tls_counts_too(tmp_path: Path) -> None:
    """It holds a descriptor as any other: who comes behind is told by a closed connection, and later let in."""
    certificate = make_certificate(tmp_path)
    async with serve_controller(tmp_path) as served:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        port = listener.getsockname()[1]
        async with listening(
            Api(served.loop, served.store, ""), listener, serving_with(certificate), most=MOST
        ) as taken:
            silent = [
                await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port), 5.0) for _ in range(2 * MOST)
            ]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 30.0) == b""
            writer.close()
            assert taken.shed >= MOST
            for one in silent:
                one.close()


async def test_without_a_descriptor_nothing_ends(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The real limit of this process, lowered to what is open: taking rests, and goes on when there is room."""
    monkeypatch.setattr(admission, "PAUSE_S", 0.01)
    waiting = socket.socket()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = waiting.fileno()
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                held.append(socket.socket())
        waiting.settimeout(10.0)
        await asyncio.to_thread(waiting.connect, ("127.0.0.1", door.port))
        async with asyncio.timeout(30):
            while "no connection can be taken" not in caplog.text:
                await asyncio.to_thread(waiting.getsockname)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in held:
            one.close()

    waiting.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = await asyncio.to_thread(waiting.recv, 4096)
    waiting.close()
    assert answer.startswith(b"HTTP/1.1 200")


def test_the_soft_limit_is_raised_and_some_descriptors_are_kept() -> None:
    """As far as the hard one allows, and never above it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, soft), hard))
        raised = raise_limit()
        now = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert raised == now == min(hard, admission.MOST_DESCRIPTORS)
    assert most_connections(1024) == 1024 - admission.RESERVED
    assert most_connections(10) > 0


async def test_who_sends_a_body_too_slowly_is_told_so(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that another handler reads: it has a deadline too."""
    monkeypatch.setattr("megascale_ops.controller.server.bodies.BODY_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)

    writer.write(b"POST /v1/evidence HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    answer = await asyncio.wait_for(reader.readuntil(b"}"), 30.0)

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not come within" in answer
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    "odd",
    [
        b"GET / HTTP/1.1\r\nHost: [\r\n\r\n",
        b"GET http://[/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET //[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/evidence HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/evidence HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
        b"POST /v1/evidence HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: y\r\n\r\n",
        b"GET /%00%ff\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT x HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /static/..%2f..%2fetc%2fpasswd HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\0\0\0\0",
    ],
)
async def test_odd_requests_get_one_answer_and_no_traceback(
    door: Door, caplog: pytest.LogCaptureFixture, odd: bytes
) -> None:
    """400 or 404, one line of log at most, and the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)

    writer.write(odd)
    answer = await asyncio.wait_for(reader.read(), 30.0)

    assert answer[:12] in {b"HTTP/1.1 400", b"HTTP/1.1 404", b"HTTP/1.0 400"}, answer
    assert "Traceback" not in caplog.text
    assert len(caplog.text.splitlines()) <= 1
    writer.close()
    await writer.wait_closed()


def _beat(seq: int, node: str = "a") -> Heartbeat:
    return Heartbeat(node, f"agent-{node}", seq, float(seq), 1.8e9)


def test_first_words_have_less_time_than_requests() -> None:
    """Seconds, where the library would wait for an hour."""
    patience = Patience()

    assert patience.first_byte_s <= patience.request_s <= patience.idle_s <= 100
