# SPDX-License-Identifier: Apache-2.0
"""What a launch costs the controller against the number of nodes: from the first request to the first step's barrier.

A real controller in a process of its own, with its journal on disk, and nodes of eight ranks (``nodes.py``) that come
all at once. Per stage its CPU seconds (user and system, of all its threads) and what it sends:

- ``join``: every run looks whether the controller is there, joins, and gets its place once all are in;
- ``barrier``: every runner waits for orders, every agent tells that its ranks have started, then of their first step;
- ``restart``: a rank dies; every node is ordered to start again, joins, and comes as far as the barrier once more;
- ``end``: every runner leaves, waits for the others, and asks for what its last line tells.

``growth`` is the exponent of a stage's CPU time from one row to the next: 1 is linear, 2 squared. What the controller
has done before the first node came (0.5 s of imports) is not in it.

    python benchmarks/rendezvous/rendezvous.py > benchmarks/results/rendezvous.txt
"""

import argparse
import asyncio
import contextlib
import gc
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from nodes import Node

NODES = (96, 192, 384, 768, 1536)
STAGES = ("join", "barrier", "restart", "end")
GOAL_S = 10.0  # join and barrier together, with 1,536 nodes
SERVE = """
import sys
from pathlib import Path
from megascale_ops.controller.config import ControllerConfig
from megascale_ops.controller.main import serve
folder = Path(sys.argv[1])
serve(ControllerConfig(listen="127.0.0.1:0", store=f"sqlite:///{folder}/ops.db", port_file=folder / "port",
                       exit_with_parent=int(sys.argv[2])))
"""


class Cost(NamedTuple):
    """Of one stage: the controller's CPU seconds, seconds on the clock, requests, bytes that the controller sent."""

    cpu_s: float
    wall_s: float
    requests: int
    sent_bytes: int


@contextlib.contextmanager
def controller() -> Iterator[tuple[int, int]]:
    """Run a controller; yield its pid and port."""
    with tempfile.TemporaryDirectory(prefix="megascale-bench-") as folder:
        process = subprocess.Popen([sys.executable, "-c", SERVE, folder, str(os.getpid())], stderr=subprocess.DEVNULL)
        try:
            port_file = Path(folder) / "port"
            deadline_s = time.monotonic() + 60
            while not port_file.exists():
                assert process.poll() is None, "the controller ended"
                assert time.monotonic() < deadline_s, "the controller does not come up"
                time.sleep(0.02)
            yield process.pid, int(port_file.read_text(encoding="ascii"))
        finally:
            process.terminate()
            process.wait(timeout=60)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process until now."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def all_of(nodes: list[Node], what: Callable[[Node], Awaitable[None]]) -> None:
    """Let all nodes do one thing at the same time."""
    await asyncio.gather(*(what(node) for node in nodes))


async def launch(count: int, nproc: int) -> dict[str, Cost]:
    """Take one job of so many nodes from its launch to its end; return what each stage cost the controller."""
    found = {}
    with controller() as (pid, port):
        nodes = [Node(place, count, nproc, port) for place in range(count)]
        lines = [line for node in nodes for line in node.lines]

        def told() -> tuple[int, int]:
            return sum(one.requests for one in lines), sum(one.received_bytes for one in lines)

        async def stage(name: str, doing: Callable[[], Awaitable[None]]) -> None:
            began_s, began_wall_s, (asked, sent) = cpu_s(pid), time.perf_counter(), told()
            await doing()
            wall_s = time.perf_counter() - began_wall_s
            await asyncio.sleep(0.3)  # what it does after its last answer belongs to the stage
            requests, sent_bytes = told()
            found[name] = Cost(cpu_s(pid) - began_s, wall_s, requests - asked, sent_bytes - sent)

        async def join() -> None:
            await all_of(nodes, Node.greet)
            await all_of(nodes, Node.join)

        async def barrier() -> None:
            for node in nodes:
                node.poll()
            await all_of(nodes, lambda node: node.beat(-1))
            await all_of(nodes, lambda node: node.beat(0))

        async def restart() -> None:
            first, *others = nodes
            await asyncio.gather(first.fail(), *(node.obey() for node in others))
            await barrier()

        gc.disable()
        for name, doing in (("join", join), ("barrier", barrier), ("restart", restart)):
            await stage(name, doing)
        await stage("end", lambda: all_of(nodes, Node.end))
        gc.enable()
        for node in nodes:
            node.hang_up()
    return found


def growth(before: tuple[int, float], now: tuple[int, float]) -> float:
    """Return the exponent by which a cost has grown from one number of nodes to the next."""
    return math.log(max(now[1], 0.01) / max(before[1], 0.01)) / math.log(now[0] / before[0])


def main() -> int:
    """Measure, print the table, and say whether the goal is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    options = parser.parse_args()
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"$ python {' '.join(['benchmarks/rendezvous/rendezvous.py', *sys.argv[1:]])}")
    print("CPU seconds of the controller, growth from the row before, and MB that it sent")
    print(f"{'nodes':>6}{'ranks':>8}" + "".join(f"{name + ': CPU s, growth, MB, wall s':>36}" for name in STAGES))
    before: tuple[int, dict[str, Cost]] | None = None
    for count in options.nodes:
        found = asyncio.run(launch(count, options.ranks_per_node))
        cells = []
        for name in STAGES:
            one = found[name]
            grown = f"{growth((before[0], before[1][name].cpu_s), (count, one.cpu_s)):.2f}" if before else "-"
            cells.append(f"{one.cpu_s:.2f} {grown:>6} {one.sent_bytes / 1e6:8.1f} {one.wall_s:7.1f}")
        print(f"{count:>6,}{count * options.ranks_per_node:>8,}" + "".join(f"{cell:>36}" for cell in cells), flush=True)
        before = count, found
    assert before is not None
    took_s = before[1]["join"].cpu_s + before[1]["barrier"].cpu_s
    met = took_s <= GOAL_S
    told = f"{took_s:.1f} s of CPU (goal {GOAL_S:g} s: {'met' if met else 'NOT met'})"
    print(f"join to the first step's barrier with {before[0]:,} nodes: {told}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
