# SPDX-License-Identifier: Apache-2.0
"""Networks that are cut, held up or slow: between a node and the controller, and between the nodes themselves.

The way to the controller leads through a relay in user space, so these tests need no right of any kind. To cut the
ranks off from each other each node must have a network of its own; that needs network namespaces, and ranks that
speak TCP: those of torch.
"""

import os
import time

import pytest

from megascale_ops.schema.events import Incident, JobStatus
from tests.fakes.relay import Relay
from tests.processes.launch import TOY, acted_upon, until
from tests.processes.networks import Networks, made, with_networks
from tests.processes.nodes import Cluster, Clusters

pytestmark = pytest.mark.processes


def _behind_relay(cluster: Cluster, name: str) -> Relay:
    """Start the controller and both nodes, one of them behind a relay."""
    cluster.controller.start()
    relay = Relay(cluster.controller.port)
    cluster[name].controller_url = relay.url
    for node in cluster.nodes.values():
        node.start()
        cluster.until_known(node)
    cluster.until_status("running", step=20)
    return relay


def _furthest(status: JobStatus) -> int:
    """Return the step of the rank that is seen furthest: the job's own step counts all, those of cut nodes too."""
    return max(rank.report.progress.step for rank in status.ranks if rank.report.progress is not None)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        # The test with lost packets, in a network of its own, has the same; what a cut connection does, the two below.
        pytest.param("a", "cut", marks=pytest.mark.matrix),
        pytest.param("b", "hold", marks=pytest.mark.matrix),
        pytest.param("a", "hold", marks=pytest.mark.matrix),
        pytest.param("b", "cut", marks=pytest.mark.matrix),
    ],
)
def test_a_node_cut_off_from_the_controller_only_goes_on_training(clusters: Clusters, name: str, how: str) -> None:
    """Nobody restarts while all make steps together, however long: a warning says so, and ends when it is healed."""
    cluster = clusters("a", "b", nnodes="1:2")

    def warnings() -> list[Incident]:
        """Those of a node that is not heard: a busy machine has warnings of slow ranks beside it."""
        return [one for one in cluster.incidents() if one.verdict is not None and one.verdict.fault == "node_lost"]

    with _behind_relay(cluster, name) as relay:
        (relay.cut if how == "cut" else relay.hold)()
        until(warnings, "the warning that a node is not heard")
        before = _furthest(cluster.until_status())
        time.sleep(8.0)  # more than the patience again
        after = cluster.until_status()
        [warning] = warnings()
        relay.heal()
        until(lambda: warnings()[0].state == "over", "the warning to end")
        cluster.finish()

    assert (after.state, after.round) == ("running", 1)
    assert _furthest(after) > before + 20
    assert warning.verdict is not None
    assert (warning.state, warning.verdict.nodes) == ("watching", (name,))
    assert cluster.faults() == []
    assert "in round 2" not in cluster["a"].output() + cluster["b"].output()


@pytest.mark.matrix
def test_a_node_that_dies_behind_a_cut_is_lost(clusters: Clusters) -> None:
    """The opposite: what is cut off and dead is replaced by going on alone, and is taken back when it is whole."""
    cluster = clusters("a", "b", nnodes="1:2")
    with _behind_relay(cluster, "b") as relay:
        relay.cut()
        cluster["b"].kill_whole()
        alone = cluster.until_status("degraded", round_=2)
        relay.heal()
        cluster["b"].start()
        cluster.until_status("running", round_=3)
        cluster.finish()

    assert alone.world_size == 1
    assert cluster.faults() == ["node_lost", "membership"]
    assert acted_upon(cluster.incidents())[0].verdict.nodes == ("b",)  # type: ignore[union-attr]  # it has one


def test_a_rank_that_fails_behind_a_cut_costs_one_restart_and_its_node_comes_back(clusters: Clusters) -> None:
    """While b can't be asked, the others go on without it; healed, its runner asks by itself and is taken in again."""
    cluster = clusters("a", "b", nnodes="1:2")
    with _behind_relay(cluster, "b") as relay:
        relay.cut()
        os.kill(cluster["b"].rank_pids()[0], 9)
        cluster.until_status("degraded", round_=2)
        relay.heal()
        together = cluster.until_status("running", round_=3)
        cluster.finish()

    assert together.world_size == 2
    assert cluster.faults()[-1] == "membership"
    assert "begins at step 0 in round 3" not in cluster["a"].output()


def test_a_slow_way_to_the_controller_is_no_loss(clusters: Clusters) -> None:
    """A delay of 0.3 s a chunk and 20 KB/s: late heartbeats accuse nobody and nothing is restarted."""
    cluster = clusters("a", "b", nnodes="1:2")
    with _behind_relay(cluster, "b") as relay:
        relay.delay_s, relay.bytes_per_s = 0.3, 20_000
        cluster.finish()

    # On a busy machine a rank may be slow, which is another matter.
    assert [fault for fault in cluster.faults(warnings=True) if fault != "straggler"] == []
    assert "in round 2" not in cluster["a"].output()


