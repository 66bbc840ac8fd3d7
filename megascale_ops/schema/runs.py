# SPDX-License-Identifier: Apache-2.0
"""A run of this machine, living or over: what `jobs` lists and `clean` looks at, and what its ranks printed."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from megascale_ops.schema.ranges import Count, Rank, Round

RUNNING, FINISHED, FAILED, LOST = "running", "finished", "failed", "lost"
STOPPED, CLEANED, ELSEWHERE, UNKNOWN = "stopped", "cleaned", "elsewhere", "unknown"

# 1,000 lines: 2 MB at most, and more than a person reads.
MOST_LINES = 1000
# 2,000 characters: a longer line is a dump of numbers.
MOST_LINE = 2000
# The newest 100 rounds: `megascale-ops logs --round` on the node reads older ones.
MOST_ROUNDS = 100
NEWEST = -1


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


class LogQuery(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which lines of which rank: the query of ``GET /v1/jobs/{job}/logs``, and what an agent is asked for them."""

    rank: Rank = 0
    round: Annotated[int, Meta(ge=NEWEST, le=2**31, description="-1: the newest in which the rank has printed")] = (
        NEWEST
    )
    stream: Literal["stdout", "stderr"] = "stderr"
    lines: Annotated[int, Meta(ge=1, le=MOST_LINES, description="the last so many")] = 200
    after: Annotated[Count, Meta(description="only what came after this place, the `end` of an earlier answer")] = 0
    grep: Annotated[str, Meta(max_length=128, description="only lines that hold this text, whatever its case")] = ""


class LogPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """Lines of what a rank printed into one file, as ``GET /v1/jobs/{job}/logs`` answers.

    ``rounds``: in which the rank has such a file, the newest first. ``end``: to be given as ``after`` for what comes
    next. ``is_cut``: there were more lines than are shown, before the first of them. ``is_anew``: the file is shorter
    than what was read of it, so these are its first lines. ``node``: whose agent has read it; "": the controller has.
    """

    rank: Rank
    round: Round
    stream: Literal["stdout", "stderr"]
    lines: Annotated[tuple[Annotated[str, Meta(max_length=MOST_LINE)], ...], Meta(max_length=MOST_LINES)] = ()
    rounds: Annotated[tuple[Round, ...], Meta(max_length=MOST_ROUNDS)] = ()
    end: Count = 0
    is_cut: bool = False
    is_anew: bool = False
    node: str = ""
