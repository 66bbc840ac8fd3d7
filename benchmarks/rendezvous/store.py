# SPDX-License-Identifier: Apache-2.0
"""What a round's store is asked against the number of ranks: by torch's engine, and by a barrier of all ranks.

The store is a real TCPStore in a process of its own, as node rank 0 offers one for each round; nodes and ranks are
threads that open a connection each, and what they run is torch's own code: ``_assign_worker_ranks`` of its elastic
engine (one call a node), then ``_store_based_barrier`` (one a rank), which a script gets after ``init_process_group``
by TORCH_DIST_INIT_BARRIER=1. Requests are counted at the clients, CPU seconds are the server's, growth is the exponent
of these from row to row: 1 is linear, 2 squared.

The last lines are MegaScale's lesson (NSDI 2024, 3.5). With that variable each ``new_group`` has a barrier of *all*
ranks, whoever is in it, so a job asks for ranks times groups, and groups grow with ranks; with
``use_local_synchronization=True`` each rank waits for its own groups only. These requests are reckoned from those that
a barrier was counted to take, and their seconds from those that it took; nothing of that size was run.

    python benchmarks/rendezvous/store.py > benchmarks/results/rendezvous_store.txt
"""

import argparse
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

NODES = (96, 192, 384, 768, 1536)
TENSOR, PIPELINE = 8, 8  # sizes of the groups of the job in the last lines; data parallel groups are what is left
_PATIENCE = timedelta(seconds=300)
SERVE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class Cost(NamedTuple):
    """The server's CPU seconds, requests of all clients, seconds on the clock."""

    cpu_s: float
    requests: int
    wall_s: float


class Counted:
    """A connection to the store that counts what is asked through it."""

    def __init__(self, port: int) -> None:
        self._store = TCPStore("localhost", port, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
        self.requests = 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever torch's code asks for
        self.requests += 1
        return getattr(self._store, name)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process until now."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(pid: int, port: int, number: int, doing: Callable[[int, Counted], object]) -> Cost:
    """Return what one thing costs that so many do at once, each with a connection of its own that it opens first."""
    stores: list[Counted] = []

    def come(place: int) -> None:
        store = Counted(port)
        stores.append(store)
        doing(place, store)

    before, began_s = cpu_s(pid), time.perf_counter()
    threads = [threading.Thread(target=come, args=(place,), daemon=True) for place in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE.total_seconds())
    assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"
    assert len(stores) == number
    return Cost(cpu_s(pid) - before, sum(store.requests for store in stores), time.perf_counter() - began_s)


def round_of(nodes: int, nproc: int) -> tuple[Cost, Cost]:
    """Return what the engines of so many nodes cost the store of a round, and a barrier of their ranks."""
    server = subprocess.Popen([sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        spec = WorkerSpec(role="default", local_world_size=nproc, rdzv_handler=None, entrypoint="python")  # type: ignore[arg-type]  # the one call that is made looks at no handler

        def assign(node: int, store: Counted) -> None:
            workers = LocalElasticAgent._assign_worker_ranks(None, store, node, nodes, spec)  # type: ignore[arg-type]  # noqa: SLF001  torch's own, which is measured
            assert [one.global_rank for one in workers] == list(range(node * nproc, (node + 1) * nproc))

        def meet(rank: int, store: Counted) -> None:
            c10d._store_based_barrier(rank, store, "0", nodes * nproc, _PATIENCE)  # type: ignore[arg-type]  # noqa: SLF001  as above

        return measured(server.pid, port, nodes, assign), measured(server.pid, port, nodes * nproc, meet)
    finally:
        server.kill()
        server.wait(timeout=30)


def lesson(ranks: int, barrier: Cost) -> str:
    """Return what making all groups of a job would cost, from what one barrier of all its ranks did."""
    sizes = TENSOR, PIPELINE, ranks // (TENSOR * PIPELINE)
    groups = sum(ranks // size for size in sizes)
    each_s, each = barrier.cpu_s / barrier.requests, barrier.requests / ranks
    rows = []
    for words, waiters in (("of all ranks", groups * ranks), ("of the group's own ranks", len(sizes) * ranks)):
        requests = waiters * each
        rows.append(f"  a barrier {words}: {requests:,.0f} requests, {requests * each_s:,.1f} s of the store's CPU")
    shape = " x ".join(map(str, sizes))
    return "\n".join((f"{groups:,} groups of {ranks:,} ranks (tensor x pipeline x data: {shape}), reckoned:", *rows))


def main() -> None:
    """Measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    options = parser.parse_args()
    threading.stack_size(256 << 10)
    # Each client has its own address looked up, for its log: a name server that drops questions costs 5 s each time.
    os.environ |= {"RES_OPTIONS": "timeout:1 attempts:1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    print(f"$ python {' '.join(['benchmarks/rendezvous/store.py', *sys.argv[1:]])}")
    print("the store of one round: requests, CPU seconds of its process, growth from the row before, seconds")
    words = "requests, CPU s, growth, s"
    print(f"{'nodes':>6}{'ranks':>8}{f'engines: {words}':>40}{f'barrier: {words}':>42}")
    before: tuple[int, tuple[Cost, Cost]] | None = None
    for nodes in options.nodes:
        found = round_of(nodes, options.ranks_per_node)
        cells = []
        for place, one in enumerate(found):
            grown = "-"
            if before is not None:
                ratio = max(one.cpu_s, 0.01) / max(before[1][place].cpu_s, 0.01)
                grown = f"{math.log(ratio) / math.log(nodes / before[0]):.2f}"
            cells.append(f"{one.requests:,} {one.cpu_s:8.2f} {grown:>6} {one.wall_s:7.1f}")
        print(f"{nodes:>6,}{nodes * options.ranks_per_node:>8,}{cells[0]:>40}{cells[1]:>42}", flush=True)
        before = nodes, found
    assert before is not None
    print(lesson(before[0] * options.ranks_per_node, before[1][1]))


if __name__ == "__main__":
    main()
