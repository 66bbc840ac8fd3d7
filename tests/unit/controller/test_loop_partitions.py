# SPDX-License-Identifier: Apache-2.0
"""Nodes that are cut off, come back, are replaced, wait as spares, or describe a job that the controller has lost.

Next to each the opposite, where the same signs mean that something is broken.
"""

import msgspec
import pytest

from megascale_ops.controller.rendezvous.poll import Poll
from megascale_ops.errors import RefusedError
from megascale_ops.schema.messages import Join, Leave
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition
from tests.fakes.controlled_job import World


def _collective(world: World, number: int) -> None:
    for ranks in world.ranks.values():
        for rank in ranks:
            rank.collective = CollectivePosition(number, number, "all_reduce")


async def _train(world: World, seconds: float, *, without: str = "", step: int = 20) -> int:
    """Let all nodes train, a step and a collective each half second; one may go unheard."""
    for _ in range(round(seconds * 2)):
        step += 1
        world.train(step)
        _collective(world, step)
        for _ in range(5):
            world.now_s += 0.1
            for node in world.ranks:
                if node != without:
                    world.beat(node)
                    world.poll(node)
            world.loop.tick()
            await world.settle()
    return step


async def test_a_node_cut_off_from_the_controller_only_is_left_alone() -> None:
    """The others finish steps and collectives, so it lives: a warning, no restart; healed, all is as before."""
    world = World(nproc=1, min_nodes=1, max_nodes=2, policy=JobPolicy(node_lost_s=5.0))
    await world.up("a", "b")
    step = await _train(world, 2.0)

    step = await _train(world, 30.0, without="b", step=step)
    state, warnings = world.state, [one.state for one in world.memory.incidents.values()]
    await _train(world, 3.0, step=step)

    assert (state, world.round) == ("running", 1)
    assert warnings == ["watching"]
    assert [one.state for one in world.memory.incidents.values()] == ["over"]
    assert "training is left alone" in world.incident(1).verdict.reason  # type: ignore[union-attr]  # it has one


async def test_a_node_cut_off_is_lost_once_the_others_stand_still() -> None:
    """The opposite: patience counts from the last step that was made together."""
    world = World(nproc=1, min_nodes=1, max_nodes=2, policy=JobPolicy(node_lost_s=5.0))
    await world.up("a", "b")
    step = await _train(world, 2.0)
    await _train(world, 10.0, without="b", step=step)
    del world.ranks["b"]
    before = world.state

    for _ in range(9):
        world.poll("a")
        await world.wait(1.0)

    assert before == "running"
    assert world.state == "stopping"
    acted = [one for one in world.memory.incidents.values() if one.state == "open"]
    assert [one.verdict.nodes for one in acted if one.verdict is not None] == [("b",)]


async def test_steps_without_collectives_prove_nothing() -> None:
    """Ranks that never meet go on without a dead node; it is lost after its patience, as ever."""
    world = World(nproc=1, min_nodes=1, max_nodes=2, policy=JobPolicy(node_lost_s=5.0))
    await world.up("a", "b")

    for step in range(14):
        world.rank(0).step, world.rank(0).moved_s = 30 + step, world.now_s
        world.rank(0).steps_seen += 1
        for _ in range(5):
            world.now_s += 0.1
            world.beat("a")
            world.poll("a")
            world.loop.tick()
            await world.settle()

    assert world.state == "stopping"
    assert world.incident(1).verdict.nodes == ("b",)  # type: ignore[union-attr]  # it has one


async def test_a_node_that_comes_back_after_its_round_is_ordered_into_the_next() -> None:
    """It was cut off when the others restarted: its next poll brings the order that never reached it, once."""
    world = World(nproc=1, min_nodes=1, max_nodes=2, policy=JobPolicy(node_lost_s=5.0))
    await world.up("a", "b")
    del world.ranks["b"]
    await world.wait(12.0)
    await world.ask(world.new_join("a", cause="order", previous_round=1))
    await world.run_round(40)

    first = await world.loop.orders(Poll("job", "b", "runner-b", 1), 0.0)
    after = first.orders[0].id
    second = await world.loop.orders(Poll("job", "b", "runner-b", 1, after), 0.0)
    current = await world.loop.orders(Poll("job", "a", "runner-a", 2), 0.0)

    assert [(order.kind, order.round) for order in first.orders] == [("restart", 1)]
    assert second.orders == ()
    assert current.orders == ()
    assert world.round == 2


