# SPDX-License-Identifier: Apache-2.0
"""Where the agents' metrics are, by the agents' own reports. Pure: a registry in, targets out."""

from collections import Counter

from megascale_ops.controller.cluster.node_view import NodeView
from megascale_ops.controller.cluster.registry import Registry
from megascale_ops.schema.targets import COMPONENT, JOBS, TargetGroup

# 10 min: a node that is away for so long is not coming back by itself; until then `up == 0` shows that it is away.
KEPT_S = 600.0
_LOOPBACK = ("127.", "[::1]", "localhost")


def is_loopback(address: str) -> bool:
    """Return whether only its own machine can reach an address."""
    return address == "::1" or address.startswith(_LOOPBACK)


def targets(registry: Registry, now_s: float, *, is_near: bool) -> list[TargetGroup]:
    """Return one group for each agent that serves metrics, by node.

    Args:
        registry: what is known of nodes.
        now_s: monotonic seconds.
        is_near: the client is on this machine. Only then loopback addresses are of any use, and only those that no
            two nodes have: else they are of different machines.
    """
    views = [view for view in registry.nodes() if view.metrics and now_s - view.heard_s < KEPT_S]
    told = Counter(view.metrics for view in views)
    reachable = [view for view in views if not is_loopback(view.metrics) or (is_near and told[view.metrics] == 1)]
    return [_group(view) for view in sorted(reachable, key=lambda view: view.node)]


def _group(view: NodeView) -> TargetGroup:
    labels = {"node": view.node, COMPONENT: "agent"}
    if view.shares:
        labels[JOBS] = f",{','.join(sorted(view.shares))},"
    return TargetGroup((view.metrics,), labels)
