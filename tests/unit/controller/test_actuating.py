# SPDX-License-Identifier: Apache-2.0
"""What a verdict puts out is drained once, and what the engine has out is known; no answer of it harms a job."""

from collections.abc import Mapping

import pytest

from megascale_ops.cli.nodes.node_words import NO_ENGINE, lines_of
from megascale_ops.controller.actuating import Actuating
from megascale_ops.controller.live.node_lines import node_lines
from megascale_ops.controller.nodes.book import DRAINED, NOT_DRAINED, RESUMED, NodeBook, same_again
from megascale_ops.controller.nodes.evidence import Accusation
from megascale_ops.controller.nodes.life import NodeState
from megascale_ops.controller.policy.decision import Eviction
from megascale_ops.controller.recovery.decide import spares, unwelcome
from megascale_ops.engines.actuator import PREFIX, EngineError, EngineNode, ForeignError, RightsError
from megascale_ops.errors import RefusedError
from megascale_ops.schema.health import NodeCheck, NodeLife
from tests.fakes.controlled_job import World


class Cluster:
    """An engine's nodes a and b; what goes wrong is set."""

    title = "Slurm"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.drained: list[tuple[str, str]] = []
        self.resumed: list[str] = []
        self.wrong: EngineError | None = None
        self.nodes = {name: EngineNode(name, "mixed", is_usable=True) for name in "ab"}

    def drain(self, node: str, reason: str) -> str:
        """Note it."""
        self.asked.append(node)
        if self.wrong is not None:
            raise self.wrong
        self.drained.append((node, reason))
        self.nodes[node] = EngineNode(node, "drained", is_usable=False, reason=f"{PREFIX}{reason}")
        return f"node {node} is drained"

    def resume(self, node: str) -> str:
        """Note it."""
        if self.wrong is not None:
            raise self.wrong
        self.resumed.append(node)
        self.nodes[node] = EngineNode(node, "mixed", is_usable=True)
        return f"node {node} is back in service"

    def states(self) -> Mapping[str, EngineNode]:
        """As they were set."""
        if self.wrong is not None:
            raise self.wrong
        return self.nodes


async def _two_nodes() -> tuple[World, Cluster, Actuating]:
    world = World(min_nodes=1, max_nodes=2)
    await world.up("a", "b")
    cluster = Cluster()
    return world, cluster, Actuating(world.loop, cluster, 60.0)


def _evict(world: World, node: str, for_s: float = 60.0) -> None:
    job, wall_s = world.loop.jobs["job"], world.loop.wall()
    job.change(evictions=(*job.record.evictions, Eviction(node, wall_s, wall_s + for_s, "killed twice")))


def _kinds(world: World) -> list[str]:
    return [
        event.kind for event in world.memory.events if event.kind.startswith("node_") and event.kind != "node_moved"
    ]


async def test_an_eviction_is_told_once() -> None:
    """However often it is looked; the reason names the job and the verdict. The next eviction is another one."""
    world, cluster, actuating = await _two_nodes()

    _evict(world, "b")
    await actuating.poll()
    await actuating.poll()
    world.now_s += 1000.0
    _evict(world, "b")
    await actuating.poll()

    assert cluster.drained == [("b", "job: killed twice")] * 2
    assert _kinds(world) == ["node_drained", "node_withheld", "node_drained"]


async def test_what_the_controller_before_has_told_is_not_told_again() -> None:
    """After a restart of it; what it could not tell before it was killed is told, while the eviction stands."""
    world, cluster, actuating = await _two_nodes()
    _evict(world, "b")
    await actuating.poll()
    world.now_s += 1.0
    _evict(world, "a")
    world.loop.transitions.save(world.loop.jobs["job"])
    world.restart_controller()

    again = Actuating(world.loop, cluster, 60.0)
    again.begin()
    for _ in range(2):
        await again.poll()
    late = Actuating(world.loop, Cluster(), 60.0)
    world.now_s += 61.0
    late.begin()
    await late.poll()

    assert [node for node, _ in cluster.drained] == ["b", "a"]


