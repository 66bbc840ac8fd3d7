# SPDX-License-Identifier: Apache-2.0
"""Decisions in the life of a job: dry runs, warnings that are paid for, nodes let go, changes while it lives."""

import signal

import msgspec
import pytest

from megascale_ops.controller.policy.replay import replay
from megascale_ops.errors import UsageError
from megascale_ops.schema.events import Event, Incident
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.policy import JobPolicy
from tests.fakes.controlled_job import World

KILL = -signal.SIGKILL
DRY = JobPolicy(dry_run=True, node_lost_s=5.0)


def _decisions(world: World) -> list[Event]:
    return [event for event in world.memory.events if event.kind == "decision"]


def _freeze(world: World, rank: int) -> None:
    world.rank(rank).state, world.rank(rank).stopped_since_s = "T", world.now_s


def _warn(world: World, *, cost: float = 0.5, rank: int = 2, cause: str = "compute") -> Incident:
    """Let a warning of a straggler hold, as a judge of stragglers would each second."""
    verdict = Verdict("straggler", f"rank {rank} is slow", 0.9, culprits=(rank,), cost=cost, cause=cause)
    return world.loop.transitions.warn(world.loop.jobs["job"], f"straggler:{rank}", verdict)


async def _train(world: World, first: int, last: int, *, spare: str = "") -> None:
    """Train on, one step of a second each; the runner of a spare asks again whenever it is answered."""
    asked = world.ask(world.new_join(spare)) if spare else None
    for ranks in world.ranks.values():
        for rank in ranks:
            rank.p50_s = 1.0
    for step in range(first, last):
        world.train(step)
        for node in world.ranks:
            world.poll(node)
        if asked is not None and asked.done():
            asked = world.ask(world.new_join(spare))
        await world.wait(1.0)


async def test_a_dry_run_stops_no_hang() -> None:
    """A frozen rank: evidence and verdict as ever, no order that changes the job, and what would have been done."""
    world = World(policy=DRY)
    await world.up("a")
    poll = world.poll("a")
    _freeze(world, 1)

    await world.wait(8.0)

    incident = world.incident(1)
    assert (world.state, world.round, poll.done()) == ("running", 1, False)
    assert incident.state == "harmless"
    assert incident.done.startswith("dry run: would have restarted: ")
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits, incident.verdict.action) == ("frozen", (1,), "none")
    assert {order.kind for order in world.beat("a").orders} <= {"dump_stacks", "dump_flight_recorder"}


async def test_a_dry_run_tells_of_a_hang_once() -> None:
    """As long as no rank moves it is the same hang, also under the next controller; the next is recorded again."""
    world = World(policy=DRY)
    await world.up("a")
    _freeze(world, 1)
    await world.wait(20.0)
    world.restart_controller()
    await world.wait(20.0)
    once = len(world.memory.incidents)

    world.rank(1).state = "R"
    world.train(21)
    await world.wait(1.0)
    moved = [event.text for event in world.memory.events if event.kind == "moved_again"]
    _freeze(world, 0)
    await world.wait(8.0)

    assert once == 1
    assert len(moved) == 1
    assert "job-1: it moved again by itself" in moved[0]
    assert sorted(world.memory.incidents) == ["job-1", "job-2"]
    assert world.state == "running"


async def test_without_dry_run_the_same_hang_is_stopped() -> None:
    """The negative control of the dry run."""
    world = World()
    await world.up("a")
    _freeze(world, 1)

    await world.wait(4.0)

    assert world.state == "stopping"


async def test_a_death_ends_a_dry_run_and_says_so() -> None:
    """What is dead cannot go on without a restart: the job ends, with what would have been done."""
    world = World(policy=DRY)
    await world.up("a")

    reply = await world.ask(world.new_join(cause="failure", exits=(world.exit(1, KILL),), previous_round=1))

    assert reply.status == "stop"
    assert "dry run: would have restarted" in reply.reason
    assert "without a restart the job ends" in world.incident(1).done


