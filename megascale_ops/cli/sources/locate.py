# SPDX-License-Identifier: Apache-2.0
"""Find the controller, or the journal of a finished run, that ``status``, ``incidents`` and ``why`` should ask.

In this order: the address given (``--controller``, MEGASCALE_CONTROLLER); the newest embedded controller that still
runs, of which each run leaves ``controller.json`` in its folder; and, for what has happened already, the journal in
the newest run folder, read without a controller.
"""

import os
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from megascale_ops.cards import Reader
from megascale_ops.errors import ControllerUnreachableError
from megascale_ops.link.token_files import find_token
from megascale_ops.link.whereabouts import CONTROLLER_FILE, read_whereabouts, state_root, token_file_of
from megascale_ops.suggest import unknown

JOURNAL_FILE = "journal.db"


class Place(NamedTuple):
    """Where to ask: ``url`` of a controller and its ``token_file``, else ``journal`` of a run that is over.

    ``folder`` is the run's where the controller is a run's own: it ends with that run.
    """

    url: str = ""
    journal: Path | None = None
    token_file: str = ""
    folder: Path | None = None


class Wanted(NamedTuple):
    """What the user said about where to look; empty means not said."""

    controller: str = ""
    job: str = ""
    run_dir: str = ""


def find_place(wanted: Wanted, *, journal_too: bool) -> Place:
    """Return the controller to ask, or the journal to read when ``journal_too`` and no controller runs.

    Raises:
        UsageError: what was given is no address.
        ControllerUnreachableError: there is neither; the message names where was looked and what to do.
    """
    url = wanted.controller or os.environ.get("MEGASCALE_CONTROLLER", "")
    if url:
        from megascale_ops.link.connection import addresses

        addresses(url)  # what can't be one is told before anything else is
        return Place(url=url)
    folders = run_folders(wanted)
    for folder in folders:
        whereabouts = read_whereabouts(folder)
        if whereabouts is not None and answers(whereabouts.url):
            return Place(url=whereabouts.url, token_file=whereabouts.token_file, folder=folder)
    if journal_too:
        for folder in folders:
            if (folder / JOURNAL_FILE).is_file():
                return Place(journal=folder / JOURNAL_FILE, folder=folder)
    raise ControllerUnreachableError(_nothing(wanted, folders, journal_too=journal_too))


def run_folders(wanted: Wanted) -> list[Path]:
    """Return the run folders that may be meant, the newest first."""
    if wanted.run_dir:
        return [Path(wanted.run_dir)]
    root = state_root()
    if wanted.job:
        return [root / wanted.job]
    return sorted(_folders_of(root), key=_last_written, reverse=True)


def narrowed(wanted: Wanted, incident_id: str) -> Wanted:
    """Return ``wanted`` with the job in an incident's name (``<job>-<number>``), if that run has a folder."""
    job, dash, number = incident_id.rpartition("-")
    if wanted.job or wanted.run_dir or not (dash and number.isdigit() and (state_root() / job).is_dir()):
        return wanted
    return wanted._replace(job=job)


def reader_of(wanted: Wanted, token_file: str | None, place: Place) -> Reader:
    """Return from where a card is read: a command that it offers names the same place, and files that are here."""
    said = (
        ("--controller", wanted.controller),
        ("--run-dir", wanted.run_dir),
        ("--job", wanted.job if place.journal is not None and not wanted.run_dir else ""),
        ("--token-file", token_file or ""),
    )
    options = " ".join(f"{name} {shlex.quote(value)}" for name, value in said if value)
    return Reader(options, _is_there, is_live=place.journal is None)


def _is_there(path: str) -> bool:
    """Say whether a file or folder is on this machine and holds something that we may read."""
    try:
        return any(os.scandir(path)) if os.path.isdir(path) else os.path.getsize(path) > 0 and os.access(path, os.R_OK)  # noqa: PTH112, PTH202  a path that another node may have sent, whatever it looks like
    except (OSError, ValueError):
        return False


def read_token(token_file: str | None, place: Place) -> str | None:
    """Return the token for a controller: from the file given, else its own, else what the environment names.

    A run's own controller has a token of its own, in a file that the run names in its folder: nothing has to be given.
    For an address that was given, the newest run folders are asked whether that controller is theirs.

    Raises:
        UsageError: the file can't be read, others may read it, or it holds no good token.
    """
    path = token_file or place.token_file
    if not path and place.url:
        path = token_file_of(place.url, run_folders(Wanted()))
    return find_token(path, os.environ)


def _folders_of(root: Path) -> Iterator[Path]:
    try:
        yield from (entry for entry in root.iterdir() if entry.is_dir())
    except OSError:
        return


def _last_written(folder: Path) -> float:
    """Return when the run last wrote something of note; 0 for a folder that is none of ours.

    SQLite makes an empty write-ahead file for a mere reader of a journal: that is none of the run's.
    """
    times = [0.0]
    for name in (CONTROLLER_FILE, JOURNAL_FILE, JOURNAL_FILE + "-wal"):
        try:
            found = (folder / name).stat()
        except OSError:
            continue
        if found.st_size or name == JOURNAL_FILE:
            times.append(found.st_mtime)
    return max(times)


def answers(url: str) -> bool:
    """Return whether something listens there. A killed run leaves its file behind, and process ids are used again."""
    try:
        parts = urlsplit(url)
        # 1 s: an embedded controller listens on this machine; longer means that it is not there.
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=1.0):
            return True
    except (OSError, ValueError):
        return False


def _nothing(wanted: Wanted, folders: list[Path], *, journal_too: bool) -> str:
    where = wanted.run_dir or (str(state_root() / wanted.job) if wanted.job else str(state_root()))
    if wanted.run_dir and not Path(wanted.run_dir).is_dir():
        return f"there is no folder {wanted.run_dir}: --run-dir takes the folder of a run"
    if wanted.job and not wanted.run_dir and not Path(where).is_dir():
        known = [folder.name for folder in run_folders(Wanted())]
        return (
            f"{unknown('job', wanted.job, known)} (`megascale-ops jobs` lists the runs of this machine; a job of a "
            "controller that several share is found with --controller URL)"
        )
    if not journal_too and any((folder / JOURNAL_FILE).is_file() for folder in folders):
        return (
            f"no controller runs under {where}: `megascale-ops status`, `incidents`, `why` and `report` still read "
            "what the last run left; --controller URL asks another machine's"
        )
    what = "neither a running controller nor a journal was" if journal_too else "no running controller was"
    return f"{what} found under {where}: start a run, or give --controller URL"
