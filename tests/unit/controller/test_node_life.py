# SPDX-License-Identifier: Apache-2.0
"""A node outlives its jobs: suspected, measured, kept out and taken back, with a limit and a person's word."""

import signal
from pathlib import Path

import msgspec
import pytest

from megascale_ops.controller.live.node_lines import node_lines
from megascale_ops.controller.nodes.evidence import Accusation, accusations_of
from megascale_ops.controller.nodes.life import ILLEGAL, TABLE, NodeEvent, NodeState, diagram
from megascale_ops.controller.policy.decision import Eviction
from megascale_ops.errors import RefusedError
from megascale_ops.ledger import ROWS
from megascale_ops.schema.health import NODE_STATES, Finding, HardwareFinding, NodeCheck, Verdict
from megascale_ops.schema.messages import Join, JoinReply
from megascale_ops.schema.policy import JobPolicy
from tests.fakes.controlled_job import World

KILL = -signal.SIGKILL
BAD = NodeCheck("bad", "GPU 0 computes at 61 % of the fleet's median", 12.0, "/run/job/check-a.json")
GOOD = NodeCheck("good", "", 12.0)


def _asks(world: World, node: str, **more: object) -> Join:
    """Return a join of a runner that can measure its node."""
    return msgspec.structs.replace(world.new_join(node), can_check=True, **more)


def _xid(world: World, node: str, rank: int) -> None:
    """Let the GPU of a rank report an Xid."""
    world.rank(rank).gpu = f"GPU-{node}"
    now_s = world.loop.wall()
    text = f"GPU 0 of {node}: Xid 79, it has fallen off the bus"
    world.findings[node] = (
        HardwareFinding("xid_79", text, "kernel_log", "fail", f"GPU-{node}", now_s, now_s, is_bad=True),
    )
    world.gpus[node] = (f"GPU-{node}",)
    world.beat(node)


async def _fail(world: World, node: str, rank: int, others: tuple[str, ...]) -> dict[str, Join]:
    """Let a rank of a node be killed; return what the runners ask for then."""
    ends = tuple(
        world.exit(one.rank, KILL if one.rank == rank else -signal.SIGTERM, by_us=one.rank != rank)
        for one in world.ranks[node]
    )
    asked = {node: _asks(world, node, cause="failure", exits=ends, previous_round=world.round)}
    for other in others:
        stopped = tuple(world.exit(one.rank, -signal.SIGTERM, by_us=True) for one in world.ranks[other])
        asked[other] = _asks(world, other, cause="order", exits=stopped, previous_round=world.round)
    world.ranks.clear()
    return asked


async def _answers(world: World, joins: dict[str, Join], *, wait_s: float = 1.0) -> dict[str, JoinReply]:
    """Return what runners are told within a second; those that are told nothing wait on."""
    tasks = {node: world.ask(join) for node, join in joins.items()}
    await world.wait(wait_s)
    return {node: task.result() for node, task in tasks.items() if task.done()}


async def _broken(*, max_nodes: int = 2, min_nodes: int = 2, spare: bool = True, policy: JobPolicy | None = None):  # noqa: ANN202
    """Return a world in which a rank of node a was killed, its GPU with an Xid, and what the runners ask for."""
    world = World(min_nodes=min_nodes, max_nodes=max_nodes, policy=policy)
    await world.up("a", "b")
    if spare:
        world.beat("c")
        world.ask(_asks(world, "c"))
        await world.wait(0.2)
    _xid(world, "a", 1)
    return world, await _fail(world, "a", 1, ("b",))


def test_the_table_knows_every_event_in_every_state() -> None:
    """Each pair has a row, or there is a reason why it has none; and every state has its words for people."""
    assert {event for _, event in TABLE} == set(NodeEvent)
    assert set(ILLEGAL) == set(NodeEvent)
    assert {state.value for state in NodeState} == set(NODE_STATES)


