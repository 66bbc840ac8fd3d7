# SPDX-License-Identifier: Apache-2.0
"""What a real Prometheus makes of our pages: clean by its linter, found by discovery, within the budget of series."""

import asyncio
import contextlib
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO

import pytest
from aiohttp import web
from megascale_agents.collectors.table import declared

from megascale_ops.blackbox.records import CollectiveRecord
from megascale_ops.schema.metrics import METRICS, metrics_of
from tests.fakes.boards import FakeBoard
from tests.fakes.cluster import JOB, Cluster
from tests.fakes.hardware import FakeMachine
from tests.fakes.node import FakeNode
from tests.fakes.prometheus import RealPrometheus
from tests.fakes.scraped import samples
from tests.fakes.served_controller import Served, serve_controller
from tests.matrix import wide
from tests.processes.warmed import env_of_programs, start

pytestmark = pytest.mark.processes

NPROC = 8
ALL, FEW = 1_536, 192  # nodes of the job that the budget is for, and as many as show what each of them tells
# What the issue allows for one job of 12,288 ranks. Series of the nodes themselves (hardware, host, agent) are there
# without any job: they have a budget of their own, and can be scraped by themselves.
JOB_BUDGET = 200_000
NODE_BUDGET = 500

# Rows of the agent's table that this node cannot show, and why.
NOT_HERE = {
    "megascale_rank_process_info": "all processes are well",
    "megascale_agent_log_matches_total": "no rank has printed a known error",
    "megascale_agent_collector_errors_total": "no collector is sick",
    "megascale_agent_orders_total": "nothing was ordered",
    "megascale_nvswitch_sxid_events_total": "the driver has reported no SXid",
    "megascale_kernel_log_events_total": "the kernel has told of nothing else",
    "megascale_nvswitch_sxid_age_seconds": "likewise",
    "megascale_ib_counters_full": "no counter has reached its largest value",
    "megascale_ib_counters_refused": "the driver tells all of them",
    "megascale_checkpoint_stall_seconds": "no rank has saved a checkpoint of ours",
    "megascale_checkpoint_write_seconds": "likewise",
    "megascale_checkpoint_saves_in_flight": "likewise",
    "megascale_checkpoint_failed_saves_total": "likewise",
    "megascale_checkpoint_sealed_timestamp_seconds": "likewise",
    "megascale_checkpoint_restores_total": "no rank has restored one",
    "megascale_checkpoint_restore_seconds": "likewise",
    "megascale_checkpoint_restore_read_bytes": "likewise",
    "megascale_checkpoint_passed_over_total": "likewise",
    "megascale_checkpoint_failed_restores_total": "likewise",
}


# What a rank of a large job calls in each step, with bytes: five classes of operation and size.
CALLS = (
    ("all_reduce", 8),
    ("all_reduce", 1 << 19),
    ("all_reduce", 1 << 27),
    ("all_gather", 1 << 27),
    ("reduce_scatter", 1 << 27),
)


# What is there when hardware has been looked at once.
SHOWN = (b"gpu_sm_active_ratio{", b'check="fabric"')
# The driver's library in an agent, measured on the host of one H100; the stand-in takes nothing.
NVML_BYTES = 18.5e6


def _waiting(kernel: str, rank: int) -> FakeBoard:
    """Return a launch in which all thread blocks wait, for each of the seven others in turn."""
    board = FakeBoard(kernel, rank=rank, world_size=NPROC, ctas=14, tiles=56)
    for cta in range(14):
        board.tile(cta, cta)
        board.wait(cta, cta, peer=(rank + 1 + cta % 7) % NPROC, channel=0)
    return board


def fetched(url: str) -> bytes:
    """Return a page."""
    with urllib.request.urlopen(url, timeout=150) as answer:  # noqa: S310  our own address
        page: bytes = answer.read()
        return page


