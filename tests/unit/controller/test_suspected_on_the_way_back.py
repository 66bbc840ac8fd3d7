# SPDX-License-Identifier: Apache-2.0
"""A silence while the job is on its way back from an incident: looked at after a minute, beside what is open."""

import signal

import pytest

from megascale_ops.schema.progress import CollectivePosition
from tests.fakes.controlled_job import World

KILL = -signal.SIGKILL


async def catching_up() -> World:
    """A job of two ranks, killed at step 52, that steps again from 40."""
    world = World()
    await world.up("a", step=50)
    exits = (world.exit(1, KILL, step=52, ago_s=0.5),)
    await world.ask(world.new_join(cause="failure", exits=exits, previous_round=1))
    world.spawn("a")
    world.beat_all()
    for number in range(2):
        world.rank(number).step = 40
    await world.wait(1.0)
    world.train(46)
    await world.wait(0.4)
    assert world.state == "catching_up"
    return world


async def silent(world: World, seconds: float) -> None:
    """Rank 0 waits for rank 1 in a collective, for so long."""
    world.rank(0).collective = CollectivePosition(5, 4, "all_reduce")
    world.rank(1).collective = CollectivePosition(4, 4, "all_reduce")
    await world.wait(seconds)


async def test_a_silence_of_less_than_a_minute_brings_no_second_incident() -> None:
    """First steps after a restart are slow: `stuck_patience_s` is theirs."""
    world = await catching_up()

    await silent(world, 55.0)

    assert world.state == "suspect"
    assert list(world.memory.incidents) == ["job-1"]


async def test_what_moves_again_leaves_the_job_on_its_way_back() -> None:
    """The suspicion ends as harmless, and the incident before it as recovered, once all are as far as they were."""
    world = await catching_up()
    await silent(world, 65.0)
    states = world.state, world.incident(1).state, world.incident(2).state

    for number in range(2):
        world.rank(number).collective = None
    world.train(48)
    await world.wait(1.0)
    again = world.state, world.incident(1).state, world.incident(2).state
    world.train(54)
    await world.wait(1.0)

    assert states == ("confirming", "open", "open")
    assert again == ("catching_up", "open", "harmless")
    assert (world.state, world.incident(1).state, world.incident(2).state) == ("running", "recovered", "harmless")
    assert world.incident(1).marks.caught_up > 0
    assert world.loop.jobs["job"].record.aside == ""


async def test_what_is_acted_upon_ends_the_one_before_as_not_recovered() -> None:
    """Its round is over before all were as far as they had been."""
    world = await catching_up()
    await silent(world, 65.0)
    exits = (world.exit(1, KILL, step=46, ago_s=0.1),)

    await world.ask(world.new_join(cause="failure", exits=exits, previous_round=2))

    assert (world.incident(1).state, world.incident(2).state) == ("ended", "open")
    assert world.loop.jobs["job"].aside is None


@pytest.mark.parametrize("moves", [True, False])
async def test_another_controller_knows_of_both(moves: bool) -> None:
    """What is set aside stands in the journal."""
    world = await catching_up()
    await silent(world, 65.0)

    world.restart_controller()
    await world.wait(1.0)
    if moves:
        for number in range(2):
            world.rank(number).collective = None
        world.train(54)
        await world.wait(30.0)

    states = ("recovered", "harmless") if moves else ("open", "open")
    assert (world.incident(1).state, world.incident(2).state) == states