async def test_an_eviction_that_the_engine_refuses_is_tried_again_as_long_as_it_stands() -> None:
    """Journaled, shown and counted as an unfinished move, also by the next controller; then it is done, once."""
    world, cluster, actuating = await _two_nodes()
    cluster.wrong = EngineError("slurmctld does not answer")
    _evict(world, "b", 7200.0)
    await actuating.poll()
    await actuating.poll()
    refused = world.loop.nodes.book.life("b")
    shown = lines_of(world.loop.nodes.view())
    world.restart_controller()
    again = Actuating(world.loop, cluster, 60.0)
    again.begin()
    calls = []
    for _ in range(4):
        await again.poll()
        calls.append(len(cluster.asked))
        world.now_s += 61.0
    cluster.wrong = None
    world.now_s += 600.0
    for _ in range(2):
        await again.poll()

    text = "node b is not drained in Slurm, job goes on without it: slurmctld does not answer"
    assert refused.engine is not None
    assert (refused.state, refused.engine.state, refused.engine.text) == ("healthy", "not drained", text)
    assert any(text in line for line in shown)
    assert calls == [2, 3, 3, 4]
    assert [move.event for move in world.loop.nodes.book.moves_of("b")] == [NOT_DRAINED, DRAINED]
    assert cluster.drained == [("b", "job: killed twice")]
    assert [kind for kind in _kinds(world) if kind != "node_withheld"] == ["node_not_drained", "node_drained"]


@pytest.mark.parametrize("ends", ["by time", "by hand", "with its job"])
async def test_an_eviction_that_is_over_is_not_told_late(ends: str) -> None:
    """Nothing is drained for a reason that no longer holds, and nothing stays to be shown."""
    world, cluster, actuating = await _two_nodes()
    cluster.wrong = EngineError("slurmctld does not answer")
    _evict(world, "b")
    await actuating.poll()
    was = world.loop.nodes.book.life("b").engine

    if ends == "by time":
        world.now_s += 61.0
    elif ends == "by hand":
        world.now_s += 1.0
        world.loop.nodes.release("b", "ops", "it is good")
    else:
        world.loop.jobs["job"].change(evictions=())
    cluster.wrong = None
    for _ in range(2):
        await actuating.poll()

    assert was is not None
    assert cluster.drained == []
    assert world.loop.nodes.book.life("b").engine is None


async def _resumed_elsewhere(*, by_hand: bool) -> tuple[World, Cluster, Actuating]:
    """Node c, which runs nothing, is out here; somebody resumes it in the engine."""
    world, cluster, actuating = await _two_nodes()
    nodes = world.loop.nodes
    nodes.share = 1.0
    if by_hand:
        nodes.quarantine("c", "ops", "fan 3", 0.0)
    else:
        for key in ("xid", "link"):
            nodes.accuse(Accusation("c", key, world.loop.wall(), f"a fault of its {key}"))
            world.now_s += 1.0
    await actuating.poll()
    assert nodes.book.life("c").state == NodeState.QUARANTINED
    cluster.nodes["c"] = EngineNode("c", "idle", is_usable=True)
    for _ in range(3):
        world.now_s += 61.0
        await actuating.poll()
    return world, cluster, actuating


async def test_what_somebody_resumed_there_is_a_suspect_here_and_not_drained_again() -> None:
    """What evidence has put out is measured before it takes part; the move is journaled and read back the same."""
    world, cluster, _ = await _resumed_elsewhere(by_hand=False)
    nodes = world.loop.nodes

    life = nodes.book.life("c")
    assert (life.state, life.engine) == (NodeState.SUSPECT, None)
    assert nodes.is_to_check("c")
    assert "somebody has put node c back into service in" in life.reason
    assert [node for node, _ in cluster.drained] == ["c"]
    assert [move.event for move in nodes.book.moves_of("c")][-2:] == ["resumed_elsewhere", RESUMED]
    assert NodeBook(world.memory.nodes.values()).lives() == nodes.book.lives()
    assert same_again(nodes.book.moves.values())["c"] == life


