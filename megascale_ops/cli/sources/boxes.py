# SPDX-License-Identifier: Apache-2.0
"""Find the black boxes that a command line means: of a job that runs here, of an incident, or below a folder."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from megascale_ops.blackbox.roots import SHARED, find_job, roots_of, watched_roots
from megascale_ops.cli.sources.locate import Wanted, narrowed
from megascale_ops.errors import ControllerUnreachableError, MegascaleError, UsageError
from megascale_ops.link.whereabouts import state_root
from megascale_ops.suggest import unknown

if TYPE_CHECKING:
    from megascale_ops.schema.events import Incident
    from megascale_ops.trace.gather import Boxes


class Ask(msgspec.Struct, frozen=True):
    """The command line's options."""

    job: str
    incident: str
    boxes: str
    box_root: str  # "": where this user's are
    where: Wanted
    token_file: str | None
    note: str = ""  # what should be known of how it was understood


def read_ask(
    *,
    job: str | None,
    incident: str | None,
    boxes: str | None,
    box_root: str | None,
    run_dir: str | None,
    controller: str | None,
    token_file: str | None,
) -> Ask:
    """Return the options as one value; an incident's name gives the job where none is given, a run folder both.

    Where nothing is given the only job is meant whose ranks live here.

    Raises:
        UsageError: the run folder alone was given, and it is none; or nothing was, and no job or several live here.
        MegascaleError: no box of that run is left.
    """
    ask = Ask(
        job=job or "",
        incident=incident or "",
        boxes=boxes or "",
        box_root=box_root or "",
        where=narrowed(Wanted(controller or "", job or "", run_dir or ""), incident or ""),
        token_file=token_file,
    )
    if job or incident or boxes:
        return ask
    return _of_run(ask, Path(run_dir)) if run_dir else _only_one(ask)


def find_meant(ask: Ask) -> "Incident | None":
    """Return the incident, or None when there is no history to ask and its boxes alone are to be drawn.

    Raises:
        UsageError: there is none of this name, or it is another job's.
    """
    from megascale_ops.cli.sources.history import find_incident, open_history

    try:
        with open_history(ask.where, ask.token_file) as history:
            found = find_incident(history, ask.incident, ask.job or None)
    except ControllerUnreachableError:
        if _incident_folder(ask, None) is None and not ask.boxes:
            raise
        return None
    except UsageError:
        if not ask.note:
            raise
        return None  # a journal that was lost: its folder was found all the same
    if ask.job and found.job != ask.job:
        raise UsageError(f"incident {found.id} is of job {found.job!r}, not of {ask.job!r}")
    return found


def _incident_folder(ask: Ask, found: "Incident | None") -> Path | None:
    """Return where the boxes of the incident lie on this machine."""
    runs = [Path(ask.where.run_dir)] if ask.where.run_dir else []
    runs += [state_root() / ask.where.job] if ask.where.job else []
    places = [run / "incidents" / Path(ask.incident).name for run in runs]
    places += [Path(found.folder)] if found is not None and found.folder else []
    return next((place for place in places if place.is_dir()), None)


def open_meant(ask: Ask, found: "Incident | None") -> "Boxes":
    """Open the boxes that are meant.

    Raises:
        UsageError: there is no such job or folder.
        MegascaleError: the job is there, but no box of it.
    """
    from megascale_ops.trace.gather import kept_boxes, live_boxes, open_boxes

    if ask.boxes:
        folder = Path(ask.boxes)
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}: --boxes takes a folder with black boxes")
        paths = kept_boxes(folder)
        if not paths:
            raise UsageError(f"there is no black box (*.box) in {folder}")
    elif ask.incident:
        folder = _incident_folder(ask, found) or Path(found.folder if found else ask.incident)
        paths = kept_boxes(folder) if folder.is_dir() else []
        if not paths:
            raise MegascaleError(
                f"no black box of incident {ask.incident} is kept on this machine ({folder}): "
                "--boxes takes a folder with those of all nodes"
            )
    else:
        paths = live_boxes(find_job(ask.job, ask.box_root, others=True))
        if not paths:
            raise _no_boxes(ask)
    opened = open_boxes(paths, ask.job or (found.job if found else ""))
    opened.notes += [ask.note] if ask.note else []
    return opened