async def test_a_dry_run_lets_no_lost_node_end_the_round() -> None:
    """A node that is not heard is warned of, and the warning is over when it is heard again."""
    world = World(min_nodes=2, max_nodes=2, policy=DRY)
    await world.up("a", "b")
    polls = [world.poll("a"), world.poll("b")]
    await world.settle()
    polls[1].cancel()
    away = world.ranks.pop("b")
    await world.wait(8.0)
    lost = world.incident(1)

    world.ranks["b"] = away
    await _train(world, 21, 24)

    assert (world.state, world.round, lost.state) == ("running", 1, "watching")
    assert lost.done.startswith("dry run: would have restarted")
    assert world.incident(1).state == "over"


async def test_a_dry_run_takes_no_node_in() -> None:
    """A node that is offered waits; the decision is told once."""
    world = World(min_nodes=1, max_nodes=2, policy=DRY)
    await world.up("a")

    await _train(world, 21, 24, spare="b")

    assert (world.state, world.round) == ("degraded", 1)
    assert [event.data["fault"] for event in _decisions(world)] == ["membership"]


async def test_an_ignored_hang_is_left_alone_and_looked_at_again() -> None:
    """frozen=ignore: nothing is done, the incident says why; a minute later it is looked at again, then after two."""
    world = World(policy=JobPolicy(actions={"frozen": "ignore"}))
    await world.up("a")
    _freeze(world, 1)

    await world.wait(50.0)
    early = len(world.memory.incidents)
    await world.wait(20.0)
    late = len(world.memory.incidents)
    await world.wait(60.0)

    assert (early, late, len(world.memory.incidents)) == (1, 2, 2)
    assert world.incident(1).done == "nothing was done: this job's policy says ignore for frozen"
    assert (world.state, world.round) == ("running", 1)


async def test_a_straggler_is_let_go_once_it_has_cost_a_restart() -> None:
    """Half of every second: after 60 steps 30 s of the 30 s assumed are paid, and the spare takes the node's place."""
    world = World(min_nodes=2, max_nodes=2, policy=JobPolicy(restart_price_s=30.0))
    await world.up("a", "b")
    warning = _warn(world)
    await _train(world, 21, 60, spare="c")
    before = (world.state, world.incident(1).state, world.incident(1).done)
    poll = world.poll("a")
    await _train(world, 60, 84, spare="c")
    stopping = world.state

    a = world.ask(world.new_join("a", cause="order", previous_round=1))
    b = world.ask(world.new_join("b", cause="order", previous_round=1))
    await world.settle()

    assert before[:2] == ("running", "watching")
    assert "it costs 50.0 % of every step" in before[2]
    assert "assumed to cost 30 s" in before[2]
    assert stopping == "stopping"
    assert [order.kind for order in poll.result().orders] == ["restart"]
    assert a.result().status == "go"
    assert [member.node for member in world.loop.jobs["job"].record.members] == ["a", "c"]
    assert b.result().status == "wait"
    assert "b is evicted for another" in b.result().reason
    incident = world.incident(1)
    assert (incident.id, incident.state) == (warning.id, "open")
    assert incident.verdict is not None
    assert incident.verdict.action == "evict"
    assert "restarted without b: it costs 50.0 % of every step" in incident.done
    assert "rank 2" in world.loop.jobs["job"].record.evictions[0].reason


async def test_a_straggler_without_a_spare_is_borne_and_the_reason_is_told() -> None:
    """Two nodes of two: nothing can be done however dear it is, and `why` says so with the numbers."""
    world = World(min_nodes=2, max_nodes=2, policy=JobPolicy(restart_price_s=5.0))
    await world.up("a", "b")
    _warn(world)

    await _train(world, 21, 80)

    assert (world.state, world.round) == ("running", 1)
    assert "no spare waits, and 1 nodes without b are fewer than the 2 needed" in world.incident(1).done
    assert [event.data["rule"] for event in _decisions(world)] == ["hold", "no_room"]


