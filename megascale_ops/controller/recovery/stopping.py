# SPDX-License-Identifier: Apache-2.0
"""A round ends: its ranks are stopped, the cause is judged, what follows is decided; or the job is over with it.

One function for each state in which a round ends, which looks whether the state can be left.
"""

import msgspec

from megascale_ops.controller.job import diagnose, incidents
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.node_checks import NodeChecks
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.nodes.evidence import Accusation, accusations_of, is_machines
from megascale_ops.controller.policy import actions
from megascale_ops.controller.policy.decision import Decision, would
from megascale_ops.controller.record.state_machine import EventKind, State
from megascale_ops.controller.recovery import decide
from megascale_ops.schema.health import Verdict

_replace = msgspec.structs.replace

# 40 s: ranks with a SIGTERM handler have 30 to save their state, gigabytes of memory cost 64 ms each. A runner
# that still polls for orders is waited for so long; then the others go on without.
STOP_DEADLINE_S = 40.0
# 10 s for a node of which only the agent sends, and for runners that join anew after the controller's restart.
_SILENT_S = 10.0


def from_stopping(transitions: Transitions, job: Job, now_s: float) -> bool:
    """Has every node that lives stopped its ranks?"""
    if not diagnose.may_scan_nodes(job, now_s):
        return False
    missing = diagnose.not_stopped(transitions.registry, job, now_s)
    asking = any(node in job.runners and job.runners[node].is_alive(now_s) for node in missing)
    deadline_s = STOP_DEADLINE_S if asking else _SILENT_S
    if missing and now_s - job.entered_s < deadline_s:
        return False
    transitions.mark(job, "stopped")
    text = f"no answer from {', '.join(missing)} in {deadline_s:g} s" if missing else "all ranks have stopped"
    transitions.move(job, EventKind.ALL_STOPPED, text)
    return True


def from_diagnosing(transitions: Transitions, job: Job, now_s: float) -> bool:
    """Give the verdict on the round, and decide what follows; at once, unless the controller was restarted here."""
    missing = diagnose.not_stopped(transitions.registry, job, now_s)
    if missing and now_s - job.entered_s < _SILENT_S:
        return False  # the runners repeat their joins
    wall_s = transitions.wall()
    silent = [node for node in job.nodes if node not in job.waiting and node not in job.round.left]
    verdict = job.record.verdict or diagnose.judge_unmet(job, wall_s)
    verdict = verdict or diagnose.judge_exits(transitions.registry, job, now_s, wall_s, missing=silent)
    verdict = diagnose.quote_hardware(transitions.registry, job, verdict)
    failure = actions.failure_of(verdict, tuple(exit_.exit for exit_ in job.round.exits.values()))
    state_failure = actions.state_failure_of(verdict, failure, tuple(one.exit for one in job.round.exits.values()))
    question, decision = decide.ask(transitions, job, "end", verdict, failure=failure, state_failure=state_failure)
    decided = None if decision.rule in ("one_back", "restored_bad") else job.record.decided
    decision = decided or decision
    stop = decision.action == "stop" or decision.dry_run
    verdict = _replace(verdict, fault=decision.fault, action="none" if decision.dry_run else decision.action)
    if job.incident is None:
        transitions.open_incident(job, verdict, detected=wall_s)
    incident = (
        _replace(incidents.judge(job.incident, verdict), step_before=job.round.reached_step) if job.incident else None
    )
    if incident is not None:
        closed = incidents.close(incident, "ended" if stop else "open", _done(decision, verdict.reason))
        transitions.put_incident(job, closed)
    if decided is None:
        decide.report_decision(job, question, decision, job.record.incident)
    changes = decide.after(job, verdict, decision, wall_s)
    if not stop:
        _accuse(transitions, job, verdict, decision)
    _close_round(job)
    counted = failure.after(job.record.failure) if failure is not None else None
    ended = {"ended_verdict": verdict, "ended_incident": job.record.incident, "failure": counted, "verdict": None}
    ended["state_failure"] = state_failure
    if stop:
        why = _done(decision, verdict.reason) if decision.dry_run else decision.reason
        reason = why if decision.rule == "script_bug" else f"{verdict.reason}. {why}"
        transitions.move(
            job, EventKind.VERDICT_STOP, reason, reason=reason, exit_code=1, incident="", decided=None, **ended
        )
        return True
    transitions.move(job, EventKind.VERDICT_RESTART, verdict.reason, **changes, **ended)
    return True


def _accuse(transitions: Transitions, job: Job, verdict: Verdict, decision: Decision) -> None:
    """Hold against nodes what the verdict says of their hardware, before the next round is formed."""
    wall_s = transitions.wall()
    doubted = {
        (node, one.name)
        for node in {one.node for one in verdict.evidence if one.node}
        for one in transitions.registry.findings(node, job.name)
        if one.is_bad or one.severity == "fail"
    }
    found = list(accusations_of(verdict, wall_s, job.name, doubted))
    named = {one.node for one in found}
    if is_machines(decision.fault):
        found += [
            Accusation(node, f"evicted_{decision.fault}", wall_s, decision.reason, (), job.name)
            for node in decision.nodes
            if node not in named
        ]
    for one in found:
        view = transitions.registry.node(one.node, job.name)
        if view is None or not view.only_job:  # on the word of a job's own agent no node is kept from all others
            transitions.nodes.accuse(one)
    wants_all = bool(found) and job.record.policy.check_all
    job.checks = NodeChecks(job.checks.asked, job.checks.gpus_only, wants_all=wants_all)


def end(transitions: Transitions, job: Job, event: EventKind, text: str, exit_code: int) -> None:
    """The job is over: finished, cancelled or given up."""
    _close_round(job)
    if job.incident is not None:
        # Ranks that finish while they are still looked at were slow to leave, and nothing was stopped.
        left_alone = event is EventKind.RANKS_FINISHED and job.state is State.CONFIRMING
        state = "harmless" if left_alone else "ended"
        transitions.put_incident(job, incidents.close(job.incident, state, text))
    transitions.move(job, event, text, reason=text, exit_code=exit_code, incident="", verdict=None)


def _close_round(job: Job) -> None:
    """Add what the round's steps covered to the job's useful time."""
    record, step = job.record, job.round.reached_step
    job.change(
        useful_s=record.useful_s + job.round.uncounted_s,
        best_step=max(record.best_step, record.furthest, step),
        # A round that was broken before it had caught up for the first time has shown its boxes all the same.
        had_boxes=record.had_boxes or step >= 0,
    )
    job.round.is_counted = True


def _done(decision: Decision, told: str) -> str:
    """Return what follows the end of a round, for the incident; it tells the verdict's reason ``told`` itself."""
    if decision.dry_run:
        return f"{would(decision)}; without a restart the job ends, as it would have without supervision"
    if decision.action == "stop":
        return f"not started again: {decision.reason.removesuffix(f': {told}')}"
    without = f" without {', '.join(decision.nodes)}" if decision.nodes else ""
    return f"restarted{without}: {decision.reason}"
