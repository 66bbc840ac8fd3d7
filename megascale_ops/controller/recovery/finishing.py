# SPDX-License-Identifier: Apache-2.0
"""All ranks of a job have ended well: the job ends as soon as their last steps are known.

Runners tell at once that ranks have ended, and agents read black boxes ten times a second and report once a second. So
the steps of the last heartbeat would come to a job that is over, and its report would lack them. How many steps a rank
has made its runner tells, by the same box.
"""

import asyncio
from contextlib import suppress

from megascale_ops.controller.cluster.registry import Registry
from megascale_ops.controller.job import round_progress
from megascale_ops.controller.job.job import Job, wait_in
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.record.state_machine import ACTIVE, EventKind, State
from megascale_ops.controller.recovery import starting, stopping

# 1.5 s: an agent reports within a second also what is not urgent. Runners wait for the end of their leave for 3 s.
LAST_STEPS_S = 1.5
_LATE_S = 0.5  # a job that is not judged now (``own_faults``) does not end in time
_MAY_END = (*ACTIVE, State.STOPPING, State.REPLACING)


def finish(transitions: Transitions, job: Job, now_s: float) -> None:
    """End the job, or wait for the last steps of its ranks, where the runners of all nodes have left well."""
    if job.state not in _MAY_END or not _all_succeeded(job):
        return
    if job.round.finished_s is None:
        job.round.finished_s = now_s
    if now_s - job.round.finished_s >= LAST_STEPS_S or not _lacks_steps(transitions.registry, job, now_s):
        _note_progress(transitions, job, now_s)
        stopping.end(transitions, job, EventKind.RANKS_FINISHED, "every rank ended normally", 0)


async def last_steps(job: Job) -> None:
    """Wait until they are known, or are waited for no more: the runner goes then, and maybe the controller with it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_STEPS_S + _LATE_S):
            while job.round.finished_s is not None and not job.is_over:
                await wait_in(job.waiters, LAST_STEPS_S)


def _note_progress(transitions: Transitions, job: Job, now_s: float) -> None:
    """Take note of where a round went on that was over before a tick has looked at its steps."""
    if job.state is State.RESTARTING:
        starting.from_restarting(transitions, job, now_s)
    if job.state is State.CATCHING_UP:
        starting.has_stepped(transitions, job, round_progress.total(job.round.paces))


def _all_succeeded(job: Job) -> bool:
    members = job.record.members
    return bool(members) and all(
        (left := job.round.left.get(member.node)) is not None and left.outcome == "succeeded" for member in members
    )


def _lacks_steps(registry: Registry, job: Job, now_s: float) -> bool:
    """Return whether an agent that is heard has not told of all steps that a rank of its node has made."""
    for rank, end in job.round.exits.items():
        share = registry.share(end.node, job.name, job.record.round)
        report = share.ranks.get(rank) if share is not None else None
        if report is not None and (report.progress is None or report.progress.steps_seen >= end.exit.steps_seen):
            continue
        if report is None and not end.exit.steps_seen:  # nothing was told of this round yet
            continue
        if registry.agent_is_fresh(job.name, end.node, now_s):
            return True
    return False
