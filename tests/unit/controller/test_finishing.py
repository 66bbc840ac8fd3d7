# SPDX-License-Identifier: Apache-2.0
"""All ranks have ended well: the job is over when their last steps are known, or after a second and a half."""

import asyncio

import msgspec
import pytest

from megascale_ops.controller.recovery.finishing import LAST_STEPS_S, last_steps
from megascale_ops.schema.messages import Heartbeat, JobReport, Leave
from megascale_ops.schema.progress import StepWork
from tests.fakes.controlled_job import World


def _leave(world: World, *nodes: str, more: int = 0) -> None:
    """Let the runners of nodes leave well; each rank has made so many steps more than was told."""
    for node in nodes:
        exits = tuple(world.exit(one.rank, 0, steps_seen=one.steps_seen + more) for one in world.ranks[node])
        world.loop.leave(
            Leave("job", node, f"runner-{node}", "succeeded", round=world.round, exits=exits, mono_s=world.now_s)
        )


async def test_the_steps_of_the_last_heartbeat_come_before_the_end() -> None:
    """Ranks of two nodes make three steps more and end within a heartbeat; the agents tell of it one by one."""
    world = World(min_nodes=2, max_nodes=2)
    await world.up("a", "b", step=20)

    _leave(world, "a", "b", more=3)
    left = world.state
    world.train(23)
    world.beat("a")
    await world.wait(0.1, beating=False)
    half = world.state
    world.beat("b")
    await world.wait(0.1, beating=False)

    assert (left, half, world.state) == ("running", "running", "finished")
    assert world.memory.incidents == {}


async def test_nothing_is_waited_for_that_is_known_or_cannot_come() -> None:
    """Known steps; ranks without a black box; a node whose agent is not heard."""
    told, bare, unheard = World(), World(), World()
    for world in (told, bare, unheard):
        await world.up("a", step=20)
    for rank in bare.ranks["a"]:
        rank.has_box = False
    bare.beat_all()
    unheard.now_s += 6.0

    _leave(told, "a")
    _leave(bare, "a", more=3)
    _leave(unheard, "a", more=3)

    assert [world.state for world in (told, bare, unheard)] == ["finished"] * 3


async def test_an_agent_that_does_not_tell_is_waited_for_no_longer() -> None:
    """The negative control: the steps never come. What ended is not taken for lost or silent meanwhile."""
    world = World()
    await world.up("a", step=20)

    _leave(world, "a", more=3)
    await world.wait(LAST_STEPS_S - 0.2)
    before = world.state
    await world.wait(0.4)

    assert (before, world.state) == ("running", "finished")
    assert world.memory.incidents == {}


async def test_the_leave_is_answered_when_the_job_has_ended() -> None:
    """The runner goes then, and the controller of its own with it; of any other leave nothing is waited for."""
    world = World()
    await world.up("a", step=20)
    job = world.loop.jobs["job"]
    await asyncio.wait_for(last_steps(job), 5.0)
    _leave(world, "a", more=3)

    answer = asyncio.create_task(last_steps(job))
    await world.settle()
    is_held = not answer.done()
    world.train(23)
    world.beat("a")
    await world.wait(0.1, beating=False)
    await asyncio.wait_for(answer, 5.0)

    assert is_held
    assert world.state == "finished"


@pytest.mark.parametrize("outcome", ["cancelled", "failed"])
async def test_a_job_that_does_not_end_well_waits_for_no_steps(outcome: str) -> None:
    """It is over at once, as ever."""
    world = World()
    await world.up("a", step=20)
    exits = (world.exit(0, 0, steps_seen=99),)

    world.loop.leave(Leave("job", "a", "runner-a", outcome, round=1, exits=exits, mono_s=world.now_s))

    assert world.state in ("stopped", "failed")


async def test_steps_that_come_when_a_round_has_been_stopped_are_in_the_report() -> None:
    """Those between an agent's last heartbeat and a crash; nobody judges them, and no other round's are taken."""
    world = World(min_nodes=2, max_nodes=2)
    await world.up("a", "b", step=20)
    history = world.loop.histories.by_job["job"]
    before = history.buckets()[-1].step if history.buckets() else -1

    crashed = world.new_join("a", cause="failed", previous_round=1, exits=(world.exit(0, -9, steps_seen=23),))
    reply = world.ask(crashed)
    await world.settle()
    stopped = world.state
    _tell_steps(world, "b", 1, range(21, 24))
    _tell_steps(world, "b", 2, range(24, 30))  # of a round that is not formed yet

    assert (before, stopped) == (-1, "stopping")
    assert history.buckets()[-1].step == 23
    reply.cancel()


def _tell_steps(world: World, node: str, round_: int, steps: range) -> None:
    world.seq[node] = world.seq.get(node, 0) + 1
    work = tuple(StepWork(step, wall_s=0.05) for step in steps)
    reports = tuple(msgspec.structs.replace(one.report(round_), work=work) for one in world.ranks[node])
    world.loop.heartbeat(
        Heartbeat(
            node=node,
            agent_id=f"agent-{node}",
            seq=world.seq[node],
            mono_s=world.now_s,
            wall_s=world.now_s,
            full=True,
            jobs=(JobReport("job", round_, "/run/job", reports),),
        )
    )


async def test_where_a_round_went_on_is_known_also_if_it_ends_within_a_heartbeat() -> None:
    """After a crash the steps that are left are made between two looks: the incident knows where they began."""
    world = World()
    await world.up("a", step=20)
    world.ask(world.new_join("a", cause="failure", exits=(world.exit(0, -11, step=20),), previous_round=1))
    await world.settle()
    world.ranks.pop("a")
    world.spawn("a")
    for rank in world.ranks["a"]:
        rank.step, rank.steps_seen, rank.moved_s, rank.phase = 22, 5, world.now_s, "forward"

    _leave(world, "a")
    before = world.state
    world.beat("a")
    await world.wait(0.1, beating=False)

    (incident,) = world.memory.incidents.values()
    assert (before, world.state) == ("restarting", "finished")
    assert (incident.step_before, incident.step_after) == (20, 18)
