# SPDX-License-Identifier: Apache-2.0
"""Keep the histories of steps beside the journal: ``history-<job>.bin``, so that a report outlives the controller.

Taking a snapshot costs the loop little more than a list; making bytes of it, summing and writing them is a thread's
work. A step that comes meanwhile may be in some figures of the newest bucket and not
yet in others; the next write mends it. A file is written beside and renamed.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from megascale_ops.account import Account
from megascale_ops.controller.history.goodput import Accounts, reckon_left
from megascale_ops.controller.history.histories import Histories
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.own_faults import OwnFaults
from megascale_ops.controller.record.state_machine import FINAL
from megascale_ops.errors import MegascaleError
from megascale_ops.schema.events import Incident
from megascale_ops.schema.history import History, decode, encode, history_file
from megascale_ops.whole_file import write_whole

log = logging.getLogger(__name__)

EVERY_S = 10.0
# 1 %: of one core, for all jobs; a history of 12,288 ranks takes 0.1 s to write.
_SHARE = 0.01
_LOOK_S = 0.5


def folder_of(store: str, run_dir: Path | None) -> Path | None:
    """Return where histories are kept: in the run folder, else beside an SQLite journal, else nowhere."""
    if run_dir is not None:
        return run_dir
    file = store.removeprefix("sqlite:///")
    return Path(file).expanduser().absolute().parent if file and file != store else None


class Source(Protocol):
    """Where histories come from: the controller's loop."""

    jobs: dict[str, Job]
    incidents: OrderedDict[str, Incident]
    histories: Histories
    accounts: Accounts
    faults: OwnFaults

    @property
    def wall(self) -> Callable[[], float]:
        """The clock of the wall, in seconds since the epoch."""

    def goodput(self, name: str) -> Account | None:
        """Return how much of a job's time was of use so far."""


class HistoryFiles:
    """Writes what the loop's histories hold.

    Args:
        folder: where to; None keeps them in memory only.
    """

    def __init__(self, loop: Source, folder: Path | None) -> None:
        self._loop = loop
        self._folder = folder
        self._written_s: dict[str, float] = {}  # by job, monotonic
        self._took_s = 0.0
        self._failing = ""

    def restore(self) -> None:
        """Go on with the histories of jobs that are not over; a damaged one is put aside and told.

        Of those that are over only the account is taken: so their goodput is told as it was when they ended.
        """
        if self._folder is None:
            return
        for name, job in self._loop.jobs.items():
            path = history_file(self._folder, name)
            if not path.exists():
                continue
            if job.is_over:
                self._restore_account(job, path)
                continue
            try:
                kept = decode(path.read_bytes(), str(path))
            except (OSError, MegascaleError) as error:
                log.error("%s; it begins anew", error)  # noqa: TRY400  the sentence is enough
                with contextlib.suppress(OSError):
                    path.replace(path.with_suffix(".bin.damaged"))
                continue
            if kept.damage:
                log.error("%s; they begin anew", kept.damage)
            self._loop.histories.restore(job, kept)

    def _restore_account(self, job: Job, path: Path) -> None:
        try:
            kept = decode(path.read_bytes(), str(path))
        except (OSError, MegascaleError) as error:
            log.warning("%s; the goodput of job %s, which is over, is not known", error, job.name)
            return
        made = reckon_left(job, kept.facts, self._loop.incidents.values())
        if made is not None:
            self._loop.accounts.keep(job, made)

    async def keep(self) -> None:
        """Write every history in turn, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for name in self._due():
                await self._write_contained(name)

    async def close(self) -> None:
        """Write all once more."""
        for name in self._due(at_end=True):
            await self._write_contained(name)

    async def _write_contained(self, name: str) -> None:
        with self._loop.faults.contain(name, "writing the history of its steps", is_shown=True):
            await self._write(name)

    def _due(self, *, at_end: bool = False) -> list[str]:
        """Return the jobs to write now: those that were not written for a while, and those that have just ended."""
        if self._folder is None:
            return []
        pause_s = max(EVERY_S, self._took_s / _SHARE)
        since_s = time.monotonic() - pause_s
        return [
            name
            for name in self._loop.histories.by_job
            if at_end
            or self._written_s.get(name, 0.0) <= since_s
            or (self._loop.jobs[name].is_over and not self._failing)
        ]

    async def _write(self, name: str) -> None:
        job = self._loop.jobs[name]
        self._loop.histories.poll_job(job)  # the last change of state may have come after the last tick
        self._loop.goodput(name)  # and what is dropped below is counted for the last time
        snapshot = self._loop.histories.snapshot(job, self._loop.wall())
        if snapshot is None or self._folder is None:
            return
        began_s = self._written_s[name] = time.monotonic()
        try:
            await asyncio.to_thread(write_history, history_file(self._folder, name), snapshot)
        except OSError as error:
            if not self._failing:
                log.error("the history of steps can't be written (%s): reports lack it, training goes on", error)  # noqa: TRY400  the message is complete
            self._failing = str(error)
            return
        if self._failing:
            log.warning("the history of steps can be written again")
        self._failing = ""
        self._took_s = time.monotonic() - began_s
        turns = snapshot.facts.turns
        if turns and turns[-1].state in FINAL and snapshot.facts.life == job.record.life:
            self._loop.histories.forget(name)

    async def raw(self, name: str) -> bytes | None:
        """Return a job's history as bytes, None when nothing is kept of it."""
        snapshot = self._loop.histories.snapshot(self._loop.jobs[name], self._loop.wall())
        if snapshot is not None:
            return await asyncio.to_thread(encode, snapshot)
        path = history_file(self._folder, name) if self._folder is not None else None
        return await asyncio.to_thread(path.read_bytes) if path is not None and path.is_file() else None


def write_history(path: Path, history: History) -> None:
    """Write a history; no reader sees half of it.

    Raises:
        OSError: it can't be written; what was there stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, encode(history))
