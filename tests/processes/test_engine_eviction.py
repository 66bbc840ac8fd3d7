# SPDX-License-Identifier: Apache-2.0
"""A pod is evicted: real runners, one of which gets SIGTERM as the kubelet sends it, and the job goes on without it."""

import os
import signal

import pytest

from tests.processes.launch import PATIENCE_S, acted_upon, until
from tests.processes.nodes import Clusters
from tests.processes.test_versions import make_other

pytestmark = pytest.mark.processes

# Saves when it gets SIGUSR1, at the end of a step, and goes on from there; ranks wait for each other.
SAVES = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from megascale_ops.recorder import recorder
wanted = []
signal.signal(signal.SIGUSR1, lambda *_: wanted.append(1))
rank = int(os.environ["RANK"])
file = pathlib.Path(os.environ["MEGASCALE_CHECKPOINT_DIR"], f"saved-{rank}")
first = int(file.read_text()) + 1 if file.exists() else 0
dist.init_process_group("gloo")
for step in range(first, 10**6):
    time.sleep(0.02)
    dist.all_reduce(torch.ones(1))
    if wanted:
        wanted.clear()
        with recorder.phase("checkpoint"):
            file.write_text(str(step))
    recorder.step(step)
"""


def test_an_evicted_pod_saves_leaves_and_is_no_failure(clusters: Clusters) -> None:
    """All ranks save, the runner ends with 143, the verdict says eviction, and with no restart left the job goes on.

    The negative control follows in the same job: the rank that is left is killed, which is a failure and counts.
    """
    cluster = clusters("a", "b", nnodes="1:2", policy=("max_restarts=0",))
    cluster.script = cluster.launch.tmp_path / "saves.py"
    cluster.script.write_text(SAVES)
    cluster.controller.start()
    for name in ("a", "b"):
        cluster[name].start(options=("--eviction-grace=120",))
        cluster.until_known(cluster[name])
    cluster.until_status("running", step=20)
    evicted = cluster["b"].proc
    assert evicted is not None

    evicted.send_signal(signal.SIGTERM)
    code = evicted.wait(PATIENCE_S)
    alone = cluster.until_status("degraded", round_=2)
    saved = cluster.launch.tmp_path / "checkpoints" / "saved-1"
    (left,) = acted_upon(cluster.incidents())

    assert code == 128 + signal.SIGTERM
    assert saved.exists()
    assert "a checkpoint was written" in cluster["b"].output()
    assert alone.world_size == 1
    assert left.verdict is not None
    assert (left.verdict.fault, left.verdict.nodes) == ("engine_eviction", ("b",))
    assert "takes it away within 120 s" in left.verdict.reason
    until(lambda: not cluster["b"].pids(), "nothing of the evicted pod to be left")

    (pid,) = until(cluster["a"].rank_pids, "the rank of a to run")
    os.kill(pid, signal.SIGKILL)
    runner = cluster["a"].proc
    assert runner is not None
    assert runner.wait(PATIENCE_S) == 1
    assert cluster.faults() == ["engine_eviction", "killed"]


@pytest.mark.matrix
def test_a_controller_of_before_evictions_takes_the_pod_for_lost(clusters: Clusters) -> None:
    """It refuses the outcome and gets no other: the job goes on without the pod, and the runner has said so."""
    cluster = clusters("a", "b", nnodes="1:2")
    make_other(cluster.controller, -1)
    cluster.controller.start()
    for name in ("a", "b"):
        cluster[name].start(options=("--eviction-grace=16",))
        cluster.until_known(cluster[name])
    cluster.until_status("running", step=20)
    evicted = cluster["b"].proc
    assert evicted is not None

    evicted.send_signal(signal.SIGTERM)
    code = evicted.wait(PATIENCE_S)
    alone = cluster.until_status("degraded", round_=2)
    cluster.finish("a")
    (left,) = acted_upon(cluster.incidents())

    assert code == 128 + signal.SIGTERM
    assert "knows no node that leaves as evicted: it will take b for lost" in cluster["b"].output()
    assert alone.world_size == 1
    assert left.verdict is not None
    assert left.verdict.nodes == ("b",), left.verdict.reason
