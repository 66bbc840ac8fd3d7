# SPDX-License-Identifier: Apache-2.0
"""What a scrape costs: the controller's page at 12,288 and 100,000 ranks, an agent's with 8 ranks and all hardware.

The controller is the real one behind HTTP, with a cluster that beats while it is scraped; a scrape is timed by another
process, as Prometheus would see it, and asks for OpenMetrics as Prometheus does. ``pause`` is the longest that the
controller's event loop did not come round while it answered, beside the longest in as much time without scrapes: so
long heartbeats may wait. The agent is a real one, on a node with 8 real processes and files that stand for 8 GPUs and 8
adapters.

    python benchmarks/scrape.py > benchmarks/results/scrape.txt
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fakes.cluster import Cluster
from tests.fakes.hardware import FakeMachine
from tests.fakes.node import FakeNode
from tests.fakes.served_controller import serve_controller

GOAL_CONTROLLER_S, GOAL_AGENT_S, GOAL_AGENT_BYTES = 1.5, 0.020, 64 * 1024
# Scrapes one connection again and again, and prints seconds and bytes of each.
SCRAPE = """
import http.client, sys, time
from urllib.parse import urlsplit
at = urlsplit(sys.argv[1])
for turn in range(int(sys.argv[2]) + 1):
    began = time.perf_counter()
    asked = http.client.HTTPConnection(at.hostname, at.port, timeout=60)
    asked.request("GET", "/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0,*/*;q=0.1"})
    page = asked.getresponse().read()
    if turn:  # the first one fills caches
        print(time.perf_counter() - began, len(page), sum(not line.startswith(b"#") for line in page.splitlines()))
    asked.close()
    time.sleep(float(sys.argv[3]))
"""


class Row(NamedTuple):
    """One line of the table."""

    what: str
    took_s: list[float]
    size: int
    series: int
    pause_s: float  # of the event loop, 0 where not measured
    quiet_s: float

    def text(self) -> str:
        """Return it as a line of the table."""
        pauses = f"{self.pause_s * 1e3:.0f} ms ({self.quiet_s * 1e3:.0f} ms)" if self.pause_s else ""
        return (
            f"| {self.what} | {statistics.median(self.took_s) * 1e3:.1f} ms | {max(self.took_s) * 1e3:.1f} ms "
            f"| {self.size / 1024:,.0f} KB | {self.series:,} | {pauses} |"
        )


class Pauses:
    """Comes round every millisecond and notes by how much it was late."""

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def run(self) -> None:
        """Note until cancelled."""
        while True:
            began_s = time.perf_counter()
            await asyncio.sleep(0.001)
            self.worst_s = max(self.worst_s, time.perf_counter() - began_s - 0.001)

    def take(self) -> float:
        """Return the worst since the last time."""
        worst_s, self.worst_s = self.worst_s, 0.0
        return worst_s


async def scrape(url: str, turns: int, pause_s: float) -> tuple[list[float], int, int]:
    """Return how long each scrape took, bytes and series of the last."""
    asking = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRAPE, url, str(turns), str(pause_s), stdout=subprocess.PIPE
    )
    out, _ = await asking.communicate()
    rows = [line.split() for line in out.decode().splitlines()]
    assert len(rows) == turns, out
    return [float(row[0]) for row in rows], int(rows[-1][1]), int(rows[-1][2])


@contextlib.asynccontextmanager
async def beating(cluster: Cluster, every_s: float) -> AsyncIterator[None]:
    """Let every node beat each so many seconds, evenly, until the block ends."""

    async def beat() -> None:
        while True:
            began_s = time.perf_counter()
            for node in cluster.turn():
                if node % 16 == 15:
                    left_s = began_s + every_s * node / cluster.nodes - time.perf_counter()
                    await asyncio.sleep(max(0.0, left_s))

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def controller(nodes: int, every_s: float, turns: int) -> Row:
    """Measure a controller with so many nodes of 8 ranks."""
    with tempfile.TemporaryDirectory() as folder:
        async with serve_controller(Path(folder)) as served:
            cluster = Cluster(served.loop, nodes)
            await cluster.form()
            for _ in range(3 if nodes < 4096 else 1):  # a beat of 12,500 nodes takes ten seconds here
                cluster.beat()
                await asyncio.sleep(0.2)
            cluster.judge()
            pauses = Pauses()
            noting = asyncio.create_task(pauses.run())
            async with beating(cluster, every_s):
                await asyncio.sleep(2.0)
                pauses.take()
                began_s = time.perf_counter()
                took_s, size, series = await scrape(f"{served.url}", turns, 0.5)
                pause_s, lasted_s = pauses.take(), time.perf_counter() - began_s
                await asyncio.sleep(lasted_s)
                quiet_s = pauses.take()
            noting.cancel()
            await asyncio.gather(noting, return_exceptions=True)
    return Row(f"controller, {nodes * 8:,} ranks", took_s, size, series, pause_s, quiet_s)


async def agent(turns: int, gpus: int) -> Row:
    """Measure an agent with 8 ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        node, machine = FakeNode(folder), FakeMachine(folder / "machine", gpus=gpus, adapters=gpus)
        async with serve_controller(folder) as served:
            node.start_round(8)
            try:
                started = subprocess.Popen(  # noqa: ASYNC220  it starts at once; nothing else waits for this loop
                    [
                        *(sys.executable, "-m", "megascale_ops.cli.main", "agent", "--controller", served.url),
                        *("--node", node.node, "--box-root", str(node.root), "--metrics-listen", "127.0.0.1:0"),
                        *machine.options(),
                    ],
                    env={**os.environ, **machine.environment()},
                    stderr=subprocess.DEVNULL,
                )
                try:
                    for step in range(10):
                        for rank in range(8):
                            node.step(rank, step)
                        await asyncio.sleep(0.5)
                    view = served.loop.registry.node(node.node)
                    assert view is not None, "the agent did not come up"
                    await asyncio.to_thread(urllib.request.urlopen, f"http://{view.metrics}/metrics", None, 10)
                    took_s, size, series = await scrape(f"http://{view.metrics}", turns, 0.2)
                finally:
                    started.terminate()
                    started.wait(10)
            finally:
                node.kill_all()
    return Row(f"agent, 8 ranks, {gpus} GPUs", took_s, size, series, 0.0, 0.0)


async def main() -> int:
    """Measure, print the table, and say whether the goals are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="without the 100,000 ranks")
    options = parser.parse_args()
    bare, full = await agent(options.turns, 0), await agent(options.turns, 8)
    rows = [bare, full, await controller(1536, 1.0, options.turns)]
    if not options.small:
        rows.append(await controller(12_500, 8.0, options.turns))
    print("python benchmarks/scrape.py\n")
    print("| page | median | slowest | size | series | longest pause of the loop (without scrapes) |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(row.text())
    met = (
        statistics.median(rows[2].took_s) <= GOAL_CONTROLLER_S
        and statistics.median(full.took_s) <= GOAL_AGENT_S
        and full.size <= GOAL_AGENT_BYTES
    )
    print(f"goals (controller 1,500 ms, agent 20 ms and 64 KB): {'met' if met else 'NOT met'}", file=sys.stderr)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
