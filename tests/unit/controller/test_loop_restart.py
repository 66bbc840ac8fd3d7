# SPDX-License-Identifier: Apache-2.0
"""A controller killed in every state of the recovery table goes on where it stood."""

import signal
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from megascale_ops.controller.record.state_machine import State
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import Leave
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition
from tests.fakes.controlled_job import World

KILL = -signal.SIGKILL


async def _replacing(world: World) -> None:
    await world.up("a", "b")
    world.ranks["b"] = []
    world.ask(world.new_join("a", cause="failure", exits=(world.exit(0, KILL),), previous_round=1))
    await world.settle()
    await world.wait(11.0)


async def _restarting(world: World) -> None:
    for node in ("a", "b"):
        world.ask(world.new_join(node))
    await world.settle()


async def _catching_up(world: World) -> None:
    await _restarting(world)
    world.spawn("a", "b")
    await world.wait(0.4)


async def _running(world: World) -> None:
    await world.up("a", "b")


async def _suspect(world: World) -> None:
    await world.up("a", "b")
    world.rank(1).state, world.rank(1).stopped_since_s = "T", world.now_s
    await world.wait(0.6)


async def _confirming(world: World) -> None:
    await world.up("a", "b")
    for number in range(4):
        world.rank(number).collective = CollectivePosition(5, 5 if number == 3 else 4, "all_reduce")
    await world.wait(5.6)


async def _stopping(world: World) -> None:
    await world.up("a", "b")
    world.ask(world.new_join("a", cause="failure", exits=(world.exit(0, KILL),), previous_round=1))
    await world.settle()


async def _failed(world: World) -> None:
    await world.up("a", "b")
    world.loop.leave(Leave("job", "a", "runner-a", "failed", round=1))
    await world.settle()


async def _finished(world: World) -> None:
    await world.up("a", "b")
    for node in ("a", "b"):
        world.loop.leave(Leave("job", node, f"runner-{node}", "succeeded", round=1))
    await world.settle()


STATES: dict[State, Callable[[World], Awaitable[None]]] = {
    State.RESTARTING: _restarting,
    State.CATCHING_UP: _catching_up,
    State.RUNNING: _running,
    State.SUSPECT: _suspect,
    State.CONFIRMING: _confirming,
    State.STOPPING: _stopping,
    State.REPLACING: _replacing,
    State.FAILED: _failed,
    State.FINISHED: _finished,
}
TRAINING = (State.RESTARTING, State.CATCHING_UP, State.RUNNING, State.SUSPECT, State.CONFIRMING)


@pytest.mark.parametrize("state", STATES)
async def test_every_state_is_resumed(state: State) -> None:
    """State, round, members and open incident are what they were, and nothing was done that was not asked for."""
    world = World(min_nodes=2, max_nodes=2)
    await STATES[state](world)
    assert world.state == state
    before = world.loop.jobs["job"].record

    world.restart_controller()
    after = world.loop.jobs["job"].record

    assert (after.state, after.round, after.members) == (before.state, before.round, before.members)
    assert (after.incident, after.incidents, after.orders) == (before.incident, before.incidents, before.orders)


async def test_a_job_keeps_its_id_through_rounds_lives_and_controllers() -> None:
    """Ranks prove by it that an earlier round of theirs was replaced; no other job of the name has the same."""
    world, other = World(min_nodes=2, max_nodes=2), World(min_nodes=2, max_nodes=2)
    await _running(other)
    await _failed(world)
    first = world.loop.jobs["job"].record.job_id

    world.restart_controller()
    joins = [world.ask(msgspec.structs.replace(world.new_join(node), runner_id=f"next-{node}")) for node in ("a", "b")]
    replies = [await join for join in joins]

    assert first
    assert first != other.loop.jobs["job"].record.job_id
    assert [(reply.status, reply.round, reply.job_id) for reply in replies] == [("go", 2, first)] * 2


async def test_a_controller_that_lost_its_journal_is_told_the_id() -> None:
    """By the runner that requests the next round; else a recovery would wait for the lease of a checkpoint folder."""
    world = World(min_nodes=1, max_nodes=1)

    reply = await world.ask(msgspec.structs.replace(world.new_join("a", previous_round=4), job_id="as-it-was"))

    assert (reply.round, reply.job_id) == (5, "as-it-was")


@pytest.mark.parametrize("state", TRAINING)
async def test_training_does_not_notice(state: State) -> None:
    """A round that lives goes on under the next controller; a rank that moves again is not suspected any more."""
    world = World(min_nodes=2, max_nodes=2)
    await STATES[state](world)
    world.restart_controller()
    if not world.ranks:
        world.spawn("a", "b")
    for ranks in world.ranks.values():
        for rank in ranks:
            rank.state = "R"

    for step in range(30, 40):
        world.train(step)
        polls = [world.poll(node) for node in ("a", "b")]
        await world.wait(0.5)

    assert world.state == "running"
    assert world.round == 1
    assert all(not poll.done() or poll.result().known for poll in polls)


async def test_a_frozen_rank_is_still_found_by_the_next_controller() -> None:
    """A suspicion survives as the state it is in; a rank that stays frozen is named, with its patience begun anew."""
    world = World(min_nodes=2, max_nodes=2)
    await _suspect(world)

    world.restart_controller()
    await world.wait(4.5)

    assert world.state == "stopping"
    assert world.incident(1).verdict is not None
    assert world.incident(1).verdict.culprits == (1,)  # type: ignore[union-attr]  # asserted above


