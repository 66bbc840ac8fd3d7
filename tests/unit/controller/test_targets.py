# SPDX-License-Identifier: Apache-2.0
"""Whom Prometheus shall scrape: what agents say of themselves, and only what can be reached."""

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

import aiohttp
import pytest
from click.testing import CliRunner
from megascale_agents.config import reachable

from megascale_ops.cli import targets as verb
from megascale_ops.controller.cluster.registry import Registry
from megascale_ops.controller.metrics.service_discovery import KEPT_S, targets
from megascale_ops.link import BlockingLink, Link
from megascale_ops.schema.messages import Heartbeat, JobReport
from megascale_ops.schema.progress import RankReport
from megascale_ops.schema.targets import COMPONENT, JOBS, TargetGroup
from tests.fakes.served_controller import Served, serve_controller


def heartbeat(node: str, metrics: str, *jobs: str, seq: int = 1) -> Heartbeat:
    """Return a full heartbeat of an agent that serves metrics."""
    reports = tuple(JobReport(job, 1, ranks=(RankReport(0, 0, 1, 1),)) for job in jobs)
    now_s = time.monotonic()
    return Heartbeat(node, f"agent-{node}", seq, now_s, now_s, full=True, jobs=reports, metrics=metrics)


def known(*heartbeats: Heartbeat) -> Registry:
    """Return a registry that has heard these."""
    registry = Registry()
    for one in heartbeats:
        registry.fold(one, 100.0)
    return registry


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A controller without token."""
    async with serve_controller(tmp_path) as one:
        yield one


def test_each_agent_is_a_target_with_its_node_and_its_jobs() -> None:
    """The node stays with the series; jobs come and go, and may only be used to choose."""
    registry = known(heartbeat("b", "10.0.0.2:7071", "gpt", "bert"), heartbeat("a", "10.0.0.1:7071"))

    found = targets(registry, 101.0, is_near=False)

    assert found == [
        TargetGroup(("10.0.0.1:7071",), {"node": "a", COMPONENT: "agent"}),
        TargetGroup(("10.0.0.2:7071",), {"node": "b", COMPONENT: "agent", JOBS: ",bert,gpt,"}),
    ]


def test_loopback_is_a_target_only_for_its_own_machine() -> None:
    """Two nodes that tell the same loopback address are two machines."""
    registry = known(
        heartbeat("a", "127.0.0.1:7071"), heartbeat("b", "127.0.0.1:7071"), heartbeat("c", "127.0.0.1:40001")
    )

    assert targets(registry, 101.0, is_near=False) == []
    assert [group.labels["node"] for group in targets(registry, 101.0, is_near=True)] == ["c"]


def test_an_agent_that_is_gone_for_long_or_serves_nothing_is_no_target() -> None:
    """For ten minutes `up == 0` says that it is away."""
    registry = known(heartbeat("a", "10.0.0.1:7071"), heartbeat("b", ""))

    assert len(targets(registry, 100.0 + KEPT_S - 1, is_near=True)) == 1
    assert targets(registry, 100.0 + KEPT_S, is_near=True) == []


def test_a_node_is_reached_where_it_meets_its_controller() -> None:
    """Who listens everywhere names the address of the way to the controller; others name what they listen on."""
    assert reachable("http://10.1.2.3:7071/metrics", "http://10.0.0.9:7070") == "10.1.2.3:7071"
    assert reachable("http://[fd00::1]:7071/metrics", "http://10.0.0.9:7070") == "[fd00::1]:7071"
    assert reachable("http://0.0.0.0:7071/metrics", "http://127.0.0.1:7070") == "127.0.0.1:7071"
    assert reachable("http://0.0.0.0:7071/metrics", "http://no-such-host.invalid:7070").endswith(":7071")


async def test_prometheus_asks_the_controller(served: Served) -> None:
    """As HTTP discovery wants it: a list of targets and labels as JSON; an empty one before the first agent."""
    async with Link(served.url) as link, aiohttp.ClientSession() as session:
        before = await link.targets()
        await link.heartbeat(heartbeat("a", "127.0.0.1:7071", "gpt"))
        async with session.get(f"{served.url}/v1/sd/agents") as answer:
            found = await answer.json()

    assert before == ()
    assert answer.content_type == "application/json"
    assert found == [{"targets": ["127.0.0.1:7071"], "labels": {"node": "a", COMPONENT: "agent", JOBS: ",gpt,"}}]


class Answers(BlockingLink):
    """A controller that knows two agents."""

    def __init__(self, *_: object) -> None:
        """Make no connection."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind."""

    def targets(self) -> tuple[TargetGroup, ...]:
        """Return two agents."""
        return (TargetGroup(("a:1",), {"node": "a", JOBS: ",gpt,"}), TargetGroup(("b:1",), {"node": "b"}))


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb meets a controller that answers."""
    monkeypatch.setattr("megascale_ops.link.BlockingLink", Answers)


@pytest.mark.usefixtures("answering")
def test_the_file_is_changed_all_at_once(tmp_path: Path) -> None:
    """Agents and the controller; nothing is left beside it, and what was there before is gone."""
    out = tmp_path / "agents.json"
    out.write_text("old")

    done = CliRunner().invoke(verb.targets, ["--controller", "http://ops:7070", "--out", str(out)])

    assert done.exit_code == 0
    assert [group["targets"] for group in json.loads(out.read_text())] == [["a:1"], ["b:1"], ["ops:7070"]]
    assert [path.name for path in tmp_path.iterdir()] == ["agents.json"]
    assert "agents: 2, targets: 3" in done.stderr


@pytest.mark.usefixtures("answering")
def test_agents_are_chosen_by_job() -> None:
    """Of a job that does not run there are none, which is said; the output stays a list."""
    chosen = CliRunner().invoke(verb.targets, ["--controller", "http://ops:7070", "--job", "gpt", "--agents-only"])
    nobody = CliRunner().invoke(verb.targets, ["--controller", "http://ops:7070", "--job", "x", "--agents-only"])

    assert [group["targets"] for group in json.loads(chosen.stdout)] == [["a:1"]]
    assert json.loads(nobody.stdout) == []
    assert "no agent that runs job 'x'" in nobody.stderr


@pytest.mark.usefixtures("answering")
def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    """And no traceback."""
    done = CliRunner().invoke(
        verb.targets, ["--controller", "http://ops:7070", "--out", str(tmp_path / "no" / "such.json")]
    )

    assert "can't be written: No such file or directory" in str(done.exception)
