# SPDX-License-Identifier: Apache-2.0
"""Self-checks through agents: who is asked, what is refused, and the check that a slow GPU's verdict owes."""

import asyncio

import msgspec
import pytest

from megascale_ops.controller.detectors.self_checks import GPU_CHECK_S, SLACK_S, is_slow_gpu
from megascale_ops.controller.job.owed_checks import GPU_CHECKS, OwedCheck, are_awaited
from megascale_ops.controller.nodes.evidence import Accusation
from megascale_ops.controller.nodes.life import NodeState
from megascale_ops.controller.record.state_machine import EventKind
from megascale_ops.errors import NotFoundError, RefusedError
from megascale_ops.schema.events import Incident
from megascale_ops.schema.health import DEADLINES_S, CheckAsk, CheckedFinding, NodeCheck, SelfCheck, Verdict
from megascale_ops.schema.messages import DIAGNOSE, SELF_CHECK, Evidence, EvidenceItem, JoinReply, Order
from megascale_ops.schema.policy import JobPolicy
from tests.fakes.controlled_job import World

SLOW = "GPU 1: bf16 matrix products 306 TFLOP/s, 52.0% less than the other one's 638 TFLOP/s"
BAD = SelfCheck("b", "quick", "bad", seconds=9.0, made=3, gpus={"GPU 1": "GPU-1"},
                findings=(CheckedFinding("bad", "GPU 1", SLOW, check="gemm"),))  # fmt: skip

GOOD = msgspec.structs.replace(BAD, status="good", findings=())
KILLED = msgspec.structs.replace(GOOD, status="bad", trouble="the self-check was killed at its deadline of 60 s")


def slow(cause: str, rank: int = 3) -> Verdict:
    """Return a verdict on a slow rank of node b."""
    return Verdict("straggler", f"rank {rank} is slow", 0.9, (rank,), ("b",), cause=cause, cost=0.1)


def orders(world: World, node: str) -> list[Order]:
    """Return the checks that a node's agent is ordered to make now."""
    return [order for order in world.beat(node).orders if order.kind == DIAGNOSE]


def answer(world: World, order: Order, found: SelfCheck | None, text: str = "") -> None:
    """Send what an agent's check has shown."""
    item = EvidenceItem(SELF_CHECK if found is not None else "process", ok=found is not None, text=text, check=found)
    world.loop.evidence(Evidence(node=order.node, job=order.job, incident="", order=order.id, items=(item,)))


async def trains(**policy: object) -> World:
    """Return a job of two nodes that trains."""
    world = World(nproc=2, min_nodes=2, max_nodes=2, policy=JobPolicy(**policy))  # type: ignore[arg-type]  # fields
    await world.up("a", "b")
    world.beat_all()
    return world


def warn(world: World, verdict: Verdict) -> Incident:
    """Let a warning hold, and time pass."""
    job = world.loop.jobs["job"]
    incident = world.loop.transitions.warn(job, "test:3", verdict)
    world.loop.self_checks.poll()
    return incident


async def pause(world: World) -> list[asyncio.Task[JoinReply]]:
    """Let a rank of node a be killed; return what the runners, which can measure their nodes, wait for."""
    exits = {"a": (world.exit(0, -9), world.exit(1, -15, by_us=True)), "b": ()}
    asks = []
    for node in ("a", "b"):
        join = world.new_join(node, previous_round=world.round, cause="failure", exits=exits[node])
        asks.append(world.ask(msgspec.structs.replace(join, can_check=True), wait_s=200.0))
    await world.wait(2.0)
    return asks


def suspect(world: World, node: str) -> None:
    """Let an Xid speak against a node."""
    world.loop.nodes.accuse(Accusation(node, "xid_79", world.loop.wall(), "Xid 79"))


async def test_a_check_by_hand_goes_to_that_nodes_agent_once_it_is_taken_it_is_not_given_again() -> None:
    """The order names depth and checks; the result is the node's newest."""
    world = await trains()
    view = world.loop.self_checks.begin("b", CheckAsk("full", ("cpu",), preempt=True), "by hand")

    elsewhere, (order,) = orders(world, "a"), orders(world, "b")
    world.beat("b", done=(order.id,))
    again = orders(world, "b")
    answer(world, order, BAD)

    assert (view.state, view.id) == ("waiting", order.id)
    assert (elsewhere, again) == ([], [])
    assert order.ask == CheckAsk("full", ("cpu",), preempt=True)
    assert order.deadline_s == DEADLINES_S["full"]
    shown = world.loop.self_checks.view("b")
    assert (shown.state, shown.check) == ("done", BAD)


