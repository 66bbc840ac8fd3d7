# SPDX-License-Identifier: Apache-2.0
"""What the agent costs in two versions, measured in turn: on a busy machine two runs an hour apart say nothing.

Each version comes from a folder of its own (a worktree) and has a node of its own, with 8 ranks that train as in
``agent.py``. Both agents are started, then one works while the other is stopped, in turn. CPU time is what the kernel
counts of each thread in nanoseconds (/proc/PID/task/*/schedstat): ticks of 10 ms are a thirtieth of what is measured.

    git worktree add --detach ../before HEAD~3
    taskset -c 0 python benchmarks/agent_in_turn.py ../before . [--seconds 30] [--pairs 3] [--core 1]
"""

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.agent import SETTLE_S, train
from tests.fakes.controller import FakeController
from tests.fakes.hardware import FakeMachine
from tests.fakes.node import FakeNode

# Changes during the stop are sent within a second of resuming.
_CATCH_UP_S = 3.0


class Version:
    """An agent as it is in one folder, with a node that trains."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder = folder.resolve()
        self.shares: list[float] = []
        self.controller = FakeController()
        self.node = FakeNode(scratch / "node")
        self.node.start_round(8)
        self._machine = FakeMachine(scratch / "machine", adapters=8)

    async def start(self, core: int) -> None:
        """Start controller, ranks and agent."""
        await self.controller.start()
        self.training = asyncio.create_task(train(self.node))
        self._start_agent()
        os.sched_setaffinity(self.agent.pid, {core})

    def _start_agent(self) -> None:
        environment = {**os.environ, **self._machine.environment()}
        environment["PYTHONPATH"] = f"{self.folder}:{self.folder}/agents:{environment['PYTHONPATH']}"
        self.agent = subprocess.Popen(
            [
                sys.executable, "-m", "megascale_ops.cli.main", "agent",
                "--controller", self.controller.url, "--node", self.node.node, "--box-root", str(self.node.root),
                "--sys-root", str(self._machine.sys), "--kernel-log", str(self._machine.kernel_log),
            ],
            cwd=self.folder, env=environment, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    @contextmanager
    def works(self) -> Iterator[None]:
        """Let the agent work for a while."""
        os.kill(self.agent.pid, signal.SIGCONT)
        yield
        os.kill(self.agent.pid, signal.SIGSTOP)

    def ran_s(self) -> float:
        """Return the CPU time of all threads that live; the agent's live as long as it does."""
        tasks = Path(f"/proc/{self.agent.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9

    async def measure(self, seconds: float) -> str:
        """Let it work; return a line that says what it took."""
        with self.works():
            await asyncio.sleep(_CATCH_UP_S)
            ran_s, heard, began_s = self.ran_s(), len(self.controller.heartbeats), time.perf_counter()
            await asyncio.sleep(seconds)
            passed_s = time.perf_counter() - began_s
            share = (self.ran_s() - ran_s) / passed_s
            rate = (len(self.controller.heartbeats) - heard) / passed_s
        self.shares.append(share)
        return f"{self.folder.name:20} {share:.3%} of a core, {rate:.2f} heartbeats a second"

    async def end(self) -> None:
        """End everything that was started."""
        os.kill(self.agent.pid, signal.SIGCONT)
        self.agent.terminate()
        await asyncio.to_thread(self.agent.wait)
        self.training.cancel()
        self.node.kill_all()
        await self.controller.stop()


async def measure(options: argparse.Namespace) -> None:
    """Measure in turn and print what each took."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        versions = [Version(folder, Path(scratch) / str(at)) for at, folder in enumerate(options.folders)]
        for version in versions:
            await version.start(options.core)
        await asyncio.sleep(SETTLE_S)
        for version in versions:
            os.kill(version.agent.pid, signal.SIGSTOP)
        for _ in range(options.pairs):
            for version in versions:
                print(await version.measure(options.seconds), flush=True)
        for version in versions:
            await version.end()
    for version in versions:
        print(f"{version.folder.name:20} {statistics.mean(version.shares):.3%} in the mean")


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folders", type=Path, nargs=2, help="two check-outs")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to measure each time")
    parser.add_argument("--pairs", type=int, default=3, help="how often each is measured")
    parser.add_argument("--core", type=int, default=1, help="the processor on which the agents run")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