def _of_run(ask: Ask, run: Path) -> Ask:
    """Return what a run folder alone means: the job in it while its ranks live, then its newest incident.

    Raises:
        UsageError: there is no such folder, or no run was in it.
        MegascaleError: a run was, and no box is left of it.
    """
    from megascale_ops.trace.gather import kept_boxes, live_boxes

    if not run.is_dir():
        raise UsageError(f"there is no folder {run}: --run-dir takes the folder of a run")
    jobs = _jobs_of(run)
    living = next((job for job in jobs if live_boxes(find_job(job, ask.box_root, others=True))), "")
    if living:
        return msgspec.structs.replace(ask, job=living)
    for name in reversed(_folders(run / "incidents")):
        if kept_boxes(run / "incidents" / name):
            note = f"no rank of the run lives here: these are the black boxes that were kept of its incident {name}"
            return msgspec.structs.replace(ask, incident=name, note=note)
    if not jobs:
        raise UsageError(f"no run has left anything in {run}: --run-dir takes the folder of a run")
    raise MegascaleError(f"no rank of the run in {run} lives on this machine, and no incident of it kept a black box")


def _only_one(ask: Ask) -> Ask:
    """Return what nothing said means: the job whose ranks live here, where there is one only.

    Raises:
        UsageError: there is none, or there are several.
    """
    from megascale_ops.trace.gather import live_boxes

    # Not other users' jobs, which root could read: those have to be named.
    roots = [Path(ask.box_root)] if ask.box_root else roots_of(os.geteuid())
    names = dict.fromkeys(name for root in roots for name in _folders(root))
    living = [name for name in names if live_boxes(find_job(name, ask.box_root))]
    if len(living) == 1:
        return msgspec.structs.replace(ask, job=living[0])
    here = f"ranks of {', '.join(sorted(living)[:8])} live here" if living else "no job's ranks live on this machine"
    raise UsageError(f"whose black boxes? {here}: give a JOB, --run-dir DIR, --incident ID or --boxes DIR")


def _jobs_of(run: Path) -> list[str]:
    """Return the jobs that the controller of a run folder knows, by its journal; the newest first."""
    from megascale_ops.cli.sources.history import Journal
    from megascale_ops.cli.sources.locate import JOURNAL_FILE

    if not (run / JOURNAL_FILE).is_file():
        return []
    journal = Journal(run / JOURNAL_FILE)
    try:
        return [*reversed(journal.jobs())]
    finally:
        journal.close()


def _no_boxes(ask: Ask) -> MegascaleError:
    """Return the error for a job that has no box here: it is over, or there is none of this name."""
    places = [Path(ask.box_root)] if ask.box_root else watched_roots(os.geteuid())
    live, runs = [name for place in places for name in _folders(place)], _folders(state_root())
    runs = [name for name in runs if (state_root() / name / "journal.db").is_file()]
    if ask.job not in runs and ask.job not in live and not ask.where.run_dir:
        looked = ", ".join(map(str, places)) or str(SHARED)
        return UsageError(f"{unknown('job', ask.job, [*live, *runs])}; looked in {looked} and {state_root()}")
    run = Path(ask.where.run_dir) if ask.where.run_dir else state_root() / ask.job
    kept = [name for name in _folders(run / "incidents") if any((run / "incidents" / name).rglob("*.box"))]
    hint = f"of {kept[-1]} they are kept: --incident {kept[-1]}" if kept else "and none are kept of an incident"
    return MegascaleError(f"no rank of job {ask.job!r} runs on this machine: black boxes go when a run ends, {hint}")


def _folders(root: Path) -> list[str]:
    """Return the names of the folders in a folder, in the order of their last change; none where there is none."""
    try:
        found = [entry for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(".")]
        return [entry.name for entry in sorted(found, key=lambda entry: entry.stat().st_mtime)]
    except OSError:
        return []
