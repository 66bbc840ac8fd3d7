# SPDX-License-Identifier: Apache-2.0
"""What must change nothing: clocks that are stepped, heartbeats that come late, twice or in disorder, new agents."""

import random
import signal

import pytest

from megascale_ops.controller.loop import Loop
from megascale_ops.errors import VersionError
from megascale_ops.schema.messages import Heartbeat, HeartbeatReply
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.version import MESSAGE_VERSION
from tests.fakes.controlled_job import World

KILL = -signal.SIGKILL
HOUR_S = 3600.0


class SteppedWorld(World):
    """A world whose wall clock can be stepped."""

    stepped_s = 0.0

    def new_loop(self) -> Loop:
        """Return a controller that reads the clock that tests step."""
        return Loop(
            self.journal,
            clock=lambda: self.now_s,
            wall=lambda: self.now_s + 1e6 + self.stepped_s,
            post=self.post,
        )


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
async def test_a_stepped_wall_clock_changes_no_verdict_and_no_age(step_s: float) -> None:
    """An hour forth or back in mid-run: no suspicion, no forgiven budget, and the job is as old as it was."""
    world = SteppedWorld(policy=JobPolicy(restarts_per_hour=2))
    await world.up("a")
    exits = (world.exit(0, KILL),)
    await world.ask(world.new_join(cause="failure", exits=exits, previous_round=1))
    await world.run_round(30)
    job = world.loop.jobs["job"]
    age_s = world.loop.wall() - job.record.started_wall_s

    world.stepped_s = step_s
    await world.wait(1.0)
    same_age_s = world.loop.wall() - job.record.started_wall_s
    state = world.state
    shown_s = world.loop.wall()
    exits = (world.exit(0, KILL),)
    second = await world.ask(world.new_join(cause="failure", exits=exits, previous_round=2))
    await world.run_round(40)
    third = await world.ask(world.new_join(cause="failure", exits=exits, previous_round=3))

    assert state == "running"
    assert same_age_s == pytest.approx(age_s + 1.0)
    assert shown_s == pytest.approx(world.now_s + 1e6 + step_s, abs=5.0)
    assert second.status == "go"
    assert (third.status, "2 restarts in the last hour" in third.reason) == ("stop", True)


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
async def test_a_clock_stepped_while_a_job_recovers_leaves_its_incident_right(step_s: float) -> None:
    """The marks of the open incident move along: it took as long as it took."""
    world = SteppedWorld()
    await world.up("a")
    exits = (world.exit(0, KILL),)
    await world.ask(world.new_join(cause="failure", exits=exits, previous_round=1))

    world.stepped_s = step_s
    await world.run_round(40)

    marks = world.incident(1).marks
    assert world.incident(1).state == "recovered"
    assert abs(marks.caught_up - marks.detected) < 2.0
    assert marks.caught_up == pytest.approx(world.now_s + 1e6 + step_s, abs=2.0)


async def test_heartbeats_in_any_weather_raise_no_suspicion() -> None:
    """Late by up to 3 s, twice, in disorder, some lost: no rank is accused and nothing is ordered."""
    dice = random.Random(5)  # noqa: S311  the same weather in every run
    world = World()
    await world.up("a")
    in_flight: list[tuple[float, Heartbeat]] = []
    replies: list[HeartbeatReply] = []
    deliver = world.loop.heartbeat

    def delay(heartbeat: Heartbeat) -> HeartbeatReply:
        for _ in range(dice.choice([0, 1, 1, 1, 1, 2])):
            in_flight.append((world.now_s + dice.uniform(0.0, 3.0), heartbeat))
        return HeartbeatReply()

    world.loop.heartbeat = delay  # type: ignore[method-assign]  # the network between
    for count in range(600):
        world.now_s += 0.1
        world.train(20 + count)
        if count % 10 == 0:
            world.beat("a")
        due = [one for one in in_flight if one[0] <= world.now_s]
        in_flight = [one for one in in_flight if one[0] > world.now_s]
        replies += [deliver(heartbeat) for _, heartbeat in due]
        world.loop.tick()
        await world.settle()

    assert world.state == "running"
    assert world.memory.incidents == {}
    assert [reply.orders for reply in replies if reply.orders] == []
    assert world.loop.rejected["stale"] > 5


async def test_an_order_comes_once_however_often_heartbeats_do() -> None:
    """Doubled heartbeats bring the same orders again under the same ids, and no new ones."""
    world = World()
    await world.up("a")
    world.rank(1).state, world.rank(1).stopped_since_s = "T", world.now_s
    await world.wait(1.8)

    ids = [tuple(order.id for order in world.beat("a").orders) for _ in range(5)]
    world.seq["a"] -= 1  # the same number again
    doubled = world.beat("a")

    assert len(ids[0]) == 2
    assert len(set(ids)) == 1
    assert doubled.orders == ()
    assert len(world.memory.incidents) == 1


@pytest.mark.parametrize("distance", [-1, 0, 1, 2, -2])
async def test_a_known_node_whose_agent_was_updated_is_checked_again(distance: int) -> None:
    """A node that is known already may come back with an agent of another version: two apart is refused."""
    world = World()
    await world.up("a")
    theirs = MESSAGE_VERSION + distance
    heartbeat = Heartbeat("a", "new-agent", 1, world.now_s, world.now_s, version=theirs, full=True)

    if abs(distance) > 1:
        with pytest.raises(VersionError, match=rf"version {theirs}.*version {MESSAGE_VERSION}"):
            world.loop.heartbeat(heartbeat)
        view = world.loop.registry.node("a")
        assert view is not None
        assert view.agent_id == "agent-a"
    else:
        assert world.loop.heartbeat(heartbeat).send_full is False