@pytest.mark.parametrize("state", [State.STOPPING, State.REPLACING])
async def test_joins_that_come_again_end_the_stop(state: State) -> None:
    """Runners repeat their joins; the verdict is given on the exits they carry, and the next round is formed."""
    world = World(min_nodes=2, max_nodes=2)
    await STATES[state](world)
    world.restart_controller()
    polls = [world.poll("b")]
    await world.settle()

    again = world.ask(world.new_join("a", cause="failure", exits=(world.exit(0, KILL),), previous_round=1))
    other = world.ask(world.new_join("b", cause="order", exits=(world.exit(2, -15, by_us=True),), previous_round=1))
    await world.settle()

    assert (again.result().status, again.result().round) == ("go", 2)
    assert (other.result().status, other.result().node_rank) == ("go", 1)
    assert world.incident(1).verdict is not None
    if state is State.STOPPING:
        assert [order.kind for order in polls[0].result().orders] == ["restart"]
        assert world.incident(1).verdict.culprits == (0,)  # type: ignore[union-attr]  # asserted above


async def test_diagnosing_is_resumed() -> None:
    """A controller that died between stop and verdict waits for the joins to come again and then judges."""
    import msgspec

    world = World()
    await world.up("a")
    job = world.loop.jobs["job"]
    record = msgspec.structs.replace(job.record, state=State.DIAGNOSING.value)
    world.memory.cores["job"] = msgspec.json.encode(record)
    world.restart_controller()
    world.loop.tick()
    waiting = world.state

    exits = (world.exit(1, KILL),)
    reply = await world.ask(world.new_join(cause="failure", exits=exits, previous_round=1))

    assert waiting == "diagnosing"
    assert (reply.status, reply.round) == ("go", 2)
    assert reply.verdict is not None
    assert reply.verdict.culprits == (1,)


async def test_degraded_is_resumed() -> None:
    """A job on fewer nodes than it could use still takes one more in."""
    world = World(min_nodes=1, max_nodes=2)
    await world.up("a")
    world.restart_controller()
    before = world.state

    world.ask(world.new_join("b"))
    world.poll("a")
    await world.settle()
    await world.wait(0.2)

    assert (before, world.state) == ("degraded", "stopping")


async def test_an_answer_lost_with_the_controller_is_given_again() -> None:
    """A join whose answer died with the controller is answered as before: same round, same place."""
    world = World()
    join = world.new_join()
    first = await world.ask(join)

    world.restart_controller()
    again = await world.ask(join)

    assert again == first


@pytest.mark.parametrize("state", [State.FAILED, State.FINISHED])
async def test_a_job_that_is_over_stays_over(state: State) -> None:
    """A runner of the life that is over is told to stop, also by the next controller."""
    world = World(min_nodes=2, max_nodes=2)
    await STATES[state](world)

    world.restart_controller()
    reply = await world.ask(world.new_join("b", cause="order", previous_round=1))

    assert reply.status == "stop"
    assert world.state == state


async def test_budgets_survive() -> None:
    """Restarts count on under the next controller."""
    world = World(policy=JobPolicy(max_restarts=1))
    await world.up("a")
    await world.ask(world.new_join(cause="failure", exits=(world.exit(0, KILL),), previous_round=1))

    world.restart_controller()
    reply = await world.ask(world.new_join(cause="failure", exits=(world.exit(0, KILL),), previous_round=2))

    assert reply.status == "stop"


async def test_a_warning_of_the_controller_before_does_not_hold_for_ever() -> None:
    """No event would withdraw it: it is closed, and what still holds is reported anew."""
    world = World(min_nodes=2, max_nodes=2)
    await world.up("a", "b")
    job = world.loop.jobs["job"]
    world.loop.transitions.warn(job, "straggler:1", Verdict(fault="straggler", reason="made up", confidence=0.9))
    world.loop.transitions.save(job)
    await world.settle()
    before = world.incident(1).state

    world.restart_controller()
    await world.settle()

    assert (before, world.incident(1).state) == ("watching", "over")


async def test_a_controller_that_was_away_accuses_nobody() -> None:
    """After a stall of its own all patience begins anew."""
    world = World(policy=JobPolicy(node_lost_s=5.0))
    await world.up("a")

    world.now_s += 60.0
    world.loop.tick()
    await world.wait(3.0, beating=False)

    assert world.state == "running"
    assert world.memory.incidents == {}


@pytest.mark.parametrize(("is_asking", "goes_on_without"), [(True, False), (False, True)])
async def test_a_node_whose_ranks_save_what_they_have_is_waited_for(*, is_asking: bool, goes_on_without: bool) -> None:
    """25 s of SIGTERM's grace on another node are no silence as long as its runner asks; its ranks alone are."""
    world = World(min_nodes=2, max_nodes=2)
    await world.up("a", "b")
    world.ask(world.new_join(cause="failure", exits=(world.exit(1, KILL),), previous_round=1))
    await world.settle()

    poll = world.poll("b")
    for _ in range(25):
        if is_asking and poll.done():
            poll = world.poll("b", after=poll.result().orders[-1].id if poll.result().orders else "")
        elif not is_asking:
            poll.cancel()
        await world.wait(1.0)

    assert (world.state != "stopping") == goes_on_without