async def test_a_spare_takes_the_place_while_the_named_node_is_measured() -> None:
    """Stop, check, take the spare, go on: a full round does not wait for the check, and a bad node stays out."""
    world, asked = await _broken()

    told = await _answers(world, asked)
    started = [member.node for member in world.loop.jobs["job"].record.members]
    result = await _answers(world, {"a": msgspec.structs.replace(asked["a"], check=BAD)})
    life = world.loop.nodes.book.life("a")

    assert (told["a"].status, told["b"].status) == ("check", "go")
    assert "Xid 79" in told["a"].reason
    assert started == ["b", "c"]
    assert result["a"].status == "wait"
    assert "61 % of the fleet's median" in result["a"].reason
    assert "nodes release a" in result["a"].reason
    assert (life.state, life.strikes) == ("quarantined", 1)
    assert [move.event for move in world.memory.nodes.values()] == ["accused", "check_began", "check_failed"]
    assert "the report is /run/job/check-a.json on a" in world.memory.nodes[3].evidence


async def test_a_round_waits_for_a_check_and_takes_the_node_back() -> None:
    """Without a spare the round waits; a check that finds nothing brings the node back on probation."""
    world, asked = await _broken(spare=False)

    told = await _answers(world, asked)
    await world.wait(20.0, beating=False)
    asked["b"] = msgspec.structs.replace(asked["b"])  # its runner asks again, as it does when it is answered
    before = world.state
    result = await _answers(world, {"a": msgspec.structs.replace(asked["a"], check=GOOD), "b": asked["b"]})
    marks = world.incident(1).marks

    assert told["a"].status == "check"
    assert before == "replacing"
    assert {reply.status for reply in result.values()} == {"go"}
    assert world.loop.nodes.book.life("a").state == "back"
    assert 19.0 < marks.checked - marks.checking < 22.0
    assert marks.stopped <= marks.checking < marks.checked <= marks.formed
    assert "check" in ROWS


async def test_a_fault_without_hardware_checks_nobody() -> None:
    """A rank that was killed, no finding: the node takes part at once, and nothing is held against it."""
    world = World(min_nodes=2, max_nodes=2)
    await world.up("a", "b")

    told = await _answers(world, await _fail(world, "a", 1, ("b",)))

    assert {reply.status for reply in told.values()} == {"go"}
    assert world.memory.nodes == {}
    assert world.incident(1).marks.checking == 0.0


async def test_a_hardware_finding_of_another_gpu_is_not_the_ranks() -> None:
    """A GPU of the node that is no rank's, beside a rank that was killed: no reason to suspect the node."""
    world = World(min_nodes=2, max_nodes=2)
    await world.up("a", "b")
    world.rank(0).gpu, world.rank(1).gpu = "GPU-0", "GPU-1"
    world.findings["a"] = (
        HardwareFinding("xid_79", "GPU 7: Xid 79", "kernel_log", "fail", "GPU-7", world.loop.wall()),
    )
    world.beat("a")

    told = await _answers(world, await _fail(world, "a", 1, ("b",)))

    assert {reply.status for reply in told.values()} == {"go"}
    assert world.memory.nodes == {}


async def test_a_runner_that_cannot_check_is_not_asked() -> None:
    """An older runner's node stays a suspect, takes part, and a second fault has it out."""
    world, asked = await _broken(spare=False)
    old = {node: msgspec.structs.replace(join, can_check=False) for node, join in asked.items()}

    told = await _answers(world, old)

    assert {reply.status for reply in told.values()} == {"go"}
    assert world.loop.nodes.book.life("a").state == "suspect"


async def test_a_check_without_an_answer_holds_nobody_up_for_ever() -> None:
    """After three minutes the round goes on with whom it has, and the node that never answered is a suspect again."""
    world, asked = await _broken(spare=False, min_nodes=1)

    await _answers(world, asked)
    again = world.ask(asked["b"])
    await world.wait(185.0, beating=False)

    assert again.done() or world.state == "restarting"
    assert [member.node for member in world.loop.jobs["job"].record.members] == ["b"]
    assert world.loop.nodes.book.life("a").state == "suspect"
    assert not world.loop.nodes.is_to_check("a")


