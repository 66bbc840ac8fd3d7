# SPDX-License-Identifier: Apache-2.0
"""A real agent on a node with real processes, talking to a controller that only listens."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from megascale_agents.orders.preserve import Index

from megascale_ops.schema.messages import Heartbeat, Order
from megascale_ops.schema.progress import RankReport
from tests.fakes.certificates import make_certificate, serving_with
from tests.fakes.controller import FakeController
from tests.fakes.node import FakeNode
from tests.processes.launch import PATIENCE_S
from tests.processes.warmed import env_of_programs, start

pytestmark = pytest.mark.processes

# Regular heartbeats as far apart as the agent allows: what comes within 20 s was most likely sent at once.
SELDOM = ("--heartbeat-interval", "60")
AT_ONCE_S = 20.0
_PROBE = """
import sys
from megascale_agents.config import AgentConfig
from megascale_agents.daemon import run_agent
code = run_agent(AgentConfig(controller=sys.argv[1], node="node-a", box_root=sys.argv[2]))
print("heavy:", sorted({"torch", "numpy", "triton"} & set(sys.modules)))
raise SystemExit(code)
"""


class Agents:
    """Starts agents for a node and ends them."""

    def __init__(self, folder: Path, controller: FakeController, node: FakeNode) -> None:
        self.folder = folder
        self.controller = controller
        self.node = node
        self.started: list[subprocess.Popen[bytes]] = []
        self.log = folder / "agent.log"

    def start(self, *options: str, is_cold: bool = False) -> subprocess.Popen[bytes]:
        """Start one by the command line; a cold one has loaded what it needs itself, and nothing else."""
        where = ("--controller", self.controller.url, "--node", self.node.node, "--box-root", str(self.node.root))
        with self.log.open("ab") as out:
            self.started.append(start(("agent", *where, *options), env_of_programs(), out, is_cold=is_cold))
        return self.started[-1]

    def spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a Python program; its output goes to the log."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("MEGASCALE_")}
        with self.log.open("ab") as out:
            started = subprocess.Popen([sys.executable, *arguments], stdout=out, stderr=out, env=env)
        self.started.append(started)
        return started

    async def heard(self) -> Heartbeat:
        """Wait for the first heartbeat."""
        return (await self.controller.until(lambda: self.controller.heartbeats, "a heartbeat"))[0]

    async def state_of(self, rank: int, state: str, deadline_s: float = AT_ONCE_S) -> RankReport:
        """Wait until a rank's process is said to be in some state."""

        def look() -> RankReport | None:
            report = self.controller.last_report(rank)
            return report if report is not None and report.process.state == state else None

        return await self.controller.until(look, f"rank {rank} in state {state!r}", deadline_s)

    async def ended(self, started: subprocess.Popen[bytes], deadline_s: float = PATIENCE_S) -> int:
        """Wait until a program has ended; its status."""
        return await asyncio.to_thread(started.wait, deadline_s)

    def close(self) -> None:
        """Leave nothing running."""
        for started in self.started:
            if started.poll() is None:
                started.kill()
            started.wait()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    """A node with two ranks."""
    made = FakeNode(tmp_path)
    made.start_round(2)
    yield made
    made.kill_all()


@pytest.fixture
async def controller() -> AsyncIterator[FakeController]:
    """A controller that listens."""
    made = FakeController()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def agents(tmp_path: Path, controller: FakeController, node: FakeNode) -> AsyncIterator[Agents]:
    """Agents for that node."""
    made = Agents(tmp_path, controller, node)
    yield made
    made.close()


async def test_a_frozen_rank_is_told_at_once(agents: Agents, node: FakeNode) -> None:
    """State T goes up without waiting for the second to pass, and so does its end."""
    agents.start(*SELDOM)
    await agents.heard()

    os.kill(node.children[1].pid, signal.SIGSTOP)
    stopped = await agents.state_of(1, "T")
    os.kill(node.children[1].pid, signal.SIGCONT)
    resumed = await agents.state_of(1, "S")

    assert stopped.process.stopped_since_mono_s > 0
    assert resumed.process.stopped_since_mono_s == 0


async def test_a_killed_rank_is_told_at_once(agents: Agents, node: FakeNode) -> None:
    """Also what its black box said last."""
    node.step(0, 17)
    agents.start(*SELDOM)
    await agents.heard()

    os.killpg(node.children[0].pid, signal.SIGKILL)

    report = await agents.state_of(0, "")
    assert report.progress is not None
    assert report.progress.step == 17


