# SPDX-License-Identifier: Apache-2.0
"""All jobs of a controller, one line each, and which of them is opened first.

A job that is over leaves the list after a while; it can still be asked for by name.

Pure: the time is an argument.
"""

from collections.abc import Mapping

from megascale_ops.controller.job.job import Job
from megascale_ops.controller.live.headline import level_of
from megascale_ops.controller.live.words import what
from megascale_ops.controller.record.state_machine import State
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.live import JobLine

# A day: what ended in the night is shown in the morning. A week for one that failed: it may be unseen yet.
ENDED_KEPT_S = 86_400.0
FAILED_KEPT_S = 7 * ENDED_KEPT_S
_URGENCY = {"act": 0, "watch": 1, "waiting": 2, "calm": 3, "over": 4}


def job_lines(jobs: Mapping[str, Job], wall_s: float, watched: str = "") -> tuple[JobLine, ...]:
    """Return the lines of jobs that live or ended of late, and of the one that is ``watched``."""
    return tuple(_line(one) for one in jobs.values() if one.name == watched or _is_listed(one, wall_s))


def choose(jobs: Mapping[str, Job], wall_s: float) -> str:
    """Return the job that needs a look most, the newest of several; "" when there is none.

    Jobs that live come first, then those that failed, then those that finished, and last those that left the list.
    """

    def urgency(job: Job) -> tuple[bool, bool, int, float]:
        return not _is_listed(job, wall_s), job.is_over, _URGENCY[level_of(job)], -job.record.started_wall_s

    return min(jobs.values(), key=urgency).name if jobs else ""


def _is_listed(job: Job, wall_s: float) -> bool:
    kept_s = FAILED_KEPT_S if job.state is State.FAILED else ENDED_KEPT_S
    return not job.is_over or wall_s - job.record.since_wall_s <= kept_s


def _line(job: Job) -> JobLine:
    record = job.record
    verdict = _verdict(job)
    return JobLine(
        job.name,
        job.told_state.value,
        level_of(job),
        record.world_size,
        job.furthest_step,
        since_wall_s=record.since_wall_s,
        what=what(verdict, past=job.is_over) if verdict is not None else "",
    )


def _verdict(job: Job) -> Verdict | None:
    """Return what is wrong with a job, as its headline would have it: None where nothing is, or nothing is judged."""
    if job.is_over:
        return job.record.ended_verdict if job.state is State.FAILED else None
    if job.incident is not None:
        return job.incident.verdict
    if job.told_suspicion is not None:
        return job.told_suspicion.verdict
    return next((one.verdict for one in job.round.warnings.values() if one.verdict is not None), None)