async def test_what_fails_its_check_after_that_is_drained_again() -> None:
    """New evidence is a new reason."""
    world, cluster, actuating = await _resumed_elsewhere(by_hand=False)
    nodes = world.loop.nodes
    nodes.begin_check("c", "resumed there", "job")
    nodes.end_check("c", NodeCheck("bad", "GPU 3 is slow", 12.0))
    await actuating.poll()

    assert nodes.book.life("c").state == NodeState.QUARANTINED
    assert [node for node, _ in cluster.drained] == ["c", "c"]


async def test_what_a_person_has_out_here_stays_out_and_both_are_told() -> None:
    """Which of the two is right nobody here knows: it is shown, and drained again when a person puts it out again."""
    world, cluster, actuating = await _resumed_elsewhere(by_hand=True)
    nodes = world.loop.nodes
    life, drained = nodes.book.life("c"), list(cluster.drained)
    shown = lines_of(nodes.view())
    nodes.quarantine("c", "ops", "it is bad indeed", 0.0)
    for _ in range(2):
        await actuating.poll()
    again = nodes.book.life("c")

    assert life.state == NodeState.QUARANTINED
    assert life.engine is not None
    assert life.engine.state == "resumed by others"
    assert any("somebody has put node c back into service" in line and "ops has it out here" in line for line in shown)
    assert [node for node, _ in drained] == ["c"]
    assert [node for node, _ in cluster.drained] == ["c", "c"]
    assert again.engine is not None
    assert again.engine.state == "drained"


async def test_a_release_of_what_somebody_resumed_there_leaves_nothing() -> None:
    """The engine has it in service already."""
    world, cluster, actuating = await _resumed_elsewhere(by_hand=True)
    world.loop.nodes.release("c", "ops", "it is good")
    await actuating.poll()

    assert world.loop.nodes.book.life("c").engine is None
    assert cluster.resumed == []


async def test_without_rights_the_job_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """One sentence in log and journal, however often it is tried."""
    world, cluster, actuating = await _two_nodes()
    cluster.wrong = RightsError("scontrol: Invalid user id; it takes Slurm's level Operator")
    _evict(world, "b")

    await actuating.poll()
    await actuating.poll()

    assert _kinds(world) == ["node_not_drained"]
    assert sum("is not drained" in one.message for one in caplog.records if one.levelname == "WARNING") == 1
    assert sum("can't be read" in one.message for one in caplog.records) == 1
    assert world.state in {"catching_up", "running"}


async def test_what_the_engine_has_out_is_not_welcome() -> None:
    """As long as it says so; the journal tells both changes, once each."""
    world, cluster, actuating = await _two_nodes()
    job = world.loop.jobs["job"]
    await actuating.poll()
    before = unwelcome(world.loop.transitions, job, ["a", "b"])

    cluster.nodes["b"] = EngineNode("b", "draining", is_usable=False, reason="fan", by="root")
    for _ in range(2):
        world.now_s += 61.0
        await actuating.poll()
    meanwhile = unwelcome(world.loop.transitions, job, ["a", "b.example"])
    cluster.nodes["b"] = EngineNode("b", "mixed", is_usable=True)
    world.now_s += 61.0
    await actuating.poll()

    assert before == []
    assert meanwhile == ["b.example"]
    assert unwelcome(world.loop.transitions, job, ["a", "b"]) == []
    assert _kinds(world) == ["node_withheld", "node_usable"]
    assert "node b is draining by root (fan)" in next(e.text for e in world.memory.events if e.kind == "node_withheld")


async def test_a_spare_that_is_out_is_no_spare() -> None:
    """It waits, and no place is promised to it."""
    world = World(min_nodes=1, max_nodes=1)
    await world.up("a")
    world.ask(world.new_join("b"))
    await world.settle()
    job = world.loop.jobs["job"]
    was = spares(world.loop.transitions, job)

    world.loop.registry.withheld = {"b": "node b is drained"}

    assert was == ["b"]
    assert spares(world.loop.transitions, job) == []


