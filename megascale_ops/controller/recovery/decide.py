# SPDX-License-Identifier: Apache-2.0
"""Ask the policy, journal its decisions, and do what can be done without ending the round.

Gathers what a question needs, journals every decision with its inputs, leaves hangs alone that are not acted upon,
weighs warnings, and takes in a person's changes of the policy. What ends a round and forms the next is the driver's.
"""

import logging
from collections.abc import Mapping

import msgspec

from megascale_ops.controller.job import incidents
from megascale_ops.controller.job.diagnose import Observations
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.round import Answer, Told
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.policy import ski_rental
from megascale_ops.controller.policy.actions import silent_place
from megascale_ops.controller.policy.answer import answer
from megascale_ops.controller.policy.decision import (
    Decision,
    Failure,
    Question,
    Restart,
    Tab,
    blamed_node,
    remembered,
    to_event,
    would,
)
from megascale_ops.controller.policy.eviction import evict, is_evicted
from megascale_ops.controller.record.job_record import LeftAlone
from megascale_ops.controller.record.state_machine import ACTIVE, EventKind, State
from megascale_ops.diagnosis.hangs import habits
from megascale_ops.schema.courses import course_words
from megascale_ops.schema.events import Incident
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import PolicyView
from megascale_ops.schema.policy_settings import apply_settings, check_settings, differences, merge_settings

log = logging.getLogger(__name__)
_replace = msgspec.structs.replace

# Warnings are weighed each second: a rent of a few percent of a step does not change faster.
WEIGH_S = 1.0
# 10 s: the numbers that `why` shows of a warning are that fresh; each time costs one small write.
TELL_S = 10.0
# 60 s, doubled each time: how long a hang that the policy leaves alone is not looked at again.
LOOK_AGAIN_S = 60.0
# 60 s: a script without a black box, or with steps that only count from its start, has done something in so long.
LIVED_S = 60.0
# Half as many steps again as any round before: where a rank dies by chance, some rounds get a few further than others.
CLEARLY_MORE = 1.5
# 2,400: an hour of restarts that take 1.5 s each, the most that a budget can count; older ones are counted by cause.
MOST_RESTARTS = 2400
# In a job of 12,500 nodes once a minute: its record has 3 MB.
TELL_EACH_NODE_S = 0.005
LOST_NODE = "node_lost:"
_LEFT_ALONE = {
    State.RUNNING: EventKind.LEFT_ALONE,
    State.DEGRADED: EventKind.LEFT_ALONE_SHORT,
    State.CATCHING_UP: EventKind.LEFT_ALONE_EARLY,
}


