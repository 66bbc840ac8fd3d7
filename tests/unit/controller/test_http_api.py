# SPDX-License-Identifier: Apache-2.0
"""The controller's HTTP face, asked by the real client and by people who mean no good."""

import asyncio
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest

from megascale_ops.errors import RefusedError
from megascale_ops.exposition import Encoded, Page, encoded
from megascale_ops.link import Link
from megascale_ops.schema.kernels import ProfileAsk
from megascale_ops.schema.messages import (
    MAX_BODY_BYTES,
    ErrorReply,
    Evidence,
    Heartbeat,
    JobReport,
    Join,
    Leave,
    PolicyChange,
    RankExit,
)
from megascale_ops.schema.progress import RankReport
from tests.fakes.scraped import OPEN_METRICS, open_samples, values
from tests.fakes.served_controller import Served, serve_controller


def _join(**more: object) -> Join:
    fields: dict[str, object] = {
        "job": "job",
        "node": "a",
        "runner_id": "r1",
        "join_id": f"j{time.monotonic_ns()}",
        "nproc": 1,
        "min_nodes": 1,
        "max_nodes": 1,
        "addr": "127.0.0.1",
        "store_port": 29500,
        "mono_s": time.monotonic(),
    }
    return msgspec.convert({**fields, **more}, Join)


def _heartbeat(seq: int = 1) -> Heartbeat:
    ranks = tuple(RankReport(rank=rank, local_rank=rank, pid=rank, round=1) for rank in range(8))
    now_s = time.monotonic()
    return Heartbeat(
        node="a", agent_id="x", seq=seq, mono_s=now_s, wall_s=now_s, full=True, jobs=(JobReport("job", 1, ranks=ranks),)
    )


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A controller without token."""
    async with serve_controller(tmp_path) as one:
        yield one


@pytest.fixture
async def link(served: Served) -> AsyncIterator[Link]:
    """A client of it."""
    async with Link(served.url) as one:
        yield one


async def test_the_whole_road(link: Link) -> None:
    """Join, heartbeat, fail, restart, read the incident, leave: over real HTTP, with a real journal."""
    first = await link.join(_join())
    beat = await link.heartbeat(_heartbeat())
    exits = (RankExit(0, 0, 7, -9, time.monotonic(), step=3),)
    second = await link.join(_join(previous_round=1, cause="failure", exits=exits))
    incident = await link.incident("job-1")
    listed = await link.incidents("job")
    status = await link.status("job")
    await link.leave(Leave("job", "a", "r1", "succeeded", round=2))
    over = await link.status()

    assert (first.status, first.round, second.status, second.round) == ("go", 1, "go", 2)
    assert not beat.send_full
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == ("killed", (0,))
    assert [event.kind for event in incident.events][:2] == ["rank_failed", "all_stopped"]
    assert [one.id for one in listed.incidents] == ["job-1"]
    assert listed.incidents[0].events == ()
    assert (status.jobs[0].state, status.jobs[0].restarts) == ("restarting", 1)
    assert over.jobs[0].state == "finished"


async def test_orders_are_waited_for(link: Link) -> None:
    """A long poll ends the moment there is an order: here b's, since a was cancelled."""
    joining = asyncio.create_task(link.join(_join(max_nodes=2, min_nodes=2)))
    second = await link.join(_join(node="b", runner_id="r2", max_nodes=2, min_nodes=2))
    first = await joining
    poll = asyncio.create_task(link.orders("job", "b", "r2", second.round))
    # During this request the poll has arrived and waits.
    assert (await link.orders("job", "a", "nobody", 1)).known is False
    was_waiting = not poll.done()

    await link.leave(Leave("job", "a", "r1", "cancelled", round=1))

    assert (first.status, second.status, was_waiting) == ("go", "go", True)
    assert [order.kind for order in (await poll).orders] == ["shutdown"]


async def test_what_is_not_there_is_404(link: Link) -> None:
    """Unknown jobs, incidents and addresses: one sentence each."""
    for request in (
        link.status("nope"),
        link.incident("nope-1"),
        link.leave(Leave("nope", "a", "r1", "failed")),
    ):
        with pytest.raises(RefusedError, match="there is no"):
            await request
    assert not (await link.orders("nope", "a", "r", 1)).known


async def test_evidence_for_nothing_is_refused(link: Link) -> None:
    """Evidence belongs to an incident."""
    with pytest.raises(RefusedError, match="no incident 'x-1'"):
        await link.evidence(Evidence("a", "x", "x-1", "o"))


async def test_a_version_too_far_is_refused_with_both_numbers(link: Link) -> None:
    """A neighbour is understood, others are told to update."""
    with pytest.raises(RefusedError, match=r"version 9.*version 1"):
        await link.join(_join(version=9))


