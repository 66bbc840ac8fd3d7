# SPDX-License-Identifier: Apache-2.0
"""A run of this machine, living or over: what `jobs` lists and `clean` looks at, and what its ranks printed."""

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
    parts: dict[str, int] = {}  # bytes by kind: checkpoints, logs, incidents, journals, other


class LogPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """Lines of what a rank printed into one file, as ``GET /v1/jobs/{job}/logs`` answers.

    ``rounds``: in which the rank has such a file, the newest first. ``end``: to be given as ``after`` for what comes
    next. ``is_cut``: there were more lines than are shown, before the first of them. ``is_anew``: the file is shorter
    than what was read of it, so these are its first lines.
    """

    rank: int
    round: int
    stream: str
    lines: tuple[str, ...] = ()
    rounds: tuple[int, ...] = ()
    end: int = 0
    is_cut: bool = False
    is_anew: bool = False