async def test_a_runner_whose_place_was_taken_stops_its_ranks() -> None:
    """Two runners of one node never both keep ranks: the one that was thought dead is told to end, and why."""
    world = World()
    await world.up("a")
    await world.wait(8.0)

    taken = await world.ask(world.new_join(runner_id="again"))
    old = await world.poll("a")
    stranger = await world.poll("a", runner_id="nobody")
    with pytest.raises(RefusedError, match="served by another runner"):
        await world.ask(world.new_join(previous_round=1))

    assert (taken.status, taken.round) == ("go", 2)
    assert [order.kind for order in old.orders] == ["shutdown"] or old.orders == ()
    assert not old.known
    assert (stranger.known, stranger.orders) == (False, ())


async def test_a_spare_is_told_at_once_that_it_is_one() -> None:
    """It need not wait for the end of its long poll to know why nothing happens."""
    world = World(min_nodes=1, max_nodes=1)
    await world.up("a")
    join = world.new_join("b")

    told = world.ask(join)
    await world.settle()
    again = world.ask(join)
    await world.settle()

    assert told.result().status == "wait"
    assert "spare" in told.result().reason
    assert not again.done()
    world.loop.leave(Leave("job", "a", "runner-a", "succeeded", round=1))
    await world.settle()
    assert (again.result().status, again.result().exit_code) == ("stop", 0)


async def test_a_node_whose_runner_and_agent_fall_silent_together_holds_nobody_up() -> None:
    """The others wait 2.5 s for a sign of its agent, not until its last heartbeat is old."""
    world = World(nproc=1, min_nodes=1, max_nodes=2)
    await world.up("a", "b")
    poll = world.poll("b")
    world.beat("b")
    await world.settle()
    poll.cancel()
    del world.ranks["b"]

    world.ask(world.new_join("a", cause="failure", exits=(world.exit(0, 1),), previous_round=1))
    await world.wait(2.0)
    early = world.state
    await world.wait(1.0)

    assert early == "stopping"
    assert (world.state, world.round) == ("restarting", 2)


async def test_a_node_whose_agent_is_heard_after_its_runner_died_is_waited_for() -> None:
    """The opposite: its ranks are there, so no node starts without it before they have stopped."""
    world = World(nproc=1, min_nodes=1, max_nodes=2)
    await world.up("a", "b")
    poll = world.poll("b")
    await world.settle()
    poll.cancel()

    world.ask(world.new_join("a", cause="failure", exits=(world.exit(0, 1),), previous_round=1))
    await world.wait(4.0)

    assert (world.state, world.round) == ("stopping", 1)


def _described(world: World, node: str, place: int, *, round_: int = 3) -> Join:
    """Return how a runner describes the round that it runs."""
    join = world.new_join(node, cause="resume", previous_round=round_)
    return msgspec.structs.replace(join, node_rank=place, nodes=2, job_id="as-it-was")


async def test_a_controller_without_a_journal_takes_a_running_job_over() -> None:
    """When every node has described its round, the job is watched again: a frozen rank is named as ever."""
    world = World(nproc=1, min_nodes=2, max_nodes=2)

    second = await world.ask(_described(world, "b", 1))
    alone = world.loop.jobs.get("job")
    last = _described(world, "a", 0)
    first = await world.ask(last)
    again = await world.ask(last)
    await world.run_round(20)
    state, nodes = world.state, [member.node for member in world.loop.jobs["job"].record.members]
    world.rank(1).state, world.rank(1).stopped_since_s = "T", world.now_s
    await world.wait(2.0)

    assert (second.status, alone) == ("wait", None)
    assert (first.status, first.round, first.node_rank, first.job_id) == ("go", 3, 0, "as-it-was")
    assert again == first
    assert (state, world.round, nodes) == ("running", 3, ["a", "b"])
    (incident,) = world.memory.incidents.values()
    assert incident.id == "job-4"
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == ("frozen", (1,))


async def test_a_description_changes_nothing_of_a_job_that_is_known() -> None:
    """The negative control: a runner that describes a round to a controller with the job only gets a reply."""
    world = World(nproc=1, min_nodes=2, max_nodes=2)
    await world.up("a", "b")
    before = world.loop.jobs["job"].record

    reply = await world.ask(_described(world, "a", 0, round_=7))

    assert reply.status == "wait"
    assert world.loop.jobs["job"].record == before


