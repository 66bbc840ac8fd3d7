# SPDX-License-Identifier: Apache-2.0
"""What a rank printed, asked of its node's agent: who is ordered, what is taken for an answer, and every refusal."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from megascale_ops.controller.server import agent_logs
from megascale_ops.controller.server.agent_logs import MOST_OF_NODE, AgentLogs
from megascale_ops.errors import NotFoundError, RefusedError
from megascale_ops.schema.messages import LOG, READ_LOG, Evidence, EvidenceItem, Order
from megascale_ops.schema.runs import LogPart, LogQuery
from tests.fakes.controlled_job import World


class Asked:
    """Two nodes of two ranks each, and what is asked of their agents."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.logs = AgentLogs(world.loop)
        self.tasks: list[asyncio.Task[LogPart]] = []

    def ask(self, **query: object) -> "asyncio.Task[LogPart]":
        """Begin to ask for lines of a rank."""
        self.tasks.append(asyncio.create_task(self.logs.read(self.world.loop.jobs["job"], LogQuery(**query))))  # type: ignore[arg-type]  # fields
        return self.tasks[-1]

    async def orders(self, node: str) -> list[Order]:
        """Return the orders to read that a node's agent is given now."""
        await self.world.settle()
        return [order for order in self.world.beat(node).orders if order.kind == READ_LOG]

    def answer(self, order: Order, *items: EvidenceItem, node: str = "", job: str = "job") -> bool:
        """Send what an agent has read."""
        return self.logs.ingest_evidence(
            Evidence(node=node or order.node, job=job, incident="", order=order.id, items=items)
        )


@pytest.fixture
async def asked() -> AsyncIterator[Asked]:
    """A job that trains."""
    world = World(nproc=2, min_nodes=2, max_nodes=2)
    await world.up("a", "b")
    made = Asked(world)
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)


def lines(*told: str, rank: int = 3) -> EvidenceItem:
    """Return what an agent has read."""
    return EvidenceItem(kind=LOG, ok=True, rank=rank, log=LogPart(rank, 1, "stderr", told, (1,), 10, node="b"))


async def test_the_agent_of_the_ranks_node_is_asked_and_no_other(asked: Asked) -> None:
    """The order has rank, round and words to search, and no path; it is given until it is answered, and not again."""
    reading = asked.ask(rank=3, lines=5, grep="loss", after=7)

    elsewhere, (order,), (again,) = await asked.orders("a"), await asked.orders("b"), await asked.orders("b")
    assert asked.answer(order, lines("loss 1"))
    part = await reading

    assert elsewhere == []
    assert again == order
    assert (order.job, order.ranks, order.log) == ("job", (3,), LogQuery(rank=3, lines=5, grep="loss", after=7))
    assert part.lines == ("loss 1",)
    assert await asked.orders("b") == []
    assert asked.world.loop.transitions.agent_orders == {}
    assert asked.world.loop.incidents == {}


async def test_of_a_round_before_the_node_is_asked_where_the_rank_ran_then(asked: Asked) -> None:
    """Rank 3 was on b in round 1 and is on c from round 3 on; what it printed in rounds 1 and 2 lies on b."""
    job = asked.world.loop.jobs["job"]
    job.homes.note(2, (("a", 2), ("b", 2)))
    job.homes.note(3, (("a", 2), ("c", 2)))

    asked.ask(rank=3, round=1)

    assert len(await asked.orders("b")) == 1
    assert job.homes.node_of(3, 2) == "b"
    assert job.homes.node_of(3, 3) == job.homes.node_of(3, -1) == "c"
    assert job.homes.rounds_elsewhere(3, "c", 4) == [2, 1]
    assert job.homes.rounds_elsewhere(3, "b", 4) == [4, 3]
    assert job.homes.rounds_elsewhere(0, "a", 4) == []
    assert job.homes.node_of(4, 1) == job.homes.node_of(0, 0) == ""