async def test_a_warning_that_is_over_costs_nothing_more() -> None:
    """The negative control: what has passed before it had cost a restart leads to nothing."""
    world = World(min_nodes=1, max_nodes=2, policy=JobPolicy(restart_price_s=30.0))
    await world.up("a", "b")
    _warn(world)
    await _train(world, 21, 50)

    world.loop.transitions.unwarn(world.loop.jobs["job"], "straggler:2", "as fast as the others")
    await _train(world, 50, 120)

    assert (world.state, world.round) == ("running", 1)
    assert world.incident(1).state == "over"


async def test_an_evicted_node_is_not_taken_back_at_once() -> None:
    """An elastic job shrinks for the second kill on one node, runs on without it, and takes it back after its time."""
    world = World(min_nodes=1, max_nodes=2, policy=JobPolicy(eviction_s=60.0))
    await world.up("a", "b")

    for round_ in (1, 2):
        exits = (world.exit(2, KILL, step=20),)
        world.ask(world.new_join("b", cause="failure", exits=exits, previous_round=round_))
        world.ask(world.new_join("a", cause="order", previous_round=round_))
        await world.settle()
        for node in ("a", "b"):
            world.ranks.pop(node)
        await world.run_round(30 * round_)
    members = [member.node for member in world.loop.jobs["job"].record.members]
    state = world.state
    await _train(world, 100, 155, spare="b")
    still = world.state
    await _train(world, 155, 165, spare="b")

    assert (members, state, still) == (["a"], "degraded", "degraded")
    assert world.incident(2).verdict is not None
    assert world.incident(2).verdict.action == "evict"  # type: ignore[union-attr]  # asserted above
    assert "2 faults of b within an hour" in world.incident(2).done
    assert world.incident(3).verdict.fault == "membership"  # type: ignore[union-attr]  # it is taken back


async def _does_not_meet(world: World, round_: int) -> None:
    """Node b says that it could not reach the first node's store, and node a that it waited there in vain."""
    world.ask(world.new_join("b", cause="failure", previous_round=round_, unmet=(0,)))
    world.ask(world.new_join("a", cause="failure", previous_round=round_))
    await world.settle()


async def test_a_round_that_does_not_meet_twice_goes_on_without_a_node() -> None:
    """Named at once though no rank ever began; the second time without a step between the node is out."""
    world = World(min_nodes=1, max_nodes=2)
    for node in ("a", "b"):
        world.ask(world.new_join(node))
    await world.settle()

    await _does_not_meet(world, 1)
    once = [member.node for member in world.loop.jobs["job"].record.members]
    await _does_not_meet(world, 2)
    twice = [member.node for member in world.loop.jobs["job"].record.members]

    assert (once, twice, world.round) == (["a", "b"], ["a"], 3)
    verdicts = [world.incident(number).verdict for number in (1, 2)]
    assert [(one.fault, one.nodes, one.action) for one in verdicts if one is not None] == [
        ("link_cut", ("a", "b"), "restart"),
        ("link_cut", ("a", "b"), "evict"),
    ]


async def test_a_cut_between_which_and_the_next_steps_were_made_evicts_nobody() -> None:
    """The negative control: the network was whole again in between, so a restart did help."""
    world = World(min_nodes=1, max_nodes=2)
    for node in ("a", "b"):
        world.ask(world.new_join(node))
    await world.settle()

    await _does_not_meet(world, 1)
    await world.run_round(30)
    await _does_not_meet(world, 2)

    assert [member.node for member in world.loop.jobs["job"].record.members] == ["a", "b"]
    verdicts = [world.incident(number).verdict for number in (1, 2)]
    assert [one.action for one in verdicts if one is not None] == ["restart", "restart"]