async def test_what_is_out_for_all_jobs_is_drained_and_resumed_when_a_person_takes_it_back() -> None:
    """Once each time, however often it is looked; what a job has evicted is not resumed by that."""
    world, cluster, actuating = await _two_nodes()
    _evict(world, "a")
    world.loop.nodes.quarantine("b", "ops", "fan 3", 0.0)
    for _ in range(2):
        await actuating.poll()
    drained = list(cluster.drained)

    world.loop.nodes.release("b", "ops", "fan replaced")
    for _ in range(2):
        await actuating.poll()
    resumed = list(cluster.resumed)
    world.loop.nodes.quarantine("b", "ops", "again", 0.0)
    await actuating.poll()

    assert drained == [("a", "job: killed twice"), ("b", "draining by ops: fan 3")]
    assert resumed == ["b"]
    assert cluster.drained[2:] == [("b", "draining by ops: again")]


async def test_time_alone_puts_no_node_back_into_service() -> None:
    """A quarantine that is over leaves the node drained; a check that finds nothing resumes it."""
    world, cluster, actuating = await _two_nodes()
    nodes = world.loop.nodes
    nodes.quarantine("c", "ops", "fan 3", 60.0)
    await actuating.poll()
    world.now_s += 61.0
    nodes.poll()
    state = nodes.book.life("c").state
    await actuating.poll()
    before = list(cluster.resumed)

    nodes.begin_check("c", "served", "job")
    nodes.end_check("c", NodeCheck("good", "", 12.0))
    await actuating.poll()

    assert state == NodeState.SUSPECT
    assert before == []
    assert cluster.resumed == ["c"]


async def test_a_controller_that_is_started_again_resumes_what_the_one_before_has_drained() -> None:
    """And drains it no second time."""
    world, cluster, actuating = await _two_nodes()
    world.loop.nodes.quarantine("b", "ops", "fan 3", 0.0)
    await actuating.poll()

    world.restart_controller()
    again = Actuating(world.loop, cluster, 60.0)
    again.begin()
    await again.poll()
    world.loop.nodes.undo("b", "ops", "the wrong one")
    await again.poll()

    assert [node for node, _ in cluster.drained] == ["b"]
    assert cluster.resumed == ["b"]
    assert world.loop.nodes.book.life("b").engine is None


@pytest.mark.parametrize("is_out", [True, False])
async def test_what_a_controller_that_was_killed_had_not_done_is_done_by_the_next(*, is_out: bool) -> None:
    """A node that was put out a moment before is drained, one that was taken back a moment before is resumed."""
    world, cluster, actuating = await _two_nodes()
    world.loop.nodes.quarantine("b", "ops", "fan 3", 0.0)
    if not is_out:
        await actuating.poll()
        world.loop.nodes.release("b", "ops", "fan replaced")

    world.restart_controller()
    again = Actuating(world.loop, cluster, 60.0)
    again.begin()
    for _ in range(2):
        await again.poll()

    assert [node for node, _ in cluster.drained] == ["b"]
    assert cluster.resumed == ([] if is_out else ["b"])


async def test_what_failed_is_tried_again_ever_more_rarely_and_told_once() -> None:
    """Until it is done; the history has the engine's sentence, `nodes list` and the page show how it stands."""
    world, cluster, actuating = await _two_nodes()
    cluster.wrong = EngineError("slurmctld does not answer")
    world.loop.nodes.quarantine("b", "ops", "fan 3", 0.0)
    calls = []
    for _ in range(8):
        await actuating.poll()
        calls.append(len(cluster.asked))
        world.now_s += 61.0
    failed = world.loop.nodes.book.life("b").engine
    (shown,) = [line for line in node_lines(world.loop.nodes.book, world.loop.jobs["job"]) if line.node == "b"]
    cluster.wrong = None
    world.now_s += 3600.0
    await actuating.poll()

    assert calls == [1, 2, 2, 3, 3, 3, 3, 4]
    assert failed is not None
    assert (failed.state, failed.text) == ("not drained", "node b is not drained in Slurm: slurmctld does not answer")
    assert "slurmctld does not answer (the engine may put other jobs there)" in shown.engine
    events = [move.event for move in world.loop.nodes.book.moves_of("b")]
    assert events == ["drained_by_hand", NOT_DRAINED, DRAINED]