class Agent:
    """A real agent on a node of eight real processes, with files that stand for 8 GPUs and 8 adapters.

    The ranks have all that a rank of a large job on GPUs has: two overlapped kernels, GPU timers, the profiler plugin.
    """

    def __init__(self, folder: Path, controller: str, world_size: int) -> None:
        self.node = FakeNode(folder / "agent", job=JOB, node="node-real")
        self.machine = FakeMachine(folder / "machine", gpus=NPROC, adapters=NPROC)
        self.node.start_round(NPROC, world_size=world_size)
        for rank in range(NPROC):
            self.node.profile(rank, nccl_next=1000, own_ns=10_000_000, mask=66, share_ppm=900)
            self.node.gpu_step(rank, 0)
            for kernel in ("ag_gemm", "gemm_rs"):
                self.node.put_board(rank, _waiting(kernel, rank), kernel)
        self.log = folder / "agent.log"
        with self.log.open("wb") as log:
            self._started = self._start(controller, log)

    def _start(self, controller: str, log: IO[bytes]) -> "subprocess.Popen[bytes]":
        place = ("--node", self.node.node, "--box-root", str(self.node.root), "--metrics-listen", "127.0.0.1:0")
        arguments = ("agent", "--controller", controller, *place, *self.machine.options())
        # A program: its memory is judged.
        return start(arguments, {**env_of_programs(), **self.machine.environment()}, log, is_cold=True)

    async def look(self, served: Served) -> str:
        """Let ranks step until hardware has been looked at; return where the metrics are."""
        page = b""
        for step in range(600):
            for rank in range(NPROC):
                self.node.step(rank, step)
                self._call(rank, step)
            await asyncio.sleep(0.2)
            view = served.loop.registry.node(self.node.node)
            if view is None or not view.metrics:
                continue
            url = f"http://{view.metrics}/metrics"
            page = await asyncio.to_thread(fetched, url)
            # An Xid of an application: the GPU goes on. The log is read from when the agent began.
            if b"megascale_gpu_xid_events_total{" not in page:
                self.machine.xid(3, 13, "Graphics SM Warp Exception")
            elif all(name in page for name in SHOWN) and page.count(b"_bandwidth_bytes_per_second{") == len(CALLS):
                return url
        raise AssertionError(f"the agent has not shown its hardware in two minutes:\n{self.log.read_text()}\n{page!r}")

    def _call(self, rank: int, step: int) -> None:
        """Let a rank have called its collectives."""
        for place, (function, size) in enumerate(CALLS):
            now_ns = time.monotonic_ns() - 1_000_000
            seq = step * len(CALLS) + place
            self.node.boxes[rank].add_collective(
                CollectiveRecord("0", function, seq, size, now_ns, now_ns, now_ns + 500_000)
            )

    def close(self) -> None:
        """Leave nothing running."""
        self._started.terminate()
        self._started.wait(10)
        self.node.kill_all()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A real controller."""
    async with serve_controller(tmp_path) as one:
        yield one


@pytest.fixture
def agent(tmp_path: Path, served: Served, request: pytest.FixtureRequest) -> Iterator[Agent]:
    """A real agent that reports to it; of a job of eight ranks, or of as many as it is asked for."""
    made = Agent(tmp_path, served.url, getattr(request, "param", NPROC))
    yield made
    made.close()


def check(page: bytes) -> None:
    """Let Prometheus' own linter read a page."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on this machine: apt-get install prometheus")
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, timeout=150, check=False)
    assert (done.returncode, done.stderr.decode(), done.stdout.decode()) == (0, "", "")


async def test_an_agent_shows_all_of_its_table_and_is_clean(served: Served, agent: Agent) -> None:
    """Every row of the table, but for what this node cannot have; no name beside it; nothing that promtool dislikes."""
    page = await asyncio.to_thread(fetched, await agent.look(served))

    ours = [sample.name for sample in samples(page) if not sample.name.startswith("process_")]
    found = {name if name in METRICS else re.sub("_(bucket|sum|count)$", "", name) for name in ours}
    assert found == {metric.name for metric in (*metrics_of("agent"), *declared())} - NOT_HERE.keys()
    assert not NOT_HERE.keys() - METRICS.keys()
    check(page)
    # 64 KB: a scrape of an agent with 8 ranks. 90 MB: what it may take of a node, of which NVML itself takes 18.
    assert len(page) <= 64 * 1024
    (resident,) = [sample.value for sample in samples(page) if sample.name == "process_resident_memory_bytes"]
    assert 10e6 < resident <= 90e6 - NVML_BYTES