async def test_a_restart_is_measured() -> None:
    """The first recovery gives the price that the next warning is weighed by."""
    world = World()
    await world.up("a", step=50)
    await world.ask(world.new_join(cause="failure", exits=(world.exit(1, KILL, step=52),), previous_round=1))
    world.spawn("a")
    for rank in (world.rank(0), world.rank(1)):
        rank.step = 40
    await world.wait(3.0)
    world.train(60)
    await world.wait(0.5)

    prices_s = world.loop.jobs["job"].record.prices_s

    assert len(prices_s) == 1
    assert 1.0 < prices_s[0] < 5.0


async def test_restarts_that_lead_nowhere_stop_the_job() -> None:
    """Five restarts without a single step, each for another reason: the job ends and says why."""
    world = World()
    await world.up("a")

    for round_, code in enumerate((KILL, -11, -6, 3, KILL, -11), start=1):
        exits = (world.exit(1, code),)
        reply = await world.ask(world.new_join(cause="failure", exits=exits, previous_round=round_))
        world.now_s += 10.0

    assert reply.status == "stop"
    assert "5 restarts in a row led to no step" in reply.reason


async def test_every_decision_of_a_job_can_be_replayed() -> None:
    """What the journal holds gives the same answers; a stricter policy gives others."""
    world = World()
    await world.up("a")
    for round_ in (1, 2):
        exits = (world.exit(1, KILL, step=20 * round_),)
        await world.ask(world.new_join(cause="failure", exits=exits, previous_round=round_))
        await world.run_round(40 * round_)

    same = replay(world.memory.events)
    strict = replay(world.memory.events, {"max_restarts": "1"})

    assert [one.now == one.recorded for one in same] == [True, True]
    assert [one.event.incident for one in same] == ["job-1", "job-2"]
    assert [one.differs for one in strict] == [False, True]


async def test_a_policy_is_changed_while_the_job_lives() -> None:
    """The change holds at once, over a restart of the controller and over rounds; it is an event, and can be undone."""
    world = World(policy=JobPolicy(silence_floor_s=5.0))
    await world.up("a")

    view = world.loop.policy("job", {"silence_floor_s": "9", "frozen": "warn"})
    world.restart_controller()
    await world.ask(world.new_join(cause="failure", exits=(world.exit(1, KILL, step=30),), previous_round=1))
    later = world.loop.policy("job")
    undone = world.loop.policy("job", {"silence_floor_s": "default", "frozen": "default"})

    assert view is not None
    assert later is not None
    assert undone is not None
    assert view.policy.silence_floor_s == later.policy.silence_floor_s == 9.0
    assert later.policy.actions == {"frozen": "warn"}
    assert later.changed == {"silence_floor_s": "9", "actions.frozen": "warn"}
    assert (undone.policy, undone.changed) == (world.policy, {})
    told = [event.text for event in world.memory.events if event.kind == "policy_set"]
    assert told[0] == "actions.frozen from the default to warn; silence_floor_s from 5 to 9"


async def test_a_new_life_forgets_what_was_changed() -> None:
    """A start of the same name takes the settings of the new command line."""
    from megascale_ops.schema.messages import Leave

    world = World()
    await world.up("a")
    world.loop.policy("job", {"dry_run": "true"})
    world.loop.leave(Leave("job", "a", "runner-a", "succeeded", round=1))

    await world.ask(world.new_join(runner_id="another"))

    view = world.loop.policy("job")
    assert view is not None
    assert (view.policy, view.changed) == (JobPolicy(), {})


async def test_a_dry_run_that_ends_acts() -> None:
    """dry_run=false on a job that hangs: what was only said is done now."""
    world = World(policy=DRY)
    await world.up("a")
    _freeze(world, 1)
    await world.wait(8.0)

    world.loop.policy("job", {"dry_run": "no"})
    await world.wait(5.0)

    assert world.state == "stopping"


