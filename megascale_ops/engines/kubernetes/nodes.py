# SPDX-License-Identifier: Apache-2.0
"""The nodes of a Kubernetes cluster: cordoned, tainted and told of by a condition; taken back only where that is ours.

Pods that run there go on. What is changed is changed on the node as it was read: if another client has changed it in
between, the API server refuses, and it is read again.
"""

import time
from collections.abc import Callable, Mapping

from megascale_ops.engines.actuator import EngineError, EngineNode, ForeignError, Nodes, RightsError, reason_of
from megascale_ops.engines.kubernetes.client import ClusterApi, ConflictError, MissingError, NodeApi
from megascale_ops.engines.kubernetes.objects import (
    Json,
    condition,
    cordoned_by,
    has_our_taint,
    is_cordon_ours,
    putting_back,
    putting_out,
    read_node,
)

# A kubelet patches its node's status, which is a new version, each 5 minutes, and each 10 s where something changes.
_TRIES = 5


class KubernetesNodes(Nodes):
    """Nodes by the API server.

    Args:
        api: Its calls.
        wall: Seconds since 1970, for conditions.
    """

    title = "Kubernetes"

    def __init__(self, api: NodeApi | None = None, wall: Callable[[], float] = time.time) -> None:
        self._api = api or ClusterApi()
        self._wall = wall

    def states(self) -> Mapping[str, EngineNode]:
        """Return every node of the cluster."""
        return {one.name: one for one in map(read_node, self._api.list())}

    def drain(self, node: str, reason: str) -> str:
        """Put a node out of service for new pods; what an administrator has cordoned is left as it is."""
        text = reason_of(reason)
        for _ in range(_TRIES):
            found = self._known(node)
            name = str(found["metadata"]["name"])
            if (found.get("spec") or {}).get("unschedulable") or has_our_taint(found):
                seen = read_node(found)
                who = f" by {seen.by}" if seen.by else ""
                return f"node {name} is {seen.words} already{who}: {seen.reason or 'no reason is given'}"
            try:
                self._api.patch(name, putting_out(found, text))
            except ConflictError:
                continue
            return f"node {name} is cordoned and tainted in Kubernetes: {text}" + self._told(name, text, is_out=True)
        raise EngineError(f"node {node} was changed by others {_TRIES} times while it was to be cordoned")

    def resume(self, node: str) -> str:
        """Put a node back that we have put out."""
        for _ in range(_TRIES):
            found = self._known(node)
            name = str(found["metadata"]["name"])
            if not has_our_taint(found) and not (found.get("spec") or {}).get("unschedulable"):
                return f"node {name} is {read_node(found).words}: there is nothing to resume"
            if not is_cordon_ours(found):
                raise ForeignError(
                    f"node {name} is cordoned by {cordoned_by(found) or 'another user'} and stays so: "
                    f"`kubectl uncordon {name}` takes that back"
                )
            try:
                self._api.patch(name, putting_back(found))
            except ConflictError:
                continue
            return f"node {name} is back in service" + self._told(name, reason_of("taken back"), is_out=False)
        raise EngineError(f"node {node} was changed by others {_TRIES} times while it was to be taken back")

    def _told(self, name: str, reason: str, *, is_out: bool) -> str:
        """Set the condition; without it the node is out all the same, which the returned words then say."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._wall()))
        try:
            self._api.patch(name, condition(is_out=is_out, reason=reason, now=now), is_status=True)
        except (RightsError, EngineError) as error:
            return f"; its condition is not set: {error}"
        return ""

    def _known(self, node: str) -> Json:
        """Return a node by our name of it: the cluster's own, or a host name that begins with that."""
        short = node.partition(".")[0]
        try:
            return self._api.get(node)
        except MissingError:
            if short == node:
                raise
        return self._api.get(short)
