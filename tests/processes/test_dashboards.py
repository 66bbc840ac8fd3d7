# SPDX-License-Identifier: Apache-2.0
"""Every query of every dashboard is asked of a real Prometheus, and answers with data.

It scraped, once a second, a real run of four ranks on the CPU with one slow rank, one killed and one frozen; the run's
own agent looked at a machine of files (GPUs, adapters, kernel log) that is in trouble. Only what needs NCCL or a GPU
kernel comes from pages made from the table of metrics. About 60 s in all, 42 of them the run.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from megascale_ops.schema.metrics import METRICS
from tests.fakes.exposition import Cluster, Exposition, page
from tests.fakes.hardware import FakeMachine
from tests.fakes.prometheus import QueryError, RealPrometheus
from tests.fakes.read_dashboards import (
    ROOM,
    Query,
    annotations,
    filled,
    metrics_and_matchers,
    queries,
    variable_queries,
)
from tests.processes.launch import Launch, until

pytestmark = pytest.mark.processes

# Only NCCL loads the profiler, and only a GPU runs overlap kernels and times its own work.
GPU_ONLY = (
    "megascale_nccl_profiler_",
    "megascale_plugin_",
    "megascale_profiler_",
    "megascale_records_",
    "megascale_tile_",
    "megascale_step_gpu_seconds",
)
MADE = tuple(name for name in METRICS if name.startswith(GPU_ONLY))
# Queries that have no data here, and why.
EMPTY = {
    "megascale-self / What agents could not see / A": "a collector fails by a mistake of ours, not by what it looks at"
}
# Queries whose data one scrape a second may miss, or this machine may not have, and why.
BRIEF = {
    "megascale-oncall / Processes that do not run / A": "a frozen rank is stopped for good after a second or two",
    "megascale-gpu-health / What they found worst / A": "most machines have no core that is bad",
}
ALL = {
    "job": "toy",
    "rank": "[0-9]+",
    "axis": "node",
    **dict.fromkeys(("node", "tp", "pp", "dp", "op", "kernel"), ".*"),
}
# Most lines of a picture and rows of a table, whatever the size of the job: 60 rows are the tallest matrix.
MOST_LINES, MOST_ROWS = 60, 200
ALERT = """\
groups:
  - name: of this test
    rules:
      - {alert: SomethingFires, expr: "megascale_job_step >= 0", labels: {severity: critical}}
"""


class Scene(NamedTuple):
    """A Prometheus with what it saw from ``began_s`` to ``ended_s`` (wall clock); ``made`` is the made-up target."""

    prometheus: RealPrometheus
    began_s: float
    ended_s: float
    made: str


def target(job: str, address: str) -> str:
    """Return one job of a scrape configuration."""
    return f"- {{job_name: {job}, honor_labels: true, static_configs: [{{targets: ['{address}']}}]}}\n"


def trouble(machine: FakeMachine) -> None:
    """Let a GPU, an adapter and the host be ill in every way that a panel shows."""
    # 230: the driver advises a reset; 143: rows remapped; 52, 94: replays of NVLink and PCIe; 270: throttled by heat.
    fields = {"230": 1, "143": 2, "52": 9, "94": 7, "270": 4_000_000_000}
    machine.gpu(1, links=[1] * 17 + [0], ecc=[3, 1], fields=fields)
    machine.gpu(2, temperature=93, sm_mhz=900)
    machine.port("mlx5_1", state="1: DOWN", link_downed=3, symbol_error=40, np_cnp_sent=100)
    machine.pressure(memory=35.0, oom_kills=2)
    machine.process(77, "python", "D")
    machine.xid(1, 63)
    machine.log("nvidia-nvswitch0: SXid (PCI:0000:85:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")
    machine.log("nvme nvme2: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10")


def play(launch: Launch, prometheus: RealPrometheus, machine: FakeMachine) -> None:
    """Let the run suffer: a slow rank all the time, then one killed, then one frozen."""
    launch.until_step(5)
    trouble(machine)
    slow = 'megascale_straggler_score_ratio{job="toy"} > 0'
    prometheus.wait_for(slow)
    os.kill(launch.pid(1), signal.SIGKILL)
    until(lambda: restarted(launch, 1), "the restart after a rank was killed")
    os.kill(launch.pid(0), signal.SIGSTOP)
    prometheus.wait_for('megascale_hang_suspected{job="toy"} > 0')
    until(lambda: restarted(launch, 2), "the restart after a rank was frozen")
    prometheus.wait_for(slow)
    last_words(launch)
    checked = launch.command("diagnose", "--node", "node-a", "--preempt", "--check", "cpu")
    assert checked.returncode in (0, 1), checked.stderr
    prometheus.wait_for("megascale_node_check_median")
    # The agent looks at processes and adapters every ten seconds and at GPUs every five.
    prometheus.wait_for("megascale_host_blocked_processes > 0")
    prometheus.wait_for("increase(megascale_ib_link_flaps_total[5m]) > 0")
    prometheus.wait_for('megascale_gpu_recovery_action_info{action="reset"}')
    prometheus.wait_for("megascale_agent_log_matches_total")
    # Two more scrapes: a picture with a point a second has one for what came last.
    time.sleep(2.0)


def last_words(launch: Launch) -> None:
    """Let a rank write what it would had a peer gone away."""
    newest = max(launch.run_dir().rglob("stderr.log"), key=lambda path: path.stat().st_mtime_ns)
    with newest.open("a", encoding="utf-8") as log:
        log.write("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1\n")


def restarted(launch: Launch, times: int) -> bool:
    """Whether the job runs again after so many restarts."""
    status = launch.status()
    return status is not None and status.restarts >= times and status.state == "running"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Yield what has been scraped of the run, while everything still runs."""
    folder = tmp_path_factory.mktemp("dashboards")
    launch, machine = Launch(folder), FakeMachine(folder / "machine", gpus=4)
    roots = {"SYS_ROOT": machine.sys, "PROC_ROOT": machine.proc, "KERNEL_LOG": machine.kernel_log}
    launch.env |= {**machine.environment(), **{f"MEGASCALE_AGENT_{name}": str(path) for name, path in roots.items()}}
    began_s = time.time()
    rules = folder / "rules.yml"
    rules.write_text(ALERT, encoding="utf-8")
    cluster = Cluster("toy", ranks_per_node=4, names=("node-a",))
    made = [METRICS[name] for name in MADE]
    try:
        # What a node in doubt measures of itself, 6 s of CPU time, is asked for below, as far as panels show it.
        options = (
            "run", "--nproc-per-node=4", "--job=toy", "--node=node-a", "--quiet", "--policy=check_suspects=false"
        )  # fmt: skip
        workload = ("-m", "--", "megascale_ops.chaos.workload", f"--folder={folder}", "--steps=100000")
        launch.spawn(*options, *workload, "--fault=compute_100", "--slow=1.0", "--rank=2", "--at=30")
        until(launch.controller, "the run's controller")
        url = str((launch.controller() or {})["url"])
        found = f"- {{job_name: agents, honor_labels: true, http_sd_configs: [{{url: '{url}/v1/sd/agents', "
        auth = f"authorization: {{type: Bearer, credentials_file: {launch.run_dir() / 'controller.token'}}}"
        agents = found + f"refresh_interval: 1s, {auth}}}]}}\n"
        with Exposition(lambda: page(made, cluster, time.time() - began_s, time.time())) as pages:
            controller = target("controller", url.removeprefix("http://")).replace("honor", f"{auth}, honor", 1)
            scrapes = controller + agents + target("made", pages.target)
            with RealPrometheus(folder, scrapes, [rules, *sorted((ROOM / "rules").glob("*.yml"))]) as prometheus:
                for job in ("controller", "agents", "made"):
                    prometheus.wait_for_target(job)
                play(launch, prometheus, machine)
                yield Scene(prometheus, began_s, time.time(), pages.target)
    finally:
        launch.close()


