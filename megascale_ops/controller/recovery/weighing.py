# SPDX-License-Identifier: Apache-2.0
"""Warnings: what slows the job down, or looks lost, and does not stop it. Each is asked anew whether it does by now."""

import msgspec

from megascale_ops.controller.job import diagnose, incidents
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.round import Told
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.policy import ski_rental
from megascale_ops.controller.policy.decision import Tab, blamed_node, would
from megascale_ops.controller.record.state_machine import EventKind
from megascale_ops.controller.recovery import decide
from megascale_ops.schema.courses import course_words
from megascale_ops.schema.events import Incident
from megascale_ops.schema.health import Verdict

_replace = msgspec.structs.replace

# Warnings are weighed each second: a rent of a few percent of a step does not change faster.
WEIGH_S = 1.0
# 10 s: the numbers that `why` shows of a warning are that fresh; each time costs one small write.
TELL_S = 10.0
# In a job of 12,500 nodes once a minute: its record has 3 MB.
TELL_EACH_NODE_S = 0.005
LOST_NODE = "node_lost:"


def leave_nodes(transitions: Transitions, job: Job, verdict: Verdict) -> bool:
    """Only warn of lost nodes if the policy decides so, or in a dry run; return whether that was done."""
    question, decision = decide.ask(transitions, job, "hang", verdict)
    key = LOST_NODE + ",".join(verdict.nodes)
    if decision.acts:
        transitions.unwarn(job, key, "now it is acted upon")
        return False
    if key not in job.round.warnings:
        text = would(decision) if decision.dry_run else f"nothing was done: {decision.reason}"
        incident = transitions.warn(job, key, verdict)
        _note_warning(transitions, job, key, incident, text)
        decide.report_decision(job, question, decision, incident.id)
    return True


def weigh_warnings(transitions: Transitions, job: Job, now_s: float) -> bool:
    """Ask of each warning whether it is worth a restart by now; return whether one was ordered."""
    if not job.round.warnings or now_s - job.round.weighed_s < WEIGH_S:
        return False
    job.round.weighed_s = now_s
    for key, incident in list(job.round.warnings.items()):
        if key.startswith(LOST_NODE):
            nodes = key.removeprefix(LOST_NODE).split(",")
            if all(diagnose.is_alive(transitions.registry, job, node, now_s) for node in nodes):
                transitions.unwarn(job, key, f"{', '.join(nodes)} is heard again")
        elif incident.verdict is not None and _weigh(transitions, job, key, incident, incident.verdict):
            return True
    return False


def _weigh(transitions: Transitions, job: Job, key: str, incident: Incident, verdict: Verdict) -> bool:
    verdict, step_s = diagnose.place(transitions.registry, job, verdict)
    name = f"{key}@{blamed_node(verdict)}"  # after an eviction the same rank runs elsewhere
    wall_s = transitions.wall()
    before = ski_rental.open_tab(job.record.tabs.get(name), wall_s)
    tab = ski_rental.pay(
        before, cost=verdict.cost, step=job.round.step, step_s=step_s or job.record.step_s, wall_s=wall_s
    )
    _keep_tab(job, name, tab)
    unit = diagnose.unit(transitions.registry, job)
    incident = incidents.pay(incident, tab.paid_s - before.paid_s, job.record.world_size, unit)
    job.round.warnings[key] = incident
    question, decision = decide.ask(transitions, job, "warning", verdict, tab=tab)
    told = job.round.told.get(key)
    if told is None or told.answer != decide.answer_to(job, decision):
        told = job.round.told[key] = Told(decide.answer_to(job, decision))
        decide.report_decision(job, question, decision, incident.id)
    if not decision.acts:
        tell_s = max(TELL_S, len(job.record.members) * TELL_EACH_NODE_S)
        if transitions.clock() - told.at_s >= tell_s:
            told.at_s = transitions.clock()
            job.unsaved.has_record = True  # the tab too
            _note_warning(transitions, job, key, incident, would(decision) if decision.dry_run else decision.reason)
        return False
    _keep_tab(job, name, ski_rental.settle(tab, wall_s))
    job.round.end_warning(key)
    job.change(incident=incident.id, decided=decision)
    transitions.put_incident(job, _replace(incident, state="open", done=_so_far(incident), verdict=verdict))
    transitions.mark(job, "ordered")
    transitions.move(job, EventKind.CUT_LOSSES, decision.reason, verdict=verdict)
    return True


def _so_far(incident: Incident) -> str:
    """Return how a warning went until something was done about it."""
    return course_words(incident.course, incident.marks.began) if incident.course is not None else ""


def _keep_tab(job: Job, name: str, tab: Tab) -> None:
    """Keep what a warning has cost; journaled when its numbers are published, for it alone is not worth a write."""
    job.record = _replace(job.record, tabs={**job.record.tabs, name: tab})


def _note_warning(transitions: Transitions, job: Job, key: str, incident: Incident, text: str) -> None:
    noted = _replace(incident, done=text)
    job.round.warnings[key] = noted
    transitions.put_incident(job, noted)