class Decider:
    """Decisions about jobs; the only thing it remembers is in the jobs themselves."""

    def __init__(self, transitions: Transitions, observations: Observations) -> None:
        self._transitions = transitions
        self._observations = observations

    def ask(
        self, job: Job, kind: str, verdict: Verdict, *, failure: Failure | None = None, tab: Tab | None = None
    ) -> tuple[Question, Decision]:
        """Return what is known, as one question, and the answer to it."""
        record, wall_s = job.record, self._transitions.wall()
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
            progressed=self._has_progressed(job),
            counts_anew=not _counts_absolutely(job),
            members=len(record.members),
            min_nodes=record.min_nodes,
            share=member.nproc / record.world_size if member is not None else 0.0,
            spares=len(self.spares(job)),
            tab=tab,
            prices_s=record.prices_s,
            cut_before=self._cut_before(job),
            first_node=record.members[0].node if record.members else "",
        )
        return question, answer(question)

    def report_decision(self, job: Job, question: Question, decision: Decision, incident: str) -> None:
        """Write a decision into the journal, with all of its inputs."""
        event = to_event(question, decision, job=job.name, round_=job.record.round, incident=incident)
        job.unsaved.events.append(event)
        extra = {"job": job.name, "node": event.node, "rank": event.rank, "incident": incident}
        log.info("%s: decided about %s: %s", job.name, decision.fault, event.text, extra=extra)

    def spares(self, job: Job) -> list[str]:
        """Return the nodes that wait for a place and are welcome to it."""
        wall_s, now_s = self._transitions.wall(), self._transitions.clock()
        return [
            node
            for node in self._observations.joined(job, now_s)
            if job.member(node) is None and is_evicted(job.record.evictions, node, wall_s) is None
        ]

    def evicted(self, job: Job) -> list[str]:
        """Return the nodes that are kept out now."""
        wall_s = self._transitions.wall()
        return [one.node for one in job.record.evictions if one.until_wall_s > wall_s]

    def why_out(self, job: Job, node: str) -> str:
        """Return why a runner waits outside of a round, for its log; "" where that is nothing special."""
        if job.state not in ACTIVE or job.member(node) is not None:
            return ""
        wall_s = self._transitions.wall()
        out = is_evicted(job.record.evictions, node, wall_s)
        if out is None:
            return f"job {job.name} runs without {node}, which waits as a spare"
        left_s = out.until_wall_s - wall_s
        return f"{node} is evicted for another {left_s:.0f} s and waits as a spare: {out.reason}"

    def after(self, job: Job, verdict: Verdict, decision: Decision) -> dict[str, object]:
        """Return what a restart changes in the job's record."""
        wall_s, record = self._transitions.wall(), job.record
        changes: dict[str, object] = {"decided": None, "left_alone": None}
        if decision.counted:
            progressed, place = self._has_progressed(job), silent_place(verdict)
            restart = Restart(wall_s, verdict.fault, blamed_node(verdict), progressed, place)
            changes["restarts"] = (*record.restarts, restart)[-MOST_RESTARTS:]
            cause = restart.cause or "unknown"
            changes["restarted"] = record.restarted | {cause: record.restarted.get(cause, 0) + 1}
        if decision.nodes:
            changes["evictions"] = evict(record.evictions, decision.nodes, record.policy, wall_s, verdict.reason)
        return changes

    def _cut_before(self, job: Job) -> tuple[str, ...]:
        """Return the nodes that a cut network had ended the round before for, if no step was made since."""
        ended = job.record.ended_verdict
        return ended.nodes if ended is not None and ended.fault == "link_cut" and job.round.reached_step < 0 else ()

    def _has_progressed(self, job: Job) -> bool:
        """Return whether the round has made a step that none had made before."""
        record, step = job.record, job.round.reached_step
        if not record.had_boxes and step < 0:
            return self._transitions.wall() - job.round.formed_wall_s >= LIVED_S
        if _counts_absolutely(job):
            return step > record.best_step
        further = step >= 0 and step + 1 >= CLEARLY_MORE * (record.best_step + 1)
        return further or self._has_lived(job)

    def _has_lived(self, job: Job) -> bool:
        """Return whether the round's steps took longer than a restart costs, so that their result may have been saved.

        A script that counts from each start anew may well go on where it was.
        """
        return job.round.covered_s >= max(LIVED_S, ski_rental.usual_price_s(job.record.prices_s, job.record.policy))

    # Hangs that are not acted upon.

    def leave_alone(self, job: Job) -> bool:
        """Leave the suspects as they are if the policy decides so, or in a dry run; return whether that was done."""
        verdict, incident = job.record.verdict, job.incident
        if verdict is None or incident is None:
            return False
        question, decision = self.ask(job, "hang", verdict)
        if decision.acts:
            return False
        self.report_decision(job, question, decision, incident.id)
        text = would(decision) if decision.dry_run else f"nothing was done: {decision.reason}"
        judged = incidents.judge(incident, _replace(verdict, action="none" if decision.dry_run else decision.action))
        self._transitions.put_incident(job, incidents.close(judged, "harmless", text))
        self._transitions.withdraw(job, job.suspects.evidence_wanted)
        before = job.record.left_alone
        again_s = 0.0 if decision.dry_run else 2.0 * before.again_s if before is not None else LOOK_AGAIN_S
        known = LeftAlone(incident.id, self._transitions.wall(), again_s, verdict.place, job.suspects.age_s)
        event = _LEFT_ALONE.get(State(job.record.before or State.RUNNING), EventKind.LEFT_ALONE)
        self._transitions.move(job, event, text, verdict=None, before="", incident="", left_alone=known)
        return True

    def is_left_alone(self, job: Job, now_s: float) -> bool:
        """Return whether the job hangs in a way that is known and not acted upon; note when it moves again."""
        known = job.record.left_alone
        if known is None:
            return False
        if self._observations.is_blind(job, now_s):
            return True
        since_s = self._transitions.wall() - known.wall_s
        if self._observations.judge_silence(job, now_s) is None and self._observations.has_moved(job, now_s):
            self._transitions.note(
                job, "moved_again", f"{known.incident}: it moved again by itself after {since_s:.1f} s"
            )
            learned = habits.learned(job.record.habits, known.place, known.silent_s + since_s)
            job.change(left_alone=None, habits=learned)
            return False
        if 0 < known.again_s <= since_s:
            job.round.silence.odd = True
            return False
        return True

    def leave_nodes(self, job: Job, verdict: Verdict) -> bool:
        """Only warn of lost nodes if the policy decides so, or in a dry run; return whether that was done."""
        question, decision = self.ask(job, "hang", verdict)
        key = LOST_NODE + ",".join(verdict.nodes)
        if decision.acts:
            self._transitions.unwarn(job, key, "now it is acted upon")
            return False
        if key not in job.round.warnings:
            text = would(decision) if decision.dry_run else f"nothing was done: {decision.reason}"
            incident = self._transitions.warn(job, key, verdict)
            self._note_warning(job, key, incident, text)
            self.report_decision(job, question, decision, incident.id)
        return True

    def leave_offer(self, job: Job, verdict: Verdict) -> bool:
        """Leave out a node that could be taken in if the policy decides so; return whether that was done."""
        question, decision = self.ask(job, "hang", verdict)
        if decision.acts:
            return False
        told = verdict.nodes, _answer(job, decision)
        if job.round.offer_told != told:
            job.round.offer_told = told
            self.report_decision(job, question, decision, "")
        return True

    # Warnings: what slows the job down and does not stop it.

    def weigh_warnings(self, job: Job, now_s: float) -> bool:
        """Ask of each warning whether it is worth a restart by now; return whether one was ordered."""
        if not job.round.warnings or now_s - job.round.weighed_s < WEIGH_S:
            return False
        job.round.weighed_s = now_s
        for key, incident in list(job.round.warnings.items()):
            if key.startswith(LOST_NODE):
                nodes = key.removeprefix(LOST_NODE).split(",")
                if all(self._observations.is_alive(job, node, now_s) for node in nodes):
                    self._transitions.unwarn(job, key, f"{', '.join(nodes)} is heard again")
            elif incident.verdict is not None and self._weigh(job, key, incident, incident.verdict):
                return True
        return False

    def _weigh(self, job: Job, key: str, incident: Incident, verdict: Verdict) -> bool:
        verdict, step_s = self._observations.place(job, verdict)
        name = f"{key}@{blamed_node(verdict)}"  # after an eviction the same rank runs elsewhere
        wall_s = self._transitions.wall()
        before = ski_rental.open_tab(job.record.tabs.get(name), wall_s)
        tab = ski_rental.pay(
            before, cost=verdict.cost, step=job.round.step, step_s=step_s or job.record.step_s, wall_s=wall_s
        )
        self._keep_tab(job, name, tab)
        unit = self._observations.unit(job)
        incident = incidents.pay(incident, tab.paid_s - before.paid_s, job.record.world_size, unit)
        job.round.warnings[key] = incident
        question, decision = self.ask(job, "warning", verdict, tab=tab)
        told = job.round.told.get(key)
        if told is None or told.answer != _answer(job, decision):
            told = job.round.told[key] = Told(_answer(job, decision))
            self.report_decision(job, question, decision, incident.id)
        if not decision.acts:
            tell_s = max(TELL_S, len(job.record.members) * TELL_EACH_NODE_S)
            if self._transitions.clock() - told.at_s >= tell_s:
                told.at_s = self._transitions.clock()
                job.unsaved.has_record = True  # the tab too
                self._note_warning(job, key, incident, would(decision) if decision.dry_run else decision.reason)
            return False
        self._keep_tab(job, name, ski_rental.settle(tab, wall_s))
        job.round.end_warning(key)
        job.change(incident=incident.id, decided=decision)
        self._transitions.put_incident(job, _replace(incident, state="open", done=_so_far(incident), verdict=verdict))
        self._transitions.mark(job, "ordered")
        self._transitions.move(job, EventKind.CUT_LOSSES, decision.reason, verdict=verdict)
        return True

    def _keep_tab(self, job: Job, name: str, tab: Tab) -> None:
        """Keep what a warning has cost; journaled when its numbers are published, for it alone is not worth a write."""
        job.record = _replace(job.record, tabs={**job.record.tabs, name: tab})

    def _note_warning(self, job: Job, key: str, incident: Incident, text: str) -> None:
        noted = _replace(incident, done=text)
        job.round.warnings[key] = noted
        self._transitions.put_incident(job, noted)

    # What people change while the job lives.

    def set_policy(self, job: Job, settings: Mapping[str, str]) -> PolicyView:
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
        self._transitions.note(job, "policy_set", "; ".join(changed) or "nothing that was not so before")
        self._transitions.save(job)
        return self.show_policy(job)

    def show_policy(self, job: Job) -> PolicyView:
        """Return the policy that a job lives under."""
        record, wall_s = job.record, self._transitions.wall()
        evicted = {one.node: one.until_wall_s - wall_s for one in record.evictions if one.until_wall_s > wall_s}
        return PolicyView(job.name, record.policy, record.tuned, evicted, record.prices_s)


def _so_far(incident: Incident) -> str:
    """Return how a warning went until something was done about it."""
    return course_words(incident.course, incident.marks.began) if incident.course is not None else ""


def _answer(job: Job, decision: Decision) -> Answer:
    """Return the part of a decision that is published once, and again when another policy holds."""
    return Answer(decision.action, decision.rule, decision.dry_run, job.record.policy)


def _counts_absolutely(job: Job) -> bool:
    """Return whether steps are the script's own numbers: declared, or a rank ended further than it had stepped."""
    ends = [one.exit for one in job.round.exits.values()]
    return job.record.steps_are_absolute or any(end.step >= end.steps_seen > 0 for end in ends)
