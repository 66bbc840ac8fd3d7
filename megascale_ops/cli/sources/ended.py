# SPDX-License-Identifier: Apache-2.0
"""The status of a run that is over, as its controller told it last: from the journal and the history that it left."""

import time
from pathlib import Path

from megascale_ops.cli.sources.history import Journal
from megascale_ops.cli.sources.locate import Place
from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.schema.events import OVER, JobStatus, Status
from megascale_ops.schema.history import History, decode, history_file
from megascale_ops.schema.version import MESSAGE_VERSION
from megascale_ops.schema.wording import printable, state_words
from megascale_ops.suggest import unknown

# 10,000 incidents: as many as a report looks at.
MOST_INCIDENTS = 10_000
_WITHOUT_WORD = "its controller is gone, and nothing says how it ended"


def status_left(path: Path, job: str | None) -> Status:
    """Return what a journal says of its jobs, or of one of them.

    Raises:
        UsageError: it knows no such job; the nearest is named.
        MegascaleError: it can't be read.
    """
    from megascale_ops.controller.status import left_status

    journal = Journal(path)
    try:
        records = journal.jobs()
        if job is not None and job not in records:
            raise UsageError(f"{unknown('job', job, list(records))} ({path})")
        found = []
        for name, raw in records.items():
            if job in (None, name):
                incidents = journal.incidents(name, MOST_INCIDENTS).incidents
                found.append(left_status(name, raw, incidents, _history(path.parent, name), _WITHOUT_WORD))
    except ValueError as error:
        raise MegascaleError(f"what {path} says of a job can't be read: {error}") from error
    finally:
        journal.close()
    return Status(MESSAGE_VERSION, time.time(), 0.0, tuple(found))


def all_over(status: Status) -> bool:
    """Say whether there are jobs, and nothing more happens to any of them."""
    return bool(status.jobs) and all(one.state in OVER for one in status.jobs)


def last_words(status: Status, where: str) -> str:
    """Return one sentence for each job that is over, and how to read on.

    Args:
        status: of the jobs.
        where: the options by which verbs find them.
    """
    return "\n".join(f"{how_it_ended(one)}; `megascale-ops report {where}` tells the rest" for one in status.jobs)


def how_it_ended(job: JobStatus) -> str:
    """Return what became of a job in a few words: ``job gpt is over: stopped by hand on node-a, at step 2,374``."""
    if job.state not in OVER:
        return f"job {job.job} was {state_words(job.state)} when it was last heard of"
    reason, how = printable(job.reason), state_words(job.state)
    if reason:
        how = reason if reason.startswith(how) else f"{how} ({reason})"
    at = f", at step {job.step:,}" if job.step >= 0 else ", before its first step"
    return f"job {job.job} is over: {how}{at}"


def of_whom(place: Place, job: str | None) -> str:
    """Return which run is spoken of: one that is over with how it ended, else by its job or its controller."""
    if place.journal is None:
        return f"job {job}" if job else f"the jobs of the controller at {place.url}"
    try:
        jobs = status_left(place.journal, job).jobs
    except MegascaleError:
        jobs = ()
    return "; ".join(how_it_ended(one) for one in jobs) or f"the run in {place.journal.parent}"


def _history(folder: Path, name: str) -> History | None:
    """Return the history of a job's steps; without it no goodput is told."""
    file = history_file(folder, name)
    try:
        return decode(file.read_bytes(), str(file))
    except (OSError, MegascaleError):
        return None
