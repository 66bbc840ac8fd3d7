# SPDX-License-Identifier: Apache-2.0
"""Ask the policy, journal its decisions, and do what can be done without ending the round.

Here is gathered what a question needs, every decision gets into the journal with its inputs, hangs that are not acted
upon are left alone, and a person's changes of the policy are taken in. Warnings are ``weighing``'s; what ends a round
and forms the next is the driver's.
"""

import logging
from collections.abc import Iterable, Mapping

import msgspec

from megascale_ops.controller.job import diagnose, incidents
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.round import Answer
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.policy import ski_rental
from megascale_ops.controller.policy.actions import silent_place
from megascale_ops.controller.policy.answer import answer
from megascale_ops.controller.policy.decision import (
    Decision,
    Failure,
    Question,
    Restart,
    StateFailure,
    Tab,
    blamed_node,
    remembered,
    to_event,
    would,
)
from megascale_ops.controller.policy.eviction import evict, is_evicted
from megascale_ops.controller.record.job_record import LeftAlone
from megascale_ops.controller.record.state_machine import ACTIVE, EventKind, State
from megascale_ops.controller.recovery import checks
from megascale_ops.diagnosis.hangs import habits
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import PolicyView
from megascale_ops.schema.policy_settings import apply_settings, check_settings, differences, merge_settings
from megascale_ops.schema.wording import duration

log = logging.getLogger(__name__)
_replace = msgspec.structs.replace

# 60 s, doubled each time: how long a hang that the policy leaves alone is not looked at again.
LOOK_AGAIN_S = 60.0
# 60 s: a script without a black box, or with steps that only count from its start, has done something in so long.
LIVED_S = 60.0
# Half as many steps again as any round before: where a rank dies by chance, some rounds get a few further than others.
CLEARLY_MORE = 1.5
# 2,400: an hour of restarts that take 1.5 s each, the most that a budget can count; older ones are counted by cause.
MOST_RESTARTS = 2400
_LEFT_ALONE = {
    State.RUNNING: EventKind.LEFT_ALONE,
    State.DEGRADED: EventKind.LEFT_ALONE_SHORT,
    State.CATCHING_UP: EventKind.LEFT_ALONE_EARLY,
}


def ask(
    transitions: Transitions,
    job: Job,
    kind: str,
    verdict: Verdict,
    *,
    failure: Failure | None = None,
    state_failure: StateFailure | None = None,
    tab: Tab | None = None,
) -> tuple[Question, Decision]:
    """Return what is known, as one question, and the answer to it."""
    record, wall_s = job.record, transitions.wall()
    member = job.member(blamed_node(verdict))
    restarts, older = remembered(record.restarts, wall_s)
    question = Question(
        kind=kind,
        wall_s=wall_s,
        verdict=_replace(verdict, evidence=()),
        policy=record.policy,
        restarts=restarts,
        older=older,
        restarts_in_all=record.restarts_in_all,
        evictions=record.evictions,
        failure=failure,
        failure_before=record.failure if failure is not None else None,
        progressed=_has_progressed(job, wall_s),
        counts_anew=not _counts_absolutely(job),
        members=len(record.members),
        min_nodes=record.min_nodes,
        share=member.nproc / record.world_size if member is not None else 0.0,
        spares=len(spares(transitions, job)),
        tab=tab,
        prices_s=record.prices_s,
        start_s=record.start_s,
        since_saved_s=job.round.since_saved_s(wall_s),
        cut_before=_cut_before(job),
        state_failure=state_failure,
        state_failure_before=record.state_failure if state_failure is not None else None,
        restore_before=record.restore_before,
        first_node=record.members[0].node if record.members else "",
    )
    return question, answer(question)


def report_decision(job: Job, question: Question, decision: Decision, incident: str) -> None:
    """Write a decision into the journal, with all of its inputs."""
    event = to_event(question, decision, job=job.name, round_=job.record.round, incident=incident)
    job.unsaved.events.append(event)
    extra = {"job": job.name, "node": event.node, "rank": event.rank, "incident": incident}
    log.info("%s: decided about %s: %s", job.name, decision.fault, event.text, extra=extra)


