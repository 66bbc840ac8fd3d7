# SPDX-License-Identifier: Apache-2.0
"""When a job may restore any checkpoint again: a newer one than the bad one was saved since.

A job that has gone one checkpoint back passes over the bad one in every round, until it has passed its step and saved
after that. What it restores next is then its own new state, whatever the folder still holds.
"""

from megascale_ops.controller.job.job import Job
from megascale_ops.controller.record.state_machine import TRAINING


def note_saved(job: Job, wall_s: float, saved_wall_s: float) -> None:
    """Note when the newest was saved, and whether one was beyond the step from which none is restored."""
    job.round.saves = job.round.saves.with_newest(saved_wall_s)
    limit = job.record.restore_before
    if limit < 0 or job.state not in TRAINING or job.round.step <= limit:
        return
    job.round.passed_wall_s = job.round.passed_wall_s or wall_s
    if saved_wall_s > job.round.passed_wall_s:
        job.change(restore_before=-1)