async def test_a_node_that_takes_part_and_is_still_drained_is_seen_and_a_person_ends_that() -> None:
    """One that a job evicted, or whose quarantine is over: shown although it is healthy, until it is released."""
    world, cluster, actuating = await _two_nodes()
    _evict(world, "b")
    await actuating.poll()
    nodes = world.loop.nodes
    listed = lines_of(nodes.view())
    with pytest.raises(RefusedError, match="there is nothing to release it from"):
        nodes.release("a", "ops", "")

    nodes.release("b", "ops", "it is good")
    await actuating.poll()

    assert listed[0] == "b  healthy  (takes part)"
    assert "node b is drained (no other job is put there)" in listed[1]
    assert listed[2].strip() == "`megascale-ops nodes release b` takes that back"
    assert cluster.resumed == ["b"]
    assert nodes.view().nodes == ()


async def test_what_somebody_else_has_out_is_left_to_them_and_what_they_resumed_is_seen() -> None:
    """No word of ours is left on either."""
    world, cluster, actuating = await _two_nodes()
    world.loop.nodes.quarantine("b", "ops", "fan 3", 0.0)
    await actuating.poll()
    world.loop.nodes.release("b", "ops", "fan replaced")
    cluster.wrong = ForeignError("node b is drained by root (fan) and stays so")
    await actuating.poll()
    theirs = world.loop.nodes.book.life("b").engine
    cluster.wrong = None
    _evict(world, "a")
    await actuating.poll()
    ours = world.loop.nodes.book.life("a").engine
    cluster.nodes["a"] = EngineNode("a", "mixed", is_usable=True)
    world.now_s += 61.0
    await actuating.poll()

    assert theirs is None
    assert ours is not None
    assert world.loop.nodes.book.life("a").engine is None
    assert "by somebody else" in world.loop.nodes.book.moves_of("a")[-1].reason


async def test_undo_takes_back_a_persons_move_and_not_the_engines() -> None:
    """The node stands where it stood, the engine follows, and the book says the same when it is read again."""
    world, cluster, actuating = await _two_nodes()
    nodes = world.loop.nodes
    nodes.quarantine("b", "ops", "fan 3", 0.0)
    await actuating.poll()

    nodes.undo("b", "ops", "")
    still = nodes.book.life("b").engine
    await actuating.poll()

    assert still is not None
    assert cluster.resumed == ["b"]
    assert nodes.book.life("b") == NodeLife("b")
    assert same_again(nodes.book.moves.values())["b"] == NodeLife("b")
    assert NodeBook(world.memory.nodes.values()).lives() == nodes.book.lives()


async def test_without_an_engine_that_is_said() -> None:
    """Only rounds of this controller leave the node out; with one, nothing of that is said."""
    world, cluster, _ = await _two_nodes()
    world.loop.nodes.quarantine("b", "ops", "fan 3", 0.0)
    alone = lines_of(world.loop.nodes.view())
    Actuating(world.loop, cluster, 60.0).begin()

    assert NO_ENGINE in alone
    assert NO_ENGINE not in lines_of(world.loop.nodes.view())


async def test_a_node_that_can_not_be_drained_is_not_resumed(caplog: pytest.LogCaptureFixture) -> None:
    """One sentence in the log; somebody else may have taken it out for reasons of theirs."""
    world, cluster, actuating = await _two_nodes()
    cluster.wrong = RightsError("scontrol: Invalid user id; it takes Slurm's level Operator")
    world.loop.nodes.quarantine("b", "ops", "fan 3", 0.0)
    for _ in range(2):
        await actuating.poll()
    cluster.wrong = None

    world.loop.nodes.release("b", "ops", "fan replaced")
    await actuating.poll()

    assert sum("is not drained" in one.message for one in caplog.records) == 1
    assert cluster.resumed == []
    assert world.loop.nodes.book.life("b").engine is None
