# SPDX-License-Identifier: Apache-2.0
"""Suspicion, evidence, judgement through the real loop: when evidence is asked for, and what it changes."""

import msgspec
import pytest

from megascale_ops.schema.messages import CollectiveFact, Evidence, EvidenceItem, Leave
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition
from tests.fakes.controlled_job import World
from tests.fakes.looked_at import answer_looks

INSIDE = CollectivePosition(41, 40, "pg 0")
OUTSIDE = CollectivePosition(40, 40, "pg 0")
LOOP = ("spin (train.py:40)", "main (train.py:90)")
COMPILING = ("wait (subprocess.py:1264)", "compile_fx (torch/_inductor/compile_fx.py:10)")


def _call(size: int) -> EvidenceItem:
    fact = CollectiveFact("0", 41, "all_reduce", f"[[{size}]]", "float")
    return EvidenceItem("flight_recorder", ok=True, collectives=(fact,))


EAGER = JobPolicy(absent_patience_s=0.0)


async def _hang(*, waits: tuple[bool, bool, bool], busy: float = 0.0, policy: JobPolicy | None = None) -> World:
    """Three ranks train to step 20 and stop there; some of them wait in collective 41."""
    world = World(nproc=3, policy=policy)
    await world.up("a")
    for number, inside in enumerate(waits):
        world.rank(number).collective = INSIDE if inside else OUTSIDE
        world.rank(number).busy = 0.0 if inside else busy
    return world


async def _until(world: World, state: str, items: dict[int, tuple[EvidenceItem, ...]], limit_s: float) -> float:
    """Let time pass and evidence be given until the job is in a state; return how long it took."""
    began_s = world.now_s
    while world.state != state and world.now_s - began_s < limit_s:
        await world.wait(0.2)
        answer_looks(world, "a", items)
        await world.settle()
    return world.now_s - began_s


async def test_a_contradiction_is_acted_upon_after_half_the_patience() -> None:
    """One reduces other sizes: within 4 s it is named and stopped, with patience for a step being 5 s."""
    world = await _hang(waits=(True, True, True))

    took_s = await _until(world, "stopping", {0: (_call(8),), 1: (_call(16),), 2: (_call(8),)}, 20.0)

    verdict = world.incident(1).verdict
    assert verdict is not None
    assert (verdict.fault, verdict.culprits) == ("collective_mismatch", (1,))
    assert took_s < 4.0
    assert {order.kind: order.ranks for order in world.beat("a").orders}["kill"] == (1,)


async def test_a_sleeping_rank_gets_most_of_its_patience() -> None:
    """With nothing granted to absentees: looked at after 2.5 s, acted upon after 4.5 s."""
    world = await _hang(waits=(True, False, True), policy=EAGER)
    asleep = EvidenceItem("stacks", ok=True, marks=("in_syscall",), frames=LOOP)

    took_s = await _until(world, "stopping", {1: (asleep,)}, 20.0)

    verdict = world.incident(1).verdict
    assert verdict is not None
    assert (verdict.fault, verdict.culprits) == ("sleeping", (1,))
    assert 3.9 < took_s < 5.0


async def test_a_stuck_rank_is_looked_at_three_times() -> None:
    """It burns CPU in the same place: with nothing granted to absentees after 10 s instead of 60 s."""
    world = await _hang(waits=(True, False, True), busy=1.0, policy=EAGER)

    took_s = await _until(world, "stopping", {1: (EvidenceItem("stacks", ok=True, frames=LOOP),)}, 30.0)

    verdict = world.incident(1).verdict
    assert verdict is not None
    assert (verdict.fault, verdict.culprits) == ("stuck", (1,))
    assert took_s < 11.0


async def test_an_evaluation_that_nobody_declared_is_left_alone() -> None:
    """30 s of one rank, busy and somewhere else at every look: one harmless incident, and the next is calmer."""
    world = await _hang(waits=(True, False, True), busy=1.0)
    for count in range(150):
        await world.wait(0.2)
        frames = (f"layer{count % 7} (model.py:{count})", "evaluate (train.py:60)")
        answer_looks(world, "a", {1: (EvidenceItem("stacks", ok=True, frames=frames),)})
    state = world.state

    world.train(21)
    await world.wait(0.4)
    again = world.state
    await world.wait(20.0)

    assert (state, again) == ("confirming", "running")
    assert world.incident(1).state == "harmless"
    assert len(world.memory.incidents) == 1
    assert world.round == 1


async def test_a_compilation_of_ten_minutes_is_left_alone_and_seldom_looked_at() -> None:
    """Its stack shows the compiler, the same place at every look: one harmless incident, in the end a look a minute."""
    world = await _hang(waits=(True, False, True))
    asked = 0
    for _ in range(600):
        await world.wait(1.0, tick_s=0.5)
        asked += answer_looks(world, "a", {1: (EvidenceItem("stacks", ok=True, frames=COMPILING),)}) > 0
        await world.settle()
    state = world.state

    world.train(21)
    await world.wait(0.4)

    assert (state, world.state) == ("confirming", "running")
    assert world.incident(1).state == "harmless"
    assert world.round == 1
    assert 8 <= asked <= 17


