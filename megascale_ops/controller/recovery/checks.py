# SPDX-License-Identifier: Apache-2.0
"""Between two rounds: nodes that are in doubt measure themselves, side by side, before they may take part again.

A runner that waits for a round is told to check its node instead, and asks again with the result. What the result means
is the node's life (``controller.nodes``). A round is not held up by a check while it is full without that node; else it
waits, at most as long as a check may take. A runner that can't check (an older one, plain torchrun's) is not asked.
Nor is one whose node the agent measures at that moment: two checks would measure each other.
"""

from collections.abc import Iterable, Mapping
from itertools import islice

from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.node_checks import NodeChecks
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.nodes.life import CHECK_S, NodeState
from megascale_ops.controller.policy.eviction import is_evicted
from megascale_ops.controller.record.state_machine import ACTIVE
from megascale_ops.schema.health import OUT
from megascale_ops.schema.messages import Join

# 200 nodes at once, ten times a second: each is a move that is journaled, 0.3 ms of the loop.
_MOST_AT_ONCE = 200
_IN = (NodeState.HEALTHY, NodeState.SUSPECT, NodeState.BACK)


def begin(transitions: Transitions, job: Job, joined: Iterable[str], now_s: float) -> None:
    """Ask the runners of those nodes to measure them that must be measured before they take part.

    A node that the job has evicted is not asked while a round is on, nor while the others suffice for the next one: it
    would measure itself for a round that does not take it, and hear of the job's end when its controller may be gone.
    """
    joined, wall_s = list(joined), transitions.wall()
    others = [node for node in joined if is_evicted(job.record.evictions, node, wall_s) is None]
    asked = others if job.state in ACTIVE or len(others) >= job.record.min_nodes else joined
    wanted = (
        node
        for node in asked
        if node not in job.checks.asked
        and node not in transitions.nodes.by_agent
        and _is_wanted(transitions, job, node)
    )
    for node in list(islice(wanted, _MOST_AT_ONCE)):
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


def _is_wanted(transitions: Transitions, job: Job, node: str) -> bool:
    if is_wanted(transitions, job, node):
        return True
    waiting = job.waiting.get(node)
    if not job.checks.wants_all or node in job.checks.done or waiting is None or not waiting.join.can_check:
        return False
    if transitions.nodes.runs_on(node):
        return False
    return transitions.nodes.book.life(node).state in _IN


def _why(transitions: Transitions, job: Job, node: str) -> str:
    life = transitions.nodes.book.life(node)
    if life.state == NodeState.HEALTHY:
        return f"job {job.name} lets all of its nodes measure themselves after a fault of hardware (check_all)"
    return life.reason


def take_result(transitions: Transitions, job: Job, join: Join) -> None:
    """Take in what a runner's check has shown; the same request may come twice."""
    if join.check is None:
        return
    transitions.nodes.end_check(join.node, join.check, job.name)
    if job.checks.asked.pop(join.node, None) is not None:
        job.checks.done.add(join.node)
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
    job.checks = NodeChecks(job.checks.asked)


def without_barred(transitions: Transitions, job: Job, joined: Mapping[str, float]) -> dict[str, float]:
    """Return those nodes that may be in a round: neither out, nor still to be measured."""
    return {
        node: since_s
        for node, since_s in joined.items()
        if not transitions.nodes.book.is_barred(node) and not _is_wanted(transitions, job, node)
    }


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
