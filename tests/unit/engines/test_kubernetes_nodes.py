# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes node is put out by three marks and taken back only where they are ours; what others did stays."""

from typing import Any

import pytest

from megascale_ops.engines.actuator import EngineError, RightsError
from megascale_ops.engines.kubernetes.nodes import KubernetesNodes
from megascale_ops.engines.kubernetes.objects import CONDITION, REASON, TAINT, read_node, refusal
from tests.fakes.kubernetes import MemoryNodes, node

GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


def _cordoned_by(manager: str, **spec: Any) -> dict[str, Any]:  # noqa: ANN401  fields of any type
    one = node("n1", unschedulable=True, **spec)
    one["metadata"]["managedFields"] = [{"manager": manager, "fieldsV1": {"f:spec": {"f:unschedulable": {}}}}]
    return one


def _conditions(api: MemoryNodes) -> dict[str, tuple[str, str]]:
    found = api.nodes["n1"]["status"]["conditions"]
    return {one["type"]: (one["status"], one.get("message", "")) for one in found}


def test_a_node_is_cordoned_tainted_and_told_of() -> None:
    """With our prefix; a taint and a condition that were there stay."""
    api = MemoryNodes(node("n1", taints=[GPU_TAINT]))

    said = KubernetesNodes(api, wall=lambda: 0.0).drain("n1.example", "gpt: killed twice")

    found = api.nodes["n1"]
    assert said == "node n1 is cordoned and tainted in Kubernetes: megascale-ops: gpt: killed twice"
    assert found["spec"]["unschedulable"] is True
    assert found["spec"]["taints"] == [GPU_TAINT, {"key": TAINT, "value": "true", "effect": "NoSchedule"}]
    assert found["metadata"]["annotations"] == {REASON: "megascale-ops: gpt: killed twice"}
    assert _conditions(api)[CONDITION] == ("True", "megascale-ops: gpt: killed twice")
    assert _conditions(api)["Ready"][0] == "True"


def test_a_node_comes_back_as_it_was() -> None:
    """All three marks go, nothing else does."""
    api = MemoryNodes(node("n1", taints=[GPU_TAINT]))
    nodes = KubernetesNodes(api)
    nodes.drain("n1", "killed")

    assert nodes.resume("n1") == "node n1 is back in service"

    assert api.nodes["n1"]["spec"] == {"taints": [GPU_TAINT]}
    assert api.nodes["n1"]["metadata"]["annotations"] == {}
    assert _conditions(api)[CONDITION][0] == "False"
    assert nodes.states()["n1"].is_usable


def test_what_an_administrator_cordoned_is_neither_changed_nor_taken_back() -> None:
    """Whose it is, the server has noted."""
    api = MemoryNodes(_cordoned_by("kubectl-cordon"))
    nodes = KubernetesNodes(api)

    assert "cordoned already by kubectl-cordon" in nodes.drain("n1", "killed")
    with pytest.raises(EngineError, match="cordoned by kubectl-cordon and stays so: `kubectl uncordon n1`"):
        nodes.resume("n1")

    assert api.patched == []
    assert not nodes.states()["n1"].is_usable
    assert not nodes.states()["n1"].is_ours


def test_a_cordon_that_came_after_ours_stays() -> None:
    """Somebody took ours back, and cordoned it anew: our taint alone says nothing of that."""
    ours = {"key": TAINT, "value": "true", "effect": "NoSchedule"}

    with pytest.raises(EngineError, match="stays so"):
        KubernetesNodes(MemoryNodes(_cordoned_by("kubectl-cordon", taints=[ours]))).resume("n1")
    KubernetesNodes(MemoryNodes(_cordoned_by("megascale-ops", taints=[ours]))).resume("n1")


def test_a_change_in_between_is_not_written_over() -> None:
    """The server refuses, the node is read again; one that never stands still is told of."""
    api = MemoryNodes(node("n1"))
    api.between = ["n1"]
    KubernetesNodes(api).drain("n1", "killed")
    assert [one for one in api.patched if not one[1]] == [("n1", False)]

    api = MemoryNodes(node("n1"))
    api.between = ["n1"] * 9
    with pytest.raises(EngineError, match="changed by others 5 times"):
        KubernetesNodes(api).drain("n1", "killed")


def test_a_condition_that_may_not_be_set_leaves_the_node_out() -> None:
    """It is the least of the three marks; the words say that it is missing, and why."""

    class NoStatus(MemoryNodes):
        def patch(self, name: str, body: dict[str, Any], *, is_status: bool = False) -> dict[str, Any]:
            if is_status:
                raise RightsError("no right")
            return super().patch(name, body)

    api = NoStatus(node("n1"))

    assert KubernetesNodes(api).drain("n1", "killed").endswith("killed; its condition is not set: no right")
    assert not KubernetesNodes(api).states()["n1"].is_usable


def test_a_false_name_is_said_to_be_none() -> None:
    """And a node that nobody has put out has nothing to take back."""
    with pytest.raises(EngineError, match="no node n9"):
        KubernetesNodes(MemoryNodes(node("n1"))).drain("n9.example", "killed")
    assert "nothing to resume" in KubernetesNodes(MemoryNodes(node("n1"))).resume("n1")


@pytest.mark.parametrize(
    ("taint", "is_usable"),
    [
        (GPU_TAINT, True),
        ({"key": "repair.example/xid", "effect": "NoExecute"}, False),
        ({"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}, False),
        ({"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"}, False),
        ({"key": "spot", "effect": "PreferNoSchedule"}, True),
    ],
)
def test_which_taints_put_a_node_out(taint: dict[str, str], is_usable: bool) -> None:
    """Kubernetes' own, and any that ends pods; not what nodes with GPUs have for life."""
    assert read_node(node("n1", taints=[taint])).is_usable is is_usable


def test_a_node_that_is_not_ready_is_out() -> None:
    """With the kubelet's words; one without conditions, too."""
    one = node("n1")
    one["status"]["conditions"][0] |= {"status": "Unknown", "message": "Kubelet stopped posting node status."}

    assert read_node(one) == ("n1", "not ready", False, "Kubelet stopped posting node status.", "")
    assert not read_node({"metadata": {"name": "n2"}}).is_usable


def test_a_refusal_names_the_rule_that_lacks() -> None:
    """And who lacks it; what is no Status object is quoted."""
    said = '{"message": "nodes \\"n1\\" is forbidden: User \\"system:serviceaccount:a:b\\" cannot patch resource"}'

    assert refusal(403, said, "patch", "nodes/status") == (
        "the API server does not let system:serviceaccount:a:b patch nodes/status: its ClusterRole lacks the rule "
        '{apiGroups: [""], resources: [nodes/status], verbs: [patch]}'
    )
    assert refusal(502, "<html>bad gateway", "get", "nodes").endswith("refused to get nodes (502): <html>bad gateway")
    assert refusal(500, "[]", "get", "nodes").endswith("(500): []")
