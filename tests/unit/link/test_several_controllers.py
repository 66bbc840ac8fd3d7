# SPDX-License-Identifier: Apache-2.0
"""Several addresses: a client asks the controller that leads, and loses nothing while that changes."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import web

from megascale_ops.errors import ControllerUnreachableError, RefusedError, UsageError
from megascale_ops.link import BlockingLink, Link, Spool, addresses
from megascale_ops.schema.events import Status
from megascale_ops.schema.messages import ErrorReply, Heartbeat, HeartbeatReply
from megascale_ops.schema.version import MESSAGE_VERSION


class Controller:
    """One that leads, or says who does."""

    def __init__(self) -> None:
        self.url = ""
        self.epoch = 1
        self.is_leading = False
        self.leader = ""
        self.beats: list[int] = []
        self.asked = 0

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one request."""
        self.asked += 1
        body = await request.read()
        if not self.is_leading:
            return web.Response(status=503, body=msgspec.json.encode(ErrorReply("not the leader", self.leader)))
        if request.path == "/v1/heartbeat":
            self.beats.append(msgspec.json.decode(body, type=Heartbeat).seq)
            return web.Response(body=msgspec.json.encode(HeartbeatReply(epoch=self.epoch)))
        if request.path == "/v1/status":
            status = Status(version=MESSAGE_VERSION, wall_s=0.0, controller_lag_s=0.0, jobs=())
            return web.Response(body=msgspec.json.encode(status))
        return web.Response(status=409, body=msgspec.json.encode(ErrorReply("no")))


@pytest.fixture
async def three() -> AsyncIterator[list[Controller]]:
    """Three on loopback, of which the last leads."""
    made, runners = [], []
    for _ in range(3):
        one = Controller()
        app = web.Application()
        app.router.add_route("*", "/{anything:.*}", one.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        one.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        made.append(one)
        runners.append(runner)
    made[2].is_leading = True
    yield made
    for runner in runners:
        await runner.cleanup()


def _beat(seq: int) -> Heartbeat:
    return Heartbeat(node="n", agent_id="a", seq=seq, mono_s=float(seq), wall_s=0.0, full=True)


def _all(of: list[Controller]) -> str:
    return ",".join(one.url for one in of)


async def test_the_leader_is_found_and_asked_from_then_on(three: list[Controller]) -> None:
    """Without a hint one after the other; with one it is asked at once."""
    async with Link(_all(three)) as link:
        await link.heartbeat(_beat(1))
        await link.heartbeat(_beat(2))
    without_hint = [one.asked for one in three]
    three[0].leader = three[2].url
    async with Link(_all(three)) as link:
        await link.heartbeat(_beat(3))

    assert without_hint == [1, 1, 2]
    assert [one.asked for one in three] == [2, 1, 3]
    assert three[2].beats == [1, 2, 3]


async def test_an_address_that_was_not_given_is_never_asked(three: list[Controller]) -> None:
    """A token goes nowhere else, whatever a controller says."""
    three[0].leader = three[1].leader = three[2].url

    async with Link(_all(three[:2]), token="t") as link:  # noqa: S106  no secret
        with pytest.raises(ControllerUnreachableError, match="not the leader"):
            await link.heartbeat(_beat(1))

    assert [one.asked for one in three] == [1, 1, 0]


async def test_what_could_not_be_delivered_reaches_the_next_leader_in_order(three: list[Controller]) -> None:
    """While none leads heartbeats are kept; none is lost, and each comes once."""
    spool = Spool()
    async with Link(_all(three)) as link:
        await spool.send(link, _beat(1))
        three[2].is_leading = False
        for seq in (2, 3):
            with pytest.raises(ControllerUnreachableError):
                await spool.send(link, _beat(seq))
        three[0].is_leading = True
        await spool.send(link, _beat(4))

    assert three[2].beats == [1]
    assert three[0].beats == [2, 3, 4]


async def test_a_leader_that_was_replaced_is_not_believed(three: list[Controller]) -> None:
    """Its number is lower than one that was heard: its answer is thrown away, and the other one is asked again."""
    three[2].epoch = 2
    three[0].epoch = 1
    async with Link(_all(three)) as link:
        await link.heartbeat(_beat(1))
        three[0].is_leading, three[2].is_leading = True, False
        with pytest.raises(ControllerUnreachableError, match=r"leads no more: it is number 1, and number 2 was heard"):
            await link.heartbeat(_beat(2))
        three[0].is_leading, three[2].is_leading = False, True
        reply = await link.heartbeat(_beat(3))

    assert reply.epoch == 2


async def test_a_refusal_is_an_answer(three: list[Controller]) -> None:
    """The leader's no is not asked for a second time elsewhere."""
    three[0].is_leading = True

    async with Link(_all(three)) as link:
        with pytest.raises(RefusedError, match="no"):
            await link.incident("x")

    assert [one.asked for one in three] == [1, 0, 0]


async def test_threads_follow_as_well(three: list[Controller]) -> None:
    """The blocking link, from a dead address on."""
    dead = "http://127.0.0.1:1"

    def ask() -> str:
        with BlockingLink(f"{dead},{_all(three)}") as link:
            link.status()
            return link.url

    assert await asyncio.to_thread(ask) == three[2].url


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("http://a:1,b:2", r"controller address 'b:2' in 'http://a:1,b:2' can't be used"),
        ("http://a:1,", r"controller address '' in"),
        ("http://a:1,http://b:x", r"'http://b:x' in"),
        ("ftp://a", r"controller address 'ftp://a' can't be used: it looks like http://HOST:PORT"),
    ],
)
def test_an_address_that_can_not_be_used_is_named(given: str, why: str) -> None:
    """One sentence with the one of several."""
    with pytest.raises(UsageError, match=why):
        addresses(given)


def test_the_same_address_twice_is_one() -> None:
    """Spaces and a slash at the end change nothing."""
    assert addresses("http://a:1/, http://a:1,http://b:2") == ("http://a:1", "http://b:2")