def test_ranks_cut_off_from_each_other_hang_and_go_on_when_it_is_healed(clusters: Clusters, networks: Networks) -> None:
    """Both nodes are heard, so none is lost; who can't reach whom is told, and training comes back with the network.

    Nobody has to go for a network that is whole again, though the job could do without either node.
    """
    cluster = clusters("a", "b", nnodes="1:2", policy=("silence_floor_s=3", "silence_factor=5"), script=TOY)
    with_networks(cluster, networks)
    cluster.start()
    cluster.until_status("running", step=20)

    networks.set("b", "d", "down")
    until(lambda: "link_cut" in cluster.faults(warnings=True), f"the cut to be seen; so far:\n{cluster.outputs()}")
    cluster.until_status(round_=2)  # what TCP mends before that needs no restart
    networks.set("b", "d", "up")
    together = cluster.until_status("running", round_=2)
    cluster.finish(deadline_s=150.0)

    assert together.world_size == 2
    assert all(one.verdict is None or one.verdict.action != "evict" for one in cluster.incidents())
    assert "node_lost" not in cluster.faults()
    first = next(one for one in cluster.incidents() if one.verdict is not None and one.verdict.fault == "link_cut")
    assert first.state in ("recovered", "ended", "harmless")
    assert first.verdict is not None
    # Neither end shows whose cable it is.
    assert (first.verdict.fault, first.verdict.culprits, first.verdict.nodes) == ("link_cut", (0, 1), ("a", "b"))
    assert first.verdict.reason.startswith("rank 0 on a and rank 1 on b can't reach each other: ")
    assert any(finding.name == "not_acknowledged" for finding in first.verdict.evidence)
    assert cluster["a"].output().count("done at step") == 1


@pytest.mark.parametrize(
    ("net", "why"),
    [
        ("d", "the nodes of round 2 did not meet"),
        # The store of the round is reached another way, as with a network of its own for collectives.
        pytest.param("c", "lost a peer before the first step though no rank had died", marks=pytest.mark.matrix),
    ],
)
def test_of_ranks_that_stay_cut_off_from_each_other_one_node_goes(
    clusters: Clusters, networks: Networks, net: str, why: str
) -> None:
    """The next round can't begin either: it goes on without the one that does not hold rank 0, which then waits."""
    cluster = clusters("a", "b", nnodes="1:2", policy=("silence_floor_s=3", "silence_factor=5"), script=TOY)
    with_networks(cluster, networks)
    for number, node in enumerate(cluster.nodes.values(), start=2):
        node.local_addr = networks.address(net, number)
    cluster.start()
    cluster.until_status("running", step=20)

    networks.set("b", "d", "down")
    alone = cluster.until_status("degraded", round_=3)
    cluster.until_more_steps()
    cluster.finish()

    first, second = acted_upon(cluster.incidents())
    assert first.verdict is not None
    assert second.verdict is not None
    assert (first.verdict.fault, first.verdict.nodes, first.verdict.action) == ("link_cut", ("a", "b"), "restart")
    assert (second.verdict.fault, second.verdict.nodes, second.verdict.action) == ("link_cut", ("a", "b"), "evict")
    assert why in second.verdict.reason
    assert "restarted without b" in second.done
    assert alone.world_size == 1
    assert "b is evicted for another" in cluster["b"].output()
    assert "begins at step 0 in round 3" not in cluster["a"].output()


@pytest.mark.matrix
def test_a_node_that_no_other_can_reach_is_named(clusters: Clusters) -> None:
    """Three nodes, one of them cut off from both others: it is named, the other two as a pair never are."""
    with made("a", "b", "c") as networks:
        cluster = clusters("a", "b", "c", nnodes="3", policy=("silence_floor_s=3", "silence_factor=5"), script=TOY)
        with_networks(cluster, networks)
        cluster.start()
        cluster.until_status("running", step=20)

        networks.set("b", "d", "down")
        until(lambda: "link_cut" in cluster.faults(warnings=True), f"the cut to be seen; so far:\n{cluster.outputs()}")
        networks.set("b", "d", "up")
        cluster.finish(deadline_s=150.0)

        verdict = acted_upon(cluster.incidents())[0].verdict
        assert verdict is not None
        assert verdict.fault == "link_cut"
        # Cut in the midst of a collective, only one of the others may have data under way: then it is one of two ends.
        assert verdict.nodes in {("b",), ("a", "b"), ("b", "c")}
        assert 1 in verdict.culprits


def test_a_node_in_its_own_network_cut_off_from_the_controller_goes_on(clusters: Clusters, networks: Networks) -> None:
    """As behind a relay, but with lost packets instead of closed connections."""
    cluster = clusters("a", "b", nnodes="1:2", script=TOY)
    with_networks(cluster, networks)
    cluster.start()
    cluster.until_status("running", step=20)

    networks.set("b", "c", "down")
    until(lambda: "node_lost" in cluster.faults(warnings=True), "the warning that a node is not heard")
    time.sleep(4.0)
    during = cluster.until_status()
    networks.set("b", "c", "up")
    cluster.finish()

    assert (during.state, during.round) == ("running", 1)
    assert cluster.faults() == []
