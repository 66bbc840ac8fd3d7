# SPDX-License-Identifier: Apache-2.0
"""When does a job go on without a node, and for how long?

A node that kills ranks again and again costs a restart each time; a restart without it costs one more and then none.
But a node is only let go when the others suffice: a spare takes its place, or the job is elastic and may shrink. It is
not taken back at once, and each time later than the time before, or a flaky node would come and go for ever.

Pure: a question with its time in, a value and a reason out.
"""

from collections.abc import Iterable
from typing import NamedTuple

from megascale_ops.controller.policy.decision import HOUR_S, Eviction, Question, Restart, blamed_node
from megascale_ops.schema.fault_classes import class_of
from megascale_ops.schema.policy import JobPolicy

TWICE = 2
# A day: longer than any repair without an operator.
LONGEST_S = 86_400.0
# 100 evictions: at two an hour, two days; older ones no longer double anything.
MOST_EVICTIONS = 100


class Room(NamedTuple):
    """Whether a node can be spared, by what it is replaced (spare, shrink, or "" when it can't be) and why."""

    by: str
    why: str


def is_evicted(evictions: Iterable[Eviction], node: str, wall_s: float) -> Eviction | None:
    """Return the eviction that keeps ``node`` out now, or None."""
    return next((one for one in evictions if one.node == node and one.until_wall_s > wall_s), None)


def evict(
    evictions: tuple[Eviction, ...], nodes: Iterable[str], policy: JobPolicy, wall_s: float, reason: str
) -> tuple[Eviction, ...]:
    """Return the evictions with ``nodes`` among them; each time out lasts twice as long as the node's last one."""
    for node in nodes:
        times = sum(one.node == node for one in evictions)
        length_s = min(LONGEST_S, policy.eviction_s * 2.0 ** min(times, 20))
        evictions = (*evictions, Eviction(node, wall_s, wall_s + length_s, reason))
    return evictions[-MOST_EVICTIONS:]


def find_room(question: Question, node: str = "") -> Room:
    """Return whether the job can go on without a node; without a name, the one that the verdict blames."""
    node = node or blamed_node(question.verdict)
    if not node:
        return Room("", "no single node is to blame")
    policy = question.policy
    recent = sum(question.wall_s - one.wall_s < HOUR_S for one in question.evictions)
    if recent >= policy.evictions_per_hour:
        return Room("", f"{recent} evictions in the last hour use up the budget of {policy.evictions_per_hour} an hour")
    if question.spares:
        return Room("spare", f"{question.spares} spare {_nodes(question.spares)} for {node}'s place")
    left = question.members - 1
    if left >= max(1, question.min_nodes):
        return Room("shrink", f"{left} of {question.members} nodes go on, at least {question.min_nodes} are needed")
    if question.members == 1:
        return Room("", f"{node} is the only node, and no spare waits")
    return Room("", f"no spare waits, and {left} nodes without {node} are fewer than the {question.min_nodes} needed")


def repeated(question: Question) -> str:
    """Return the sentence that blames the machine, or "": the same node again, and no other."""
    verdict = question.verdict
    node = blamed_node(verdict)
    if not class_of(verdict.fault).is_machines or not node:
        return ""
    recent: list[Restart] = [
        one for one in question.restarts if question.wall_s - one.wall_s < HOUR_S and class_of(one.cause).is_machines
    ]
    here = [one.cause for one in recent if one.node == node]
    elsewhere = len(recent) - len(here)
    for name, times in question.older.items():
        cause, _, where = name.partition("@")
        if class_of(cause).is_machines:
            here += [cause] * times if where == node else []
            elsewhere += times if where != node else 0
    if len(here) + 1 < TWICE or elsewhere:
        return ""
    causes = ", ".join(dict.fromkeys([*here, verdict.fault]))
    return f"{len(here) + 1} faults of {node} within an hour ({causes}) and none of another node speak for the machine"


class Lasting(NamedTuple):
    """A cut that a restart did not mend: the node to go on without, "" where there is none, and why."""

    node: str
    why: str


def still_cut(question: Question) -> Lasting:
    """Return the node to go on without when the same nodes can't reach each other in two rounds without a step between.

    The one that the evidence names; if it fits two, the one that does not hold rank 0: what belongs to
    rank 0 alone (logs, a page, files beside it) stays where it is, and the round keeps its store.
    """
    verdict = question.verdict
    if verdict.fault != "link_cut":
        return Lasting("", "")
    again = sorted({*verdict.nodes} & {*question.cut_before})
    if not again:
        return Lasting("", "")
    lead = f"{', '.join(again)} could not be reached in the round before either, and a restart did not help"
    if len(again) == 1:
        return Lasting(again[0], lead)
    node = next(one for one in reversed(again) if one != question.first_node)
    return Lasting(node, f"{lead}; of several it is {node} that goes, which does not hold rank 0")


def _nodes(number: int) -> str:
    return "node waits" if number == 1 else "nodes wait"
