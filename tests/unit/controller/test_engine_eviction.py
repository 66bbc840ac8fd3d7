# SPDX-License-Identifier: Apache-2.0
"""A node whose engine takes it away is no failure: the others go on, no budget is spent, no machine is blamed."""

import signal

from megascale_ops.schema.messages import Leave
from megascale_ops.schema.policy import JobPolicy
from tests.fakes.controlled_job import World

WHY = "b: its engine has sent SIGTERM and takes it away within 120 s"


def _two(**policy: object) -> World:
    return World(min_nodes=1, max_nodes=2, policy=JobPolicy(**policy))  # type: ignore[arg-type]  # fields


async def _goes(world: World, *, exits: tuple[object, ...] = ()) -> None:
    """Let b's runner leave, as `run --eviction-grace` does at SIGTERM; its processes are gone with it."""
    word = Leave("job", "b", "runner-b", "evicted", round=world.round, mono_s=world.now_s, reason=WHY, exits=exits)  # type: ignore[arg-type]  # of RankExit
    world.loop.leave(word)
    world.ranks.pop("b")
    await world.settle()


async def test_the_verdict_says_eviction_and_the_rest_goes_on() -> None:
    """Even where no restart is left in the budget: nothing of it is spent."""
    world = _two(max_restarts=0)
    await world.up("a", "b", step=50)

    await _goes(world)
    reply = world.ask(world.new_join("a", cause="order", previous_round=1, exits=(world.exit(0, -15, by_us=True),)))
    await world.wait(world.policy.last_call_s + world.policy.node_lost_s + 1.0, beating=False)

    verdict = world.incident(1).verdict
    assert verdict is not None
    assert (verdict.fault, verdict.nodes, verdict.reason) == ("engine_eviction", ("b",), WHY)
    assert (reply.result().status, reply.result().nodes) == ("go", 1)
    record = world.loop.jobs["job"].record
    assert record.restarts == ()
    assert record.evictions == ()
    assert not world.memory.nodes  # no life of a node has begun: there is nothing to hold against it


async def test_the_pod_that_takes_its_place_is_taken_in() -> None:
    """A job of a fixed size waits for it: under another node's name, or the same one's."""
    world = World(min_nodes=2, max_nodes=2)
    await world.up("a", "b", step=50)

    await _goes(world)
    replies = [
        world.ask(world.new_join("a", cause="order", previous_round=1, exits=(world.exit(0, -15, by_us=True),))),
    ]
    await world.wait(30.0, beating=False)
    before = world.state
    replies.append(world.ask(world.new_join("b", runner_id="runner-b2")))
    await world.wait(1.0, beating=False)

    assert before == "replacing"
    assert [(one.result().status, one.result().nodes) for one in replies] == [("go", 2)] * 2


async def test_a_job_whose_nodes_are_all_taken_away_waits_for_new_ones() -> None:
    """As when Kueue suspends it: it is neither failed nor stopped, and goes on in its next round."""
    world = World()
    await world.up("a", step=50)

    world.loop.leave(Leave("job", "a", "runner-a", "evicted", round=1, mono_s=world.now_s))
    world.ranks.clear()
    await world.wait(60.0, beating=False)
    before = world.state
    reply = await world.ask(world.new_join("c"))

    assert before == "replacing"
    assert (reply.status, reply.round) == ("go", 2)
    assert world.loop.jobs["job"].record.restarts == ()


async def test_a_job_that_gets_no_nodes_again_is_stopped_and_not_failed() -> None:
    """After ``join_timeout_s``; its name begins anew when pods come. A job that crashed before that has failed."""
    worlds = World(), World()
    for world in worlds:
        await world.up("a", step=50)
    evicted, crashed = worlds

    evicted.loop.leave(Leave("job", "a", "runner-a", "evicted", round=1, mono_s=evicted.now_s))
    crashed.loop.leave(
        Leave("job", "a", "runner-a", "evicted", round=1, mono_s=crashed.now_s, exits=(crashed.exit(0, -9),))
    )
    for world in worlds:
        world.ranks.clear()
        await world.wait(590.0, beating=False, tick_s=0.5)
        assert world.state == "replacing"
        await world.wait(20.0, beating=False)
    record = evicted.loop.jobs["job"].record
    reply = await evicted.ask(evicted.new_join("c", runner_id="runner-c"))

    assert (record.state, record.exit_code) == ("stopped", 143)
    assert record.reason.startswith("its engine has taken all of its nodes away and has given it no others for 60")
    assert (reply.status, evicted.loop.jobs["job"].record.life) == ("go", 2)
    assert crashed.state == "failed"


async def test_a_crash_within_the_grace_is_no_eviction() -> None:
    """The negative control: a rank that was killed before the node left is judged and counted as ever."""
    world = _two()
    await world.up("a", "b", step=50)

    await _goes(world, exits=(world.exit(2, -signal.SIGKILL, step=51),))
    reply = world.ask(world.new_join("a", cause="order", previous_round=1, exits=(world.exit(0, -15, by_us=True),)))
    await world.wait(world.policy.last_call_s + world.policy.node_lost_s + 1.0, beating=False)

    verdict = world.incident(1).verdict
    assert verdict is not None
    assert (verdict.fault, verdict.culprits) == ("killed", (2,))
    assert reply.result().status == "go"
    assert [one.cause for one in world.loop.jobs["job"].record.restarts] == ["killed"]


async def test_a_crash_that_its_runner_has_told_of_stays_one() -> None:
    """It comes first; that the node leaves afterwards, while the next round is formed, changes nothing."""
    world = _two()
    await world.up("a", "b", step=50)
    world.ask(world.new_join("b", cause="failure", previous_round=1, exits=(world.exit(2, -signal.SIGKILL, step=51),)))
    await world.settle()

    await _goes(world)
    world.ask(world.new_join("a", cause="order", previous_round=1, exits=(world.exit(0, -15, by_us=True),)))
    await world.wait(1.0, beating=False)

    verdict = world.incident(1).verdict
    assert verdict is not None
    assert verdict.fault == "killed"
    assert len(world.loop.jobs["job"].record.restarts) == 1


async def test_a_spare_that_is_taken_away_disturbs_nobody() -> None:
    """It has no rank; the round goes on."""
    world = World(min_nodes=1, max_nodes=1)
    await world.up("a", step=50)
    world.ask(world.new_join("b"))
    await world.settle()

    world.loop.leave(Leave("job", "b", "runner-b", "evicted"))
    await world.wait(1.0)

    assert (world.state, world.round) == ("running", 1)
