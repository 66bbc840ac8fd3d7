# SPDX-License-Identifier: Apache-2.0
"""Jobs from their first join to their end, driven through the real loop with a clock that the test winds."""

import signal

import pytest

from megascale_ops.controller.job.transitions import again_in_s
from megascale_ops.controller.record.state_machine import State
from megascale_ops.schema.messages import Evidence, EvidenceItem, Leave
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition, RankError
from tests.fakes.controlled_job import World

KILL = -signal.SIGKILL


async def test_a_single_node_forms_at_once_and_runs() -> None:
    """With one node nothing is waited for; once all ranks step the job runs."""
    world = World()

    reply = await world.ask(world.new_join())
    await world.run_round(20)

    assert (reply.status, reply.round, reply.node_rank, reply.nodes) == ("go", 1, 0, 1)
    assert (reply.master_addr, reply.master_port) == ("host-a", 4000)
    assert world.state == "running"


async def test_a_killed_rank_is_named_and_restarted_without_a_tick() -> None:
    """A crash is judged, journaled and answered in the same breath: no time passes."""
    world = World()
    await world.up("a", step=50)
    before_s = world.now_s
    exits = (world.exit(1, KILL, step=50, phase="backward"), world.exit(0, -15, by_us=True))

    reply = await world.ask(world.new_join(cause="failure", exits=exits, previous_round=1))

    assert world.now_s == before_s
    assert (reply.status, reply.round) == ("go", 2)
    assert reply.verdict is not None
    assert (reply.verdict.fault, reply.verdict.culprits, reply.verdict.action) == ("killed", (1,), "restart")
    assert reply.incident == "job-1"


async def test_a_death_is_detected_when_it_was_seen_not_when_the_others_had_stopped() -> None:
    """A peer sits out 20 s of grace before the runner tells of the death; how that peer ends counts for nothing."""
    world = World()
    await world.up("a", step=50)
    stopped = world.exit(0, KILL, by_us=True, ago_s=25.0)
    exits = (world.exit(1, KILL, step=52, ago_s=20.0), stopped)

    await world.ask(world.new_join(cause="failure", exits=exits, previous_round=1))

    marks = world.incident(1).marks
    assert marks.named - marks.detected == pytest.approx(20.0)


async def test_an_incident_passes_all_its_marks() -> None:
    """Began, detected, named, ordered, stopped, formed, stepped, caught up; and the steps before and after."""
    world = World()
    await world.up("a", step=50)
    exits = (world.exit(1, KILL, step=52, ago_s=0.5),)
    await world.ask(world.new_join(cause="failure", exits=exits, previous_round=1))
    world.spawn("a")
    world.beat_all()
    for rank in (world.rank(0), world.rank(1)):
        rank.step = 40
    await world.wait(1.0)

    world.train(41)
    await world.wait(0.4)
    catching_up = world.incident(1)
    assert world.state == "catching_up"
    world.train(54)
    await world.wait(0.4)

    incident, marks = world.incident(1), world.incident(1).marks
    assert catching_up.state == "open"
    assert catching_up.marks.stepped > 0
    assert world.state == "running"
    assert incident.state == "recovered"
    assert (incident.step_before, incident.step_after) == (52, 41)
    assert marks.named - marks.detected == pytest.approx(0.5)
    assert marks.began <= marks.detected < marks.named <= marks.stopped <= marks.formed < marks.stepped
    assert marks.stepped < marks.caught_up
    status = world.loop.status("job")
    assert status is not None
    assert 0 < status.jobs[0].useful_ratio < 1


async def test_nothing_leaves_before_the_journal_is_safe() -> None:
    """While the journal has not written, a join gets no answer."""
    world = World()
    world.memory.hold = True

    reply = world.ask(world.new_join())
    await world.settle()
    early = reply.done()
    world.memory.hold = False
    world.memory.release()
    await world.settle()

    assert not early
    assert reply.result().status == "go"


