# SPDX-License-Identifier: Apache-2.0
"""Neighbouring versions understand each other over real HTTP; versions further apart are refused, with both named."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from megascale_ops.errors import RefusedError, VersionError
from megascale_ops.link import Link
from megascale_ops.schema.events import Status
from megascale_ops.schema.messages import Evidence, Heartbeat, Join, JoinReply, Leave
from megascale_ops.schema.version import MESSAGE_VERSION
from tests.fakes.served_controller import Served, serve_controller

Send = Callable[[Link, int], Any]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A real controller."""
    async with serve_controller(tmp_path) as found:
        yield found


def _heartbeat(version: int, agent: str = "x") -> Heartbeat:
    return Heartbeat("a", agent, 1, 1.0, 1.0, version=version, full=True)


def _join(version: int, number: int = 1) -> Join:
    return Join("job", "a", "r", f"j{number}", 1, 1, 1, "127.0.0.1", 4000, 1.0, version=version)


SENDERS: dict[str, Send] = {
    "heartbeat": lambda link, version: link.heartbeat(_heartbeat(version)),
    "join": lambda link, version: link.join(_join(version), wait_s=1.0),
    "evidence": lambda link, version: link.evidence(Evidence("a", "job", "job-1", "o", version=version)),
}


@pytest.mark.parametrize("what", SENDERS)
@pytest.mark.parametrize("distance", [-2, 2, 40])
async def test_two_versions_apart_is_refused_with_both_named(served: Served, what: str, distance: int) -> None:
    """One sentence that names both versions; nothing of the message was taken in."""
    theirs = MESSAGE_VERSION + distance

    async with Link(served.url) as link:
        with pytest.raises(RefusedError, match=rf"version {theirs}; this program speaks version {MESSAGE_VERSION}"):
            await SENDERS[what](link, theirs)

    assert served.loop.jobs == {}
    assert len(served.loop.registry) == 0


async def test_a_leave_two_versions_apart_ends_no_job(served: Served) -> None:
    """It is refused like any other message, and the job goes on as if none had left."""
    async with Link(served.url) as link:
        await link.join(_join(MESSAGE_VERSION), wait_s=5.0)
        with pytest.raises(RefusedError, match=f"version {MESSAGE_VERSION + 2}"):
            await link.leave(Leave("job", "a", "r", "cancelled", version=MESSAGE_VERSION + 2, round=1))

    assert served.loop.jobs["job"].record.state == "restarting"


@pytest.mark.parametrize("distance", [-1, 1])
async def test_a_neighbour_lives_through_a_whole_job(served: Served, distance: int) -> None:
    """Joined, heard and done, with a version one apart: the update of a cluster passes node by node."""
    version = MESSAGE_VERSION + distance

    async with Link(served.url) as link:
        reply = await link.join(_join(version), wait_s=5.0)
        heard = await link.heartbeat(_heartbeat(version))
        await link.leave(Leave("job", "a", "r", "succeeded", version=version, round=1))
        status = await link.status("job")

    assert (reply.status, reply.round) == ("go", 1)
    assert heard.orders == ()
    assert status.jobs[0].state == "finished"


async def test_what_a_newer_neighbour_adds_is_overlooked(served: Served) -> None:
    """Fields that we do not know yet say nothing to us; a policy that we could not keep is refused by its name."""
    body = msgspec.to_builtins(_join(MESSAGE_VERSION + 1))
    body["something_new"] = {"deep": [1, 2]}
    demanding = {**body, "policy": {"never_heard_of": 3}}

    async with aiohttp.ClientSession() as session:
        address = f"{served.url}/v1/jobs/job/join?wait_s=5"
        async with session.post(address, data=msgspec.json.encode(demanding)) as answer:
            refused, sentence = answer.status, await answer.text()
        async with session.post(address, data=msgspec.json.encode(body)) as answer:
            reply = msgspec.json.decode(await answer.read(), type=JoinReply)

    assert (refused, "never_heard_of" in sentence) == (400, True)
    assert reply.status == "go"


@pytest.mark.parametrize("distance", [-2, -1, 0, 1, 2])
async def test_a_controller_of_a_far_version_is_refused_before_anything_starts(
    served: Served, monkeypatch: pytest.MonkeyPatch, distance: int
) -> None:
    """A runner asks for the status first, so that it never trains under a controller that it can't understand."""
    theirs = MESSAGE_VERSION + distance
    monkeypatch.setattr(
        served.loop, "status", lambda _name, **_asked: Status(version=theirs, wall_s=0.0, controller_lag_s=0.0)
    )

    async with Link(served.url) as link:
        if abs(distance) > 1:
            with pytest.raises(VersionError, match=rf"version {theirs}.*version {MESSAGE_VERSION}"):
                await link.status()
        else:
            assert (await link.status()).version == theirs
