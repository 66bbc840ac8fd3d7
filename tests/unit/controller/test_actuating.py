# SPDX-License-Identifier: Apache-2.0
"""What a verdict puts out is drained once, and what the engine has out is known; no answer of it harms a job."""

from collections.abc import Mapping

import pytest

from megascale_ops.controller.actuating import Actuating
from megascale_ops.controller.policy.decision import Eviction
from megascale_ops.controller.recovery.decide import spares, unwelcome
from megascale_ops.engines.actuator import EngineError, EngineNode, RightsError
from tests.fakes.controlled_job import World


class Cluster:
    """An engine's nodes a and b; what goes wrong is set."""

    def __init__(self) -> None:
        self.drained: list[tuple[str, str]] = []
        self.wrong: EngineError | None = None
        self.nodes = {name: EngineNode(name, "mixed", is_usable=True) for name in "ab"}

    def drain(self, node: str, reason: str) -> str:
        """Note it."""
        if self.wrong is not None:
            raise self.wrong
        self.drained.append((node, reason))
        return f"node {node} is drained"

    def resume(self, node: str) -> str:
        """Nothing here resumes."""
        raise AssertionError(node)

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