async def test_every_refusal_is_a_sentence() -> None:
    """A node that nobody knows, one that trains, one that is being checked, one whose agent is away."""
    world = await trains()
    checks = world.loop.self_checks

    with pytest.raises(NotFoundError, match=r"no agent of a node 'c' was heard; heard of: a, b"):
        checks.begin("c", CheckAsk(), "by hand")
    with pytest.raises(RefusedError, match=r"job job trains on node b: --preempt checks it all the same"):
        checks.begin("b", CheckAsk(), "by hand")
    checks.begin("b", CheckAsk(preempt=True), "by hand")
    with pytest.raises(RefusedError, match=r"node b is being checked already \(by hand\)"):
        checks.begin("b", CheckAsk(preempt=True), "by hand")
    await world.wait(6.0, beating=False)
    with pytest.raises(RefusedError, match=r"the agent of node a is not heard, so it can't be checked from here"):
        checks.begin("a", CheckAsk(preempt=True), "by hand")


async def test_an_agent_that_does_not_answer_is_given_up_at_the_deadline() -> None:
    """The result says so and is no verdict; a late answer changes nothing."""
    world = await trains()
    world.loop.self_checks.begin("b", CheckAsk(preempt=True), "by hand")
    (order,) = orders(world, "b")

    world.now_s += DEADLINES_S["quick"] + SLACK_S + 0.1
    world.loop.self_checks.poll()
    answer(world, order, BAD)

    shown = world.loop.self_checks.view("b")
    assert shown.check is not None
    assert (shown.state, shown.check.status) == ("done", "unmeasured")
    assert "has not answered within" in shown.check.trouble


async def test_an_older_agent_is_told_as_that() -> None:
    """It refuses the order, since it does not know it."""
    world = await trains()
    world.loop.self_checks.begin("b", CheckAsk(preempt=True), "by hand")
    (order,) = orders(world, "b")

    answer(world, order, None, "refused: 'diagnose' is no order for an agent")

    shown = world.loop.self_checks.view("b").check
    assert shown is not None
    assert "is too old for it: update it" in shown.trouble


@pytest.mark.parametrize("cause", ["compute", "input", "host", "starved", "gc", "launch", ""])
async def test_a_verdict_of_another_kind_starts_nothing(cause: str) -> None:
    """Neither now nor owed."""
    world = await trains(check_preempts=True)

    warn(world, slow(cause))

    assert orders(world, "b") == []
    assert world.loop.jobs["job"].owed_checks == {}


@pytest.mark.parametrize("fault", ["slow_link", "loss_spike", "frozen"])
def test_other_faults_are_no_slow_gpu(fault: str) -> None:
    """Also with that cause."""
    assert not is_slow_gpu(Verdict(fault, "", 0.9, (3,), ("b",), cause="gpu"))
    assert is_slow_gpu(slow("gpu"))
    assert is_slow_gpu(slow("throttled"))


async def test_at_once_where_the_policy_says_so() -> None:
    """The check is ordered while the job trains, of the checks of a GPU; the result is in the incident."""
    world = await trains(check_preempts=True)
    incident = warn(world, slow("gpu"))

    (order,) = orders(world, "b")
    world.loop.jobs["job"].owed_checks[incident.id].gpu = "GPU-1"
    answer(world, order, BAD)

    assert order.ask is not None
    assert (order.ask.checks, order.ask.preempt, order.job) == (GPU_CHECKS, True, "job")
    kept = world.loop.incidents[incident.id]
    (item,) = [one for one in kept.evidence if one.kind == SELF_CHECK]
    assert SLOW in item.text
    assert "beside the training" in item.text
    assert any(event.kind == SELF_CHECK and SLOW in event.text for event in world.journal.events)
    assert orders(world, "b") == []  # once for each incident


