# SPDX-License-Identifier: Apache-2.0
"""The live feed over the link: frames as they come, in whatever pieces, and one sentence when they don't."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
from aiohttp import web

from megascale_ops.errors import ControllerUnreachableError, RefusedError, StrangerError, VersionError
from megascale_ops.link import Link
from megascale_ops.schema.live import Frame, merge
from tests.fakes.live_frames import frame

CHANGE = Frame(1, 8, 1_790_000_001.0, "gpt")


def event(data: bytes) -> bytes:
    """Return a server-sent event as the controller writes it."""
    return b"event: frame\nid: 7\ndata: %b\n\n" % data


class Streaming:
    """A server whose live feed is what a test says."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.answer: web.Response | None = None
        self.then: Callable[[], Awaitable[object]] | None = None
        self.asked: list[str] = []

    async def live(self, request: web.Request) -> web.StreamResponse:
        """Write the pieces one by one."""
        self.asked.append(request.query_string)
        if self.answer is not None:
            return self.answer
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in self.pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        if self.then is not None:
            await self.then()
        return response

    async def snapshot(self, request: web.Request) -> web.Response:
        """Answer with one frame."""
        self.asked.append(request.query_string)
        return web.Response(body=msgspec.json.encode(frame()))


@pytest.fixture
async def served() -> AsyncIterator[tuple[Streaming, Link]]:
    """A server, and a link to it that waits 0.3 s."""
    streaming = Streaming()
    app = web.Application()
    app.router.add_get("/v1/live", streaming.live)
    app.router.add_get("/v1/live/snapshot", streaming.snapshot)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    async with Link(f"http://{host}:{port}", timeout_s=0.3) as link:
        yield streaming, link
    await runner.cleanup()


async def frames_of(link: Link, job: str = "") -> list[Frame]:
    """Return all frames until the stream ends."""
    return [one async for one in link.live(job)]


@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 20])
async def test_frames_come_whole_in_whatever_pieces(served: tuple[Streaming, Link], size: int) -> None:
    """Cut anywhere, also in the middle of the two ends of line between events; comments are passed over."""
    streaming, link = served
    whole = frame(64)
    raw = b": hello\n\n" + event(msgspec.json.encode(whole)) + event(msgspec.json.encode(CHANGE))
    streaming.pieces = [raw[at : at + size] for at in range(0, len(raw), size)]

    first, second = await frames_of(link, "a b")

    assert first == whole
    assert merge(first, second).pace == whole.pace
    assert streaming.asked == ["job=a b"]


async def test_a_frame_of_12288_ranks_comes_whole(served: tuple[Streaming, Link]) -> None:
    """Hundreds of kilobytes in one line: more than aiohttp reads as a line."""
    streaming, link = served
    whole = frame(12_288)
    streaming.pieces = [event(msgspec.json.encode(whole))]

    assert await frames_of(link) == [whole]


async def test_nobody_there_is_said_alike_by_what_asks_and_by_what_follows() -> None:
    """In the kernel's words: a library's own name its classes and the addresses that it tried."""
    with socket.socket() as bound:  # nothing listens on it, and no other program gets it
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        async with Link(url, None) as link:
            with pytest.raises(ControllerUnreachableError) as asked:
                await link.status()
            with pytest.raises(ControllerUnreachableError) as followed:
                _ = [one async for one in link.live()]

    assert str(asked.value) == str(followed.value) == f"no controller answers at {url}: Connection refused"


async def test_silence_is_an_error_in_time(served: tuple[Streaming, Link]) -> None:
    """A controller that hangs must not be taken for one that has no news."""
    streaming, link = served
    gone = asyncio.Event()
    streaming.pieces, streaming.then = [event(msgspec.json.encode(frame()))], gone.wait

    feed = link.live()
    first = await anext(feed)
    with pytest.raises(ControllerUnreachableError, match=r"nothing was heard of the controller .* for 0\.3 s"):
        await anext(feed)
    gone.set()

    assert first == frame()


@pytest.mark.parametrize(
    ("status", "body", "error", "sentence"),
    [
        (404, b'{"error": "there is no job \'x\'"}', RefusedError, "there is no job 'x'"),
        (401, b'{"error": "a token is needed"}', RefusedError, "a token is needed"),
        (503, b'{"error": "64 pages watch"}', ControllerUnreachableError, "has no time: 64 pages watch"),
        (502, b"<html>", ControllerUnreachableError, "HTTP 502"),
        (404, b"<html>", StrangerError, "another program answers"),
    ],
)
async def test_who_says_no_is_quoted(
    served: tuple[Streaming, Link], status: int, body: bytes, error: type[Exception], sentence: str
) -> None:
    """The controller's own sentence, where it has one."""
    streaming, link = served
    streaming.answer = web.Response(status=status, body=body)

    with pytest.raises(error, match=sentence):
        await frames_of(link)


async def test_what_is_no_frame_is_refused(served: tuple[Streaming, Link]) -> None:
    """And a version that is too far away is named."""
    streaming, link = served
    streaming.pieces = [event(b'{"what": 1}')]
    with pytest.raises(StrangerError, match="no frame of a controller"):
        await frames_of(link)

    streaming.pieces = [event(msgspec.json.encode(msgspec.structs.replace(frame(), version=9)))]
    with pytest.raises(VersionError, match="version 9"):
        await frames_of(link)


async def test_a_snapshot_is_one_whole_frame(served: tuple[Streaming, Link]) -> None:
    """Of the job that is asked for, or of the one that needs a look most."""
    streaming, link = served

    assert await link.live_snapshot("gpt") == await link.live_snapshot() == frame()
    assert streaming.asked == ["job=gpt", ""]
