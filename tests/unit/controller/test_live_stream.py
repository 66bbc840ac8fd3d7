# SPDX-License-Identifier: Apache-2.0
"""The live feed over HTTP: who may read, what a reader gets, and what a slow one costs."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from megascale_ops.controller.live import stream
from megascale_ops.schema.live import Frame, merge
from megascale_ops.schema.messages import Join, Leave
from tests.fakes.held_frame import hold_frames
from tests.fakes.served_controller import Served, serve_controller

TOKEN = {"Authorization": "Bearer secret"}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A controller without a token."""
    async with serve_controller(tmp_path) as one:
        yield one


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20.0)) as one:
        yield one


async def _join(served: Served, job: str, nproc: int = 2) -> None:
    join = Join(job, "a", f"r-{job}", f"j-{job}", nproc, 1, 1, "127.0.0.1", 29500, time.monotonic())
    reply = await served.loop.joining.join(join, 5.0)
    assert reply.status == "go"


def _is_gathered() -> bool:
    """Return whether frames are being made for a reader."""
    return any("_Channel.run" in str(task.get_coro()) for task in asyncio.all_tasks())


async def _frame(answer: aiohttp.ClientResponse) -> Frame:
    """Read one event."""
    async with asyncio.timeout(10.0):
        raw = await answer.content.readuntil(b"\n\n")
    lines = raw.decode().splitlines()
    assert lines[0] == "event: frame"
    return msgspec.json.decode(lines[2].removeprefix("data: "), type=Frame)


async def test_a_snapshot_is_one_whole_frame(served: Served, http: aiohttp.ClientSession) -> None:
    """A single look takes a single request."""
    await _join(served, "one")

    async with http.get(f"{served.url}/v1/live/snapshot?job=one") as answer:
        frame = msgspec.json.decode(await answer.read(), type=Frame)

    assert answer.headers["Cache-Control"] == "no-store"
    assert frame.whole
    assert frame.job == "one"
    assert frame.headline is not None


async def test_a_stream_begins_with_the_whole_and_goes_on_with_changes(
    served: Served, http: aiohttp.ClientSession
) -> None:
    """The first frame is whole, later ones are changes of the one before, and nothing is missing between them."""
    await _join(served, "one")

    async with http.get(f"{served.url}/v1/live?job=one") as answer:
        first = await _frame(answer)
        second = await _frame(answer)

    assert answer.headers["Content-Type"] == "text/event-stream"
    assert (first.whole, second.whole) == (True, False)
    assert second.seq == first.seq + 1
    assert merge(first, second).headline == first.headline


async def test_who_watches_sees_the_end_before_the_controller_ends(served: Served, http: aiohttp.ClientSession) -> None:
    """A run's own controller ends with its job: the last frame of an open page says that the job is over."""
    await _join(served, "one")

    async with http.get(f"{served.url}/v1/live?job=one") as answer:
        known = await _frame(answer)
        served.loop.leave(Leave("one", "a", "r-one", "cancelled", round=1))
        await served.api.say_goodbye()
        async with asyncio.timeout(10.0):
            rest = await answer.content.read()

    for event in rest.decode().strip().split("\n\n"):
        data = event.splitlines()[-1].removeprefix("data: ")
        known = merge(known, msgspec.json.decode(data, type=Frame))
    assert known.headline is not None
    assert known.headline.sentence == "The job was stopped by hand."
    assert known.pace is not None
    assert known.pace.state == "stopped"


async def test_who_asks_for_the_headline_first_has_it_before_the_frame(
    served: Served, http: aiohttp.ClientSession
) -> None:
    """An event of its own, without the ranks, tells the headline; then the stream goes on as every other one."""
    await _join(served, "one")

    async with http.get(f"{served.url}/v1/live?headline=first&job=one") as answer:
        async with asyncio.timeout(10.0):
            raw = await answer.content.readuntil(b"\n\n")
        frame = await _frame(answer)

    name, data = raw.decode().splitlines()[:2]
    headline = msgspec.json.decode(data.removeprefix("data: "), type=Frame)
    assert name == "event: headline"
    assert (headline.job, headline.whole, headline.columns, headline.times) == ("one", False, None, None)
    assert headline.headline == frame.headline
    assert frame.whole


