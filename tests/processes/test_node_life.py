# SPDX-License-Identifier: Apache-2.0
"""A person takes a node out while real runners train on it: a spare takes its place when the round ends, not before."""

import os
import signal

import pytest

from megascale_ops.schema.health import NodeAsk
from tests.processes.launch import acted_upon, until
from tests.processes.nodes import Clusters

pytestmark = pytest.mark.processes


def test_a_spare_takes_the_place_of_a_node_that_a_person_took_out(clusters: Clusters) -> None:
    """The round goes on with it; the next one is formed of the others, and the controller that follows knows it."""
    cluster = clusters("a", "b", "c", nnodes="2")
    cluster.start()
    cluster.until_status("running", step=20)

    with cluster.controller.link() as link:
        draining = link.ask_node("b", NodeAsk("quarantine", "a fan is loud", "ada")).node
    cluster.until_more_steps()
    untouched = cluster.until_status("running").round
    cluster.controller.kill()
    cluster.controller.start()
    (pid,) = until(cluster["a"].rank_pids, "the rank of a to run")
    os.kill(pid, signal.SIGKILL)
    after = cluster.until_status("running", round_=2)

    def vacated() -> bool:
        with cluster.controller.link() as link:
            return link.node_moves("b").node.state == "quarantined"

    until(vacated, "the node to be empty")
    cluster.finish()

    assert (draining.state, draining.by, untouched) == ("draining", "ada", 1)
    assert {node.node for node in after.nodes if node.runner_age_s >= 0} >= {"a", "c"}
    assert {rank.node for rank in after.ranks} == {"a", "c"}
    assert "a fan is loud" in cluster["b"].output()
    assert [one.verdict.fault for one in acted_upon(cluster.incidents()) if one.verdict] == ["killed"]
