# SPDX-License-Identifier: Apache-2.0
"""A controller, and agents and runners of neighbouring versions, as real processes: the update of a cluster in parts.

A neighbour is made of our own programs by a small file that Python runs first (``fixtures/neighbour``): it states
another version, and says more or less than ours does.
"""

import os
import signal
from pathlib import Path

import pytest

from megascale_ops.schema.version import MESSAGE_VERSION
from tests.processes.launch import acted_upon, until
from tests.processes.nodes import Cluster, Clusters, Controller, Node

pytestmark = pytest.mark.processes

NEIGHBOUR = Path(__file__).parents[1] / "fixtures" / "neighbour"


def make_other(program: Controller | Node, distance: int) -> None:
    """Let a program, and all that it starts, speak another version."""
    path = os.pathsep.join([str(NEIGHBOUR), *filter(None, [program.env.get("PYTHONPATH")])])
    program.env |= {"PYTHONPATH": path, "TEST_VERSION_DISTANCE": str(distance)}


def spoken_by(cluster: Cluster, who: str) -> int:
    """Return the version that the controller, or a node's runner, states."""
    if who == "controller":
        with cluster.controller.link() as link:
            return link.status(cluster.job).version
    found = cluster[who].round_file()
    assert found is not None
    return found.version


@pytest.mark.parametrize(
    ("who", "distance"),
    [
        pytest.param("b", 1, marks=pytest.mark.matrix),  # as the one behind: what differs is read by tests/unit/schema
        ("controller", 1),
        pytest.param("b", -1, marks=pytest.mark.matrix),
        pytest.param("controller", -1, marks=pytest.mark.matrix),
    ],
)
def test_neighbouring_versions_train_together_and_judge_a_fault(clusters: Clusters, who: str, distance: int) -> None:
    """A rank of the node that differs is stopped: told, examined, killed and replaced through both versions."""
    cluster = clusters("a", "b", nnodes="2")
    make_other(cluster.controller if who == "controller" else cluster["b"], distance)
    cluster.start()
    cluster.until_status("running", step=20)
    stated = spoken_by(cluster, who)

    (pid,) = cluster["b"].rank_pids()
    os.kill(pid, signal.SIGSTOP)
    after = cluster.until_status("running", round_=2)
    cluster.until_more_steps()
    (incident,) = acted_upon(cluster.incidents())
    cluster.finish()

    assert stated == MESSAGE_VERSION + distance
    assert after.world_size == 2
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits, incident.verdict.nodes) == ("frozen", (1,), ("b",))
    looked_at = {item.rank for item in incident.evidence if item.kind == "process"}
    # A controller of before ``again_s`` gets a heartbeat a second of a node at rest, and waits half of one at most
    # where a rank is stopped: that state was sent without an order.
    assert looked_at == {0, 1} or (looked_at == {1} and (who, distance) == ("controller", -1))


@pytest.mark.parametrize("distance", [2, pytest.param(-2, marks=pytest.mark.matrix)])
def test_a_version_too_far_away_is_refused_before_anything_starts(clusters: Clusters, distance: int) -> None:
    """One sentence that names both versions; the job of the others is not disturbed."""
    cluster = clusters("a", "b", nnodes="1:2", policy=("last_call_s=1",))
    make_other(cluster["b"], distance)
    cluster.controller.start()
    cluster["a"].start()
    cluster.until_known(cluster["a"])
    cluster.until_status("degraded", step=10)

    cluster["b"].start()
    code = cluster["b"].finish()

    assert code != 0
    said = cluster["b"].output().strip().splitlines()[-1]
    assert f"has version {MESSAGE_VERSION}; this program speaks version {MESSAGE_VERSION + distance}" in said
    until(lambda: not cluster["b"].pids(), "what b had started to be gone")
    alone = cluster.until_more_steps()
    cluster.finish("a")
    assert {node.node for node in alone.nodes} == {"a"}
    assert "in round 2" not in cluster["a"].output()
