# SPDX-License-Identifier: Apache-2.0
"""What all nodes of a job must agree on, through the real loop: no policy changes without a word."""

from typing import TYPE_CHECKING

import msgspec
import pytest

from megascale_ops.errors import RefusedError, UsageError
from megascale_ops.schema.messages import Join, JoinReply, Leave
from megascale_ops.schema.policy import JobPolicy
from tests.fakes.controlled_job import World

if TYPE_CHECKING:
    import asyncio

KILL = -9


def changes(world: World) -> list[str]:
    """Return what the journal tells of changes that no person made by ``policy set``."""
    return [event.text for event in world.memory.events if event.kind == "policy_changed"]


async def in_touch(world: World, *nodes: str) -> "list[asyncio.Task[object]]":
    """Let the runners of these nodes wait for orders, as living ones do."""
    polls: list[asyncio.Task[object]] = [world.poll(node) for node in nodes]  # type: ignore[misc]  # only cancelled
    await world.settle()
    return polls


async def refused(world: World, join: Join) -> str:
    """Return the sentence with which a join is refused."""
    with pytest.raises(RefusedError) as caught:
        await world.ask(join, wait_s=0.0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (JobPolicy(silence_floor_s=10.0), ("silence_floor_s=10", "silence_floor_s=5")),
        (JobPolicy(actions={"frozen": "warn"}), ("actions.frozen=warn", "actions.frozen=the default")),
        (JobPolicy(dry_run=True), ("dry_run=true", "dry_run=false")),
        (JobPolicy(max_restarts=3), ("max_restarts=3", "max_restarts=-1")),
        (
            JobPolicy(absent_patience_s=0.0, actions={"busy": "stop"}),
            ("absent_patience_s=0", "absent_patience_s=540", "actions.busy=stop", "actions.busy=the default"),
        ),
    ],
)
async def test_a_node_with_another_policy_is_refused(policy: JobPolicy, words: tuple[str, ...]) -> None:
    """Before the first round: every setting that differs is named with both values, and nothing has changed."""
    world = World(min_nodes=2, max_nodes=2)
    world.ask(world.new_join("a"))
    await world.settle()

    said = await refused(world, msgspec.structs.replace(world.new_join("b"), policy=policy))

    assert all(word in said for word in words)
    assert "node b wants" in said
    assert "give every node the same --policy" in said
    assert said.count("=") == len(words) + 1  # NAME=VALUE in the advice: nothing else is reported to differ
    assert world.loop.jobs["job"].record.policy == JobPolicy()
    assert changes(world) == []


async def test_a_spare_with_another_policy_is_refused_while_the_round_runs() -> None:
    """A node that comes later would have judged the next round by its own rules."""
    world = World(min_nodes=1, max_nodes=2, policy=JobPolicy(last_call_s=0.0))
    await world.up("a")
    await in_touch(world, "a")

    said = await refused(world, msgspec.structs.replace(world.new_join("b"), policy=JobPolicy(node_lost_s=60.0)))

    assert "node_lost_s=60" in said
    assert "node_lost_s=15" in said
    assert "last_call_s" in said
    assert world.round == 1


async def test_who_is_first_among_the_members_does_not_choose_the_policy() -> None:
    """The round that follows is judged as the one before, whichever node is gone."""
    world = World(min_nodes=1, max_nodes=2, policy=JobPolicy(silence_floor_s=7.0, last_call_s=0.2))
    await world.up("a", "b")
    world.loop.policy("job", {"frozen": "warn"})

    exits = tuple(world.exit(rank, KILL, step=30) for rank in (2, 3))
    reply = world.ask(world.new_join("b", cause="failure", exits=exits, previous_round=1))
    await world.wait(30.0, beating=False)

    record = world.loop.jobs["job"].record
    assert (reply.result().status, record.round, list(world.loop.jobs["job"].nodes)) == ("go", 2, ["b"])
    assert record.policy == JobPolicy(silence_floor_s=7.0, last_call_s=0.2, actions={"frozen": "warn"})
    assert record.launch_policy == world.policy
    assert changes(world) == []


async def test_what_an_operator_has_set_may_stand_in_a_launch_line() -> None:
    """A launch line that was brought up to date joins, and so does the old one; a third value does not."""
    world = World(min_nodes=1, max_nodes=3, policy=JobPolicy(last_call_s=0.0))
    await world.up("a")
    world.loop.policy("job", {"silence_floor_s": "9"})
    await in_touch(world, "a")

    old = world.ask(world.new_join("b"))
    new = world.ask(msgspec.structs.replace(world.new_join("c"), policy=JobPolicy(last_call_s=0.0, silence_floor_s=9)))
    await world.settle()
    said = await refused(
        world, msgspec.structs.replace(world.new_join("d"), policy=JobPolicy(last_call_s=0.0, silence_floor_s=8))
    )

    assert not any(join.done() and join.exception() for join in (old, new))
    assert "silence_floor_s=8" in said
    assert world.loop.jobs["job"].record.policy.silence_floor_s == 9.0


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("actions", "sentence"),
    [
        ({"frozen": "wran"}, "unknown action 'wran': did you mean 'warn'? frozen takes"),
        ({"frozn": "warn"}, "unknown class of fault 'frozn': did you mean 'frozen'?"),
    ],
)
async def test_who_starts_with_an_action_that_nobody_knows_is_told(
    actions: dict[str, str], sentence: str, *, first: bool
) -> None:
    """A client of another make is refused as the command line would be; it would have lived by the table otherwise."""
    world = World(min_nodes=2, max_nodes=2)
    if not first:
        world.ask(world.new_join("a"))
        await world.settle()

    with pytest.raises(UsageError) as caught:
        await world.ask(msgspec.structs.replace(world.new_join("b"), policy=JobPolicy(actions=actions)), wait_s=0.0)

    assert str(caught.value).startswith(f"node b brings a policy that can't be used: {sentence}")
    assert ("job" in world.loop.jobs) is not first


