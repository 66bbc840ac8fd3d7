# SPDX-License-Identifier: Apache-2.0
"""While ranks step: has a rank fallen silent, do the suspects move again, and what does the evidence show?

One function for each state in which a round lives, which looks whether the state can be left.
"""

from collections.abc import Sequence

import msgspec

from megascale_ops.controller.job import diagnose, incidents
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.record.state_machine import EventKind, State
from megascale_ops.controller.recovery import checks, confirming, decide, weighing
from megascale_ops.controller.recovery.confirming import harmless, is_left_running
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import Order

_MOVED = {
    State.RUNNING: EventKind.MOVED,
    State.DEGRADED: EventKind.MOVED_SHORT,
    State.CATCHING_UP: EventKind.MOVED_EARLY,
}


def from_running(transitions: Transitions, job: Job, now_s: float) -> bool:
    """Has a rank fallen silent, or is a warning worth a restart by now?"""
    if job.waiting:  # spares in doubt measure themselves while no round waits for them
        checks.begin(transitions, job, diagnose.joined(job, now_s), now_s)
    return watch(transitions, job, now_s) or weighing.weigh_warnings(transitions, job, now_s)


def watch(transitions: Transitions, job: Job, now_s: float) -> bool:
    """Has a rank fallen silent that is not a known suspect?"""
    if decide.is_left_alone(transitions, job, now_s) or not job.round.silence.odd:
        return False
    suspicion = diagnose.judge_silence(transitions.registry, job, now_s, transitions.wall())
    if suspicion is None:
        return False
    transitions.move(job, EventKind.SILENCE, suspicion.verdict.reason, before=job.record.state)
    return True


def from_degraded(transitions: Transitions, job: Job, now_s: float) -> bool:
    """As running; and is there a node more?"""
    if from_running(transitions, job, now_s):
        return True
    offered = decide.spares(transitions, job)
    if not offered:
        return False
    verdict = Verdict(
        fault="membership",
        reason=f"{', '.join(offered)} can join {len(job.record.members)} nodes of {job.record.max_nodes}",
        confidence=1.0,
        nodes=tuple(offered),
        since_wall_s=transitions.wall(),
        since_step=job.round.step,
        round=job.record.round,
    )
    if decide.leave_offer(transitions, job, verdict):
        return False
    transitions.open_incident(job, verdict, detected=transitions.wall())
    transitions.mark(job, "ordered")
    transitions.move(job, EventKind.NODE_OFFERED, verdict.reason, verdict=verdict)
    return True


def from_suspect(transitions: Transitions, job: Job, now_s: float) -> bool:
    """Does it move again, or is patience used up?"""
    if diagnose.is_blind(transitions.registry, job, now_s):
        return False
    suspicion = diagnose.judge_silence(transitions.registry, job, now_s, transitions.wall())
    if suspicion is None and diagnose.has_moved(transitions.registry, job, now_s):
        _moved(transitions, job, "the suspects move again")
        return True
    return suspicion is not None and confirming.begin(transitions, job, suspicion)


def from_confirming(transitions: Transitions, job: Job, now_s: float) -> bool:
    """Is the evidence in (or its time over) and what does it show, or was it a false alarm?"""
    if diagnose.is_blind(transitions.registry, job, now_s):
        return False
    suspicion = diagnose.judge_silence(transitions.registry, job, now_s, transitions.wall())
    if suspicion is None and diagnose.has_moved(transitions.registry, job, now_s):
        return _end_harmless(transitions, job, job.record.verdict, now_s)
    if (missing := confirming.unanswered(transitions, job, now_s)) is None:
        return False
    verdict = confirming.weigh(transitions, job, suspicion, now_s) if suspicion is not None else job.record.verdict
    if verdict is None:
        return False
    if is_left_running(job, verdict):
        return _end_harmless(transitions, job, verdict, now_s)
    _act_upon(transitions, job, verdict, missing)
    return True


def _act_upon(transitions: Transitions, job: Job, verdict: Verdict, missing: Sequence[Order]) -> None:
    """Stop the suspects, unless the policy leaves them alone."""
    verdict = diagnose.quote_hardware(transitions.registry, job, verdict)
    job.change(verdict=verdict)
    if decide.leave_alone(transitions, job):
        return
    transitions.mark(job, "ordered")
    text = f"evidence: {len(missing)} orders without answer" if missing else "all evidence is in"
    transitions.move(job, EventKind.EVIDENCE_COMPLETE, f"{text}: {verdict.reason}")


def _end_harmless(transitions: Transitions, job: Job, verdict: Verdict | None, now_s: float) -> bool:
    """The suspects are not stuck: go on as before, and remember how long they were silent."""
    if job.incident is not None:
        confirming.learn(job)
        told = msgspec.structs.replace(job.incident, done="")  # what was about to happen did not
        have_left = diagnose.have_left(transitions.registry, job, told.verdict, now_s)
        transitions.put_incident(job, incidents.close(told, "harmless", harmless(verdict, have_left=have_left)))
    transitions.withdraw(job, job.suspects.evidence_wanted)
    text = "the suspects are slow" if verdict is not None and verdict.fault == "slow" else "the suspects moved again"
    _moved(transitions, job, f"a false alarm: {text} while evidence was gathered", incident="")
    return True


def _moved(transitions: Transitions, job: Job, text: str, **changes: object) -> None:
    event = _MOVED.get(State(job.record.before or State.RUNNING), EventKind.MOVED)
    transitions.move(job, event, text, verdict=None, before="", **changes)
