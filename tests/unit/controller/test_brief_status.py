# SPDX-License-Identifier: Apache-2.0
"""What each of a job's nodes asks at its begin and its end costs the controller the same for a job of any size."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from megascale_ops.link import Link
from megascale_ops.schema.messages import Join, JoinReply, Leave
from tests.fakes.served_controller import Served, serve_controller

NODES = ("a", "b")


def join(node: str) -> Join:
    """Ask for a place in the job of both."""
    return Join("gpt", node, f"r-{node}", f"j-{node}", 8, 2, 2, "127.0.0.1", 29500, 1.0)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """Serve a controller with a job of two nodes in its first round."""
    async with serve_controller(tmp_path) as one:
        async with Link(one.url) as link:
            replies: list[JoinReply] = await asyncio.gather(*(link.join(join(node)) for node in NODES))
            assert {reply.status for reply in replies} == {"go"}
        yield one


async def test_a_brief_answer_has_the_job_and_none_of_its_nodes(served: Served) -> None:
    """All else is as in the whole answer, which has them."""
    async with Link(served.url) as link:
        [brief] = (await link.status("gpt", brief=True)).jobs
        [whole] = (await link.status("gpt")).jobs

    assert (brief.state, brief.round, brief.world_size, brief.step) == (
        whole.state,
        whole.round,
        whole.world_size,
        whole.step,
    )
    assert (brief.nodes, brief.ranks) == ((), ())
    assert [one.node for one in whole.nodes] == ["a", "b"]


async def test_a_node_that_is_done_is_answered_when_the_others_are(served: Served) -> None:
    """It waits with one request; the negative control is the same request while its round goes on."""
    async with Link(served.url) as link, Link(served.url) as other:
        [before] = (await link.status("gpt", brief=True, while_round=1, wait_s=0.05)).jobs
        await link.leave(Leave("gpt", "a", "r-a", "succeeded", round=1))
        waits = asyncio.create_task(link.status("gpt", brief=True, while_round=1, wait_s=20.0))
        await asyncio.sleep(0)  # the request is on its way; the answer has to wait for the other node all the same
        await other.leave(Leave("gpt", "b", "r-b", "succeeded", round=1))
        [after] = (await waits).jobs

    assert before.state == "restarting"
    assert after.state == "finished"


async def test_one_that_waits_for_another_round_or_for_no_job_is_answered_at_once(served: Served) -> None:
    """A round that is over already, and no wait without a job: neither takes the minute that was granted."""
    async with Link(served.url) as link, asyncio.timeout(30.0):
        [job] = (await link.status("gpt", brief=True, while_round=7, wait_s=60.0)).jobs
        everything = await link.status(brief=True, while_round=1, wait_s=60.0)

    assert job.round == 1
    assert [one.job for one in everything.jobs] == ["gpt"]