async def test_the_same_join_again_gets_the_same_answer() -> None:
    """A runner whose answer was lost asks again and starts nothing new."""
    world = World()
    join = world.new_join()

    first = await world.ask(join)
    again = await world.ask(join)

    assert again == first


async def test_two_nodes_restart_together() -> None:
    """When one node fails, the other is ordered to restart, and both get the next round in the old order."""
    world = World(min_nodes=2, max_nodes=2)
    await world.up("a", "b")
    poll = world.poll("b")
    await world.settle()
    world.ranks["a"][0].state = ""

    failed = world.ask(world.new_join("a", cause="failure", exits=(world.exit(0, KILL),), previous_round=1))
    await world.settle()
    orders = poll.result().orders
    state = world.state
    obeyed = world.ask(world.new_join("b", cause="order", exits=(world.exit(2, -15, by_us=True),), previous_round=1))
    await world.settle()

    assert [order.kind for order in orders] == ["restart"]
    assert state == "stopping"
    assert (failed.result().node_rank, obeyed.result().node_rank) == (0, 1)
    assert obeyed.result().master_addr == "host-a"
    assert world.incident(1).verdict is not None
    assert world.incident(1).verdict.culprits == (0,)  # type: ignore[union-attr]  # asserted above


async def test_a_frozen_rank_is_confirmed_stopped_and_named() -> None:
    """State T beyond the grace: evidence is asked for, the culprit killed, the runner told to restart."""
    world = World()
    await world.up("a")
    poll = world.poll("a")
    frozen = world.rank(1)
    frozen.state, frozen.stopped_since_s = "T", world.now_s

    await world.wait(1.0)
    suspect = world.state
    await world.wait(0.8)
    dumps = {order.kind: order.id for order in world.beat("a").orders}
    confirming = world.state
    for kind in ("stacks", "flight_recorder"):
        item = EvidenceItem(kind=kind, ok=True, rank=1, text="here")
        world.loop.evidence(Evidence("a", "job", "job-1", dumps[f"dump_{kind}"], items=(item,)))
    await world.settle()
    kinds = [order.kind for order in world.beat("a").orders]

    assert (suspect, confirming, world.state) == ("suspect", "confirming", "stopping")
    assert kinds == ["preserve", "kill"]
    assert [order.kind for order in (await poll).orders] == ["restart"]
    incident = world.incident(1)
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == ("frozen", (1,))
    assert len(incident.evidence) == 2
    assert incident.marks.ordered > incident.marks.named > 0


async def test_agents_of_an_urgent_job_report_sooner() -> None:
    """While a rank is suspected, heartbeats are requested five times a second."""
    world = World()
    await world.up("a")
    calm = world.beat("a").again_s
    world.rank(1).state, world.rank(1).stopped_since_s = "T", world.now_s

    await world.wait(0.4)

    assert calm == 0.0
    assert world.beat("a").again_s == pytest.approx(0.2)


@pytest.mark.parametrize(("nodes", "later_s"), [(1, 0.2), (400, 0.2), (1_536, 0.768), (12_500, 6.25)])
def test_many_nodes_report_sooner_for_as_long_as_evidence_takes(nodes: int, later_s: float) -> None:
    """Then at most 2,000 heartbeats a second in all: an absent rank is waited for nine minutes. No calm job asks."""
    assert again_in_s(State.CONFIRMING, 1.0, nodes) == 0.2
    assert again_in_s(State.CONFIRMING, 60.0, nodes) == pytest.approx(later_s)
    assert again_in_s(State.RUNNING, 60.0, nodes) == 0.0


async def test_a_process_continued_in_time_costs_nothing() -> None:
    """SIGCONT within the grace: no incident, no order, no restart."""
    world = World()
    await world.up("a")
    world.rank(1).state, world.rank(1).stopped_since_s = "T", world.now_s
    await world.wait(1.0)

    world.rank(1).state = "R"
    await world.wait(1.0)

    assert world.state == "running"
    assert world.memory.incidents == {}


