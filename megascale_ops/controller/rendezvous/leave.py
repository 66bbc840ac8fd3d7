# SPDX-License-Identifier: Apache-2.0
"""Where runners take their leave: how their ranks ended, and what that means for the job."""

from collections.abc import Mapping

from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.own_faults import OwnFaults
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.record.job_record import EVICTED_CODE
from megascale_ops.controller.record.state_machine import FINAL, EventKind, State
from megascale_ops.controller.recovery import failures, finishing, stopping
from megascale_ops.controller.recovery.by_hand import STOPPED_CODE
from megascale_ops.controller.recovery.driver import advance
from megascale_ops.errors import RefusedError, UsageError
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import OUTCOMES, Leave, unknown_outcome
from megascale_ops.schema.version import MESSAGE_VERSION, check_version


def leave(jobs: Mapping[str, Job], transitions: Transitions, faults: OwnFaults, word: Leave) -> None:
    """Take note that a runner is done.

    Raises:
        UsageError: it can't be taken as it is.
        RefusedError: another runner serves this node.
    """
    check_version(f"the leave of node {word.node}", word.version, MESSAGE_VERSION)
    if word.outcome not in OUTCOMES:
        raise UsageError(f"{unknown_outcome(word.outcome)}{', '.join(OUTCOMES)}")
    job = jobs.get(word.job)
    runner = job.runners.get(word.node) if job is not None else None
    if job is None or runner is None or runner.runner_id != word.runner_id:
        raise RefusedError(f"no runner {word.runner_id} of node {word.node} is known for job {word.job}")
    job.waiting.pop(word.node, None)
    if job.state in FINAL:
        return
    transitions.note(job, "left", f"{word.node} left: {word.outcome}", node=word.node)
    failures.take_exits(job, word.node, word.exits, word.mono_s, transitions.clock())
    is_member = job.member(word.node) is not None
    if is_member or job.state is State.REPLACING:
        _end_by(transitions, job, word, is_member=is_member)
    advance(transitions, faults, job)
    job.wake()


def _end_by(transitions: Transitions, job: Job, word: Leave, *, is_member: bool) -> None:
    job.round.left[word.node] = word
    if word.outcome == "cancelled":
        by_signal = word.reason.removeprefix(f"{word.node}: ")  # an older runner names none
        how, code = (by_signal, EVICTED_CODE) if by_signal else ("stopped by hand", STOPPED_CODE)
        stopping.end(transitions, job, EventKind.CANCELLED, f"{how} on {word.node}", code)
    elif word.outcome == "evicted" and is_member:
        _evicted(transitions, job, word)
    elif word.outcome == "failed" and is_member:
        why = word.reason.removeprefix(f"{word.node}: ")
        text = f"the runner on {word.node} gave up{': ' if why else ''}{why}"
        stopping.end(transitions, job, EventKind.GAVE_UP, text, 1)
    elif is_member:
        finishing.finish(transitions, job, transitions.clock())


def _evicted(transitions: Transitions, job: Job, word: Leave) -> None:
    """Go on without a node that its engine takes away; a rank of it that has failed by itself is judged as ever."""
    if any(one.code != 0 and not one.by_us for one in word.exits):
        failures.fail(transitions, job, word.node)
    verdict = Verdict(
        fault="engine_eviction",
        reason=word.reason or f"{word.node} is taken away by the engine that owns it",
        confidence=1.0,
        nodes=(word.node,),
        since_wall_s=transitions.wall(),
        round=job.record.round,
    )
    failures.lose_nodes(transitions, job, verdict)
