# SPDX-License-Identifier: Apache-2.0
"""The client against a real controller, against a closed port, and against foreign servers."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from megascale_ops.errors import ControllerUnreachableError, RefusedError, StrangerError, UsageError
from megascale_ops.link import Backoff, BlockingLink, Link, Spool
from megascale_ops.schema.messages import Heartbeat, HeartbeatReply, Join
from tests.fakes.served_controller import serve_controller


def _heartbeat(seq: int) -> Heartbeat:
    return Heartbeat(node="n", agent_id="a", seq=seq, mono_s=float(seq), wall_s=0.0, full=True)


@pytest.fixture
def port_of_nobody() -> Iterator[int]:
    """A port where nothing listens, and which no other program gets."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])


class Server:
    """A server that answers as it is told to."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.body = b"{}"
        self.drop = 0  # so many requests lose their connection first
        self.stall = False
        self.seen: list[tuple[str, bytes]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        self.seen.append((request.headers.get("Authorization", ""), await request.read()))
        if self.drop:
            self.drop -= 1
            assert request.transport is not None
            request.transport.close()
        if self.stall:
            await asyncio.sleep(60)
        return web.Response(status=self.status, body=self.body)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server on a loopback port."""
    one = Server()
    app = web.Application()
    app.router.add_route("*", "/{anything:.*}", one.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    one.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield one
    await runner.cleanup()


@pytest.mark.parametrize("url", ["", "127.0.0.1:7070", "ftp://x", "http://", "unix:///x"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """One sentence with what it looks like."""
    with pytest.raises(UsageError, match="http://HOST:PORT"):
        Link(url)


def test_a_certificate_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """Wrong trust is a mistake of the user, not a broken connection later."""
    with pytest.raises(UsageError, match="certificate"):
        Link("https://localhost:1", ca_file=tmp_path / "none.pem")


async def test_nobody_there_is_unreachable(port_of_nobody: int) -> None:
    """A refused connection is said with the address."""
    async with Link(f"http://127.0.0.1:{port_of_nobody}") as link:
        with pytest.raises(ControllerUnreachableError, match=str(port_of_nobody)):
            await link.status()


async def test_a_controller_that_does_not_answer_is_unreachable(server: Server) -> None:
    """Every wait has a deadline."""
    server.stall = True

    async with Link(server.url, timeout_s=0.05) as link:
        with pytest.raises(ControllerUnreachableError, match=r"no answer .* in 0\.05 s"):
            await link.heartbeat(_heartbeat(1))


async def test_a_closed_kept_connection_is_tried_again_once(server: Server) -> None:
    """A connection that was closed in the meantime costs nothing; two in a row are an error."""
    async with Link(server.url) as link:
        server.drop = 1
        assert await link.heartbeat(_heartbeat(1)) == HeartbeatReply()
        server.drop = 2
        with pytest.raises(ControllerUnreachableError):
            await link.heartbeat(_heartbeat(2))

    assert len([body for _token, body in server.seen if body]) == 4  # a last one finds out who closes, without a token
    assert server.seen[-1] == ("", b"")


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_proxy_without_controller_is_unreachable(server: Server, status: int) -> None:
    """What a proxy says for a missing controller is no refusal."""
    server.status = status

    async with Link(server.url) as link:
        with pytest.raises(ControllerUnreachableError, match=str(status)):
            await link.status()


async def test_a_refusal_carries_the_sentence(server: Server) -> None:
    """4xx and 5xx of the controller say why."""
    server.status, server.body = 409, b'{"error":"not now"}'

    async with Link(server.url) as link:
        with pytest.raises(RefusedError, match="not now"):
            await link.status()


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"", b"[1]", b'{"jobs": "\xff"}', b'{"x":' + b"[" * 5000])
@pytest.mark.parametrize("status", [200, 404])
async def test_an_answer_that_is_none_of_ours_is_refused(server: Server, status: int, body: bytes) -> None:
    """Another program on that port is named as such."""
    server.status, server.body = status, body

    async with Link(server.url) as link:
        with pytest.raises(StrangerError, match="another program answers"):
            await link.status()


async def test_the_token_travels_and_is_never_told(server: Server) -> None:
    """It is in the header and in no message."""
    async with Link(server.url, "s3cret") as link:
        await link.heartbeat(_heartbeat(1))
        server.status, server.body = 401, b'{"error":"no"}'
        with pytest.raises(RefusedError) as refused:
            await link.status()

    assert server.seen[0][0] == "Bearer s3cret"
    assert "s3cret" not in str(refused.value)
    assert "s3cret" not in repr(link)


async def test_strange_names_stay_one_part_of_the_address(server: Server) -> None:
    """A name with a slash or a question mark asks for what it says, not for something else."""
    async with Link(server.url) as link:
        server.body = b'{"known":false}'
        assert not (await link.orders("a/../b?c", "n&x=1", "r", 1)).known


async def test_the_spool_delivers_in_order_after_an_absence(server: Server, port_of_nobody: int) -> None:
    """While the controller is away heartbeats wait; then they go out oldest first, the last one says how many."""
    spool = Spool(limit=3)
    async with Link(f"http://127.0.0.1:{port_of_nobody}") as away:
        for seq in range(1, 6):
            with pytest.raises(ControllerUnreachableError):
                await spool.send(away, _heartbeat(seq))

    server.body = b'{"send_full":true}'
    async with Link(server.url) as link:
        reply = await spool.send(link, _heartbeat(6))

    sent = [msgspec.json.decode(body, type=Heartbeat) for _token, body in server.seen]
    assert [heartbeat.seq for heartbeat in sent] == [4, 5, 6]
    assert sent[-1].spooled == 3
    assert spool.dropped == 3
    assert len(spool) == 0
    assert reply.send_full


async def test_a_refused_heartbeat_is_not_kept(server: Server) -> None:
    """It would be refused again for ever."""
    spool = Spool()
    server.status, server.body = 400, b'{"error":"no"}'

    async with Link(server.url) as link:
        with pytest.raises(RefusedError):
            await spool.send(link, _heartbeat(1))

    assert len(spool) == 0


def test_pauses_double_up_to_a_bound() -> None:
    """0.05, 0.1, 0.2 ... 2 s, and from the beginning after a success."""
    backoff = Backoff(0.5, 2.0)

    assert [backoff.next_s() for _ in range(4)] == [0.5, 1.0, 2.0, 2.0]
    backoff.reset()
    assert backoff.next_s() == 0.5


async def test_a_blocking_link_understands_answers_as_the_other_one_does(server: Server) -> None:
    """A closed connection is asked once more, a refusal has its sentence, a silent server is not waited for."""
    with await asyncio.to_thread(BlockingLink, server.url, "s3cret", 5.0) as link:
        server.drop = 1
        assert await asyncio.to_thread(link.heartbeat, _heartbeat(1)) == HeartbeatReply()
        server.status, server.body = 409, b'{"error":"not now"}'
        with pytest.raises(RefusedError, match="not now"):
            await asyncio.to_thread(link.status)
    with await asyncio.to_thread(BlockingLink, server.url, "s3cret", 0.1) as hurried:
        server.stall = True
        with pytest.raises(ControllerUnreachableError, match=r"no answer .* in 0\.1 s"):
            await asyncio.to_thread(hurried.status)

    assert {token for token, _body in server.seen} == {"Bearer s3cret"}


async def test_threads_share_one_blocking_link(tmp_path: Path) -> None:
    """A long poll of one thread holds no other thread up; closing ends the poll."""
    async with serve_controller(tmp_path) as served:
        link = await asyncio.to_thread(BlockingLink, served.url)
        join = Join("job", "a", "r", "j", 1, 1, 1, "127.0.0.1", 29500, time.monotonic())
        assert (await asyncio.to_thread(link.join, join)).status == "go"
        ended: list[object] = []

        def _poll() -> None:
            try:
                ended.append(link.orders("job", "a", "r", 1))
            except ControllerUnreachableError as error:
                ended.append(error)

        poller = threading.Thread(target=_poll)
        poller.start()
        status = await asyncio.to_thread(link.status)
        while not served.loop.jobs["job"].runners["a"].open_requests:  # noqa: ASYNC110  nothing signals an open poll
            await asyncio.sleep(0)
        await asyncio.to_thread(link.close)
        await asyncio.to_thread(poller.join, 10)

    assert status.jobs[0].job == "job"
    assert isinstance(ended[0], ControllerUnreachableError)
    assert "closed" in str(ended[0])
    with pytest.raises(ControllerUnreachableError, match="closed"):
        link.status()
    link.close()