async def test_without_that_it_waits_for_the_next_pause_which_waits_for_it() -> None:
    """Nothing while it trains; ranks fail, the runners come back, the round is held until the answer is there."""
    world = await trains()
    incident = warn(world, slow("gpu"))
    before = orders(world, "b")
    round_ = world.round

    exits = {"a": (world.exit(0, -9), world.exit(1, -15, by_us=True)), "b": ()}
    asks = [
        world.ask(world.new_join(node, previous_round=round_, cause="failure", exits=exits[node]))
        for node in ("a", "b")
    ]
    await world.wait(2.0)
    held, (order,) = world.round, orders(world, "b")
    answer(world, order, BAD)
    await world.wait(1.0)

    assert before == []
    assert held == round_
    assert order.ask is not None
    assert not order.ask.preempt
    assert world.round == round_ + 1
    assert SELF_CHECK in [one.kind for one in world.loop.incidents[incident.id].evidence]
    for ask in asks:
        ask.cancel()


async def test_a_check_that_hangs_holds_no_round_for_longer_than_its_deadline() -> None:
    """The incident says that there was no answer."""
    world = await trains()
    incident = warn(world, slow("gpu"))
    round_ = world.round
    exits = {"a": (world.exit(0, -9), world.exit(1, -15, by_us=True)), "b": ()}
    asks = [
        world.ask(world.new_join(node, previous_round=round_, cause="failure", exits=exits[node]), wait_s=200.0)
        for node in ("a", "b")
    ]
    await world.wait(2.0)

    await world.wait(GPU_CHECK_S + SLACK_S + 1.0)

    assert world.round == round_ + 1
    kept = world.loop.incidents[incident.id]
    assert "has not answered within" in next(one.text for one in kept.evidence if one.kind == SELF_CHECK)
    for ask in asks:
        ask.cancel()


def test_a_round_waits_only_for_nodes_that_it_would_have() -> None:
    """Not for one that is not there, nor one that is kept out, nor past the deadline."""
    owed = OwedCheck("job-1", "b", 3, "", 0.0)

    assert are_awaited([owed], ["a", "b"], [], 5.0)
    assert not are_awaited([owed], ["a"], [], 5.0)
    assert not are_awaited([owed], ["a", "b"], ["b"], 5.0)
    owed.until_s = 4.0
    assert not are_awaited([owed], ["a", "b"], [], 5.0)


@pytest.mark.parametrize(
    ("found", "state"), [(BAD, NodeState.SUSPECT), (GOOD, NodeState.HEALTHY), (KILLED, NodeState.HEALTHY)]
)
async def test_a_bad_check_is_held_against_its_node_which_is_not_measured_twice_in_that_pause(
    found: SelfCheck, state: NodeState
) -> None:
    """Evidence: what the check has found. One that found nothing, or was killed, accuses nobody."""
    world = await trains()
    warn(world, slow("gpu"))
    round_ = world.round

    asks = await pause(world)
    (order,) = orders(world, "b")
    answer(world, order, found)
    await world.wait(1.0)

    assert world.round == round_ + 1
    assert [ask.result().status for ask in asks] == ["go", "go"]
    assert world.loop.nodes.book.life("b").state == state
    moves = world.loop.nodes.book.moves_of("b")
    assert [(move.event, SLOW in move.evidence) for move in moves] == [("accused", True)] * (found is BAD)


async def test_in_the_next_pause_the_runner_of_a_node_that_was_accused_so_measures_it() -> None:
    """One pause later it is a suspect like others."""
    world = await trains(check_preempts=True)
    warn(world, slow("gpu"))
    (order,) = orders(world, "b")
    answer(world, order, BAD)

    asks = await pause(world)

    assert world.loop.nodes.book.life("b").state == NodeState.UNDER_CHECK
    assert asks[1].result().status == "check"
    asks[0].cancel()


async def test_the_agent_of_one_job_alone_accuses_no_node() -> None:
    """Its result is in the incident, and the node is as healthy as before."""
    world = await trains(check_preempts=True)
    incident = warn(world, slow("gpu"))
    (order,) = orders(world, "b")
    view = world.loop.registry.node("b", "job")
    assert view is not None
    view.only_job = "job"

    answer(world, order, BAD)

    assert SELF_CHECK in [one.kind for one in world.loop.incidents[incident.id].evidence]
    assert world.loop.nodes.book.moves_of("b") == ()


