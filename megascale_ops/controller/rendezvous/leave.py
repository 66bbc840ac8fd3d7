# SPDX-License-Identifier: Apache-2.0
"""Where runners take their leave: how their ranks ended, and what that means for the job."""

from collections.abc import Mapping

from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.record.state_machine import FINAL, EventKind, State
from megascale_ops.controller.recovery.driver import Driver
from megascale_ops.controller.recovery.failures import Failures
from megascale_ops.errors import RefusedError, UsageError
from megascale_ops.schema.messages import Leave
from megascale_ops.schema.version import MESSAGE_VERSION, check_version

_OUTCOMES = ("succeeded", "failed", "cancelled")


class Leaving:
    """The last word of runners."""

    def __init__(self, jobs: Mapping[str, Job], transitions: Transitions, driver: Driver, losses: Failures) -> None:
        self._jobs = jobs
        self._transitions = transitions
        self._driver = driver
        self._failures = losses

    def leave(self, leave: Leave) -> None:
        """Take note that a runner is done.

        Raises:
            UsageError: it can't be taken as it is.
            RefusedError: another runner serves this node.
        """
        check_version(f"the leave of node {leave.node}", leave.version, MESSAGE_VERSION)
        if leave.outcome not in _OUTCOMES:
            raise UsageError(f"outcome {leave.outcome!r} is none of {', '.join(_OUTCOMES)}")
        job = self._jobs.get(leave.job)
        runner = job.runners.get(leave.node) if job is not None else None
        if job is None or runner is None or runner.runner_id != leave.runner_id:
            raise RefusedError(f"no runner {leave.runner_id} of node {leave.node} is known for job {leave.job}")
        job.waiting.pop(leave.node, None)
        if job.state in FINAL:
            return
        self._transitions.note(job, "left", f"{leave.node} left: {leave.outcome}", node=leave.node)
        self._failures.take_exits(job, leave.node, leave.exits, leave.mono_s)
        is_member = job.member(leave.node) is not None
        if is_member or job.state is State.REPLACING:
            self._end_by(job, leave, is_member=is_member)
        self._driver.advance(job)
        job.wake()

    def _end_by(self, job: Job, leave: Leave, *, is_member: bool) -> None:
        job.round.left[leave.node] = leave
        if leave.outcome == "cancelled":
            self._driver.end(job, EventKind.CANCELLED, f"stopped by hand on {leave.node}", 130)
        elif leave.outcome == "failed" and is_member:
            self._driver.end(job, EventKind.GAVE_UP, f"the runner on {leave.node} gave up", 1)
        elif is_member and job.state is not State.DIAGNOSING and self._all_succeeded(job):
            self._driver.end(job, EventKind.RANKS_FINISHED, "every rank ended normally", 0)

    def _all_succeeded(self, job: Job) -> bool:
        members = job.record.members
        return bool(members) and all(
            (left := job.round.left.get(member.node)) is not None and left.outcome == "succeeded" for member in members
        )