async def test_who_hangs_after_a_compilation_is_found_out() -> None:
    """It compiles for five minutes and sleeps from then on: acted upon within a minute, not after half an hour."""
    world = await _hang(waits=(True, False, True), policy=EAGER)
    for _ in range(300):
        await world.wait(1.0, tick_s=0.5)
        answer_looks(world, "a", {1: (EvidenceItem("stacks", ok=True, frames=COMPILING),)})
        await world.settle()
    asleep = EvidenceItem("stacks", ok=True, marks=("in_syscall",), frames=LOOP)

    took_s = await _until(world, "stopping", {1: (asleep,)}, 600.0)

    verdict = world.incident(1).verdict
    assert verdict is not None
    assert verdict.culprits == (1,)
    assert took_s < 62.0


async def test_a_rank_that_dies_while_it_is_looked_at_is_judged_by_its_death() -> None:
    """An exit status says more than a silence whose patience is not used up."""
    world = await _hang(waits=(True, False, True))
    await world.wait(3.2)
    state = world.state

    exits = (world.exit(2, -9, step=20),)
    await world.ask(world.new_join("a", cause="failure", exits=exits, previous_round=1))

    verdict = world.incident(1).verdict
    assert state == "confirming"
    assert verdict is not None
    assert (verdict.fault, verdict.culprits) == ("killed", (2,))


async def test_evidence_survives_the_controller() -> None:
    """Killed while it waits for more, the next one judges with what the journal has."""
    world = await _hang(waits=(True, True, True))
    await world.wait(3.0)
    state = world.state
    answer_looks(world, "a", {0: (_call(8),), 1: (_call(8),), 2: (_call(8),)})
    world.restart_controller()

    looks = world.loop.jobs["job"].suspects.looks

    assert (state, world.state) == ("confirming", "confirming")
    assert sorted(looks) == [0, 1, 2]


async def test_evidence_that_is_sent_again_is_one_look() -> None:
    """The answer to the agent was lost, so it hands the same in three times: no rank was seen in three looks."""
    world = await _hang(waits=(True, False, True), busy=1.0)
    await world.wait(3.0)
    seen = EvidenceItem("stacks", ok=True, rank=1, frames=LOOP)
    missing = EvidenceItem("stderr", ok=False, rank=1, text="the rank's stderr is not in a file")
    orders = [order for order in world.beat("a").orders if order.kind == "dump_stacks"]

    for _ in range(3):
        world.loop.evidence(Evidence("a", "job", orders[0].incident, orders[0].id, items=(seen, missing)))

    assert world.loop.jobs["job"].suspects.looks[1].alike == 1
    await world.wait(0.2)  # it is journaled with the next tick
    assert [item.kind for item in world.incident(1).evidence] == ["stacks", "stderr"]


async def test_ranks_that_finish_while_they_are_looked_at_were_only_slow_to_leave() -> None:
    """The last rank takes long over its end: the run succeeds, and what was suspected is called harmless."""
    world = await _hang(waits=(True, False, True))
    await _until(world, "confirming", {}, 20.0)

    world.loop.leave(Leave("job", "a", "runner-a", "succeeded", round=1))
    await world.settle()

    assert world.state == "finished"
    assert world.incident(1).state == "harmless"


@pytest.mark.parametrize(("actions", "ends"), [({}, "running"), ({"slow": "restart"}, "stopping")])
async def test_what_is_slow_goes_on_unless_the_policy_says_otherwise(actions: dict[str, str], ends: str) -> None:
    """Collectives end between two looks: nothing is stopped, but by a job's own ``slow = restart``."""
    world = World(nproc=3, policy=JobPolicy(actions=actions, absent_patience_s=0.0))
    await world.up("a")
    for rank in range(3):
        world.rank(rank).collective = INSIDE if rank != 1 else OUTSIDE
    seen = {world.state}

    for count in range(100):
        await world.wait(0.2)
        done = CollectiveFact("0", 40 + count // 10, "all_reduce", "[[8]]", "float", done=True)
        item = EvidenceItem("flight_recorder", ok=True, collectives=(done,))
        answer_looks(world, "a", dict.fromkeys(range(3), (item,)))
        await world.settle()
        seen.add(world.state)
        if world.state == ends and "confirming" in seen:
            break

    assert world.state == ends
    assert "confirming" in seen
    verdict = world.incident(1).verdict
    assert verdict is not None
    assert verdict.fault == "slow"


@pytest.mark.parametrize(("answers", "named"), [(True, "sleeping"), (False, "not_joined")])
async def test_a_rank_that_has_not_answered_is_asked_again_before_it_is_stopped(*, answers: bool, named: str) -> None:
    """An agent on a busy machine may need more than an order's deadline; one that never answers stops nothing twice."""
    world = await _hang(waits=(True, False, True), policy=EAGER)
    sleeps = EvidenceItem("stacks", ok=True, frames=("wait (train.py:7)",), marks=("in_syscall",))
    began_s, asked = world.now_s, set[str]()
    while world.state in ("running", "suspect", "confirming") and world.now_s - began_s < 30.0:
        await world.wait(0.2)
        for order in [one for one in world.beat("a").orders if one.kind.startswith("dump_")]:
            asked.add(order.incident + order.id)
            if answers and len(asked) > 2:  # stacks and flight recorder of the second look
                mine = (msgspec.structs.replace(sleeps, rank=1),) if order.kind == "dump_stacks" else ()
                world.loop.evidence(Evidence("a", "job", order.incident, order.id, items=mine))
        await world.settle()

    verdict = world.incident(1).verdict
    assert verdict is not None
    assert (verdict.fault, verdict.culprits) == (named, (1,))
    assert world.state == "stopping"
    assert len(asked) == 4