def spares(transitions: Transitions, job: Job) -> list[str]:
    """Return the nodes that wait for a place and are welcome to it."""
    wall_s, now_s = transitions.wall(), transitions.clock()
    return [
        node
        for node in diagnose.joined(job, now_s)
        if job.member(node) is None
        and is_evicted(job.record.evictions, node, wall_s) is None
        and not transitions.registry.why_withheld(node)
        and not transitions.nodes.book.is_barred(node)
        and not checks.is_wanted(transitions, job, node)
    ]


def unwelcome(transitions: Transitions, job: Job, joined: Iterable[str]) -> list[str]:
    """Return the nodes that are left out while others suffice: evicted ones, and those that the engine has out."""
    out = evicted(job, transitions.wall())
    return out + [node for node in joined if node not in out and transitions.registry.why_withheld(node)]


def evicted(job: Job, wall_s: float) -> list[str]:
    """Return the nodes that are kept out now."""
    return [one.node for one in job.record.evictions if one.until_wall_s > wall_s]


def why_out(transitions: Transitions, job: Job, node: str, wall_s: float) -> str:
    """Return why a runner waits outside of a round, for its log; "" where that is nothing special."""
    if job.state is State.REPLACING and job.record.due_wall_s > wall_s:
        left_s = job.record.due_wall_s - wall_s
        ended = job.record.ended_verdict
        why = f"{ended.reason}: " if ended is not None else ""
        most = f"ends after {duration(job.record.policy.service_patience_s)} of it (--policy service_patience_s)"
        return f"{why}job {job.name} waits {left_s:.0f} s for a service that its script needs, tries again, and {most}"
    barred = transitions.nodes.why_barred(node)
    if barred and job.member(node) is None and job.state in (*ACTIVE, State.REPLACING):
        return f"job {job.name} goes on without {node}: {barred}"
    if job.state not in ACTIVE or job.member(node) is not None:
        return ""
    out = is_evicted(job.record.evictions, node, wall_s)
    if out is None:
        return f"job {job.name} runs without {node}, which waits as a spare"
    left_s = out.until_wall_s - wall_s
    return f"{node} is evicted for another {left_s:.0f} s and waits as a spare: {out.reason}"


def after(job: Job, verdict: Verdict, decision: Decision, wall_s: float) -> dict[str, object]:
    """Return what a restart changes in the job's record."""
    record = job.record
    due_wall_s = wall_s + decision.wait_s if decision.wait_s else 0.0
    changes: dict[str, object] = {"decided": None, "left_alone": None, "due_wall_s": due_wall_s}
    if decision.counted:
        progressed, place = _has_progressed(job, wall_s), silent_place(verdict)
        node, away = blamed_node(verdict), (decision.wait_s, decision.outage_wall_s)
        restart = Restart(wall_s, verdict.fault, node, progressed, place, *away)
        changes["restarts"] = (*record.restarts, restart)[-MOST_RESTARTS:]
        cause = restart.cause or "unknown"
        changes["restarted"] = record.restarted | {cause: record.restarted.get(cause, 0) + 1}
    if decision.restore_before >= 0:
        changes["restore_before"] = decision.restore_before
    if decision.nodes:
        changes["evictions"] = evict(record.evictions, decision.nodes, record.policy, wall_s, verdict.reason)
    return changes


def _cut_before(job: Job) -> tuple[str, ...]:
    """Return the nodes that a cut network had ended the round before for, if no step was made since."""
    ended = job.record.ended_verdict
    return ended.nodes if ended is not None and ended.fault == "link_cut" and job.round.reached_step < 0 else ()


def _has_progressed(job: Job, wall_s: float) -> bool:
    """Return whether the round has made a step that none had made before."""
    record, step = job.record, job.round.reached_step
    if not record.had_boxes and step < 0:
        return wall_s - job.round.formed_wall_s >= LIVED_S
    if _counts_absolutely(job):
        return step > record.best_step
    further = step >= 0 and step + 1 >= CLEARLY_MORE * (record.best_step + 1)
    return further or _has_lived(job)


def _has_lived(job: Job) -> bool:
    """Return whether the round's steps took longer than a restart costs, so that their result may have been saved.

    A script that counts from each start anew may well go on where it was.
    """
    return job.round.covered_s >= max(LIVED_S, ski_rental.usual_price_s(job.record.prices_s, job.record.policy))


# Hangs that are not acted upon.