async def test_a_frame_that_takes_long_shows_that_it_is_being_made(
    served: Served, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the headline and its frame there are signs of life, so that no page takes the connection for dead."""
    may_go_on = hold_frames(monkeypatch)
    monkeypatch.setattr(stream, "FRAME_S", 0.05)
    await _join(served, "one")

    async with http.get(f"{served.url}/v1/live?headline=first&job=one") as answer:
        async with asyncio.timeout(10.0):
            headline = await answer.content.readuntil(b"\n\n")
            signs = [await answer.content.readuntil(b"\n\n") for _ in range(3)]
            may_go_on.set()
            while not (frame := await answer.content.readuntil(b"\n\n")).startswith(b"event"):
                signs.append(frame)

    assert headline.startswith(b"event: headline\n")
    assert set(signs) == {b": a frame is being made\n\n"}
    assert frame.startswith(b"event: frame\n")


async def test_a_frame_that_is_there_needs_no_headline_before_it(served: Served, http: aiohttp.ClientSession) -> None:
    """A second page, opened while the first one watches, begins with the whole frame."""
    await _join(served, "one")

    async with http.get(f"{served.url}/v1/live?job=one") as first:
        await _frame(first)
        async with http.get(f"{served.url}/v1/live?headline=first&job=one") as second:
            frame = await _frame(second)

    assert frame.whole


async def test_what_was_gathered_a_while_ago_is_not_told_as_if_it_were_now(
    served: Served, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that begins after a while without readers begins with a frame of its own time."""
    monkeypatch.setattr(stream, "NEW_S", 0.05)
    await _join(served, "one")
    async with http.get(f"{served.url}/v1/live/snapshot?job=one") as answer:
        before = msgspec.json.decode(await answer.read(), type=Frame)

    await asyncio.sleep(0.2)
    async with http.get(f"{served.url}/v1/live?job=one") as answer:
        first = await _frame(answer)

    assert first.whole
    assert first.wall_s - before.wall_s >= 0.1


async def test_a_change_of_state_is_told_at_once(
    served: Served, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the controller itself decides does not wait for the next frame, which here would never come."""
    monkeypatch.setattr(stream, "FRAME_S", 1e6)
    await _join(served, "one")

    async with http.get(f"{served.url}/v1/live?job=one") as answer:
        await _frame(answer)
        served.loop.jobs["one"].change(state="failed", since_wall_s=time.time())
        told = await _frame(answer)

    assert told.pace is not None
    assert told.pace.state == "failed"


async def test_a_job_that_comes_is_seen_by_who_waits_for_one(served: Served, http: aiohttp.ClientSession) -> None:
    """A page that is open before the first job ends its stream when there is one, and asks again."""
    async with http.get(f"{served.url}/v1/live") as answer:
        empty = await _frame(answer)
        await _join(served, "one")
        async with asyncio.timeout(5.0):
            await answer.content.read()

    assert empty.job == ""


async def test_an_unknown_job_is_a_sentence(served: Served, http: aiohttp.ClientSession) -> None:
    """404 and which one."""
    async with http.get(f"{served.url}/v1/live?job=nope") as answer:
        assert answer.status == 404
        assert (await answer.json())["error"] == "there is no job 'nope'"


async def test_more_readers_than_there_is_room_for_are_told_so(
    served: Served, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reader too many gets 503 with a sentence; when another one goes, there is room again."""
    monkeypatch.setattr(stream, "MOST_READERS", 1)
    await _join(served, "one")
    async with http.get(f"{served.url}/v1/live?job=one") as first:
        await _frame(first)
        async with http.get(f"{served.url}/v1/live?job=one") as second:
            refused, why = second.status, (await second.json())["error"]

    assert refused == 503
    assert why == "1 pages watch this controller already: close one of them"
    async with asyncio.timeout(5.0):
        while True:
            async with http.get(f"{served.url}/v1/live?job=one") as third:
                if third.status == 200:
                    break
            await asyncio.sleep(0.02)


async def test_nothing_is_gathered_for_nobody(served: Served, http: aiohttp.ClientSession) -> None:
    """When the last reader goes, the gathering ends with it."""
    await _join(served, "one")
    async with http.get(f"{served.url}/v1/live?job=one") as answer:
        await _frame(answer)
        during = _is_gathered()

    assert during
    async with asyncio.timeout(5.0):
        while _is_gathered():  # noqa: ASYNC110  there is no event for what does not happen any more
            await asyncio.sleep(0.01)


async def test_a_reader_that_takes_nothing_is_let_go(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop that was closed costs no memory: after a while its connection is ended."""
    monkeypatch.setattr(stream, "SLOW_S", 0.3)
    monkeypatch.setattr(stream, "FRAME_S", 0.1)
    await _join(served, "big", nproc=100_000)
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(b"GET /v1/live?job=big HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")

    async with asyncio.timeout(15.0):
        while _is_gathered():
            served.loop.jobs["big"].change(reason="x" * 1_000_000 + str(time.monotonic()))
            await asyncio.sleep(0.05)

    writer.close()


@pytest.mark.parametrize("path", ["/v1/live", "/v1/live/snapshot", "/v1/incidents"])
async def test_with_a_token_data_is_for_those_who_know_it(
    tmp_path: Path, http: aiohttp.ClientSession, path: str
) -> None:
    """The page itself is served to all, what it shows is not."""
    async with serve_controller(tmp_path, "secret") as served:
        async with http.get(f"{served.url}{path}") as answer:
            without = answer.status
        async with http.get(f"{served.url}{path}", headers=TOKEN) as answer:
            with_token = answer.status
        async with http.get(f"{served.url}/") as answer:
            page = answer.status

    assert (without, with_token, page) == (401, 200, 200)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/live/snapshot", 200),
        ("GET", "/v1/incidents", 200),
        ("GET", "/v1/status", 401),
        ("GET", "/metrics", 401),
        ("POST", "/v1/jobs/x/policy", 401),
        ("POST", "/v1/heartbeat", 401),
        ("POST", "/v1/jobs/x/leave", 401),
    ],
)
async def test_an_open_page_lets_everybody_read_and_nobody_change(
    tmp_path: Path, http: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    """--open-page opens what the page reads, and nothing else."""
    async with (
        serve_controller(tmp_path, "secret", open_page=True) as served,
        http.request(method, f"{served.url}{path}", data=b"{}") as answer,
    ):
        assert answer.status == status


async def test_the_page_and_its_files_forbid_everything_foreign(served: Served, http: aiohttp.ClientSession) -> None:
    """No inline script, no frame, nothing from elsewhere; each file with its own type, and 304 when it is known."""
    async with http.get(f"{served.url}/") as answer:
        policy, text = answer.headers["Content-Security-Policy"], await answer.text()
    async with http.get(f"{served.url}/static/app.js") as answer:
        script = answer.headers
    async with http.get(f"{served.url}/static/app.js", headers={"If-None-Match": script["ETag"]}) as answer:
        again = answer.status
    async with http.get(f"{served.url}/static/..%2fapi.py") as answer:
        outside = answer.status

    assert "default-src 'none'" in policy
    assert "'unsafe-inline'" not in policy
    assert "frame-ancestors 'none'" in policy
    assert script["Content-Type"].startswith("text/javascript")
    assert script["X-Content-Type-Options"] == "nosniff"
    assert (again, outside) == (304, 404)
    assert "http://" not in text
    assert "https://" not in text


async def test_a_foreign_page_gets_nothing(served: Served, http: aiohttp.ClientSession) -> None:
    """403 for what a browser sends for another site, also where no token is asked for."""
    async with http.get(f"{served.url}/v1/live/snapshot", headers={"Origin": "http://evil.example"}) as answer:
        assert answer.status == 403
        assert "http://evil.example" in (await answer.json())["error"]
