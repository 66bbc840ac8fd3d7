# SPDX-License-Identifier: Apache-2.0
"""A slow node goes when it has cost as much as a restart does, and not before: real runners, a real spare.

The node is slow by sleeping, whichever rank it has; what a restart of this job costs is measured from one that the test
brings about.
"""

import os
import signal

import pytest

from megascale_ops.controller.policy.decision import Decision, Question, from_event
from tests.processes.launch import TOY, until
from tests.processes.nodes import Cluster, Clusters

pytestmark = pytest.mark.processes


def weighed(cluster: Cluster, rule: str) -> list[tuple[Question, Decision]]:
    """Return what was decided about slow ranks by one rule, oldest first, as the journal has it."""
    found = [known for event in cluster.events() if (known := from_event(event)) is not None]
    return [(asked, said) for asked, said in found if asked.kind == "warning" and said.rule == rule]


def until_weighed(cluster: Cluster, rule: str) -> tuple[Question, Decision]:
    """Wait for the first such decision."""
    return until(lambda: weighed(cluster, rule), f"a decision {rule}; so far:\n{cluster.outputs()}", 120.0)[0]


def set_policy(cluster: Cluster, setting: str) -> None:
    """Change the job's policy while it trains, as a user does."""
    done = cluster.launch.command("policy", "set", cluster.job, setting, f"--controller={cluster.controller.url}")
    assert done.returncode == 0, done.stderr


def test_a_slow_node_goes_once_it_has_cost_as_much_as_a_restart_and_a_spare_steps_in(clusters: Clusters) -> None:
    """While a restart is thought to be dear, nothing is done; once one is measured, the node goes when that is paid."""
    policy = ("warning_hold_s=1", "restart_price_s=100000")
    cluster = clusters("a", "b", "c", nnodes="2", policy=policy, script=TOY)
    cluster.controller.start()
    slow = ("--slow-node=b", "--slow-s=0.1")
    for name in ("a", "b"):
        cluster[name].start(*slow)
        cluster.until_known(cluster[name])
    cluster.until_status("running", step=10)
    cluster["c"].start(*slow)
    until(lambda: "c, which waits as a spare" in cluster["c"].output(), "the spare to say that it is one")

    dear, _ = until_weighed(cluster, "paying")
    left_alone = cluster.until_more_steps()  # the negative control: as slow, but not worth it
    (pid,) = cluster["a"].rank_pids()
    os.kill(pid, signal.SIGKILL)
    without = cluster.until_status("running", round_=3)
    cluster.until_more_steps()
    cluster.finish()

    assert (dear.verdict.nodes, dear.prices_s, left_alone.round) == (("b",), (), 1)
    ((asked, said),) = weighed(cluster, "spare")
    assert asked.tab is not None
    assert asked.tab.paid_s >= asked.start_s + asked.since_saved_s > 0.0
    assert len(asked.prices_s) == 1
    assert (said.action, said.nodes) == ("evict", ("b",))
    assert "as much as a restart" in said.reason
    assert "a restart now costs" in said.reason
    assert "of work since the newest checkpoint)" in said.reason
    assert {rank.node for rank in without.ranks} == {"a", "c"}
    assert cluster.faults() == ["killed", "straggler"]
    assert "b is evicted for another" in cluster["b"].output()
    assert "in round 4" not in cluster["a"].output()


@pytest.mark.matrix  # the test above leaves it alone while it is too dear; each rule is tests/unit/controller's
def test_a_slow_node_that_is_worth_more_than_it_costs_is_left_alone(clusters: Clusters) -> None:
    """It makes every step a third longer, and without it half of all ranks would be missing; nor where told to warn."""
    policy = ("warning_hold_s=1", "restart_price_s=1", "straggler=warn")
    cluster = clusters("a", "b", nnodes="1:2", policy=policy, script=TOY)
    cluster.start("--slow-node=b", "--step-s=0.1", "--slow-s=0.05")

    until_weighed(cluster, "table")
    set_policy(cluster, "straggler=evict")
    asked, said = until_weighed(cluster, "too_dear")
    after = cluster.until_more_steps()
    cluster.finish()

    assert asked.tab is not None
    assert asked.tab.paid_s >= 1.0  # it is paid for, and still not done
    assert asked.share == 0.5
    assert "without b 50.0 % of all ranks would be missing" in said.reason
    assert (after.round, after.world_size) == (1, 2)
    assert cluster.faults() == []