@contextlib.asynccontextmanager
async def pages(job_page: bytes, node_page: bytes, count: int) -> AsyncIterator[int]:
    """Serve the agents of all nodes: node n at the loopback address of its own that its heartbeats tell."""

    async def show(request: web.Request) -> web.Response:
        host = request.transport.get_extra_info("sockname")[0] if request.transport is not None else ""
        node = nodes[host]
        page = job_page if request.query.get("part") == "job" else node_page
        text = page.replace(b"node-real", Cluster.name(node).encode())
        for rank in range(NPROC):
            text = text.replace(b'rank="%d"' % rank, b'rank="@%d"' % (node * NPROC + rank))
        return web.Response(body=text.replace(b'"@', b'"'), content_type="text/plain")

    nodes = {Cluster.host(node): node for node in range(count)}
    app = web.Application()
    app.router.add_get("/metrics", show)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    assert runner.server is not None
    events = asyncio.get_running_loop()
    first = await events.create_server(runner.server, host=Cluster.host(0), port=0)
    port: int = first.sockets[0].getsockname()[1]
    others = await events.create_server(runner.server, host=list(nodes)[1:], port=port)
    try:
        yield port
    finally:
        for server in (first, others):
            server.close()
        await runner.cleanup()


SCRAPES = """
    - job_name: controller
      honor_labels: true
      static_configs: [{{targets: ["{controller}"]}}]
      scrape_interval: 5s
      scrape_timeout: 5s
    - job_name: agents
      honor_labels: true
      http_sd_configs: [{{url: "http://{controller}/v1/sd/agents", refresh_interval: 60s}}]
      params: {{part: [job]}}
"""


def counted(folder: Path, scrapes: str, nodes: int) -> tuple[float, float, float]:
    """Scrape everything once; return how many series there are, ranks among them, and series of the controller."""
    # 30 s: 1,536 pages are five seconds of a core, which others use too, and one round is enough.
    with RealPrometheus(folder, scrapes, scrape_interval="30s") as prom:
        prom.wait_for(f'count(up{{job="agents"}} == 1) == {nodes}')
        prom.wait_for("megascale_controller_series")
        # In one query: the controller is scraped again meanwhile, and may tell more by then.
        beside = prom.value('count({__name__!="", __name__!~"up|scrape_.+"}) - scalar(megascale_controller_series)')
        own = prom.value("megascale_controller_series")
        return beside + own, prom.value("count(megascale_rank_step)"), own  # "up" and the like are Prometheus' own


@pytest.mark.parametrize("agent", [ALL * NPROC], indirect=True)
@pytest.mark.parametrize("nodes", wide([FEW, ALL], keep=[FEW]))
async def test_a_job_of_12288_ranks_stays_within_its_budget_of_series(
    tmp_path: Path, served: Served, agent: Agent, nodes: int
) -> None:
    """1,536 agents, found by asking the controller, scraped by a real Prometheus: at most 200,000 series.

    Or fewer of them: each has as many series as it is told that a node of so large a job may have.

    All that agents and controller tell of the job, nothing left out; hardware is there without it and scraped apart.
    """
    url = await agent.look(served)
    job_page = await asyncio.to_thread(fetched, f"{url}?part=job")
    node_page = await asyncio.to_thread(fetched, f"{url}?part=node")
    agent.close()
    served.loop.registry.forget(float("inf"))  # its page stands for all of the cluster's
    async with pages(job_page, node_page, nodes) as port:
        cluster = Cluster(served.loop, nodes, NPROC, port)
        await cluster.form()
        for _ in range(3):
            cluster.beat()
            await asyncio.sleep(0)
        cluster.judge()
        check(await asyncio.to_thread(fetched, f"{served.url}/metrics"))
        scrapes = SCRAPES.format(controller=served.url.removeprefix("http://"))
        series, ranks, own = await asyncio.to_thread(counted, tmp_path, scrapes, nodes)

    of_job, of_nodes = samples(job_page), samples(node_page)
    print(
        f"{series:,.0f} series of {ranks:,.0f} ranks: {own:,.0f} the controller's, {len(of_job)} each agent's; "
        f"hardware, host and agent of each node are {len(of_nodes)} more, {len(of_nodes) * nodes:,} in all"
    )
    assert ranks == nodes * NPROC
    assert series == own + nodes * len(of_job), "nothing that was told is left out of the count"
    assert own + ALL * len(of_job) <= JOB_BUDGET
    assert len(of_nodes) <= NODE_BUDGET, "of a node of 8 GPUs and 8 adapters"
    families = {metric.name for metric in metrics_of("agent") if "job" in metric.labels} - NOT_HERE.keys()
    told = {re.sub("_(bucket|sum|count)$", "", one.name) for one in of_job}
    assert told == families - {"megascale_rank_cpu_seconds_total", "megascale_rank_resident_bytes"}
