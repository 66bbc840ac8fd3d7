# SPDX-License-Identifier: Apache-2.0
"""What a job does when Slurm signals that it has to go: save, and back into the queue? Pure.

SIGUSR1 is what `--signal=USR1@120` sends ahead of the time limit. SIGTERM has several meanings: the time limit itself
(then SIGKILL comes KillWait later), a job of a higher priority (then after the partition's grace), or the end of a
job that its user has cancelled, which must not come back. Only Slurm's record of the job tells which.
"""

from typing import NamedTuple

from megascale_ops.engines.slurm.answers import JobView, Settings

# 15 s of the time that is left: ranks get up to 5 s for their own end where they can't use more, tidying takes 3 s.
END_S = 15.0
# 60 s for a checkpoint where Slurm names no end.
_UNKNOWN_S = 60.0


class Ending(NamedTuple):
    """What follows a signal. ``kind``: limit, preempted or cancelled.

    ``save_s``: how long a checkpoint is waited for. ``requeue``: whether the job goes back into the queue; ``said`` is
    the sentence for it.
    """

    kind: str
    requeue: bool
    save_s: float
    said: str


def decide(signal: str, job: JobView, settings: Settings, budget: int, now_wall_s: float) -> Ending:
    """Return what is done about a signal.

    Args:
        signal: SIGUSR1 or SIGTERM.
        job: Slurm's record of it.
        settings: What slurm.conf says about ends.
        budget: How often the job may be requeued in all.
        now_wall_s: Seconds of the wall clock.
    """
    kind = _kind(signal, job)
    if kind == "cancelled":
        return Ending(kind, requeue=False, save_s=0.0, said="the job was cancelled")
    why = "another job takes its nodes" if kind == "preempted" else "its time limit is near"
    left_s = job.ends_wall_s - now_wall_s if job.ends_wall_s else _UNKNOWN_S + END_S
    if signal == "SIGTERM" and kind == "limit":  # it is over, and KillWait is all that is left
        why, left_s = "its time limit is reached", settings.kill_wait_s
    save_s = max(0.0, left_s - END_S)
    if not job.may_requeue:
        said = f"{why}, and Slurm was told not to requeue it (--no-requeue, or JobRequeue=0): it ends"
        return Ending(kind, requeue=False, save_s=save_s, said=said)
    if job.restarts >= budget:
        said = f"{why}, and it was requeued {job.restarts} times, which is its budget (--requeues {budget}): it ends"
        return Ending(kind, requeue=False, save_s=save_s, said=said)
    said = f"{why}: a checkpoint, then back into the queue (requeue {job.restarts + 1} of {budget})"
    return Ending(kind, requeue=True, save_s=save_s, said=said)


def _kind(signal: str, job: JobView) -> str:
    if job.preempted_wall_s or job.state == "PREEMPTED":
        return "preempted"
    if signal == "SIGUSR1":
        return "limit"
    # Of a job that comes to its end only the reason tells why.
    return "limit" if job.state == "TIMEOUT" or job.reason == "TimeLimit" else "cancelled"