async def test_a_false_alarm_while_confirming_is_harmless() -> None:
    """A rank that moves again before a stop goes on; the incident records it."""
    world = World(policy=JobPolicy(silence_floor_s=5.0))
    await world.up("a")
    for number in (0, 1):
        world.rank(number).collective = CollectivePosition(5, 5 - number, "all_reduce")
    await world.wait(5.5)
    state = world.state

    world.train(21)
    await world.wait(0.4)

    assert state == "confirming"
    assert world.state == "running"
    assert world.incident(1).state == "harmless"
    assert world.beat("a").orders == ()


async def test_evidence_that_never_comes_holds_nothing_up() -> None:
    """After its deadline the missing evidence is noted as such and the job goes on to stop."""
    world = World()
    await world.up("a")
    world.rank(1).state, world.rank(1).stopped_since_s = "T", world.now_s

    await world.wait(2.6)

    assert world.state == "stopping"
    assert [item.ok for item in world.incident(1).evidence] == [False, False]
    assert "no answer" in world.incident(1).evidence[0].text


async def test_a_slow_first_step_is_no_silence() -> None:
    """A minute before the first step causes nothing."""
    world = World()
    await world.ask(world.new_join())
    world.spawn("a")

    await world.wait(60.0)

    assert world.state == "catching_up"
    assert world.memory.incidents == {}


async def test_a_script_without_black_box_runs() -> None:
    """A shell script has no steps: once its processes are up there is nothing to wait for."""
    world = World()
    await world.ask(world.new_join())
    world.spawn("a")
    for rank in world.ranks["a"]:
        rank.has_box = False

    await world.wait(4.0)

    assert world.state == "running"


async def test_a_lost_node_stops_the_others() -> None:
    """Neither agent nor runner answers for node_lost_s: the rest restarts without it."""
    world = World(min_nodes=1, max_nodes=2, policy=JobPolicy(node_lost_s=5.0))
    await world.up("a", "b")
    poll = world.poll("a")
    del world.ranks["b"]

    await world.wait(7.0)
    state, orders = world.state, poll.result().orders
    reply = world.ask(world.new_join("a", cause="order", previous_round=1))
    await world.settle()

    assert state == "stopping"
    assert [order.kind for order in orders] == ["restart"]
    assert (reply.result().status, reply.result().nodes) == ("go", 1)
    assert world.incident(1).verdict is not None
    assert world.incident(1).verdict.nodes == ("b",)  # type: ignore[union-attr]  # asserted above


async def test_a_dead_agent_costs_nothing() -> None:
    """As long as the runner asks, a node without an agent is not lost."""
    world = World(policy=JobPolicy(node_lost_s=5.0))
    await world.up("a")

    for _ in range(20):
        world.poll("a")
        await world.wait(1.0, beating=False)

    assert world.state == "running"
    assert world.memory.incidents == {}


async def test_a_node_offered_is_taken_in() -> None:
    """A job on fewer nodes than it could use restarts when one more comes; no budget pays for it."""
    world = World(min_nodes=1, max_nodes=2, policy=JobPolicy(max_restarts=0))
    await world.up("a")
    degraded = world.state
    newcomer = world.ask(world.new_join("b"))
    await world.settle()
    state = world.state

    member = world.ask(world.new_join("a", cause="order", previous_round=1))
    await world.settle()

    assert (degraded, state) == ("degraded", "stopping")
    assert (member.result().node_rank, newcomer.result().node_rank) == (0, 1)
    assert world.incident(1).verdict is not None
    assert world.incident(1).verdict.fault == "membership"  # type: ignore[union-attr]  # asserted above


