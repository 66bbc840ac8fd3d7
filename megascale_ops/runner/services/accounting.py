# SPDX-License-Identifier: Apache-2.0
"""What Slurm's accounting tells of a job that has failed: the verdict that ended it, as the job's comment.

`squeue --format=%k`, `scontrol show job` and, for good, where slurmdbd keeps comments
(`AccountingStoreFlags=job_comment`), `sacct --format=Comment` show it. The job's owner may write it.
"""

import logging
import os

from megascale_ops.engines.actuator import PREFIX, EngineError, reason_of
from megascale_ops.engines.slurm.commands import ask
from megascale_ops.runner.slurm_step import Step

log = logging.getLogger(__name__)


def beside(before: str, ours: str) -> str:
    """Return a job's comment with ours in it: the user's own stays in front, one of an earlier life of the job goes."""
    theirs = before.strip().partition(PREFIX)[0].rstrip("; ")
    return f"{theirs}; {ours}" if theirs and theirs != "(null)" else ours


def comment(step: Step | None, text: str) -> None:
    """Write why a job has ended into Slurm's record of it, once, by the step's first node; a failure is told.

    Args:
        step: The step that this run is a task of; None: nothing is written.
        text: Why.
    """
    if step is None or step.node != 0:
        return
    job = os.environ.get("SLURM_JOB_ID", str(step.job))
    try:
        before = ask("squeue", "--noheader", f"--jobs={job}", "--format=%k")
        ask("scontrol", "update", f"jobid={job}", f"comment={beside(before, reason_of(text))}")
    except EngineError as error:
        log.info("Slurm's record of the job does not tell why it has ended: %s", error)