def leave_alone(transitions: Transitions, job: Job) -> bool:
    """Leave the suspects as they are if the policy decides so, or in a dry run; return whether that was done."""
    verdict, incident = job.record.verdict, job.incident
    if verdict is None or incident is None:
        return False
    question, decision = ask(transitions, job, "hang", verdict)
    if decision.acts:
        return False
    report_decision(job, question, decision, incident.id)
    text = would(decision) if decision.dry_run else f"nothing was done: {decision.reason}"
    judged = incidents.judge(incident, _replace(verdict, action="none" if decision.dry_run else decision.action))
    transitions.put_incident(job, incidents.close(judged, "harmless", text))
    transitions.withdraw(job, job.suspects.evidence_wanted)
    before = job.record.left_alone
    again_s = 0.0 if decision.dry_run else 2.0 * before.again_s if before is not None else LOOK_AGAIN_S
    known = LeftAlone(incident.id, transitions.wall(), again_s, verdict.place, job.suspects.age_s)
    event = _LEFT_ALONE.get(State(job.record.before or State.RUNNING), EventKind.LEFT_ALONE)
    transitions.move(job, event, text, verdict=None, before="", incident="", left_alone=known)
    return True


def is_left_alone(transitions: Transitions, job: Job, now_s: float) -> bool:
    """Return whether the job hangs in a way that is known and not acted upon; note when it moves again."""
    known = job.record.left_alone
    if known is None:
        return False
    if diagnose.is_blind(transitions.registry, job, now_s):
        return True
    wall_s, registry = transitions.wall(), transitions.registry
    since_s = wall_s - known.wall_s
    suspicion = diagnose.judge_silence(registry, job, now_s, wall_s)
    if suspicion is None and diagnose.has_moved(registry, job, now_s):
        transitions.note(job, "moved_again", f"{known.incident}: it moved again by itself after {since_s:.1f} s")
        learned = habits.learned(job.record.habits, known.place, known.silent_s + since_s)
        job.change(left_alone=None, habits=learned)
        return False
    if 0 < known.again_s <= since_s:
        job.round.silence.odd = True
        return False
    return True


def leave_offer(transitions: Transitions, job: Job, verdict: Verdict) -> bool:
    """Leave out a node that could be taken in if the policy decides so; return whether that was done."""
    question, decision = ask(transitions, job, "hang", verdict)
    if decision.acts:
        return False
    told = verdict.nodes, answer_to(job, decision)
    if job.round.offer_told != told:
        job.round.offer_told = told
        report_decision(job, question, decision, "")
    return True


# What people change while the job lives.


def set_policy(transitions: Transitions, job: Job, settings: Mapping[str, str]) -> PolicyView:
    """Change the policy of a job that lives; over all its rounds, until its name is started anew.

    Raises:
        UsageError: an unknown name or a value that can't be; nothing was changed.
    """
    checked = check_settings(settings)
    record = job.record
    launched = record.launch_policy or record.policy
    tuned = merge_settings(record.tuned, checked)
    policy = apply_settings(launched, tuned)
    changed = [f"{one.name} from {one.before} to {one.after}" for one in differences(record.policy, policy)]
    job.change(policy=policy, launch_policy=launched, tuned=tuned)
    if (policy.dry_run, policy.actions) != (record.policy.dry_run, record.policy.actions):
        job.change(left_alone=None)  # it may be acted upon now
    job.round.silence.odd = True  # what is known is judged anew
    transitions.note(job, "policy_set", "; ".join(changed) or "nothing that was not so before")
    transitions.save(job)
    return show_policy(job, transitions.wall())


def show_policy(job: Job, wall_s: float) -> PolicyView:
    """Return the policy that a job lives under."""
    record = job.record
    evicted = {one.node: one.until_wall_s - wall_s for one in record.evictions if one.until_wall_s > wall_s}
    return PolicyView(job.name, record.policy, record.tuned, evicted, record.prices_s)


def answer_to(job: Job, decision: Decision) -> Answer:
    """Return the part of a decision that is published once, and again when another policy holds."""
    return Answer(decision.action, decision.rule, decision.dry_run, job.record.policy)


def _counts_absolutely(job: Job) -> bool:
    """Return whether steps are the script's own numbers: declared, or a rank ended further than it had stepped."""
    ends = [one.exit for one in job.round.exits.values()]
    return job.record.steps_are_absolute or any(end.step >= end.steps_seen > 0 for end in ends)
