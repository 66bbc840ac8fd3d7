# SPDX-License-Identifier: Apache-2.0
"""While ranks step: has a rank fallen silent, do the suspects move again, and what does the evidence show?

One function for each state in which a round lives, which looks whether the state can be left.
"""

from collections.abc import Sequence

import msgspec

from megascale_ops.controller.job import incidents
from megascale_ops.controller.job.diagnose import Observations
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.record.state_machine import EventKind, State
from megascale_ops.controller.recovery.confirming import Confirming, harmless, is_left_running
from megascale_ops.controller.recovery.decide import Decider
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import Order

_MOVED = {
    State.RUNNING: EventKind.MOVED,
    State.DEGRADED: EventKind.MOVED_SHORT,
    State.CATCHING_UP: EventKind.MOVED_EARLY,
}


class Watching:
    """Rounds that live; the only thing it remembers is in the jobs themselves."""

    def __init__(self, transitions: Transitions, observations: Observations, decider: Decider) -> None:
        self._transitions = transitions
        self._observations = observations
        self._decider = decider
        self._confirm = Confirming(transitions, observations)

    def running(self, job: Job, now_s: float) -> bool:
        """Has a rank fallen silent, or is a warning worth a restart by now?"""
        return self.watch(job, now_s) or self._decider.weigh_warnings(job, now_s)

    def watch(self, job: Job, now_s: float) -> bool:
        """Has a rank fallen silent that is not a known suspect?"""
        if self._decider.is_left_alone(job, now_s) or not job.round.silence.odd:
            return False
        suspicion = self._observations.judge_silence(job, now_s)
        if suspicion is None:
            return False
        self._transitions.move(job, EventKind.SILENCE, suspicion.verdict.reason, before=job.record.state)
        return True

    def degraded(self, job: Job, now_s: float) -> bool:
        """As running; and is there a node more?"""
        if self.running(job, now_s):
            return True
        offered = self._decider.spares(job)
        if not offered:
            return False
        verdict = Verdict(
            fault="membership",
            reason=f"{', '.join(offered)} can join {len(job.record.members)} nodes of {job.record.max_nodes}",
            confidence=1.0,
            nodes=tuple(offered),
            since_wall_s=self._transitions.wall(),
            since_step=job.round.step,
            round=job.record.round,
        )
        if self._decider.leave_offer(job, verdict):
            return False
        self._transitions.open_incident(job, verdict, detected=self._transitions.wall())
        self._transitions.mark(job, "ordered")
        self._transitions.move(job, EventKind.NODE_OFFERED, verdict.reason, verdict=verdict)
        return True

    def suspect(self, job: Job, now_s: float) -> bool:
        """Does it move again, or is patience used up?"""
        if self._observations.is_blind(job, now_s):
            return False
        suspicion = self._observations.judge_silence(job, now_s)
        if suspicion is None and self._observations.has_moved(job, now_s):
            self._moved(job, "the suspects move again")
            return True
        return suspicion is not None and self._confirm.begin(job, suspicion)

    def confirming(self, job: Job, now_s: float) -> bool:
        """Is the evidence in (or its time over) and what does it show, or was it a false alarm?"""
        if self._observations.is_blind(job, now_s):
            return False
        suspicion = self._observations.judge_silence(job, now_s)
        if suspicion is None and self._observations.has_moved(job, now_s):
            return self._end_harmless(job, job.record.verdict, now_s)
        if (missing := self._confirm.unanswered(job, now_s)) is None:
            return False
        verdict = self._confirm.weigh(job, suspicion, now_s) if suspicion is not None else job.record.verdict
        if verdict is None:
            return False
        if is_left_running(job, verdict):
            return self._end_harmless(job, verdict, now_s)
        self._act_upon(job, verdict, missing)
        return True

    def _act_upon(self, job: Job, verdict: Verdict, missing: Sequence[Order]) -> None:
        """Stop the suspects, unless the policy leaves them alone."""
        verdict = self._observations.quote_hardware(job, verdict)
        job.change(verdict=verdict)
        if self._decider.leave_alone(job):
            return
        self._transitions.mark(job, "ordered")
        text = f"evidence: {len(missing)} orders without answer" if missing else "all evidence is in"
        self._transitions.move(job, EventKind.EVIDENCE_COMPLETE, f"{text}: {verdict.reason}")

    def _end_harmless(self, job: Job, verdict: Verdict | None, now_s: float) -> bool:
        """The suspects are not stuck: go on as before, and remember how long they were silent."""
        if job.incident is not None:
            self._confirm.learn(job)
            told = msgspec.structs.replace(job.incident, done="")  # what was about to happen did not
            have_left = self._observations.have_left(job, told.verdict, now_s)
            self._transitions.put_incident(
                job, incidents.close(told, "harmless", harmless(verdict, have_left=have_left))
            )
        self._transitions.withdraw(job, job.suspects.evidence_wanted)
        text = (
            "the suspects are slow" if verdict is not None and verdict.fault == "slow" else "the suspects moved again"
        )
        self._moved(job, f"a false alarm: {text} while evidence was gathered", incident="")
        return True

    def _moved(self, job: Job, text: str, **changes: object) -> None:
        event = _MOVED.get(State(job.record.before or State.RUNNING), EventKind.MOVED)
        self._transitions.move(job, event, text, verdict=None, before="", **changes)
