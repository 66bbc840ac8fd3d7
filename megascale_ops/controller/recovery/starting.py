# SPDX-License-Identifier: Apache-2.0
"""From nodes that wait to ranks that step: form a round, see its ranks come up, and let them catch up.

One function for each state in which a round begins, which looks whether the state can be left.
"""

from collections.abc import Iterable

import msgspec

from megascale_ops.controller.job import diagnose, incidents, round_progress, terms
from megascale_ops.controller.job.diagnose import SCAN_EACH_RANK_S
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.owed_checks import are_awaited
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.policy import ski_rental
from megascale_ops.controller.record.job_record import EVICTED_CODE, Member
from megascale_ops.controller.record.state_machine import EventKind
from megascale_ops.controller.recovery import checks, decide, running, stopping
from megascale_ops.controller.recovery.formation import form
from megascale_ops.diagnosis.rank_view import RankView

# 5 s: a node whose agent has never sent can't report that its ranks are up; its runner's polls must do.
NO_AGENT_S = 5.0
# 3 s after all processes are up without a black box among them: it is no torch script, there is nothing to wait for.
NO_BOX_S = 3.0


def from_replacing(transitions: Transitions, job: Job, now_s: float) -> bool:
    """Can a round be formed?"""
    if _is_paused(transitions, job, now_s) or not diagnose.may_scan_nodes(job, now_s):
        return False
    record = job.record
    joined = diagnose.joined(job, now_s)
    checks.owe(transitions, job, now_s)
    checks.begin(transitions, job, joined, now_s)
    welcome = checks.without_barred(transitions, job, joined)
    before = [node for node in job.nodes if node not in job.round.left]
    formation = form(
        welcome,
        min_nodes=record.min_nodes,
        max_nodes=record.max_nodes,
        before=before,
        alive=[
            node for node in before if node not in welcome and diagnose.is_alive(transitions.registry, job, node, now_s)
        ],
        now_s=now_s,
        waiting_since_s=job.entered_s,
        last_call_s=record.policy.last_call_s,
        straggler_s=record.policy.node_lost_s,
        evicted=[*decide.unwelcome(transitions, job, joined), *filter(transitions.nodes.book.is_barred, before)],
        asked={node: one.join.node_rank for node, one in job.waiting.items() if one.join.node_rank >= 0},
    )
    if checks.are_awaited(job, now_s, is_full=len(formation.nodes) >= record.max_nodes):
        return False
    if formation.nodes:
        if are_awaited(job.owed_checks.values(), joined, decide.evicted(job, transitions.wall()), now_s):
            return False
        _form(transitions, job, formation.nodes, formation.reason)
        return True
    succeeded = [node for node, leave in job.round.left.items() if leave.outcome == "succeeded"]
    hopeless = bool(succeeded) and not any(
        diagnose.is_alive(transitions.registry, job, node, now_s) for node in before if node not in joined
    )
    checks.tell_out(transitions, job, joined, formation.reason)
    waited_s = now_s - max(job.entered_s, job.pause_ends_s)
    if waited_s < record.policy.join_timeout_s and not hopeless:
        return False
    if not joined and not hopeless and _is_evicted(job):
        text = f"its engine has taken all of its nodes away and has given it no others for {waited_s:.0f} s"
        stopping.end(transitions, job, EventKind.CANCELLED, text, EVICTED_CODE)
    else:
        text = f"{formation.reason} after {waited_s:.0f} s{checks.why_barred(transitions, joined)}"
        if hopeless:
            text = f"{', '.join(succeeded)} finished and left, and {formation.reason}"
        if job.incident is not None:
            transitions.put_incident(job, incidents.close(job.incident, "ended", text))
        transitions.move(job, EventKind.TIMED_OUT, text, reason=text, exit_code=1, incident="")
    return True


def _is_paused(transitions: Transitions, job: Job, now_s: float) -> bool:
    """Return whether a service is waited for; the time to gather nodes begins after that."""
    left_s = job.record.due_wall_s - transitions.wall()
    if left_s > 0:
        job.pause_ends_s = now_s + left_s
    return left_s > 0


def _is_evicted(job: Job) -> bool:
    """Return whether the round before has ended since its engine took nodes away: Kueue has suspended it, say."""
    ended = job.record.ended_verdict
    return ended is not None and ended.fault == "engine_eviction"


