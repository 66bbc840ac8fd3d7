# SPDX-License-Identifier: Apache-2.0
"""Between two rounds: nodes that are in doubt measure themselves, side by side, before they may take part again.

A runner that waits for a round is told to check its node instead, and asks again with the result. What the result means
is the node's life (``controller.nodes``). A round is not held up by a check while it is full without that node; else it
waits, at most as long as a check may take. A runner that can't check (an older one, plain torchrun's) is not asked.
Nor is one whose node the agent measures at that moment: two checks would measure each other.

A GPU that did not come to its collective is measured, too, where all such are on one node: the kernel without an end
may be the script's own, so the node is no suspect, but to hang without an error is one way of a GPU to be bad.
"""

from collections.abc import Iterable, Mapping

from megascale_ops.controller.job import diagnose
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.node_checks import NodeChecks
from megascale_ops.controller.job.owed_checks import OwedCheck
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.nodes.life import CHECK_S, NodeState
from megascale_ops.controller.record.state_machine import ACTIVE
from megascale_ops.schema.fault_classes import class_of
from megascale_ops.schema.health import OUT
from megascale_ops.schema.messages import SELF_CHECK, Join

# 200 nodes at once, ten times a second: each is a move that is journaled, 0.3 ms of the loop.
_MOST_AT_ONCE = 200
_IN = (NodeState.HEALTHY, NodeState.SUSPECT, NodeState.BACK)


def owe(transitions: Transitions, job: Job, now_s: float) -> None:
    """Note a check of the GPU whose hang has ended the round, once; from what is journaled of it."""
    record = job.record
    verdict, incident = record.ended_verdict, record.ended_incident
    if verdict is None or not incident or incident in job.checks_noted:
        return
    job.checks_noted.add(incident)
    is_due = record.policy.check_suspects and class_of(verdict.fault).checks_gpu
    if not is_due or not verdict.culprits or len(set(verdict.nodes)) != 1:
        return
    node, rank = verdict.nodes[0], min(verdict.culprits)
    gpu = diagnose.gpu_of(transitions.registry, job, node, rank)
    owed = job.owed_checks[incident] = OwedCheck(incident, node, rank, gpu, now_s, hung=True)
    transitions.note(job, SELF_CHECK, f"{incident}: {owed.who} is checked before {node} goes on")
    transitions.save(job)


def begin(transitions: Transitions, job: Job, joined: Iterable[str], now_s: float) -> None:
    """Ask the runners of those nodes to measure them that must be measured before they take part.

    A node that the job has evicted is not asked while a round is on, nor while the others suffice for the next one: it
    would measure itself for a round that does not take it, and hear of the job's end when its controller may be gone.
    """
    joined, wall_s = list(joined), transitions.wall()
    out = {one.node for one in job.record.evictions if one.until_wall_s > wall_s}
    others = [node for node in joined if node not in out] if out else joined
    asked = others if job.state in ACTIVE or len(others) >= job.record.min_nodes else joined
    wanted = [
        node
        for node in _wanted(transitions, job, asked)
        if node not in job.checks.asked and node not in transitions.nodes.by_agent
    ]
    for node in wanted[:_MOST_AT_ONCE]:
        (job.checks.gpus_only.discard if _is_wanted_whole(transitions, job, node) else job.checks.gpus_only.add)(node)
        transitions.nodes.begin_check(node, _why(transitions, job, node), job.name)
        job.checks.asked[node] = now_s + CHECK_S
        transitions.mark(job, "checking")
        runner = job.runners.get(node)
        if runner is not None:
            runner.wake()


def is_wanted(transitions: Transitions, job: Job, node: str) -> bool:
    """Return whether a node in doubt would be measured before it takes part in a round."""
    if node in job.checks.accused:
        return False
    waiting = job.waiting.get(node)
    # A node that another job trains on is not measured: the two would disturb each other.
    can_check = waiting is not None and waiting.join.can_check and not transitions.nodes.runs_on(node)
    return can_check and job.record.policy.check_suspects and transitions.nodes.is_to_check(node)


def measures_itself(transitions: Transitions, job: Job, node: str) -> bool:
    """Return whether a node's runner measures it in this pause, or is about to: its agent need not."""
    if transitions.nodes.book.life(node).state == NodeState.UNDER_CHECK or node in job.checks.asked:
        return True
    return _is_wanted(transitions, job, node)


