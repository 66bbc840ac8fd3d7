# SPDX-License-Identifier: Apache-2.0
"""A node that fails again and again is left out by real runners, and comes back when its time is over."""

import os
import signal

import pytest

from tests.processes.launch import acted_upon, until
from tests.processes.nodes import Cluster, Clusters

pytestmark = pytest.mark.processes


def kill_rank(cluster: Cluster, name: str) -> None:
    """SIGKILL to a node's only rank."""
    (pid,) = until(cluster[name].rank_pids, f"the rank of {name} to run")
    os.kill(pid, signal.SIGKILL)


def test_a_node_that_fails_twice_is_left_out_and_taken_back(clusters: Clusters) -> None:
    """Twice within an hour and never on another node: the job shrinks, and grows again after ``eviction_s``."""
    cluster = clusters("a", "b", nnodes="1:2", policy=("eviction_s=15",))
    cluster.start()
    cluster.until_status("running", step=20)

    kill_rank(cluster, "b")
    once = cluster.until_status("running", round_=2)
    cluster.until_more_steps()
    kill_rank(cluster, "b")
    alone = cluster.until_status("degraded", round_=3)
    back = cluster.until_status("running", round_=4)
    with cluster.controller.link() as link:
        life = link.node_moves("b")
    cluster.finish()

    first, second = (one.verdict for one in acted_upon(cluster.incidents())[:2])
    assert first is not None
    assert second is not None
    assert (first.fault, first.nodes, first.action) == ("killed", ("b",), "restart")
    assert (second.fault, second.nodes, second.action) == ("killed", ("b",), "evict")
    assert [status.world_size for status in (once, alone, back)] == [2, 1, 2]
    assert cluster.faults() == ["killed", "killed", "membership"]
    assert "begins at step 0 in round 3" not in cluster["a"].output()
    # Before it came back it has measured itself, in its own runner, while the job went on without it.
    assert [move.event for move in life.moves] == ["accused", "check_began", "check_passed"], life
    assert life.node.state == "back"
    assert "this node is measured before it takes part again" in cluster["b"].output()


@pytest.mark.matrix  # the count of faults is tests/unit/controller/test_eviction's; that one fault only restarts, above
def test_faults_of_several_nodes_leave_nobody_out(clusters: Clusters) -> None:
    """The negative control: one fault on each node speaks against neither of them."""
    cluster = clusters("a", "b", nnodes="1:2")
    cluster.start()
    cluster.until_status("running", step=20)

    kill_rank(cluster, "b")
    cluster.until_status("running", round_=2)
    cluster.until_more_steps()
    kill_rank(cluster, "a")
    after = cluster.until_status("running", round_=3)
    with cluster.controller.link() as link:
        suspects = link.nodes().nodes
    cluster.finish()

    assert suspects == ()  # these were faults of processes
    assert after.world_size == 2
    assert [one.verdict.action for one in acted_upon(cluster.incidents()) if one.verdict] == ["restart", "restart"]


@pytest.mark.matrix  # the budget is tests/unit/controller/test_eviction's; that a node goes and comes back, above
@pytest.mark.parametrize(("budget", "action", "left"), [(1, "restart", 2), (2, "evict", 1)])
def test_no_more_nodes_are_evicted_in_an_hour_than_the_policy_grants(
    clusters: Clusters, budget: int, action: str, left: int
) -> None:
    """Two nodes of three fail, a class for which a node goes: with one eviction an hour the second one stays."""
    policy = ("killed=evict", f"evictions_per_hour={budget}")
    cluster = clusters("a", "b", "c", nnodes="1:3", policy=policy)
    cluster.start()
    cluster.until_status("running", step=20)

    kill_rank(cluster, "b")
    once = cluster.until_status("degraded", round_=2)
    cluster.until_more_steps()
    kill_rank(cluster, "c")
    twice = cluster.until_status("degraded", round_=3)
    cluster.finish()

    first, second = acted_upon(cluster.incidents())[:2]
    assert first.verdict is not None
    assert second.verdict is not None
    assert (first.verdict.nodes, first.verdict.action) == (("b",), "evict")
    assert (second.verdict.nodes, second.verdict.action) == (("c",), action)
    assert (once.world_size, twice.world_size) == (2, left)
    refused = "1 evictions in the last hour use up the budget of 1 an hour"
    assert (refused in second.done) == (action == "restart"), second.done