@pytest.mark.parametrize(("spare", "told"), [(True, {"a": "wait", "b": "go"}), (False, {"a": "check"})])
async def test_a_node_that_its_job_has_evicted_is_measured_only_where_it_is_needed(
    spare: bool, told: dict[str, str]
) -> None:
    """Its runner would measure for a round that does not take it, and miss the end of the job."""
    world, asked = await _broken(spare=spare)
    job, wall_s = world.loop.jobs["job"], world.loop.wall()
    job.record = msgspec.structs.replace(job.record, evictions=(Eviction("a", wall_s, wall_s + 600.0),))

    answers = await _answers(world, asked)
    if spare:
        await world.up("b", "c")  # and while the next round is on it is not measured, either
        await world.wait(2.0)

    assert {node: reply.status for node, reply in answers.items()} == told
    assert world.loop.nodes.book.life("a").state == ("suspect" if spare else "under check")


async def test_all_nodes_are_measured_side_by_side_where_the_policy_says_so() -> None:
    """``check_all``: after a fault of hardware each node is asked at once; after any other none is."""
    world, asked = await _broken(policy=JobPolicy(check_all=True), spare=False)

    told = await _answers(world, asked)
    results = {
        "a": msgspec.structs.replace(asked["a"], check=GOOD),
        "b": msgspec.structs.replace(asked["b"], check=GOOD),
    }
    done = await _answers(world, results)

    assert {reply.status for reply in told.values()} == {"check"}
    assert {reply.status for reply in done.values()} == {"go"}
    assert [world.loop.nodes.book.life(node).state for node in "ab"] == ["back", "healthy"]


async def test_what_is_known_of_a_node_survives_the_controller_and_the_job() -> None:
    """The next controller and the next job both keep the node out, and its runner hears why."""
    world, asked = await _broken()
    await _answers(world, asked)
    await _answers(world, {"a": msgspec.structs.replace(asked["a"], check=BAD)})

    world.restart_controller()
    other = msgspec.structs.replace(_asks(world, "a"), job="other", min_nodes=1, max_nodes=1)
    told = world.ask(other, wait_s=0.5)
    await world.wait(1.0, beating=False)

    assert world.loop.nodes.book.life("a").state == "quarantined"
    assert told.result().status == "wait"
    assert "61 % of the fleet's median" in told.result().reason


async def test_a_gpu_that_is_remembered_makes_its_node_a_suspect_wherever_it_turns_up() -> None:
    """The bad GPU was put into another machine: that one is measured before it takes part."""
    world = World()
    world.findings["z"] = (
        HardwareFinding("xid_79", "GPU 3: Xid 79", "kernel_log", "fail", "GPU-3", 1.0, 1.0, is_bad=True),
    )
    world.beat("z")
    world.gpus["a"] = ("GPU-3",)
    await world.up("a")

    assert world.loop.nodes.book.life("a").state == "suspect"
    assert "GPU-3" in world.loop.nodes.book.life("a").reason


async def test_the_limit_stops_what_goes_by_itself_and_no_person() -> None:
    """Of three nodes one goes a day; the second stays, people are told, and may do it themselves."""
    world = World(min_nodes=1, max_nodes=3)
    await world.up("a", "b", "c")
    nodes = world.loop.nodes
    for node in "ab":
        for key in ("xid_79", "ecc"):
            nodes.accuse(Accusation(node, key, world.loop.wall(), f"{node}: {key}"))
    by_itself = {node: nodes.book.life(node).state for node in "ab"}

    view = nodes.view()
    nodes.quarantine("b", "ada", "I have looked", 0.0)

    assert by_itself == {"a": "draining", "b": "suspect"}
    assert (view.moved_out, view.most_out, view.spared) == (1, 1, ("b",))
    assert "1 of 3 nodes a day" in nodes.book.moves[4].reason
    assert nodes.book.life("b").state == "draining"
    assert (nodes.view().moved_out, nodes.view().spared) == (1, ())