async def test_a_rank_that_the_job_does_not_have_is_none_of_any_node(asked: Asked) -> None:
    """No agent is asked for it."""
    with pytest.raises(NotFoundError, match="there is no rank 4: job job has ranks 0-3"):
        await asked.ask(rank=4)

    assert await asked.orders("b") == []


async def test_an_agent_that_is_not_heard_is_not_waited_for(asked: Asked) -> None:
    """Node b's last heartbeat is 8 s old: the sentence says what to type there."""
    asked.world.now_s += 8.0
    asked.world.beat("a")

    with pytest.raises(RefusedError, match=r"agent of node b, .* is not heard: `megascale-ops logs job --rank 3` on"):
        await asked.ask(rank=3)


async def test_an_agent_that_does_not_answer_is_given_up(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the deadline the order is withdrawn, and an answer that comes later is taken, to no effect."""
    monkeypatch.setattr(agent_logs, "PATIENCE_S", 0.05)
    reading = asked.ask(rank=3)
    (order,) = await asked.orders("b")

    with pytest.raises(RefusedError, match="agent of node b has not answered"):
        await reading

    assert await asked.orders("b") == []
    assert asked.answer(order, lines("late"))


async def test_an_older_agent_is_told_as_one(asked: Asked) -> None:
    """It refuses an order that it does not know, or, where it knew some of it, answers without lines."""
    unknown = EvidenceItem("signal", ok=False, text="refused: 'read_log' is no order for an agent")
    for item in (unknown, EvidenceItem(LOG, ok=True, rank=3)):
        reading = asked.ask(rank=3)
        (order,) = await asked.orders("b")
        asked.answer(order, item)

        with pytest.raises(RefusedError, match="agent of node b is too old to read logs: update it, or `megascale"):
            await reading


async def test_what_the_agent_says_is_passed_on(asked: Asked) -> None:
    """No such file is 404, anything else that it can't do 409; either names the node."""
    nothing = LogPart(3, 0, "stderr")
    for item, kind in (
        (EvidenceItem(LOG, ok=False, text="rank 3 has left no stderr", log=nothing), NotFoundError),
        (EvidenceItem(LOG, ok=False, text="the disk did not answer within 3 s"), RefusedError),
    ):
        reading = asked.ask(rank=3)
        (order,) = await asked.orders("b")
        asked.answer(order, item)

        with pytest.raises(kind, match=f"node b: {item.text}"):
            await reading


async def test_nobody_else_answers(asked: Asked) -> None:
    """Evidence of another node, of another job, and of an incident is none of this."""
    reading = asked.ask(rank=3)
    (order,) = await asked.orders("b")

    assert asked.answer(order, lines("forged"), node="a")
    assert asked.answer(order, lines("forged"), job="other")
    assert not asked.logs.ingest_evidence(Evidence("b", "job", "job-1", order.id, items=(lines("forged"),)))
    assert not asked.logs.ingest_evidence(Evidence("b", "job", "", "checkpoint-1:b", items=(lines("forged"),)))
    await asked.world.settle()

    assert not reading.done()


async def test_no_node_is_asked_too_much(asked: Asked) -> None:
    """The ninth request for one node is refused while eight wait; another node's are not, and places come back."""
    waiting = [asked.ask(rank=3) for _ in range(MOST_OF_NODE)]
    orders = await asked.orders("b")
    with pytest.raises(RefusedError, match="8 logs of node b are being read: ask again in a few seconds"):
        await asked.ask(rank=2)
    other = asked.ask(rank=0)
    await asked.world.settle()
    assert not other.done()

    for order in orders:
        asked.answer(order, lines("line"))
    await asyncio.gather(*waiting)
    asked.ask(rank=2)

    assert len(await asked.orders("b")) == 1


async def test_who_goes_away_leaves_no_order(asked: Asked) -> None:
    """A page that is closed while its request waits."""
    reading = asked.ask(rank=3)
    await asked.world.settle()

    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)

    assert asked.world.loop.transitions.agent_orders == {}