async def test_a_bad_change_changes_nothing() -> None:
    """One unknown name among good ones: refused whole, with the nearest name."""
    world = World()
    await world.up("a")
    record = world.loop.jobs["job"].record

    with pytest.raises(UsageError, match="did you mean 'silence_floor_s'"):
        world.loop.policy("job", {"dry_run": "true", "sielence_floor_s": "1"})

    assert world.loop.jobs["job"].record == record
    assert world.loop.policy("nobody") is None


async def test_what_decisions_rest_on_survives_the_controller() -> None:
    """Tabs, prices, evictions: the next controller knows what was paid."""
    world = World(min_nodes=2, max_nodes=2, policy=JobPolicy(restart_price_s=1_000.0))
    await world.up("a", "b")
    _warn(world)
    await _train(world, 21, 60)
    paid_s = world.loop.jobs["job"].record.tabs["straggler:2@b"].paid_s

    world.restart_controller()

    kept_s = world.loop.jobs["job"].record.tabs["straggler:2@b"].paid_s
    assert paid_s > 15.0
    assert paid_s - kept_s <= 10.0 * 0.5
    assert msgspec.json.encode(world.loop.jobs["job"].record)


async def _die(world: World, round_: int, steps: int, *, lived_s: float = 1.0) -> str:
    """Let all ranks of a round make so many steps, counted from its start, within ``lived_s``; then one is killed."""
    world.spawn("a")
    for ranks in world.ranks.values():
        for rank in ranks:
            rank.absolute, rank.p50_s, rank.p99_s = False, lived_s / steps, lived_s / steps
    for step in range(steps):
        world.train(step)
        await world.wait(lived_s / steps)
    exits = (world.exit(1, KILL, step=steps - 1, steps_seen=steps),)
    reply = await world.ask(world.new_join(cause="failure", exits=exits, previous_round=round_))
    return f"{reply.status} {reply.reason}"


async def test_a_plain_script_that_gets_no_further_is_stopped_too() -> None:
    """Its steps count from each start anew: 8 of them again and again are no progress, nor are 9 or 10."""
    world = World()
    await world.ask(world.new_join("a"))

    told = [await _die(world, round_, steps) for round_, steps in enumerate((8, 8, 10, 9, 8, 9), start=1)]

    assert [text.split()[0] for text in told] == ["go"] * 5 + ["stop"]
    assert "5 restarts in a row led no further than the rounds before" in told[-1]


@pytest.mark.parametrize(
    ("steps", "lived_s"),
    [
        ((8, 8, 8, 8, 8, 8, 8), 80.0),  # each has lived longer than a restart costs: it may go on where it was
        ((8, 8, 8, 8, 16, 8, 8), 1.0),  # one got clearly further
    ],
    ids=["long-rounds", "one-got-further"],
)
async def test_a_plain_script_whose_rounds_may_lead_on_is_not(steps: tuple[int, ...], lived_s: float) -> None:
    """The negative controls: what counts from its start may still save and load, or have bad luck for a while."""
    world = World(policy=JobPolicy(restarts_per_cause_per_hour=99, restarts_per_hour=99))
    await world.ask(world.new_join("a"))

    told = [await _die(world, round_, made, lived_s=lived_s) for round_, made in enumerate(steps, start=1)]

    assert [text.split()[0] for text in told] == ["go"] * len(steps)


async def test_steps_that_were_seen_to_go_on_are_absolute() -> None:
    """A rank that ended at step 108 after 8 steps had read its number somewhere: the next 8 are progress."""
    world = World()
    await world.ask(world.new_join("a"))

    for round_ in range(1, 8):
        exits = (world.exit(1, KILL, step=100 + 8 * round_, steps_seen=8),)
        reply = await world.ask(world.new_join(cause="failure", exits=exits, previous_round=round_))
        world.now_s += 10.0

    assert reply.status == "go"