async def test_the_only_node_never_goes_by_itself() -> None:
    """Without it there is no job: it is told, and stays."""
    world = World()
    await world.up("a")

    for key in ("xid_79", "ecc"):
        world.loop.nodes.accuse(Accusation("a", key, world.loop.wall(), key))

    assert world.loop.nodes.book.life("a").state == "suspect"
    assert world.loop.nodes.view().spared == ("a",)


async def test_a_person_takes_a_node_out_and_back() -> None:
    """It runs on until its round ends, is told again each day, and an undo restores exactly what was."""
    world = World(min_nodes=1, max_nodes=2)
    await world.up("a", "b")
    nodes = world.loop.nodes

    nodes.quarantine("a", "ada", "a fan is loud", 0.0)
    running = nodes.book.life("a").state
    told = await _answers(world, await _fail(world, "b", 2, ("a",)))
    await world.wait(2.0)
    out = nodes.book.life("a")
    nodes.undo("a", "ada", "")
    back = nodes.book.life("a")
    released = nodes.release("a", "ada", "the fan is new")

    assert running == "draining"
    assert told["b"].status == "go"
    assert "a fan is loud" in told["a"].reason
    assert (out.state, out.is_held, out.by) == ("quarantined", True, "ada")
    assert back == world.memory.nodes[1].after
    assert released.state == "healthy"
    with pytest.raises(RefusedError, match="there is nothing to release it from"):
        nodes.release("a", "ada", "")
    with pytest.raises(RefusedError, match="no move that could be taken back"):
        nodes.undo("z", "ada", "")


async def test_a_round_that_lacks_a_node_since_it_is_out_says_so_at_once_and_once() -> None:
    """No spare is there: the job's history tells who is out, why and what ends it; released, the round is formed."""
    world = World(min_nodes=2, max_nodes=2)
    await world.up("a", "b")
    world.loop.nodes.quarantine("b", "ada", "a fan is loud", 0.0)

    joins = await _fail(world, "a", 0, ("b",))
    tasks = {node: world.ask(join, wait_s=60.0) for node, join in joins.items()}
    await world.wait(20.0)
    told = [event.text for event in world.memory.events if event.kind == "nodes_out"]
    waits = not any(task.done() for task in tasks.values())
    world.loop.nodes.release("b", "ada", "the fan is new")
    await world.wait(2.0)

    assert waits
    (text,) = told
    assert "until a person releases it, by ada" in text
    assert "a fan is loud; `megascale-ops nodes release b` ends that" in text
    assert {task.result().status for task in tasks.values()} == {"go"}


async def test_a_quarantine_ends_by_itself_or_is_told_again() -> None:
    """By evidence: an hour, then the node is a suspect and then healthy. By hand without an end: told each day."""
    world = World(min_nodes=1, max_nodes=2)
    nodes = world.loop.nodes
    world.beat("a")
    world.beat("b")
    for key in ("xid_79", "ecc"):
        nodes.accuse(Accusation("a", key, world.loop.wall(), key))
    nodes.quarantine("b", "ada", "later", 0.0)
    seen = []
    for _ in range(30):
        world.now_s += 3601.0
        nodes.poll()
        seen.append((nodes.book.life("a").state, nodes.book.life("b").state))

    assert seen[0] == ("suspect", "quarantined")
    assert seen[-1] == ("healthy", "quarantined")
    assert [move.event for move in nodes.book.moves_of("b")] == ["quarantined_by_hand", "told_again"]
    assert "until a person releases it" in nodes.book.moves_of("b")[-1].reason


