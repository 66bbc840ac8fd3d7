# SPDX-License-Identifier: Apache-2.0
"""A slow link between two nodes: the pair is warned of, no rank is called a straggler, and nothing is stopped.

Both nodes live in networks of their own; all that one of them says to the other goes over a wire in user space.
"""

from collections.abc import Iterator

import pytest

from megascale_ops.schema.events import Incident
from tests.processes.launch import TOY, until
from tests.processes.networks import Networks, made, with_networks
from tests.processes.nodes import Cluster, Clusters

# Calm: ranks that are starved of CPU look as slow as those with a slow network.
pytestmark = [pytest.mark.processes, pytest.mark.calm]

# 256 KiB in a ring of four: each rank sends 384 KiB in a step, of which a wire of 1 MB/s makes 0.4 s. While it is fast
# the ranks wait 15 ms in a step, and on a loaded machine 30: far from the fifth of 200 ms that a name takes.
PAYLOAD = ("--payload-kb=256", "--step-s=0.2")
SLOW_BYTES_PER_S = 1_000_000


@pytest.fixture
def wired() -> Iterator[Networks]:
    """Networks for nodes a and b, with a wire of our own between b and a."""
    with made("a", "b", wired="b") as networks:
        yield networks


def warnings(cluster: Cluster) -> list[Incident]:
    """Return what was warned of or acted upon so far."""
    return [one for one in cluster.incidents() if one.verdict is not None and one.state != "harmless"]


def test_a_slow_link_between_two_nodes_names_the_pair_and_no_straggler(clusters: Clusters, wired: Networks) -> None:
    """No rank while the wire is fast; the ranks at both ends while it is slow, until it is fast again."""
    cluster = clusters("a", "b", nnodes="2", nproc=2, script=TOY)
    with_networks(cluster, wired)
    cluster.start(*PAYLOAD)
    # The negative control: some 13 looks at the queues over the same wire, one a second; ten are enough for a name.
    cluster.until_status("running", step=60)
    fast = warnings(cluster)

    assert wired.wire is not None
    wired.wire.bytes_per_s = SLOW_BYTES_PER_S
    (told,) = until(lambda: warnings(cluster), f"the slow link to be named; so far:\n{cluster.outputs()}")
    before = cluster.until_more_steps()
    wired.wire.bytes_per_s = 0
    until(lambda: cluster.incidents()[-1].state == "over", "the warning to end with its reason")
    cluster.finish()

    assert fast == []
    assert told.verdict is not None
    assert (told.state, told.verdict.fault) == ("watching", "slow_link")
    assert told.verdict.nodes == ("a", "b")
    # The two ranks of a ring of four that send from one node to the other, whichever way round Gloo's ring goes.
    assert told.verdict.culprits in {(0, 2), (1, 3)}
    assert "send over the link between a and b" in told.verdict.reason
    assert (before.state, before.round) == ("running", 1)
    assert {one.verdict.fault for one in warnings(cluster) if one.verdict is not None} == {"slow_link"}
