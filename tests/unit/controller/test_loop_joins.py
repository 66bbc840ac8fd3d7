# SPDX-License-Identifier: Apache-2.0
"""Who may join a job, and who may not: names used again, two runners of one node, nodes that disagree or are too few.

Driven through the real loop with a clock that the test winds.
"""

import signal

import msgspec
import pytest

from megascale_ops.errors import RefusedError, UsageError
from megascale_ops.schema.messages import Leave
from megascale_ops.schema.policy import JobPolicy
from tests.fakes.controlled_job import World

KILL = -signal.SIGKILL


async def test_a_name_may_be_used_again() -> None:
    """A finished job whose name comes again begins a new life: rounds count on, its past is forgiven."""
    world = World(policy=JobPolicy(max_restarts=1))
    await world.up("a")
    await world.ask(world.new_join(cause="failure", exits=(world.exit(0, KILL),), previous_round=1))
    world.loop.leave(Leave("job", "a", "runner-a", "succeeded", round=2))

    old = await world.ask(world.new_join())
    new = await world.ask(world.new_join(runner_id="another"))

    assert old.status == "stop"
    assert (new.status, new.round) == ("go", 3)
    assert world.loop.jobs["job"].record.restarts == ()
    assert world.loop.jobs["job"].record.life == 2


async def test_a_second_runner_on_a_node_is_refused_while_the_first_lives() -> None:
    """The first one, asked whether it lives, polls again: the second is turned away with a sentence."""
    world = World()
    await world.up("a")
    first = world.poll("a")
    await world.settle()

    second = world.ask(world.new_join(runner_id="intruder"))
    await world.settle()
    nudged = first.result()
    world.poll("a")
    await world.settle()

    assert nudged.known
    assert nudged.orders == ()
    with pytest.raises(RefusedError, match="already has a living runner on node a"):
        await second


async def test_a_dead_runner_gives_way() -> None:
    """A runner that was killed is replaced by the next start; its round has ended with it."""
    world = World()
    await world.up("a")
    first = world.poll("a")
    await world.settle()
    first.cancel()
    await world.wait(1.5, beating=False)

    reply = await world.ask(world.new_join(runner_id="again"))
    old = await world.poll("a")

    assert (reply.status, reply.round) == ("go", 2)
    assert reply.verdict is not None
    assert reply.verdict.fault == "runner_lost"
    assert not old.known


async def test_different_node_counts_are_refused() -> None:
    """Nodes that disagree on --nnodes are told so."""
    world = World(min_nodes=2, max_nodes=2)
    world.ask(world.new_join("a"))
    await world.settle()
    world.max_nodes = 3

    with pytest.raises(RefusedError, match="2:3 nodes, but job job was started with 2:2"):
        await world.ask(world.new_join("b"))


async def test_too_few_nodes_for_too_long() -> None:
    """A job that never gathers min_nodes fails with the numbers."""
    world = World(min_nodes=2, max_nodes=2, policy=JobPolicy(join_timeout_s=5.0))
    reply = world.ask(world.new_join("a"), wait_s=30.0)

    await world.wait(6.0, beating=False)

    assert reply.result().status == "stop"
    assert "1 of at least 2" in reply.result().reason


async def test_a_round_is_not_formed_with_a_runner_that_died_waiting() -> None:
    """A runner whose connection broke while it waited is not counted."""
    world = World(min_nodes=2, max_nodes=2)
    dead = world.ask(world.new_join("a"))
    await world.settle()
    dead.cancel()
    await world.wait(1.5, beating=False)

    reply = world.ask(world.new_join("b"))
    await world.wait(1.0, beating=False)

    assert not reply.done()
    assert world.state == "replacing"


@pytest.mark.parametrize(
    "change", [{"nproc": 0}, {"min_nodes": 0}, {"min_nodes": 3}, {"store_port": 0}, {"job": "a/b"}, {"join_id": ""}]
)
async def test_a_join_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    """What a runner may not ask for is told in one sentence."""
    world = World()

    with pytest.raises(UsageError):
        await world.ask(msgspec.structs.replace(world.new_join(), **change))


async def test_a_second_runner_is_refused_while_the_first_waits_to_join() -> None:
    """A runner that waits for its round is asked in the same way: it joins again, the second is turned away."""
    world = World(min_nodes=2, max_nodes=2)
    join = world.new_join("a")
    first = world.ask(join)
    await world.settle()

    second = world.ask(world.new_join("a", runner_id="intruder"))
    await world.settle()
    nudged = first.result()
    world.ask(join)
    await world.settle()

    assert nudged.status == "wait"
    with pytest.raises(RefusedError, match="living runner"):
        await second