async def test_where_the_runner_measures_its_node_that_is_the_check_that_was_owed() -> None:
    """The agent of a suspect is not asked, and what its runner has found is written into the incident."""
    world = await trains()
    incident = warn(world, slow("gpu"))
    suspect(world, "b")
    round_ = world.round

    asks = await pause(world)
    told, meanwhile = asks[1].result(), orders(world, "b")
    check = NodeCheck("good", "", 21.0, "/run/check-b.json")
    join = world.new_join("b", previous_round=round_, cause="failure")
    again = world.ask(msgspec.structs.replace(join, can_check=True, check=check), wait_s=200.0)
    await world.wait(1.0)

    assert told.status == "check"
    assert meanwhile == []
    assert orders(world, "b") == []
    assert world.round == round_ + 1
    assert again.result().status == "go"
    assert world.loop.nodes.book.life("b").state == NodeState.BACK
    (item,) = [one for one in world.loop.incidents[incident.id].evidence if one.kind == SELF_CHECK]
    assert item.text == (
        "the self-check of node b, 21.00 s, for the GPU of rank 3 on b, finds nothing bad; "
        "the report is /run/check-b.json on b"
    )
    assert world.loop.jobs["job"].owed_checks == {}
    asks[0].cancel()


async def test_while_the_agent_measures_a_node_its_runner_is_not_asked_to() -> None:
    """A person's check comes first; a suspect is measured by its runner after that, and the round waits for both."""
    world = await trains()
    suspect(world, "b")
    world.loop.self_checks.begin("b", CheckAsk(preempt=True), "by hand")
    (order,) = orders(world, "b")

    asks = await pause(world)
    meanwhile = world.loop.nodes.book.life("b").state
    answer(world, order, BAD)
    await world.wait(1.0)

    assert meanwhile == NodeState.SUSPECT
    assert asks[1].result().status == "check"
    with pytest.raises(RefusedError, match=r"node b is measured by its runner right now \(Xid 79\)"):
        world.loop.self_checks.begin("b", CheckAsk(), "by hand")
    asks[0].cancel()


async def test_no_round_waits_for_another_jobs_ranks_on_the_node() -> None:
    """They are no pause of the node: the check stays owed, and the round is formed."""
    world = await trains()
    incident = warn(world, slow("gpu"))
    round_ = world.round
    world.loop.nodes.runs_on = lambda node: ("other",) if node == "b" else ()  # type: ignore[method-assign]  # a fake

    asks = await pause(world)

    assert world.round == round_ + 1
    assert orders(world, "b") == []
    assert list(world.loop.jobs["job"].owed_checks) == [incident.id]
    for ask in asks:
        ask.cancel()


def hung(fault: str = "gpu_stuck", nodes: tuple[str, ...] = ("b",), ranks: tuple[int, ...] = (3,)) -> Verdict:
    """Return a verdict on a hang that is acted upon."""
    return Verdict(fault, f"{fault} of {ranks}", 0.9, ranks, nodes)


async def stopped(world: World, verdict: Verdict, *, can_check: bool = True) -> list[asyncio.Task[JoinReply]]:
    """Let a verdict on a hang stop the round; return what the runners wait for then."""
    job = world.loop.jobs["job"]
    transitions = world.loop.transitions
    transitions.open_incident(job, verdict, detected=world.loop.wall())
    transitions.move(job, EventKind.RANK_FAILED, verdict.reason, verdict=verdict)
    asks = []
    for node, ranks in (("a", (0, 1)), ("b", (2, 3))):
        ends = tuple(world.exit(rank, -15, by_us=True) for rank in ranks)
        join = world.new_join(node, previous_round=world.round, cause="order", exits=ends)
        asks.append(world.ask(msgspec.structs.replace(join, can_check=can_check), wait_s=200.0))
    await world.wait(2.0)
    return asks


def measured(world: World, round_: int, check: NodeCheck) -> asyncio.Task[JoinReply]:
    """Let the runner of node b ask again with what it has measured."""
    join = world.new_join("b", previous_round=round_, cause="order")
    return world.ask(msgspec.structs.replace(join, can_check=True, check=check), wait_s=200.0)


