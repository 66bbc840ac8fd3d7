# SPDX-License-Identifier: Apache-2.0
"""A run of this machine, living or over: what `jobs` lists and `clean` looks at."""

import msgspec

RUNNING, FINISHED, FAILED, LOST = "running", "finished", "failed", "lost"
STOPPED, CLEANED, UNKNOWN = "stopped", "cleaned", "unknown"


class Run(msgspec.Struct, frozen=True):
    """One job as one run folder tells of it.

    ``result`` is running, finished, failed, stopped (by hand), lost (its controller is gone, and nothing says how it
    ended), cleaned (only its checkpoints are left) or unknown (the journal can't be read; ``reason`` says why).
    ``step`` is -1 where no rank has told one; sizes are bytes on disk.
    """

    job: str
    folder: str
    result: str
    state: str = ""
    reason: str = ""
    step: int = -1
    ranks: int = 0
    restarts: int = 0
    incidents: int = 0
    began_wall_s: float = 0.0
    until_wall_s: float = 0.0
    size_bytes: int = 0
    checkpoint_bytes: int = 0
