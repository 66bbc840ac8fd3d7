# SPDX-License-Identifier: Apache-2.0
"""A profile of a job: who is ordered, what comes back, and that every wait ends."""

from pathlib import Path

import msgspec
import pytest

from megascale_ops.errors import NotFoundError, RefusedError, UsageError
from megascale_ops.link import Link
from megascale_ops.schema.kernels import KernelTime, ProfileAsk, ProfileView, RankKernels
from megascale_ops.schema.messages import Evidence, EvidenceItem, Order
from tests.fakes.controlled_job import World
from tests.fakes.served_controller import serve_controller


async def two_nodes() -> World:
    """Return a world with a job of four ranks on two nodes."""
    world = World(nproc=2, min_nodes=2, max_nodes=2)
    await world.up("a", "b")
    return world


def begin(world: World, **more: object) -> ProfileView:
    """Ask for a profile."""
    return world.loop.profiling.begin(world.loop.jobs["job"], msgspec.structs.replace(ProfileAsk(), **more))


def view(world: World, name: str) -> ProfileView:
    """Look at a profile."""
    return world.loop.profiling.view("job", name)


def orders(world: World, node: str) -> list[Order]:
    """Return the orders to profile that a node's agent is given now."""
    return [order for order in world.beat(node).orders if order.kind == "profile"]


def answer(world: World, order: Order, slow: int = -1, missing: tuple[int, ...] = ()) -> None:
    """Answer as an agent does: the gemm takes 1 ms, on the slow rank 1.4 ms."""
    items = []
    for rank in order.ranks:
        us = 1400.0 if rank == slow else 1000.0
        rows = (KernelTime("gemm", 10, 10 * us, us, us),)
        found = RankKernels(order.id, "gpu", order.steps, 21, 0.1, 0.001, rows)
        if rank in missing:
            items.append(EvidenceItem("profile", ok=False, rank=rank, text="no answer in 60 s"))
        else:
            items.append(EvidenceItem("profile", ok=True, rank=rank, path=f"/run/rank-{rank}.json", kernels=found))
    world.loop.evidence(Evidence(node=order.node, job="job", incident="", order=order.id, items=tuple(items)))


