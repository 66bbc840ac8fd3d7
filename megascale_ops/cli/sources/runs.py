# SPDX-License-Identifier: Apache-2.0
"""The runs of this user on this machine: what each left in its folder, and what a living one says now.

A run folder is one that holds a journal or tells where its controller is. Whoever has ended without a word (a
power cut, SIGKILL of all its processes) is told apart from one that finished, failed or still runs.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from megascale_ops.cli.sources.history import Journal
from megascale_ops.cli.sources.locate import JOURNAL_FILE, Place, Wanted, answers, read_token, run_folders
from megascale_ops.errors import MegascaleError
from megascale_ops.foreign import UNREADABLE
from megascale_ops.link.whereabouts import CONTROLLER_FILE, is_ours, read_whereabouts
from megascale_ops.schema.runs import CLEANED, FAILED, FINISHED, LOST, RUNNING, STOPPED, UNKNOWN, Run

# What is the script's own and can't be made again; all else in a run folder tells of the past.
CHECKPOINTS = "checkpoints"


class _Facts(msgspec.Struct, frozen=True):
    """What is read of a job's record in the journal."""

    job: str
    state: str = ""
    reason: str = ""
    best_step: int = -1
    furthest: int = -1
    restarted: dict[str, int] = {}
    incidents: int = 0
    started_wall_s: float = 0.0
    since_wall_s: float = 0.0
    exit_code: int = 0
    members: tuple[dict[str, object], ...] = ()


def list_runs(*, ask: bool = True) -> list[Run]:
    """Return all runs under the user's state folder, the one that began last first; unknown beginnings come last.

    Args:
        ask: ask the controllers of living runs; else all is as their journals have it.
    """
    found = [run for folder in run_folders(Wanted()) for run in runs_in(folder, ask=ask)]
    return sorted(found, key=lambda run: -run.began_wall_s)


def runs_in(folder: Path, *, ask: bool) -> list[Run]:
    """Return the jobs of one run folder; none for a folder that is no run's."""
    if not is_run_folder(folder):
        return []
    size, kept = sizes(folder)
    found = (_live_runs(folder) if ask else []) or _ended_runs(folder)
    return [msgspec.structs.replace(run, size_bytes=size, checkpoint_bytes=kept) for run in found]


def is_run_folder(folder: Path) -> bool:
    """Say whether a run has left something there that tells of it."""
    return any((folder / name).exists() for name in (JOURNAL_FILE, CONTROLLER_FILE, CHECKPOINTS))


def is_live(folder: Path) -> bool:
    """Say whether the run's controller answers, or a process of ours has its runner's number (a doubt counts)."""
    found = read_whereabouts(folder)
    return found is not None and (answers(found.url) or is_ours(found.runner_pid))


def sizes(folder: Path) -> tuple[int, int]:
    """Return the bytes of everything in a folder, and of its checkpoints; links are not followed."""
    whole = kept = 0
    for path, size in files_of(folder):
        whole += size
        kept += size if path.relative_to(folder).parts[0] == CHECKPOINTS else 0
    return whole, kept


def files_of(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield every file below a folder with its bytes on disk; what vanishes meanwhile is left out."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            try:
                yield path, path.lstat().st_blocks * 512
            except OSError:
                continue


def _live_runs(folder: Path) -> list[Run]:
    """Ask the controller that the run brought up; nothing where it does not answer."""
    found = read_whereabouts(folder)
    if found is None or not answers(found.url):
        return []
    from megascale_ops.link import BlockingLink

    try:
        with BlockingLink(found.url, read_token(None, Place(url=found.url, token_file=found.token_file))) as link:
            jobs = link.status().jobs
    except MegascaleError:
        return []  # somebody else listens there now, or it ends at this moment: the journal is asked
    began = {run.job: run.began_wall_s for run in _ended_runs(folder)}
    return [
        Run(
            job=one.job,
            folder=str(folder),
            result=one.state if one.state in (FINISHED, FAILED) else RUNNING,
            state=one.state,
            reason=one.reason,
            step=one.step,
            ranks=one.world_size,
            restarts=one.restarts,
            incidents=one.incidents,
            began_wall_s=began.get(one.job, one.since_wall_s),
        )
        for one in jobs
    ]


def _ended_runs(folder: Path) -> list[Run]:
    """Read the journal that the run's controller kept."""
    path = folder / JOURNAL_FILE
    if not path.is_file():
        return [Run(folder.name, str(folder), CLEANED, reason="only its checkpoints are left")]
    try:
        journal = Journal(path)
        try:
            records = journal.jobs()
        finally:
            journal.close()
    except MegascaleError as error:
        return [Run(folder.name, str(folder), UNKNOWN, reason=str(error))]
    return [_ended(folder, name, raw) for name, raw in records.items()] or [
        Run(folder.name, str(folder), LOST, reason="it ended before any rank had joined")
    ]


def _ended(folder: Path, name: str, raw: bytes) -> Run:
    try:
        facts = msgspec.json.decode(raw, type=_Facts)
    except UNREADABLE as error:
        return Run(name, str(folder), UNKNOWN, reason=f"what the journal says of it can't be read: {error}")
    is_over = facts.state in (FINISHED, FAILED)
    by_hand = facts.state == FINISHED and facts.exit_code != 0
    ranks = [member.get("nproc", 0) for member in facts.members]
    return Run(
        job=name,
        folder=str(folder),
        result=(STOPPED if by_hand else facts.state) if is_over else LOST,
        state=facts.state,
        reason=facts.reason if is_over else "its controller is gone",
        step=max(facts.best_step, facts.furthest),
        ranks=sum(count for count in ranks if isinstance(count, int)),
        restarts=sum(facts.restarted.values()),
        incidents=facts.incidents,
        began_wall_s=facts.started_wall_s,
        until_wall_s=facts.since_wall_s if is_over else 0.0,
    )