async def test_a_gpu_that_hung_is_measured_by_its_runner_before_its_node_goes_on() -> None:
    """Its GPUs alone, while the other node waits; what came of it is in the incident, and the node is healthy."""
    world = await trains()
    round_ = world.round

    asks = await stopped(world, hung())
    told, waits = asks[1].result(), not asks[0].done()
    again = measured(world, round_, NodeCheck("good", "", 11.0, "/run/check-b.json"))
    await world.wait(1.0)

    assert waits
    assert (told.status, told.checks) == ("check", GPU_CHECKS)
    assert told.reason == "incident job-1: the GPU of rank 3 on b did not come to its collective"
    assert orders(world, "b") == []
    assert (world.round, again.result().status) == (round_ + 1, "go")
    (item,) = [one for one in world.loop.incidents["job-1"].evidence if one.kind == SELF_CHECK]
    assert "for the GPU of rank 3 on b, finds nothing bad" in item.text
    assert world.loop.nodes.book.life("b").state == NodeState.HEALTHY
    assert world.loop.jobs["job"].owed_checks == {}
    assert world.loop.jobs["job"].checks.gpus_only == set()


async def test_a_gpu_that_hung_and_is_bad_does_not_come_back() -> None:
    """Its node is in quarantine, and the round is formed without it."""
    world = World(nproc=2, min_nodes=1, max_nodes=2)
    await world.up("a", "b")
    world.beat_all()
    round_ = world.round

    await stopped(world, hung())
    again = measured(world, round_, NodeCheck("bad", SLOW, 11.0))
    await world.wait(200.0)

    assert world.loop.nodes.book.life("b").state == NodeState.QUARANTINED
    assert [member.node for member in world.loop.jobs["job"].record.members] == ["a"]
    assert not again.done() or again.result().status == "wait"
    (item,) = [one for one in world.loop.incidents["job-1"].evidence if one.kind == SELF_CHECK]
    assert SLOW in item.text


async def test_where_the_runner_cannot_measure_the_agent_of_a_gpu_that_hung_does() -> None:
    """An older runner's, or plain torchrun's: the round waits for the agent."""
    world = await trains()
    round_ = world.round

    asks = await stopped(world, hung(), can_check=False)
    (order,) = orders(world, "b")
    before = world.round
    answer(world, order, GOOD)
    await world.wait(1.0)

    assert before == round_
    assert order.ask is not None
    assert order.ask.checks == GPU_CHECKS
    assert "did not come to its collective" in order.reason
    assert {ask.result().status for ask in asks} == {"go"}


async def test_another_controller_goes_on_with_that_check() -> None:
    """What is owed follows from what is journaled of the round; all is measured then, and once."""
    world = await trains()
    await stopped(world, hung())

    world.restart_controller()
    world.beat_all()
    round_ = world.round
    other, told = (
        world.ask(msgspec.structs.replace(world.new_join(node, previous_round=round_), can_check=True), wait_s=60.0)
        for node in ("a", "b")
    )
    await world.wait(12.0)
    again = measured(world, round_, NodeCheck("good", "", 11.0))
    await world.wait(12.0)

    assert told.result().status == "check"
    assert (again.result().status, other.result().status) == ("go", "go")
    assert world.loop.jobs["job"].owed_checks == {}
    assert [move.event for move in world.loop.nodes.book.moves_of("b")].count("check_began") == 1


@pytest.mark.parametrize(
    "verdict",
    [
        *(hung(fault) for fault in ("sleeping", "stuck", "data_stall", "gil_held", "exception", "not_joined", "busy")),
        hung(nodes=("a", "b"), ranks=(1, 3)),
        hung(nodes=(), ranks=()),
    ],
    ids=lambda verdict: f"{verdict.fault}-{len(verdict.nodes)}",
)
async def test_other_hangs_owe_no_check(verdict: Verdict) -> None:
    """What is not the GPU's, or on several nodes, costs the restart no second."""
    world = await trains()

    asks = await stopped(world, verdict)

    assert {ask.result().status for ask in asks} == {"go"}
    assert world.loop.jobs["job"].owed_checks == {}


async def test_the_policy_can_leave_a_gpu_that_hung_unmeasured() -> None:
    """``check_suspects=false`` is for this check, too."""
    world = await trains(check_suspects=False)

    asks = await stopped(world, hung())

    assert {ask.result().status for ask in asks} == {"go"}