async def test_every_nodes_agent_is_asked_and_the_slow_rank_is_named() -> None:
    """The orders carry what was asked; they are not given again; nothing of the job changes."""
    world = await two_nodes()
    asked = begin(world, steps=3, deadline_s=30.0)
    assert asked.state == "waiting"

    given = [*orders(world, "a"), *orders(world, "b")]
    for order in given:
        answer(world, order, slow=2)

    assert [(order.ranks, order.steps, order.round, order.deadline_s) for order in given] == [
        ((0, 1), 3, 1, 30.0),
        ((2, 3), 3, 1, 30.0),
    ]
    found = view(world, asked.id)
    assert found.state == "done"
    assert found.verdict == "rank 2 runs gemm 1.40 times as slowly as its equals"
    assert [(rank.rank, rank.node, rank.path) for rank in found.ranks] == [
        (rank, "ab"[rank // 2], f"/run/rank-{rank}.json") for rank in range(4)
    ]
    assert orders(world, "a") == orders(world, "b") == []
    assert world.state == "running"
    assert world.loop.incidents == {}
    assert [event.kind for event in world.memory.events].count("profile") == 1


async def test_only_the_ranks_that_were_named_are_asked() -> None:
    """Node a has none of them."""
    world = await two_nodes()
    begin(world, ranks=[3])

    assert orders(world, "a") == []
    assert [order.ranks for order in orders(world, "b")] == [(3,)]


async def test_an_agent_that_is_silent_is_told_when_its_time_is_over() -> None:
    """Its ranks are named with their node; the others' answers stand, and the order is withdrawn."""
    world = await two_nodes()
    asked = begin(world, deadline_s=10.0)
    answer(world, orders(world, "a")[0], missing=(1,))
    assert view(world, asked.id).state == "waiting"

    for step in range(21, 60):
        world.train(step)
        await world.wait(0.4)

    found = view(world, asked.id)
    assert found.state == "done"
    assert {rank.rank: rank.text for rank in found.ranks} == {
        0: "",
        1: "no answer in 60 s",
        2: "no answer of its agent",
        3: "no answer of its agent",
    }
    assert orders(world, "b") == []


async def test_an_answer_that_comes_too_late_changes_nothing() -> None:
    """What has been told stays as it was told; it is taken, so that the agent does not send it again."""
    world = await two_nodes()
    asked = begin(world, ranks=[0])
    (order,) = orders(world, "a")
    answer(world, order)
    told = view(world, asked.id)

    answer(world, order, slow=0)

    assert view(world, asked.id) == told


async def test_an_agent_that_was_not_heard_of_late_is_not_waited_for() -> None:
    """Node b's last heartbeat is 8 s old."""
    world = await two_nodes()
    world.now_s += 8.0
    world.beat("a")
    asked = begin(world)

    texts = {rank.rank: rank.text for rank in asked.ranks}

    assert texts == {2: "the agent of node b is not heard", 3: "the agent of node b is not heard"}


async def test_a_round_that_ends_ends_its_profile() -> None:
    """The next round's ranks are others."""
    world = await two_nodes()
    asked = begin(world)
    world.loop.jobs["job"].change(round=2)
    world.loop.tick()

    found = view(world, asked.id)

    assert found.state == "done"
    assert found.verdict == "no rank has answered"
    assert {rank.text for rank in found.ranks} == {"round 1 ended meanwhile"}
    assert world.loop.transitions.agent_orders == {}


async def test_one_profile_at_a_time() -> None:
    """The second is refused with the first one's name, until that has ended."""
    world = await two_nodes()
    asked = begin(world)

    with pytest.raises(RefusedError, match=f"is being profiled already .{asked.id}., for 65 s at most"):
        begin(world)
    for node in "ab":
        answer(world, orders(world, node)[0])
    again = begin(world)

    assert again.id != asked.id
    with pytest.raises(RefusedError, match="knows no profile"):
        view(world, asked.id)


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        ({"ranks": [0, 4, 9]}, "there is no rank 4,9: job job has ranks 0-3"),
        ({"steps": 101}, "101 steps can't be profiled: 1 to 100"),
        ({"steps": -1}, "-1 steps can't be profiled"),
        ({"deadline_s": 0.5}, "0.5 s can't be the deadline of a profile: 1 to 600"),
        ({"deadline_s": float("nan")}, "nan s can't be the deadline"),
    ],
)
async def test_what_cannot_be_asked_is_refused(ask: dict[str, object], sentence: str) -> None:
    """In one sentence, and no order is given."""
    world = await two_nodes()

    with pytest.raises(UsageError, match=sentence):
        begin(world, **ask)

    assert orders(world, "a") == []


async def test_a_job_that_does_not_run_is_not_profiled() -> None:
    """It waits for nodes."""
    world = World(min_nodes=2, max_nodes=2)
    world.ask(world.new_join("a"))
    await world.settle()

    with pytest.raises(RefusedError, match="job job is replacing: only ranks that run are profiled"):
        begin(world)


async def test_evidence_of_nobodys_profile_is_refused_as_before() -> None:
    """One that was never asked for, and an old one's that comes late."""
    world = await two_nodes()
    asked = begin(world)
    (order,) = orders(world, "a")
    stranger = msgspec.structs.replace(order, id="20200101-000000:a")
    foreign = Evidence(node="b", job="job", incident="", order=order.id)

    with pytest.raises(NotFoundError, match="there is no incident"):
        answer(world, stranger)
    with pytest.raises(NotFoundError, match="there is no incident"):
        world.loop.evidence(foreign)

    assert view(world, asked.id).state == "waiting"


async def test_over_http(tmp_path: Path) -> None:
    """An unknown job, an unknown profile and a body that is none: one sentence each."""
    async with serve_controller(tmp_path) as served, Link(served.url) as link:
        with pytest.raises(RefusedError, match="there is no job 'job'"):
            await link.profile("job", ProfileAsk())
        with pytest.raises(RefusedError, match="this controller knows no profile 'x' of job job"):
            await link.profiled("job", "x")
        with pytest.raises(RefusedError, match="can't be read"):
            await link._ask("POST", "/v1/jobs/job/profile", ProfileView, body=KernelTime("a", 1, 1.0, 1.0, 1.0))