async def test_health_and_metrics(link: Link, served: Served) -> None:
    """Healthy is said, and what Prometheus asks for is there."""
    await link.join(_join())
    await link.heartbeat(_heartbeat())

    async with aiohttp.ClientSession() as session, session.get(f"{served.url}/metrics") as answer:
        text = await answer.text()

    assert (await link.healthz())["status"] == "ok"
    assert "megascale_controller_heartbeats_total 1.0" in text
    assert 'megascale_job_round{job="job"} 1.0' in text


async def test_metrics_come_as_open_metrics_to_who_accepts_them(link: Link, served: Served) -> None:
    """As Prometheus asks for them."""
    await link.join(_join())

    headers = {"Accept": OPEN_METRICS}
    async with aiohttp.ClientSession() as session, session.get(f"{served.url}/metrics", headers=headers) as answer:
        page = await answer.read()

    assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0;")
    assert page.endswith(b"\n# EOF\n")
    found = {(one.name, values(one)): one.value for one in open_samples(page)}
    assert found["megascale_job_round", ("job",)] == 1.0


async def test_heartbeats_are_answered_while_a_page_is_written(
    link: Link, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of 12,288 ranks takes the library a third of a second; here it takes until the heartbeat is answered."""
    begun, answered = threading.Event(), threading.Event()

    def slowly(page: Page, accept: str) -> Encoded:
        begun.set()
        assert answered.wait(30.0), "no heartbeat was answered meanwhile"
        return encoded(page, accept)

    monkeypatch.setattr("megascale_ops.controller.metrics.page.encoded", slowly)
    await link.join(_join())
    async with aiohttp.ClientSession() as session:
        scrape = asyncio.create_task(session.get(f"{served.url}/metrics"))
        assert await asyncio.to_thread(begun.wait, 30.0)

        reply = await link.heartbeat(_heartbeat())

        is_early = scrape.done()
        answered.set()
        async with await scrape as answer:
            text = await answer.text()

    assert reply is not None
    assert not is_early
    assert answer.status == 200
    assert 'megascale_job_round{job="job"} 1.0' in text


async def test_a_token_is_demanded_of_everybody_but_the_health_check(tmp_path: Path) -> None:
    """No token, a wrong one, a strange one: 401. The right one passes."""
    async with serve_controller(tmp_path, "secret") as served:
        for token in (None, "wrong", "sécrèt"):
            async with Link(served.url, token) as link:
                with pytest.raises(RefusedError, match="wants a token"):
                    await link.status()
                assert (await link.healthz())["status"] == "ok"
        async with Link(served.url, "secret") as link:
            assert (await link.status()).jobs == ()


async def test_tokens_are_never_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every log at its finest, neither the right token nor a wrong one stands in it, also not beside an error."""
    caplog.set_level(logging.DEBUG)

    async with serve_controller(tmp_path, "the-right-secret") as served:
        monkeypatch.setattr(served.loop, "status", lambda _job, **_asked: 1 // 0)
        for token, may_pass in (("the-right-secret", True), ("the-wrong-secret", False), (None, False)):
            async with Link(served.url, token) as link:
                requests = (link.join(_join()), link.heartbeat(_heartbeat()), link.incident("nope-1"), link.status())
                answers = [(await asyncio.gather(one, return_exceptions=True))[0] for one in requests]
            assert all("wants a token" in str(one) for one in answers) is not may_pass

    assert "a request to /v1/status failed" in caplog.text
    logged = caplog.text + "".join(repr(vars(record)) for record in caplog.records)
    assert "the-right-secret" not in logged
    assert "the-wrong-secret" not in logged


async def _post(session: aiohttp.ClientSession, url: str, body: bytes) -> tuple[int, str]:
    async with session.post(url, data=body) as answer:
        return answer.status, msgspec.json.decode(await answer.read(), type=ErrorReply).error


async def test_oversized_bodies_are_413(served: Served, link: Link) -> None:
    """Beyond 256 KiB nothing is taken, whether the size is announced or not."""

    async def _drip() -> AsyncIterator[bytes]:
        for _ in range(6):
            yield b" " * 65536

    async with aiohttp.ClientSession() as session:
        announced = await _post(session, f"{served.url}/v1/heartbeat", b" " * (MAX_BODY_BYTES + 1))
        async with session.post(f"{served.url}/v1/heartbeat", data=_drip()) as answer:
            dripped = answer.status

    assert announced[0] == 413
    assert str(MAX_BODY_BYTES) in announced[1]
    assert dripped == 413
    assert (await link.healthz())["status"] == "ok"


BAD_BODIES = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b"{",
    b"\xff\xfe",
    b'{"node": 3}',
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b'{"node":"a/b","agent_id":"x","seq":1,"mono_s":0,"wall_s":0}',
    b'{"node":"a","agent_id":"x","seq":1,"mono_s":0,"wall_s":0,"version":77}',
    b'{"node":"a","agent_id":"x","seq":"1","mono_s":0,"wall_s":0}',
    b'{"node":"a","agent_id":"x","seq":1,"mono_s":NaN,"wall_s":0}',
    b'{"node":"' + b"a" * 5000 + b'","agent_id":"x","seq":1,"mono_s":0,"wall_s":0}',
]


@pytest.mark.parametrize(
    "path", ["heartbeat", "evidence", "jobs/job/join", "jobs/job/leave", "jobs/job/policy", "jobs/job/profile"]
)
async def test_malformed_bodies_are_400(served: Served, link: Link, path: str) -> None:
    """Each gets one sentence; the controller is unharmed."""
    async with aiohttp.ClientSession() as session:
        for body in BAD_BODIES:
            status, sentence = await _post(session, f"{served.url}/v1/{path}", body)
            # A request for a profile needs no body; it is the job that does not exist.
            assert status == (404 if (path, body) == ("jobs/job/profile", b"{}") else 400), body[:60]
            assert sentence
    assert (await link.status()).jobs == ()


async def test_mutated_messages_never_harm_the_controller(served: Served, link: Link) -> None:
    """Hundreds of damaged but nearly right messages: an answer below 500 for each, and training goes on."""
    dice = random.Random(7)  # noqa: S311  the same damage in every run
    good = {
        "heartbeat": msgspec.json.encode(_heartbeat()),
        "jobs/job/join?wait_s=0": msgspec.json.encode(_join()),
        "jobs/job/leave": msgspec.json.encode(Leave("job", "a", "r1", "succeeded")),
        "evidence": msgspec.json.encode(Evidence("a", "job", "job-1", "o")),
        "jobs/job/policy": msgspec.json.encode(PolicyChange({"silence_floor_s": "10"})),
        "jobs/job/profile": msgspec.json.encode(ProfileAsk(steps=3, ranks=(0,), deadline_s=5.5)),
    }
    statuses = set()
    async with aiohttp.ClientSession() as session:
        for count in range(600):
            path = dice.choice(list(good))
            body = bytearray(good[path])
            for _ in range(dice.randint(0, 4)):
                body[dice.randrange(len(body))] = dice.choice(b'0123456789-"{}[],:.eEnt\x00\xff/ ')
            async with session.post(f"{served.url}/v1/{path}", data=bytes(body)) as answer:
                statuses.add((path, answer.status))
                assert answer.status < 500, (count, bytes(body))

    assert {(path, 400) for path in good} <= statuses
    assert {(path, 200) for path in good if path != "evidence"} <= statuses  # there is no incident that it could be of
    assert (await link.healthz())["status"] == "ok"
    assert (await link.join(_join(job="other"))).status == "go"


@pytest.mark.parametrize("wait_s", ["x", "nan", "-1", "inf"])
async def test_a_wait_that_is_no_time_is_refused(served: Served, wait_s: str) -> None:
    """Query values are checked like bodies."""
    body = msgspec.json.encode(_join())

    async with aiohttp.ClientSession() as session:
        status, _sentence = await _post(session, f"{served.url}/v1/jobs/job/join?wait_s={wait_s}", body)

    assert status == 400


async def test_the_address_and_the_body_must_agree(served: Served) -> None:
    """A join for one job under another's address is a mistake."""
    async with aiohttp.ClientSession() as session:
        status, sentence = await _post(session, f"{served.url}/v1/jobs/b/join", msgspec.json.encode(_join()))

    assert status == 400
    assert "'b'" in sentence


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110  the server signals no arrival to the test
            await asyncio.sleep(0)


async def test_a_runner_whose_connection_breaks_is_noticed(served: Served) -> None:
    """A killed runner's poll breaks; the next start on its node takes over without waiting for time-outs."""
    async with Link(served.url) as first:
        await first.join(_join())
        poll = asyncio.create_task(first.orders("job", "a", "r1", 1))
        await _until(lambda: served.loop.jobs["job"].runners["a"].open_requests > 0)
        poll.cancel()
        await asyncio.gather(poll, return_exceptions=True)
    runner = served.loop.jobs["job"].runners["a"]
    await _until(lambda: runner.open_requests == 0)
    runner.seen_s -= 2.0

    async with Link(served.url) as second:
        reply = await second.join(_join(runner_id="r2"))

    assert runner.broken
    assert (reply.status, reply.round) == ("go", 2)
