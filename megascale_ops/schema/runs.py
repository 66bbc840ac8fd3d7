# SPDX-License-Identifier: Apache-2.0
"""A run of this machine, living or over: what `jobs` lists and `clean` looks at."""

import msgspec

RUNNING, FINISHED, FAILED, LOST = "running", "finished", "failed", "lost"
STOPPED, CLEANED, ELSEWHERE, UNKNOWN = "stopped", "cleaned", "elsewhere", "unknown"


class Run(msgspec.Struct, frozen=True):
    """One job by its run folder.

    ``result`` is running, finished, failed, stopped (by hand), lost (its controller is gone, and nothing shows how it
    ended), elsewhere (another controller keeps its journal), cleaned (only its checkpoints are left) or unknown (the
    journal can't be read; ``reason`` is why). ``step`` is -1 where no rank has reported one; sizes are bytes on disk;
    ``written_wall_s`` is when anything was last written into the folder.
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
    written_wall_s: float = 0.0
