# SPDX-License-Identifier: Apache-2.0
"""The runs of this user on this machine: what each left in its folder, and the state of a living one now.

A run folder is one that holds a journal, output or checkpoints, or names its controller. A run that ended without a
record (a power cut, SIGKILL of all its processes) is distinguished from one that finished, failed or still runs.
"""

import os
from pathlib import Path

import msgspec

from megascale_ops.blackbox.roots import roots_of
from megascale_ops.cli.sources.history import Journal
from megascale_ops.cli.sources.locate import JOURNAL_FILE, Place, Wanted, answers, read_token, run_folders
from megascale_ops.errors import MegascaleError
from megascale_ops.foreign import UNREADABLE
from megascale_ops.link.whereabouts import CONTROLLER_FILE, is_ours, read_whereabouts
from megascale_ops.runner.ranks.leftovers import is_held
from megascale_ops.schema.events import OVER
from megascale_ops.schema.recording.entries import FOLDER as RECORDINGS
from megascale_ops.schema.runs import CLEANED, ELSEWHERE, FAILED, FINISHED, LOST, RUNNING, STOPPED, UNKNOWN, Run

# What is the script's own and can't be made again; all else in a run folder is a record of the past.
CHECKPOINTS = "checkpoints"
LOGS = "logs"
CLEANED_FILE = ".cleaned"
# A day: a run that lives writes its history, journal, output or the lease of its checkpoints far more often.
QUIET_S = 86_400.0
# 60 s: agent and controller write a last line when the job is over.
_LAST_WORDS_S = 60.0
# By how the names of files and folders begin that a run makes.
_KINDS = {
    CHECKPOINTS: CHECKPOINTS,
    LOGS: "logs",
    "agent.log": "logs",
    "controller.log": "logs",
    "incidents": "incidents",
    "profiles": "incidents",
    JOURNAL_FILE: "journals",
    "history": "journals",
    RECORDINGS: "journals",
}
_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's own are
_OF_READERS = (f"{JOURNAL_FILE}-shm", f"{JOURNAL_FILE}-wal")


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
    parts, written_s = _measured(folder)
    found = (_live_runs(folder) if ask else []) or _ended_runs(folder)
    replace = msgspec.structs.replace
    size, kept = sum(parts.values()), parts.get(CHECKPOINTS, 0)
    return [
        replace(run, size_bytes=size, checkpoint_bytes=kept, written_wall_s=written_s, parts=parts) for run in found
    ]


def is_run_folder(folder: Path) -> bool:
    """Return whether a run has left one of its files there."""
    return any((folder / name).exists() for name in (JOURNAL_FILE, CONTROLLER_FILE, LOGS, CHECKPOINTS))


def lives_here(folder: Path) -> bool:
    """Return whether a run is seen to live: its controller answers, or its runner lives on this machine."""
    found = read_whereabouts(folder)
    if found is not None and (answers(found.url) or is_ours(found.runner_pid)):
        return True
    named = os.environ.get("MEGASCALE_BOX_ROOT", "")
    roots = [*([Path(named)] if named else []), *roots_of(os.geteuid())]
    return any(is_held(root, folder.name) for root in roots)


def may_live(run: Run, now_s: float) -> bool:
    """Return whether a run may live although it is not seen to: on another node of a shared disk, or without a word.

    What ended by its journal, or was cleaned, is over, unless something was written later: a new life of its name.
    """
    is_over = run.result in (FINISHED, FAILED, STOPPED, CLEANED)
    if is_over and run.written_wall_s <= run.until_wall_s + _LAST_WORDS_S:
        return False
    return now_s - run.written_wall_s < QUIET_S


def mark_cleaned(folder: Path) -> None:
    """Note that all but the checkpoints were removed from a folder: nothing else there shows that the run is over."""
    (folder / CLEANED_FILE).touch()


def _measured(folder: Path) -> tuple[dict[str, int], float]:
    """Return the bytes in a folder by kind, and when it was last written to.

    Links are not followed, and what vanishes meanwhile is left out. What SQLite makes for a reader is no writing.
    """
    sizes: dict[str, int] = {}
    written_s = 0.0
    for parent, _, names in os.walk(folder):
        above = Path(parent).relative_to(folder).parts[:1]
        for name in names:
            try:
                found = Path(parent, name).lstat()
            except OSError:
                continue
            kind = _kind_of(above[0] if above else name)
            sizes[kind] = sizes.get(kind, 0) + found.st_blocks * _BLOCK_BYTES
            if name not in _OF_READERS or (found.st_size and name != f"{JOURNAL_FILE}-shm"):
                written_s = max(written_s, found.st_mtime)
    return sizes, written_s


def _kind_of(name: str) -> str:
    """Return which kind of thing the first name below a run folder is."""
    return next((kind for start, kind in _KINDS.items() if name.startswith(start)), "other")


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
        return []  # another program listens there now, or it ends at this moment: read the journal
    began = {run.job: run.began_wall_s for run in _ended_runs(folder)}
    return [
        Run(
            job=one.job,
            folder=str(folder),
            result=one.state if one.state in OVER else RUNNING,
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
        return [_without_journal(folder)]
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


def _without_journal(folder: Path) -> Run:
    cleaned = folder / CLEANED_FILE
    if cleaned.is_file() and not (folder / LOGS).exists():
        until_s = cleaned.stat().st_mtime
        return Run(folder.name, str(folder), CLEANED, reason="only its checkpoints are left", until_wall_s=until_s)
    return Run(folder.name, str(folder), ELSEWHERE, reason="its journal is kept by another controller, or is lost")


def _ended(folder: Path, name: str, raw: bytes) -> Run:
    try:
        facts = msgspec.json.decode(raw, type=_Facts)
    except UNREADABLE as error:
        return Run(name, str(folder), UNKNOWN, reason=f"what the journal says of it can't be read: {error}")
    is_over = facts.state in OVER
    by_hand = facts.state == FINISHED and facts.exit_code != 0  # as an older program has it
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