def answer(scene: Scene, query: Query, values: dict[str, str]) -> tuple[int, str]:
    """Return how many series a query had with a number at any moment of the run, and what Prometheus had against it."""
    try:
        found = scene.prometheus.drawn(filled(query.expr, values), scene.began_s, scene.ended_s, 1.0)
    except QueryError as error:
        return 0, str(error)
    return len(found), ""


def test_every_query_has_data(scene: Scene) -> None:
    """Panels, annotations and the choices of variables; whoever has none is named with its query."""
    asked = [*queries(), *annotations(), *variable_queries()]

    answers = {query: answer(scene, query, ALL) for query in asked}

    without = {query.place: said or query.expr for query, (found, said) in answers.items() if not found}
    assert len(asked) > 150
    assert {place: why for place, why in without.items() if place not in EMPTY | BRIEF} == {}
    assert set(EMPTY) <= set(without), "these have data now: no excuse is needed"


def test_only_what_needs_nccl_or_a_gpu_kernel_is_made_up(scene: Scene) -> None:
    """A metric that this machine's own programs expose is taken from them."""
    real = scene.prometheus.query(f'group by (__name__) ({{__name__=~"megascale_.*", instance!="{scene.made}"}})')
    asked = {name for query in queries() for name, _ in metrics_and_matchers(query.expr)}

    names = {one["metric"]["__name__"] for one in real}

    assert len(names) > 80
    assert names.isdisjoint(MADE)
    assert set(MADE) <= asked, "these are asked for by no panel and need not be made up"


def test_no_picture_has_a_line_for_each_rank(tmp_path: Path) -> None:
    """In a job of 256 ranks on 64 nodes no picture has more than 60 lines and no table more than 200 rows."""
    began_s = time.time() - 60.0
    cluster = Cluster("toy", nodes=64, ranks_per_node=4)
    with (
        Exposition(lambda: page(METRICS.values(), cluster, time.time() - began_s, time.time())) as pages,
        # More nodes than lines, more ranks than rows. A page of them takes a second to make on a busy machine, and a
        # scrape may take an interval.
        RealPrometheus(tmp_path, target("made", pages.target), scrape_interval="8s") as prometheus,
    ):
        prometheus.wait_for_target("made")
        prometheus.wait_for("rate(megascale_agent_scans_total[20s]) > 0")
        ended_s = time.time()
        scene = Scene(prometheus, ended_s - 5.0, ended_s, pages.target)

        found = {query: answer(scene, query, ALL) for query in queries()}

    assert {query.place: said for query, (_, said) in found.items() if said} == {}
    most = {
        query.place: lines
        for query, (lines, _) in found.items()
        if lines > (MOST_ROWS if query.kind == "table" else MOST_LINES)
    }
    assert most == {}
    assert sum(lines > 0 for lines, _ in found.values()) > 150
