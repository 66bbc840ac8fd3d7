# SPDX-License-Identifier: Apache-2.0
"""A real agent on a node whose GPUs, adapters and kernel log are files: what breaks is told, what hangs hangs alone."""

import asyncio
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from megascale_ops.schema.health import HardwareFinding
from tests.fakes.controller import FakeController
from tests.fakes.hardware import FakeMachine, uuid_of
from tests.fakes.node import FakeNode
from tests.processes.launch import PATIENCE_S
from tests.processes.warmed import env_of_programs, start

pytestmark = pytest.mark.processes


class Watched:
    """One agent, the machine it looks at, and what the controller has heard of it."""

    def __init__(self, folder: Path, controller: FakeController) -> None:
        self.controller = controller
        self.machine = FakeMachine(folder / "machine")
        self.node = FakeNode(folder)
        self.node.start_round(2)
        self.log = folder / "agent.log"
        self.agent: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Start the agent by the command line."""
        arguments = (
            "agent", "--controller", self.controller.url, "--node", "node-a", "--box-root", str(self.node.root),
            *self.machine.options(), *options,
        )  # fmt: skip
        with self.log.open("ab") as out:
            self.agent = start(arguments, env_of_programs() | self.machine.environment(), out)
        return self.agent

    def finding(self, name: str) -> HardwareFinding | None:
        """Return the newest finding of this name, None when the newest list has none."""
        told = [beat.findings for beat in self.controller.heartbeats if beat.findings is not None]
        return next((one for one in (told[-1] if told else ()) if one.name == name), None)

    async def page(self) -> str:
        """Return the agent's metrics."""
        line = next(line for line in self.log.read_text().splitlines() if "metrics at" in line)
        async with aiohttp.ClientSession() as session, session.get(line.split("metrics at ")[1].split()[0]) as page:
            return await page.text()

    async def until(self, name: str, deadline_s: float = PATIENCE_S) -> HardwareFinding:
        """Wait for a finding."""
        return await self.controller.until(lambda: self.finding(name), name, deadline_s)

    def close(self) -> None:
        """Leave nothing running."""
        if self.agent is not None and self.agent.poll() is None:
            self.agent.kill()
        if self.agent is not None:
            self.agent.wait()
        self.node.kill_all()


@pytest.fixture
async def controller() -> AsyncIterator[FakeController]:
    """A controller that listens."""
    made = FakeController()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
def watched(tmp_path: Path, controller: FakeController) -> Iterator[Watched]:
    """A node with two ranks, eight GPUs and two adapters."""
    made = Watched(tmp_path, controller)
    yield made
    made.close()


async def test_an_xid_is_told_at_once_and_not_again_by_the_next_agent(watched: Watched) -> None:
    """Though the next heartbeat is twenty seconds away; an agent that is started again counts from there."""
    first = watched.start("--heartbeat-interval", "20")
    await watched.controller.until(lambda: any(beat.gpus for beat in watched.controller.heartbeats) or None, "GPUs")
    watched.machine.xid(3, 79, "GPU has fallen off the bus.")
    told = await watched.until("xid_79", 18.0)
    first.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(first.wait, PATIENCE_S) == 0
    watched.controller.heartbeats.clear()
    watched.machine.xid(4, 95)
    watched.start()
    missed = await watched.until("xid_95")

    assert (told.gpu, told.severity, told.is_bad) == (uuid_of(3), "fail", True)
    assert missed.count == 1
    assert watched.finding("xid_79") is None


async def test_a_driver_that_hangs_holds_nobody_up(watched: Watched) -> None:
    """Heartbeats and scrapes go on, the check says unknown, and the agent still ends when it is told to."""
    watched.node.job_folder.mkdir(exist_ok=True)
    agent = watched.start("--metrics-listen", "127.0.0.1:0")
    await watched.controller.until(lambda: any(beat.gpus for beat in watched.controller.heartbeats) or None, "GPUs")
    watched.machine.driver(hang_s=600.0)
    await watched.until("no_answer_gpu")
    heard = len(watched.controller.heartbeats)
    await watched.controller.until(lambda: len(watched.controller.heartbeats) > heard + 2 or None, "heartbeats")
    text = await watched.page()
    agent.send_signal(signal.SIGTERM)
    status = await asyncio.to_thread(agent.wait, PATIENCE_S)

    assert status == 0
    shown = {
        (sample.name, sample.labels.get("check", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert shown["megascale_health_check_status", "gpu"] == 3
    assert shown["megascale_health_check_timeouts_total", "gpu"] == 1
    assert shown["megascale_health_check_status", "fabric"] == 0
    assert ("megascale_gpu_info", "") in shown
    assert ("megascale_gpu_power_watts", "") not in shown
    assert watched.log.read_text().count("has not answered") == 1
    if shutil.which("promtool"):
        checking = await asyncio.create_subprocess_exec(
            "promtool", "check", "metrics", stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        said = await asyncio.wait_for(checking.communicate(text.encode()), 30.0)
        assert (checking.returncode, said[1]) == (0, b"")
