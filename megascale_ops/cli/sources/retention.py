# SPDX-License-Identifier: Apache-2.0
"""What goes of runs that are over: by hand (`clean`), and by itself once a day after a run.

A run folder is removed entry by entry, its journal last: after an interruption the run is still listed, and it can
be removed again. By itself never a checkpoint goes: it can't be made again.
"""

import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from megascale_ops.cli.sources.locate import JOURNAL_FILE, Wanted, run_folders
from megascale_ops.cli.sources.runs import (
    CHECKPOINTS,
    is_run_folder,
    list_runs,
    lives_here,
    mark_cleaned,
    may_live,
)
from megascale_ops.errors import MegascaleError
from megascale_ops.link.whereabouts import state_root
from megascale_ops.schema.runs import Run

DAY_S = 86_400.0
# Once a day: folders are looked at for their size, which takes a millisecond for each hundred files.
_STAMP = ".retention"


class Freed(NamedTuple):
    """What was removed of runs that are over."""

    runs: int
    size_bytes: int


def remove(folder: Path, *, with_checkpoints: bool) -> None:
    """Remove a run folder; its checkpoints, and then the folder itself, stay unless they are to go, too.

    Raises:
        MegascaleError: something can't be removed; what is left is still listed as this run's.
    """
    try:
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name.startswith(JOURNAL_FILE)):
            if entry.is_dir() and not entry.is_symlink():
                if entry.name != CHECKPOINTS or with_checkpoints:
                    shutil.rmtree(entry)
            else:
                entry.unlink()
        if any(folder.iterdir()):
            mark_cleaned(folder)
        else:
            folder.rmdir()
    except OSError as error:
        raise MegascaleError(f"{error.filename or folder} can't be removed: {error.strerror}") from error


def living(found: list[Run], now_s: float) -> set[str]:
    """Return the folders of runs that live, or may."""
    return {run.folder for run in found if lives_here(Path(run.folder)) or may_live(run, now_s)}


def over(found: list[Run], folders: set[str]) -> list[Run]:
    """Return one run for each folder that is none of ``folders``, in the order given (the newest first)."""
    return list({run.folder: run for run in reversed(found) if run.folder not in folders}.values())[::-1]


def ended_s(run: Run) -> float:
    """Return when it was last heard of: its end, or when its folder was last written to."""
    return run.until_wall_s or run.written_wall_s


def tidy(keep_days: float, keep_runs: int) -> Freed:
    """Remove what the settings no longer keep, at most once a day; checkpoints, and all that may live, stay.

    Args:
        keep_days: runs that ended longer ago go; 0: none for its age.
        keep_runs: of those that are over the newest so many stay; 0: all.

    Raises:
        MegascaleError: something can't be removed.
    """
    now_s = time.time()
    if not (keep_days or keep_runs) or not _is_due(state_root() / _STAMP, now_s):
        return Freed(0, 0)
    if len([folder for folder in run_folders(Wanted()) if is_run_folder(folder)]) < 2:
        return Freed(0, 0)  # the run that has just ended
    found = list_runs(ask=False)
    ended = over(found, living(found, now_s))
    gone = [
        run
        for place, run in enumerate(ended)
        if run.size_bytes > run.checkpoint_bytes
        and ((keep_runs and place >= keep_runs) or (keep_days and ended_s(run) < now_s - keep_days * DAY_S))
    ]
    for run in gone:
        remove(Path(run.folder), with_checkpoints=False)
    return Freed(len(gone), sum(run.size_bytes - run.checkpoint_bytes for run in gone))


def _is_due(stamp: Path, now_s: float) -> bool:
    """Say whether a day has passed since the last time, and take note of this one."""
    try:
        if now_s - stamp.stat().st_mtime < DAY_S:
            return False
    except OSError:
        pass
    try:
        stamp.touch()
        os.utime(stamp, (now_s, now_s))
    except OSError:
        return False  # no run has left a folder, or the disk is full: nothing is removed that could not be noted
    return True