async def test_last_words_are_told(agents: Agents, controller: FakeController, node: FakeNode) -> None:
    """A line of stderr that names a fault."""
    agents.start()
    await agents.heard()

    with node.stderr(1).open("a") as stderr:
        stderr.write("RuntimeError: CUDA error: an illegal memory access was encountered\n")

    words = await controller.until(lambda: (report := controller.last_report(1)) and report.last_words, "last words")
    assert (words[0].pattern, words[0].fault) == ("cuda_error", "cuda_error")


async def looked(agent: "subprocess.Popen[bytes]") -> None:
    """Wait until an agent that nobody hears has looked at its ranks, which it does five times a second or more.

    What is seen of that is that it sleeps, and wakes up: a dozen times also beside what else it does.
    """
    path = Path(f"/proc/{agent.pid}/status")

    def slept() -> int:
        return int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", path.read_text(), re.MULTILINE)[0])

    before, end_s = slept(), time.monotonic() + PATIENCE_S
    await asyncio.sleep(0.6)
    while slept() < before + 12:
        assert time.monotonic() < end_s, "the agent does not look"
        await asyncio.sleep(0.1)


async def test_nothing_is_lost_while_the_controller_is_away(
    agents: Agents, controller: FakeController, node: FakeNode
) -> None:
    """A freeze that came and went, and a death, are both told afterwards; the numbers have no gap."""
    agent = agents.start()
    await agents.heard()

    await controller.stop()
    os.kill(node.children[0].pid, signal.SIGSTOP)
    await looked(agent)
    os.kill(node.children[0].pid, signal.SIGCONT)
    os.killpg(node.children[1].pid, signal.SIGKILL)
    await looked(agent)
    await controller.start()

    await agents.state_of(1, "")
    states = [r.process.state for h in controller.heartbeats for j in h.jobs for r in j.ranks if r.rank == 0]
    assert "T" in states
    seqs = [heartbeat.seq for heartbeat in controller.heartbeats]
    assert seqs == list(range(1, len(seqs) + 1))
    assert max(heartbeat.spooled for heartbeat in controller.heartbeats) > 0


async def test_an_agent_waits_for_a_controller_that_comes_later(agents: Agents, controller: FakeController) -> None:
    """At start-up there is no listener: one line in the log, and the first heartbeat once there is."""
    await controller.stop()
    started = agents.start()
    await controller.until(lambda: "heartbeats are kept" in agents.log.read_text(), "the line in the log")

    await controller.start()

    assert (await agents.heard()).full
    assert started.poll() is None
    assert agents.log.read_text().count("heartbeats are kept") == 1


async def test_a_new_round_is_told_at_once_and_in_full(
    agents: Agents, controller: FakeController, node: FakeNode
) -> None:
    """The controller waits for all ranks of the round it has just formed."""
    agents.start(*SELDOM)
    await agents.heard()

    node.start_round(2)

    def all_up() -> bool:
        full = [beat for beat in controller.heartbeats if beat.full]
        return any([(job.round, len(job.ranks)) for job in beat.jobs] == [(2, 2)] for beat in full)

    assert await controller.until(all_up, "round 2", AT_ONCE_S)


async def test_preserve_keeps_what_a_restart_sweeps_away(
    agents: Agents, controller: FakeController, node: FakeNode
) -> None:
    """Boxes, stderr and an index lie in the run folder; the controller hears where, and that the order is done."""
    node.step(0, 33)
    node.stderr(0).write_text("all is well\nSegmentation fault\n")
    agents.start()
    await agents.heard()
    node.start_round(2)
    await controller.until(lambda: controller.heartbeats[-1].jobs and controller.heartbeats[-1].jobs[0].round == 2, "2")

    controller.orders.append(
        Order(id="o-1", job="job", node="node-a", kind="preserve", round=1, incident="job-1", reason="test")
    )

    await controller.until(lambda: any("o-1" in h.done_orders for h in controller.heartbeats), "the order done")
    folder = node.run_dir / "incidents" / "job-1" / "node-a"
    index = msgspec.json.decode((folder / "evidence.json").read_bytes(), type=Index)
    assert index.ranks[0].progress is not None
    assert index.ranks[0].progress.step == 33
    assert (folder / "rank-0.stderr.txt").read_text() == "all is well\nSegmentation fault\n"
    assert {item.rank for item in controller.evidence[0].items} == {0, 1}


async def test_kill_ends_a_frozen_rank(agents: Agents, controller: FakeController, node: FakeNode) -> None:
    """What it takes before a restart: SIGTERM would stay pending."""
    agents.start()
    await agents.heard()
    os.kill(node.children[0].pid, signal.SIGSTOP)
    await agents.state_of(0, "T")

    controller.orders.append(
        Order(id="o-1", job="job", node="node-a", kind="kill", round=1, ranks=(0,), incident="job-1")
    )

    assert await agents.ended(node.children[0]) == -signal.SIGKILL
    await agents.state_of(0, "")
    assert node.children[1].poll() is None