def _form(transitions: Transitions, job: Job, nodes: tuple[str, ...], why: str) -> None:
    """Begin a round of these nodes, in this order."""
    joins = [job.waiting.pop(node).join for node in nodes]
    checks.end(transitions, job)
    members = tuple(
        Member(join.node, join.runner_id, join.join_id, join.nproc, join.addr, join.store_port) for join in joins
    )
    # What the round that ends now has left may still be preserved; agents have none of the rounds before it.
    void = {order.id for order in job.orders.values() if order.kind != "preserve" or order.round < job.record.round}
    transitions.withdraw(job, void)
    _note_start(job, job.round.steps_began_wall_s)  # of a round whose black boxes came late
    best = max(job.record.best_step, job.record.furthest, job.round.reached_step)
    transitions.mark(job, "formed")
    # Numbers that agents or runners have seen are not given again, whatever the journal has lost.
    number = max(job.record.round, job.heard_round) + 1
    text = f"round {number} on {', '.join(nodes[:8])}{'...' if len(nodes) > 8 else ''}: {why}"
    transitions.move(
        job,
        EventKind.NODES_READY,
        text,
        round=number,
        members=members,
        launch_policy=terms.launched_with(job),
        left_alone=None,
        run_dir=job.record.run_dir or joins[0].run_dir,
        best_step=best,
        furthest=-1,
    )


def look_at_pace(job: Job, node: str, ranks: Iterable[RankView], wall_s: float) -> None:
    """Note how far a node is, from its heartbeat; needed only until the job has caught up."""
    job.round.paces[node] = round_progress.measure_pace(ranks, job.record.best_step, wall_s)


def from_restarting(transitions: Transitions, job: Job, now_s: float) -> bool:
    """Are all ranks up?"""
    record = job.record
    waited_s = now_s - job.entered_s
    if len(job.round.paces) < len(record.members) and waited_s < NO_AGENT_S:
        return False
    if not all(_is_up(transitions, job, member, now_s) for member in record.members):
        return False
    transitions.move(job, EventKind.RANKS_UP, f"all {record.world_size} ranks are up")
    return True


def _is_up(transitions: Transitions, job: Job, member: Member, now_s: float) -> bool:
    """Return whether a node's ranks are up: its agent reports so, or there is none and its runner polls."""
    known = job.round.paces.get(member.node)
    if known is not None and known.reported >= member.nproc:
        return True
    runner = job.runners.get(member.node)
    polls = runner is not None and runner.round == job.record.round
    return polls and not transitions.registry.agent_is_fresh(job.name, member.node, now_s)


def from_catching_up(transitions: Transitions, job: Job, now_s: float) -> bool:
    """Has every rank stepped, and as far as the round before?"""
    if running.watch(transitions, job, now_s):
        return True
    if now_s - job.round.scanned_s < job.record.world_size * SCAN_EACH_RANK_S:
        return False
    job.round.scanned_s = now_s
    now = round_progress.total(job.round.paces)
    if now.boxes == 0 and not job.record.had_boxes:
        if now_s - job.entered_s < NO_BOX_S:
            return False
        _recovered(transitions, job, transitions.wall(), "all ranks are up; no black box tells of their steps")
        return True
    return now.reported > 0 and has_stepped(transitions, job, now)


def has_stepped(transitions: Transitions, job: Job, now: round_progress.Pace) -> bool:
    """Note first steps, and leave catching up when every rank is as far as the round before."""
    if now.stepped < max(now.reported, job.record.world_size):
        return False
    transitions.mark(job, "stepped", now.first_step_wall_s)
    _note_start(job, now.first_step_wall_s)
    _account_resumed(transitions, job, now)
    if now.caught_up < now.stepped:
        return False
    job.change(had_boxes=True, step_s=now.step_s, steps_are_absolute=now.is_absolute)
    best = f" and have passed step {job.record.best_step}" if job.record.best_step >= 0 else ""
    _recovered(transitions, job, now.caught_up_wall_s, f"all {job.record.world_size} ranks step{best}")
    return True


def _note_start(job: Job, first_step_wall_s: float) -> None:
    """Note once what the start of this round took, so that the next one's can be predicted."""
    if job.round.has_started or not first_step_wall_s:
        return
    job.round.has_started = True
    if job.round.formed_wall_s and first_step_wall_s > job.round.formed_wall_s:
        job.change(start_s=first_step_wall_s - job.round.formed_wall_s)


def _account_resumed(transitions: Transitions, job: Job, now: round_progress.Pace) -> None:
    """Take the steps that must be made again out of the useful time; once for each incident."""
    if job.incident is None or job.incident.step_after >= 0 or not now.is_absolute:
        return
    lost = max(0, job.record.best_step - now.resumed_at + 1)
    job.change(useful_s=max(0.0, job.record.useful_s - lost * now.step_s), steps_are_absolute=True)
    transitions.put_incident(job, msgspec.structs.replace(job.incident, step_after=now.resumed_at))


def _recovered(transitions: Transitions, job: Job, wall_s: float, text: str) -> None:
    transitions.mark(job, "caught_up", wall_s)
    if job.incident is not None:
        price_s = ski_rental.price_of(job.incident, job.record.step_s)
        if price_s:
            job.change(prices_s=(*job.record.prices_s, price_s)[-ski_rental.MOST_PRICES :])
        transitions.put_incident(job, incidents.close(job.incident, "recovered"))
    short = len(job.record.members) < job.record.max_nodes
    transitions.move(job, EventKind.CAUGHT_UP_SHORT if short else EventKind.CAUGHT_UP, text, incident="")
