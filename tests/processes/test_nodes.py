# SPDX-License-Identifier: Apache-2.0
"""Nodes that die whole, come back and are replaced: two or three on one machine, each with its own runner and agent."""

import os
import signal

import pytest

from tests.processes.launch import acted_upon, until
from tests.processes.nodes import Clusters

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("dead", ["a", pytest.param("b", marks=pytest.mark.matrix)])
def test_a_node_dies_whole_and_is_taken_back(clusters: Clusters, dead: str) -> None:
    """The rest goes on alone from the checkpoint, the verdict names the node, and the node is taken back.

    Node a holds rank 0 and the store of the round; it may die like any other.
    """
    cluster = clusters("a", "b", nnodes="1:2")
    alive = "b" if dead == "a" else "a"
    cluster.start()
    cluster.until_status("running", step=20)

    cluster[dead].kill_whole()
    alone = cluster.until_status("degraded", round_=2)
    (lost,) = acted_upon(cluster.incidents())
    cluster[dead].start()
    together = cluster.until_status("running", round_=3)
    cluster.finish()

    assert lost.verdict is not None
    assert (lost.verdict.fault, lost.verdict.nodes) == ("node_lost", (dead,))
    assert alone.world_size == 1
    assert together.world_size == 2
    assert cluster.faults() == ["node_lost", "membership"]
    assert "begins at step 0 in round 2" not in cluster[alive].output()


def test_a_spare_node_steps_in_and_the_dead_one_becomes_the_spare(clusters: Clusters) -> None:
    """Two of three runners train; the third says that it waits, takes the dead one's place, and keeps it."""
    cluster = clusters("a", "b", "c", nnodes="2")
    cluster.controller.start()
    for name in ("a", "b"):
        cluster[name].start()
        cluster.until_known(cluster[name])
    cluster.until_status("running", step=10)
    cluster["c"].start()
    until(lambda: "c, which waits as a spare" in cluster["c"].output(), "the spare to say that it is one")
    undisturbed = cluster.until_status().round

    cluster["a"].kill_whole()
    replaced = cluster.until_status("running", round_=2)
    cluster["a"].start()
    until(lambda: "a, which waits as a spare" in cluster["a"].output(), "the dead node to come back as a spare")
    cluster.finish()

    assert undisturbed == 1
    assert {node.node for node in replaced.nodes if node.node != "a"} == {"b", "c"}
    assert replaced.world_size == 2
    assert cluster.faults() == ["node_lost"]
    (lost,) = [one.verdict for one in acted_upon(cluster.incidents())]
    assert lost is not None
    assert lost.nodes == ("a",)
    assert "in round 3" not in cluster["b"].output()


@pytest.mark.matrix  # as with one node, which test_own_faults has
def test_a_node_whose_agent_alone_dies_is_no_loss(clusters: Clusters) -> None:
    """The negative control: an agent that is killed comes back, and nothing is restarted."""
    cluster = clusters("a", "b", nnodes="1:2")
    cluster.start()
    cluster.until_status("running", step=20)
    found = cluster["b"].round_file()
    assert found is not None

    os.kill(found.agent_pid, signal.SIGKILL)
    cluster.finish()

    assert [fault for fault in cluster.faults(warnings=True) if fault != "straggler"] == []
    assert "in round 2" not in cluster["a"].output()