def _wanted(transitions: Transitions, job: Job, nodes: Iterable[str]) -> list[str]:
    """Return which of these nodes are to be measured before they take part in a round.

    Asked of all nodes that have joined, ten times a second while one measures itself: of thousands nearly none is in
    doubt, and what the book has nothing of is not looked at.
    """
    if not job.checks.wants_all:
        noted = {one.node for one in job.owed_checks.values()}.union(transitions.nodes.book.noted)
        nodes = [node for node in nodes if node in noted] if noted else ()
    return [node for node in nodes if _is_wanted(transitions, job, node)]


def _is_wanted(transitions: Transitions, job: Job, node: str) -> bool:
    return _is_wanted_whole(transitions, job, node) or (
        _hang_of(job, node) is not None and _can_check_now(transitions, job, node)
    )


def _is_wanted_whole(transitions: Transitions, job: Job, node: str) -> bool:
    """Return whether all of a node is to be measured, not its GPUs alone."""
    if is_wanted(transitions, job, node):
        return True
    return job.checks.wants_all and _can_check_now(transitions, job, node)


def _can_check_now(transitions: Transitions, job: Job, node: str) -> bool:
    """Return whether a node against which nothing speaks can be measured, and has not been in this pause."""
    waiting = job.waiting.get(node)
    if node in job.checks.done or waiting is None or not waiting.join.can_check or transitions.nodes.runs_on(node):
        return False
    return transitions.nodes.book.life(node).state in _IN


def _hang_of(job: Job, node: str) -> OwedCheck | None:
    """Return the check that a GPU of a node is owed since it did not come to its collective."""
    owed = (one for one in job.owed_checks.values() if one.hung and one.node == node)
    return next((one for one in owed if not one.begun and one.instead is None), None)


def _why(transitions: Transitions, job: Job, node: str) -> str:
    hang = _hang_of(job, node)
    if hang is not None and node in job.checks.gpus_only:
        return f"incident {hang.incident}: {hang.why}"
    life = transitions.nodes.book.life(node)
    if life.state == NodeState.HEALTHY:
        return f"job {job.name} lets all of its nodes measure themselves after a fault of hardware (check_all)"
    return life.reason


def take_result(transitions: Transitions, job: Job, join: Join) -> None:
    """Take in what a runner's check has shown; the same request may come twice."""
    if join.check is None:
        return
    move = transitions.nodes.end_check(join.node, join.check, job.name)
    if job.checks.asked.pop(join.node, None) is None and move is None:
        return
    job.checks.done.add(join.node)  # also where another controller had asked
    for owed in job.owed_checks.values():
        if owed.node == join.node and not owed.begun:
            owed.instead = join.check
    if not job.checks.asked:
        transitions.mark(job, "checked")


def are_awaited(job: Job, now_s: float, *, is_full: bool) -> str:
    """Return why a round is not formed yet, "" where no check holds it up; checks whose time is over are given up."""
    for node in [node for node, until_s in job.checks.asked.items() if until_s <= now_s]:
        del job.checks.asked[node]
        job.checks.done.add(node)
    if is_full or not job.checks.asked:
        return ""
    return f"{', '.join(sorted(job.checks.asked))} measures itself first"


def end(transitions: Transitions, job: Job) -> None:
    """A round is formed: the next one asks anew. What is still under check goes on, and may be a spare."""
    if job.incident is not None and job.incident.marks.checking:
        transitions.mark(job, "checked")
    job.checks = NodeChecks(job.checks.asked, job.checks.gpus_only & set(job.checks.asked))


def without_barred(transitions: Transitions, job: Job, joined: Mapping[str, float]) -> dict[str, float]:
    """Return those nodes that may be in a round: neither out, nor still to be measured."""
    book = transitions.nodes.book
    out = {*_wanted(transitions, job, joined), *filter(book.is_barred, book.noted)}
    return {node: since_s for node, since_s in joined.items() if node not in out}


def tell_out(transitions: Transitions, job: Job, joined: Iterable[str], reason: str) -> None:
    """Tell once that a round waits though nodes are there, since those are out; a check under way is told as such."""
    out = {one for one in joined if transitions.nodes.book.life(one).state in OUT}
    if out and out != job.checks.told_out:
        job.checks.told_out = out
        transitions.note(job, "nodes_out", f"{reason}{why_barred(transitions, sorted(out))}")
        transitions.save(job)


def why_barred(transitions: Transitions, nodes: Iterable[str]) -> str:
    """Return which of these nodes are kept out and why, as the end of a sentence; "" where none is."""
    said = [why for node in nodes if (why := transitions.nodes.why_barred(node))]
    return f"; {'; '.join(said[:4])}" if said else ""