async def test_of_two_stories_the_newer_round_is_believed() -> None:
    """A node that was cut off describes an older round; it is not mixed into the one that runs."""
    world = World(nproc=1, min_nodes=1, max_nodes=2)

    await world.ask(_described(world, "b", 1, round_=2))
    await world.ask(_described(world, "a", 0, round_=3))
    await world.ask(_described(world, "b", 1, round_=2))
    unknown = world.loop.jobs.get("job")
    done = await world.ask(_described(world, "c", 1, round_=3))

    assert unknown is None
    assert (done.status, world.round) == ("go", 3)
    assert [member.node for member in world.loop.jobs["job"].record.members] == ["a", "c"]


async def test_a_job_of_which_nobody_is_heard_is_waited_for() -> None:
    """A cut between the controller and all nodes at once: told, not acted upon; healed, the job is as it was."""
    world = World(nproc=1, min_nodes=1, max_nodes=2, policy=JobPolicy(node_lost_s=5.0))
    await world.up("a", "b")
    step = await _train(world, 2.0)

    for _ in range(60):
        await world.wait(1.0, beating=False)
    state, warnings = world.state, [one.state for one in world.memory.incidents.values()]
    await _train(world, 3.0, step=step)

    assert (state, warnings) == ("running", ["watching"])
    assert "nobody of this job is heard" in world.incident(1).verdict.reason  # type: ignore[union-attr]  # it has one
    assert (world.state, world.round) == ("running", 1)
    assert [one.state for one in world.memory.incidents.values()] == ["over"]


async def test_a_node_that_stays_away_after_a_cut_of_all_is_lost_after_its_own_patience() -> None:
    """The first that is heard again does not condemn the second, which may be a moment later; in the end it does."""
    world = World(nproc=1, min_nodes=1, max_nodes=2, policy=JobPolicy(node_lost_s=5.0))
    await world.up("a", "b")
    for _ in range(60):
        await world.wait(1.0, beating=False)
    del world.ranks["b"]

    states = []
    for _ in range(8):
        world.poll("a")
        await world.wait(1.0)
        states.append(world.state)

    assert states[:4] == ["running"] * 4
    assert states[-1] == "stopping"
    acted = [one for one in world.memory.incidents.values() if one.state == "open"]
    assert [one.verdict.nodes for one in acted if one.verdict is not None] == [("b",)]


async def test_a_job_unheard_for_too_long_is_lost() -> None:
    """All nodes are gone for as long as a round is waited for: then the job is counted as lost."""
    world = World(nproc=1, policy=JobPolicy(node_lost_s=5.0, join_timeout_s=60.0))
    await world.up("a")

    states = []
    for _ in range(70):
        await world.wait(1.0, beating=False)
        states.append(world.state)

    assert set(states[:50]) == {"running"}
    assert states[-1] != "running"


@pytest.mark.parametrize("lived_s", [0, 3])
async def test_a_dead_runner_whose_agent_speaks_is_not_unheard(lived_s: int) -> None:
    """The opposite: the node's agent says that all its ranks are gone, so the runner is lost after its patience.

    Also after all have run for so long that no node is looked at one by one any more.
    """
    world = World(nproc=1, policy=JobPolicy(node_lost_s=5.0))
    await world.up("a")
    for _ in range(lived_s):
        await world.wait(1.0)
    for rank in world.ranks["a"]:
        rank.state = ""

    for _ in range(12):
        await world.wait(1.0)

    assert world.state != "running"
    assert world.incident(1).verdict.fault == "runner_lost"  # type: ignore[union-attr]  # it has one


async def test_a_runner_has_its_patience_from_when_its_node_is_heard_again() -> None:
    """Ranks may have ended while the node was cut off: its agent says so first, its runner's word is on the way."""
    world = World(nproc=1, min_nodes=1, max_nodes=2, policy=JobPolicy(node_lost_s=6.0))
    await world.up("a", "b")
    await _train(world, 10.0, without="b")
    for rank in world.ranks["b"]:
        rank.state = ""

    await world.wait(3.0)
    soon = world.state
    await world.wait(6.0)

    assert soon == "running"
    assert world.state != "running"
