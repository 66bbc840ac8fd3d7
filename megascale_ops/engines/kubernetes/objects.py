# SPDX-License-Identifier: Apache-2.0
"""Node objects of Kubernetes as values, the patches that put one out of service and back, and refusals as sentences.

Three marks stand on a node that we have put out: it is cordoned (no new pod), it has a taint of ours (what Kueue and
other repair tools look for), and a condition says why. The taint says whose cordon it is: a taint's value holds 63
characters of few kinds, so the reason is an annotation and the condition's message.
"""

import json
from collections.abc import Mapping
from typing import Any

from megascale_ops.engines.actuator import PREFIX, EngineNode

Json = dict[str, Any]

TAINT = "megascale-ops/unhealthy"
REASON = "megascale-ops/reason"  # an annotation
CONDITION = "MegascaleOpsUnhealthy"
# Who changed a field, as the API server notes it.
MANAGER = "megascale-ops"
# What Kubernetes itself puts on a node that is not well, or that is cordoned.
_OF_KUBERNETES = "node.kubernetes.io/"
_SENTENCE = 300  # characters of a server's message


def read_node(node: Json) -> EngineNode:
    """Return how the cluster sees a node.

    Out are: a cordoned node, one with our taint, one that is not Ready, one with a taint of Kubernetes' own, and one
    with any taint that ends pods (NoExecute). Another's NoSchedule taint is none: nodes with GPUs have one for life.
    """
    spec, name = node.get("spec") or {}, str(node["metadata"]["name"])
    taints = spec.get("taints") or []
    words = ["cordoned"] if spec.get("unschedulable") else []
    ready = _condition(node, "Ready")
    if ready.get("status") != "True":
        words.append("not ready")
    words += [f"tainted {one['key']}" for one in taints if _puts_out(one)]
    if has_our_taint(node):
        by, reason = (
            MANAGER,
            str((node["metadata"].get("annotations") or {}).get(REASON) or PREFIX + "no reason is left"),
        )
        if not is_cordon_ours(node):
            by, reason = cordoned_by(node), ""
    else:
        by = cordoned_by(node) if spec.get("unschedulable") else ""
        reason = "" if ready.get("status") == "True" else str(ready.get("message") or ready.get("reason") or "")
    return EngineNode(name, ", ".join(words) or "ready", is_usable=not words, reason=reason, by=by)


def has_our_taint(node: Json) -> bool:
    """Return whether we have put this node out, and no user has taken that back."""
    return any(one["key"] == TAINT for one in (node.get("spec") or {}).get("taints") or [])


def is_cordon_ours(node: Json) -> bool:
    """Return whether no other program has cordoned the node since ours; our taint decides where none is noted."""
    is_cordoned = (node.get("spec") or {}).get("unschedulable")
    return has_our_taint(node) and (not is_cordoned or cordoned_by(node) in ("", MANAGER))


def cordoned_by(node: Json) -> str:
    """Return the program that has cordoned the node, as the server noted it, such as kubectl-cordon; "": not known."""
    for field in node["metadata"].get("managedFields") or []:
        if "f:unschedulable" in ((field.get("fieldsV1") or {}).get("f:spec") or {}):
            return str(field.get("manager") or "")
    return ""


def putting_out(node: Json, reason: str) -> Json:
    """Return the merge patch that cordons and taints a node; the server refuses it if the node has changed since."""
    taints = [*(node.get("spec") or {}).get("taints", []), {"key": TAINT, "value": "true", "effect": "NoSchedule"}]
    return {
        "metadata": {**_version(node), "annotations": {REASON: reason}},
        "spec": {"unschedulable": True, "taints": taints},
    }


def putting_back(node: Json) -> Json:
    """Return the merge patch that takes back what ``putting_out`` did, and leaves all else.

    The taint that Kubernetes adds to a cordoned node is left to it.
    """
    taints = [one for one in (node.get("spec") or {}).get("taints") or [] if one["key"] != TAINT]
    return {
        "metadata": {**_version(node), "annotations": {REASON: None}},
        "spec": {"unschedulable": None, "taints": taints or None},
    }


def condition(*, is_out: bool, reason: str, now: str) -> Json:
    """Return the patch of a node's status that says why it is out, or that it is not; other conditions stay.

    Args:
        is_out: Whether it is out.
        reason: Why, with the prefix.
        now: The time as RFC 3339 in UTC.
    """
    said = {
        "type": CONDITION,
        "status": "True" if is_out else "False",
        "reason": "VerdictPutItOut" if is_out else "TakenBack",
        "message": reason,
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }
    return {"status": {"conditions": [said]}}


def lacking_rule(verb: str, resource: str, group: str = "") -> str:
    """Return the rule of a role that allows a call; ``group``: the resource's, "" for Kubernetes' core."""
    group = group or '""'
    return f"{{apiGroups: [{group}], resources: [{resource}], verbs: [{verb}]}}"


def refusal(status: int, body: str, verb: str, resource: str, group: str = "", role: str = "ClusterRole") -> str:
    """Return what a refusal means, in one sentence.

    Args:
        status: HTTP's.
        body: The server's answer: a Status object as JSON, or anything that stands before a server.
        verb: What was asked for: get, list or patch.
        resource: Such as nodes or nodes/status.
        group: Its API group, "" for Kubernetes' core.
        role: The kind of role that would allow it.
    """
    said = _message(body)
    if status == 403:
        who = said.partition('User "')[2].partition('"')[0]
        return (
            f"the API server does not let {who or 'this account'} {verb} {resource}: its {role} lacks the rule "
            f"{lacking_rule(verb, resource, group)}"
        )
    if status == 401:
        return (
            "the API server does not know this token (401): a service account's is renewed by the kubelet in its file"
        )
    return f"the API server refused to {verb} {resource} ({status}){': ' if said else ''}{said}"


def _message(body: str) -> str:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        said = body
    text = said.get("message", "") if isinstance(said, dict) else said
    return " ".join(str(text).split())[:_SENTENCE]


def _puts_out(taint: Mapping[str, str]) -> bool:
    key, effect = taint["key"], taint.get("effect")
    if key == _OF_KUBERNETES + "unschedulable":
        return False  # the cordon says it
    return key == TAINT or effect == "NoExecute" or (key.startswith(_OF_KUBERNETES) and effect == "NoSchedule")


def _condition(node: Json, kind: str) -> Json:
    found = [one for one in (node.get("status") or {}).get("conditions") or [] if one.get("type") == kind]
    return dict(found[0]) if found else {}


def _version(node: Json) -> Json:
    version = node["metadata"].get("resourceVersion")
    return {"resourceVersion": version} if version else {}
