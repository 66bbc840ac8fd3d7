# SPDX-License-Identifier: Apache-2.0
"""What evidence means for a node: suspected the first time, out the second, and which verdicts blame a machine.

Pure: a life and an accusation with its time in, an event of the table out.
"""

from collections.abc import Container
from typing import NamedTuple

from megascale_ops.controller.nodes.life import NodeEvent, NodeState
from megascale_ops.diagnosis.hardware import SOURCE
from megascale_ops.schema.fault_classes import class_of
from megascale_ops.schema.health import NodeLife, Verdict

# 10 min: a finding of something that happened once stands for so long, and a burst of Xids is one fault.
SAME_S = 600.0
# Faults of a process that hardware may explain where a finding beside them names some; a script's exception or a full
# disk is none, whatever the agent finds wrong with the node as well.
_NOT_HARDWARE = frozenset(
    {"out_of_memory", "disk_full", "script_bug", "membership", "engine_eviction", "duplicate_rank"}
)
_NO_MACHINE = (f"{SOURCE}_oom_kill",)


class Accusation(NamedTuple):
    """Evidence against one node. ``wall_s``: when what it tells of happened."""

    node: str
    key: str  # a word for what it is
    wall_s: float
    text: str
    evidence: tuple[str, ...] = ()
    job: str = ""


def event_for(
    life: NodeLife, accusation: Accusation, wall_s: float, *, is_busy: bool, has_room: bool
) -> NodeEvent | None:
    """Return what an accusation does to a node; None: nothing, it is known, forgiven, or the node is out already.

    Args:
        life: the node's.
        accusation: against it.
        wall_s: now.
        is_busy: a round runs on it.
        has_room: the day's limit allows one more node to go.
    """
    if accusation.wall_s <= life.cleared_wall_s:
        return None
    if life.state == NodeState.HEALTHY:
        return NodeEvent.ACCUSED
    is_same = accusation.wall_s < life.accused_wall_s  # it tells of what came before, and is no second time
    is_same = is_same or (accusation.key == life.key and wall_s - life.accused_wall_s < SAME_S)
    if life.state not in (NodeState.SUSPECT, NodeState.BACK) or is_same:
        return None
    if not has_room:
        return NodeEvent.SPARED
    return NodeEvent.CONDEMNED_BUSY if is_busy else NodeEvent.CONDEMNED


def accusations_of(
    verdict: Verdict, wall_s: float, job: str, doubted: Container[tuple[str, str]]
) -> tuple[Accusation, ...]:
    """Return what the verdict that ended a round says against machines: by the hardware findings that it quotes.

    A rank that was killed, or fell over an exception, says nothing of its node by itself; with an Xid of the rank's
    own GPU beside it, it does. What the findings say of a node as a whole counts where the verdict blames that node.

    Args:
        verdict: with the findings that it quotes.
        wall_s: now.
        job: whose round it ended.
        doubted: node and name of the findings that put hardware in doubt; a script brings Xids about as well.
    """
    if verdict.fault in _NOT_HARDWARE:
        return ()
    found: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    for one in verdict.evidence:
        name = one.name.removeprefix(f"{SOURCE}_")
        if one.source != SOURCE or one.name in _NO_MACHINE or (one.node, name) not in doubted:
            continue
        if one.rank in verdict.culprits or (one.rank < 0 and one.node in verdict.nodes and is_machines(verdict.fault)):
            found.setdefault(one.node, []).append(one.text)
            names.setdefault(one.node, name)
    return tuple(
        Accusation(node, names[node], wall_s, f"{class_of(verdict.fault).name}: {texts[0]}", tuple(texts), job)
        for node, texts in found.items()
    )


def is_machines(fault: str) -> bool:
    """Return whether a class of fault is a machine's as a rule."""
    return class_of(fault).is_machines