async def test_a_job_that_runs_does_not_end_for_a_word() -> None:
    """Its controller may be older than its runners, which know more classes: the next round is formed all the same."""
    world = World(policy=JobPolicy(actions={"frozn": "warn"}))
    joined = msgspec.structs.replace(world.new_join("a", previous_round=5, cause="resume"), node_rank=0, nodes=1)
    await world.ask(joined, wait_s=0.0)

    exits = tuple(world.exit(rank, KILL, step=30) for rank in (0, 1))
    reply = await world.ask(world.new_join("a", cause="failure", exits=exits, previous_round=5), wait_s=0.0)

    assert (reply.status, world.round) == ("go", 6)


async def start_again(world: World, policy: JobPolicy) -> JoinReply:
    """Start a runner of the job's node anew, by hand and with this policy."""
    join = msgspec.structs.replace(world.new_join("a", runner_id="again"), policy=policy)
    return await world.ask(join, wait_s=0.0)


async def test_a_new_life_says_what_its_policy_changes() -> None:
    """A name that is started again lives under the new launch line, and the journal tells what was otherwise before."""
    world = World(policy=JobPolicy(silence_floor_s=7.0))
    await world.up("a")
    world.loop.policy("job", {"frozen": "warn"})
    world.loop.leave(Leave("job", "a", "runner-a", "cancelled", round=1))

    reply = await start_again(world, JobPolicy(node_lost_s=60.0))

    record = world.loop.jobs["job"].record
    assert (reply.status, record.life, record.policy) == ("go", 2, JobPolicy(node_lost_s=60.0))
    assert len(changes(world)) == 1
    for words in (
        "actions.frozen from warn to the default",
        "node_lost_s from 15 to 60",
        "silence_floor_s from 7 to 5",
    ):
        assert words in changes(world)[0]


async def test_a_new_life_with_the_same_policy_says_nothing() -> None:
    """An event tells of a change, not of a start."""
    world = World(policy=JobPolicy(silence_floor_s=7.0))
    await world.up("a")
    world.loop.leave(Leave("job", "a", "runner-a", "cancelled", round=1))

    await start_again(world, JobPolicy(silence_floor_s=7.0))

    assert world.loop.jobs["job"].record.life == 2
    assert changes(world) == []


async def test_the_only_runner_is_started_again_with_another_policy_in_the_same_life() -> None:
    """No member is left to disagree with, so it is not locked out until the job is given up."""
    world = World()
    await world.up("a")
    first = (await in_touch(world, "a"))[0]
    first.cancel()
    await world.wait(1.5, beating=False)

    reply = await start_again(world, JobPolicy(silence_floor_s=10.0))

    record = world.loop.jobs["job"].record
    assert (reply.status, record.life, record.policy) == ("go", 1, JobPolicy(silence_floor_s=10.0))
    assert changes(world) == ["the runner of a was started again with another policy: silence_floor_s from 5 to 10"]


@pytest.mark.parametrize("heard", [True, False])
async def test_a_runner_that_is_started_again_is_refused_while_another_one_lives(*, heard: bool) -> None:
    """Also by a controller that was itself restarted in between."""
    world = World(min_nodes=1, max_nodes=2, policy=JobPolicy(last_call_s=0.0))
    world.policy = JobPolicy(last_call_s=5.0)
    await world.up("a", "b")
    polls = await in_touch(world, "a", "b")
    polls[0].cancel()
    await world.wait(1.5, beating=False)
    if not heard:
        world.restart_controller()
        await in_touch(world, "b")
        await world.wait(5.4, beating=False)

    said = await refused(
        world, msgspec.structs.replace(world.new_join("a", runner_id="again"), policy=JobPolicy(last_call_s=1.0))
    )

    assert "last_call_s=1" in said
    assert world.loop.jobs["job"].record.policy == world.policy


async def test_a_round_that_is_taken_over_says_what_it_changes_in_the_policy() -> None:
    """A journal that was set back to an older copy knows another policy than the round that runs was started with."""
    world = World(policy=JobPolicy(silence_floor_s=7.0))
    await world.up("a")
    joined = world.new_join("a", previous_round=5, cause="resume")
    resumed = msgspec.structs.replace(joined, node_rank=0, nodes=1, policy=JobPolicy(silence_floor_s=8.0))
    world.restart_controller()
    await world.wait(6.0, beating=False)

    reply = await world.ask(resumed, wait_s=0.0)

    assert (reply.status, world.round) == ("go", 5)
    assert changes(world) == ["the round that runs was started with silence_floor_s from 7 to 8"]