async def test_a_full_job_keeps_a_spare_waiting() -> None:
    """A runner more than the job can use waits, and takes the place of a node that is lost."""
    world = World(min_nodes=1, max_nodes=1)
    await world.up("a")

    join = world.new_join("b")
    told = await world.ask(join)  # once, that it is a spare
    spare = world.ask(join)
    await world.wait(1.0)
    waiting = spare.done()
    world.loop.leave(Leave("job", "a", "runner-a", "succeeded", round=1))
    await world.settle()

    assert told.status == "wait"
    assert not waiting
    assert spare.result().status == "stop"
    assert spare.result().exit_code == 0


async def test_the_same_exception_at_the_same_step_twice_stops_the_job() -> None:
    """The second time it is a bug in the script, and the runner is told so."""
    world = World()
    error = RankError(type="ValueError", message="bad 17", where="train.py:9 main", step=30)
    await world.up("a", step=30)
    exits = (world.exit(1, 1, error=error, step=30, steps_seen=31),)

    first = await world.ask(world.new_join(cause="failure", exits=exits, previous_round=1))
    await world.run_round(30)
    second = await world.ask(world.new_join(cause="failure", exits=exits, previous_round=2))

    assert first.status == "go"
    assert (second.status, second.exit_code) == ("stop", 1)
    assert "same exception at step 30" in second.reason
    assert second.verdict is not None
    assert second.verdict.reason in second.reason
    assert world.incident(2).done.endswith("twice in a row is a bug in the script")  # its reason is told above it
    assert second.verdict.fault == "script_bug"
    assert world.state == "failed"


async def test_memory_that_runs_out_at_the_same_step_a_third_time_stops_the_job() -> None:
    """Counted over rounds and a controller's restart; the runner is told in one sentence."""
    world = World()
    error = RankError(type="torch.OutOfMemoryError", message="CUDA out of memory. Tried to allocate 2.00 GiB", step=30)
    await world.up("a", step=30)
    exits = (world.exit(1, 1, error=error, step=30, steps_seen=31),)

    replies = [await world.ask(world.new_join(cause="failure", exits=exits, previous_round=1))]
    await world.run_round(30)
    replies.append(await world.ask(world.new_join(cause="failure", exits=exits, previous_round=2)))
    world.restart_controller()
    await world.run_round(30)
    replies.append(await world.ask(world.new_join(cause="failure", exits=exits, previous_round=3)))

    assert [one.status for one in replies] == ["go", "go", "stop"]
    assert "out_of_memory at step 30 with the same words 3 times in a row" in replies[-1].reason
    assert replies[-1].reason.count("Tried to allocate") == 1


async def test_budgets_end_what_does_not_recover() -> None:
    """--max-restarts 1: the second kill ends the job with the reason."""
    world = World(policy=JobPolicy(max_restarts=1))
    await world.up("a")

    first = await world.ask(world.new_join(cause="failure", exits=(world.exit(0, KILL),), previous_round=1))
    await world.run_round(30)
    second = await world.ask(world.new_join(cause="failure", exits=(world.exit(0, KILL),), previous_round=2))

    assert first.status == "go"
    assert second.status == "stop"
    assert "budget of 1 restarts" in second.reason


async def test_all_nodes_succeed() -> None:
    """The job is finished when the last node says so, however far apart they end."""
    world = World(min_nodes=2, max_nodes=2)
    await world.up("a", "b")

    world.loop.leave(Leave("job", "a", "runner-a", "succeeded", round=1))
    del world.ranks["a"]
    await world.wait(4.0)
    between = world.state
    world.loop.leave(Leave("job", "b", "runner-b", "succeeded", round=1))

    assert (between, world.state) == ("running", "finished")


async def test_ctrl_c_on_one_node_stops_all() -> None:
    """A cancelled runner ends the job; the others are ordered to shut down."""
    world = World(min_nodes=2, max_nodes=2)
    await world.up("a", "b")
    poll = world.poll("b")
    await world.settle()

    world.loop.leave(Leave("job", "a", "runner-a", "cancelled", round=1))
    await world.settle()

    assert world.state == "stopped"
    assert [order.kind for order in poll.result().orders] == ["shutdown"]