async def test_a_second_agent_of_a_node_is_refused(agents: Agents) -> None:
    """One sentence that names the first, and status 1; the first goes on."""
    first = agents.start()
    await agents.heard()

    second = agents.start()

    assert await agents.ended(second) == 1
    assert f"node node-a has an agent already: process {first.pid}" in agents.log.read_text()
    assert "Traceback" not in agents.log.read_text()
    assert first.poll() is None


async def test_the_lock_of_a_killed_agent_is_free(agents: Agents, controller: FakeController) -> None:
    """The kernel gives it back; no program has to clean up."""
    first = agents.start()
    await agents.heard()
    first.kill()
    await agents.ended(first)
    before = controller.heartbeats[-1].agent_id

    agents.start()

    await controller.until(lambda: controller.heartbeats[-1].agent_id != before, "the second agent")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_ends_when_told_to(agents: Agents, number: signal.Signals) -> None:
    """With status 0, without a traceback, and it says so."""
    started = agents.start()
    await agents.heard()

    started.send_signal(number)

    assert await agents.ended(started) == 0
    assert "Traceback" not in agents.log.read_text()
    assert "ends" in agents.log.read_text()


async def test_it_ends_in_time_while_the_controller_is_away(agents: Agents, controller: FakeController) -> None:
    """A last heartbeat without a receiver is not waited for."""
    started = agents.start()
    await agents.heard()
    await controller.stop()
    await asyncio.sleep(0.3)

    started.terminate()

    assert await agents.ended(started) == 0


async def test_it_ends_with_its_parent(agents: Agents) -> None:
    """An embedded agent must not outlive its run, even when that is killed."""
    parent = agents.spawn("-c", "import time; time.sleep(600)")
    started = agents.start("--exit-with-parent", str(parent.pid))
    await agents.heard()

    parent.kill()

    assert await agents.ended(started) == 0


async def test_nothing_heavy_is_loaded(agents: Agents) -> None:
    """Torch alone would take three times the agent's memory."""
    started = agents.spawn("-c", _PROBE, agents.controller.url, str(agents.node.root))
    await agents.heard()

    started.terminate()

    assert await agents.ended(started) == 0
    assert "heavy: []" in agents.log.read_text()


async def test_metrics_can_be_scraped(agents: Agents) -> None:
    """Under the address that the log names, by an agent that has not loaded aiohttp: 13 MB less."""
    started = agents.start("--metrics-listen", "127.0.0.1:0", is_cold=True)
    await agents.heard()
    line = next(line for line in agents.log.read_text().splitlines() if "metrics at " in line)
    url = line.split("metrics at ")[1].split()[0]

    async with aiohttp.ClientSession() as session, session.get(url) as page:
        text = await page.text()

    assert 'megascale_rank_round{job="job",node="node-a"} 1.0' in text
    loaded = Path(f"/proc/{started.pid}/maps").read_text()  # noqa: ASYNC240  of the kernel
    assert "msgspec" in loaded
    assert "aiohttp" not in loaded


async def test_a_controller_behind_tls_is_told_as_well(
    tmp_path: Path, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TLS, and without aiohttp as all others."""
    certificate = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    controller = FakeController(serving_with(certificate))
    await controller.start()
    agents = Agents(tmp_path, controller, node)
    try:
        started = agents.start("--metrics-listen", "", is_cold=True)

        await agents.heard()

        loaded = Path(f"/proc/{started.pid}/maps").read_text()  # noqa: ASYNC240  of the kernel
        assert [name in loaded for name in ("libssl", "aiohttp")] == [True, False]
    finally:
        agents.close()
        await controller.stop()


async def test_a_folder_that_cannot_be_read_costs_only_that_job(
    agents: Agents, controller: FakeController, node: FakeNode
) -> None:
    """A broken neighbour is said in the log; this job is watched, this agent lives."""
    (node.root / "broken").mkdir()
    (node.root / "broken" / "node-a.round.json").write_text("{")
    (node.job_folder / "9.box").write_bytes(b"not a box")
    started = agents.start()

    first = await agents.heard()

    assert [job.job for job in first.jobs] == ["job"]
    assert "is no round file" in agents.log.read_text()
    assert started.poll() is None
    assert controller.last_report(9) is None


async def test_a_box_root_that_cannot_be_made_is_one_sentence(agents: Agents, tmp_path: Path) -> None:
    """Status 2: the user gave something that can't work."""
    (tmp_path / "file").write_text("")

    started = agents.start("--box-root", str(tmp_path / "file" / "boxes"))

    assert await agents.ended(started) == 2
    assert "box root" in agents.log.read_text()
    assert "Traceback" not in agents.log.read_text()
