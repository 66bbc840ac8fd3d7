# SPDX-License-Identifier: Apache-2.0
"""What a verdict puts out is drained once, and what the engine has out is known; no answer of it harms a job."""

from collections.abc import Mapping

import pytest

from megascale_ops.controller.actuating import Actuating
from megascale_ops.controller.nodes.life import NodeState
from megascale_ops.controller.policy.decision import Eviction
from megascale_ops.controller.recovery.decide import spares, unwelcome
from megascale_ops.engines.actuator import EngineError, EngineNode, RightsError
from megascale_ops.schema.health import NodeCheck
from tests.fakes.controlled_job import World


class Cluster:
    """An engine's nodes a and b; what goes wrong is set."""

    def __init__(self) -> None:
        self.drained: list[tuple[str, str]] = []
        self.resumed: list[str] = []
        self.wrong: EngineError | None = None
        self.nodes = {name: EngineNode(name, "mixed", is_usable=True) for name in "ab"}

    def drain(self, node: str, reason: str) -> str:
        """Note it."""
        if self.wrong is not None:
            raise self.wrong
        self.drained.append((node, reason))
        return f"node {node} is drained"

    def resume(self, node: str) -> str:
        """Note it."""
        if self.wrong is not None:
            raise self.wrong
        self.resumed.append(node)
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


def _evict(world: World, node: str) -> None:
    job, wall_s = world.loop.jobs["job"], world.loop.wall()
    job.change(evictions=(*job.record.evictions, Eviction(node, wall_s, wall_s + 60.0, "killed twice")))


def _kinds(world: World) -> list[str]:
    return [event.kind for event in world.memory.events if event.kind.startswith("node_")]


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
    assert _kinds(world) == ["node_drained", "node_drained"]


async def test_what_the_controller_before_has_told_is_not_told_again() -> None:
    """After a restart of it."""
    world, cluster, actuating = await _two_nodes()
    _evict(world, "b")

    actuating.begin()
    await actuating.poll()

    assert cluster.drained == []


async def test_without_rights_the_job_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """One sentence in log and journal, and no second attempt."""
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

    actuating.begin()
    await actuating.poll()
    world.loop.nodes.undo("b", "ops", "the wrong one")
    await actuating.poll()

    assert cluster.drained == []
    assert cluster.resumed == ["b"]


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
