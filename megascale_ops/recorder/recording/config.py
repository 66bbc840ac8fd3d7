# SPDX-License-Identifier: Apache-2.0
"""A rank's settings from its environment: torchrun's variables and ours."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from megascale_ops.recorder.hook_guard import step_aside
from megascale_ops.schema import environment


class FoundRank(msgspec.Struct, frozen=True):
    """The rank of a process; ``world`` distinguishes its group of all ranks from another one on the same node."""

    rank: int
    local_rank: int  # -1: not known
    world_size: int
    world: str


class RankSettings(msgspec.Struct, frozen=True):
    """A rank's identity, and where its black box belongs."""

    box_dir: Path
    job: str
    node: str
    round: int
    rank: int
    local_rank: int
    world_size: int
    stderr_path: str
    profile_every: int = 0  # sample the kernels of one step in so many; 0: none
    gpu_timers: bool = True


def shows_later(environ: Mapping[str, str], pid: int) -> bool:
    """Return whether process ``pid`` had no RANK when it began, below a launcher of another kind: it may be one yet."""
    return environ.get(environment.WRAPPED) == "1" and environ.get(environment.CLAIMED) != str(pid)


def read_settings(environ: Mapping[str, str], pid: int) -> RankSettings | None:
    """Return the settings of the rank that process ``pid`` is, or None when it is none.

    None as well when the recorder is switched off, or when another process has claimed to be the rank: then this is
    one of its children.

    Raises:
        ValueError: a variable that must be a number is none.
    """
    if not environ.get("RANK"):
        return None
    local_rank, world_size = int(environ.get("LOCAL_RANK") or -1), int(environ.get("WORLD_SIZE") or 0)
    return read_found_settings(environ, pid, FoundRank(int(environ["RANK"]), local_rank, world_size, ""))


def read_found_settings(environ: Mapping[str, str], pid: int, found: FoundRank) -> RankSettings | None:
    """Return the settings of a process that is the rank ``found``, whatever RANK is.

    Raises:
        ValueError: a variable that must be a number is none.
    """
    if not environ.get(environment.BOX_DIR) or environ.get(environment.RECORDER) == "0":
        return None
    if environ.get(environment.CLAIMED, str(pid)) != str(pid):
        return None
    box_dir = Path(environ[environment.BOX_DIR])
    return RankSettings(
        box_dir=box_dir,
        job=environ.get(environment.JOB) or box_dir.name,
        node=environ.get(environment.NODE) or os.uname().nodename,
        round=int(environ.get(environment.ROUND) or 0),
        rank=found.rank,
        local_rank=found.local_rank,
        world_size=found.world_size,
        stderr_path=environ.get(environment.STDERR_PATH, ""),
        profile_every=_profile_every(environ),
        gpu_timers=environ.get(environment.GPU_TIMERS) != "0",
    )


def _profile_every(environ: Mapping[str, str]) -> int:
    """Return how often to sample; a value that is no number above 0 switches sampling off only."""
    said = environ.get(environment.PROFILE_EVERY) or "0"
    if not said.isascii() or not said.isdigit():
        step_aside("sampling of kernels", ValueError(f"{environment.PROFILE_EVERY}={said!r} is no number of steps"))
        return 0
    return int(said)