def test_a_slow_rank_is_no_evidence_against_a_machine() -> None:
    """A straggler, a script's exception or a full disk, also beside a finding: only faults of hardware accuse."""
    xid = Finding("hardware_xid_79", "a: Xid 79", "hardware", 3, "a")
    node_wide = Finding("hardware_port_down", "a: port down", "hardware", -1, "a")

    def accused(fault: str, *evidence: Finding) -> list[str]:
        verdict = Verdict(fault, "why", 0.9, culprits=(3,), nodes=("a",), evidence=evidence)
        return [one.key for one in accusations_of(verdict, 1.0, "job", {("a", "xid_79"), ("a", "port_down")})]

    assert accused("cuda_error", xid) == ["xid_79"]
    assert accused("node_lost", node_wide) == ["port_down"]
    assert accused("exception", node_wide) == []
    assert accused("straggler") == []
    assert accused("cuda_error", Finding("hardware_xid_31", "a: Xid 31, a script's", "hardware", 3, "a")) == []
    assert accused("disk_full", xid) == []
    assert accused("killed", Finding("hardware_oom_kill", "a: killed for memory", "hardware", 3, "a")) == []


async def test_the_page_shows_the_nodes_of_its_job_alone() -> None:
    """Where each stands, why, until when and what a person may type; no node of another job, and no healthy one."""
    world = World(min_nodes=1, max_nodes=2)
    await world.up("a", "b")
    world.beat("z")
    nodes = world.loop.nodes
    nodes.quarantine("a", "ada", "a fan is loud", 0.0)
    nodes.quarantine("z", "ada", "another job's", 0.0)

    (line,) = node_lines(nodes.book, world.loop.jobs["job"])

    assert (line.node, line.state, line.by, line.reason) == ("a", "draining", "ada", "a fan is loud")
    assert line.until_wall_s == 0.0
    assert line.command == "megascale-ops nodes release a"


async def test_a_gpu_that_fails_makes_its_node_a_suspect_though_no_job_runs_there() -> None:
    """By the node's own agent; what is told by the agent of one job keeps no node from all others."""
    world = World()
    now_s = world.loop.wall()
    world.findings["z"] = (
        HardwareFinding("xid_79", "GPU 3: Xid 79", "kernel_log", "fail", "GPU-3", now_s, now_s, is_bad=True),
    )

    world.beat("z")

    assert world.loop.nodes.book.life("z").state == "suspect"
    assert world.memory.events[-1].kind == "node_moved"


def test_the_picture_in_the_guide_is_the_table() -> None:
    """Whoever changes the table changes what people read of it."""
    guide = Path(__file__).parents[3] / "docs" / "how-to" / "keep-bad-nodes-out.md"

    assert f"<!-- nodes -->\n```mermaid\n{diagram()}\n```\n<!-- /nodes -->" in guide.read_text(encoding="utf-8")


async def test_a_node_that_is_slow_in_its_first_step_alone_is_no_suspect() -> None:
    """The others wait two minutes for a node that compiles: nothing is held against the machine."""
    world = World(min_nodes=2, max_nodes=2)
    for node in "ab":
        world.ask(_asks(world, node))
    await world.settle()
    world.spawn("a", "b")
    world.beat_all()
    for one in world.ranks["a"]:
        one.step, one.steps_seen, one.phase = 0, 1, "forward"
    await world.wait(120.0)
    for step in range(1, 40):
        world.train(step)
        await world.wait(0.2)

    assert world.state == "running"
    assert world.memory.nodes == {}


async def test_a_node_that_another_job_trains_on_is_not_measured() -> None:
    """Both would be disturbed: it takes part as a suspect, and is measured when it is free."""
    world, asked = await _broken(spare=False)
    other = msgspec.structs.replace(_asks(world, "a"), job="other", runner_id="other", min_nodes=1, max_nodes=1)
    first = world.ask(other)
    await world.wait(0.5)

    told = await _answers(world, asked)

    assert first.result().status == "go"
    assert {reply.status for reply in told.values()} == {"go"}
    assert world.loop.nodes.book.life("a").state == "suspect"
