# SPDX-License-Identifier: Apache-2.0
"""A job's history, from a running controller or, when none runs, from the journal that a finished run left.

``incidents`` and ``why`` ask here and do not care which of the two answers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megascale_ops.cli.sources.locate import Place, Wanted, find_place, read_token
from megascale_ops.errors import MegascaleError, RefusedError, UsageError
from megascale_ops.schema.events import BadHardwareList, Incident, Incidents
from megascale_ops.suggest import unknown

if TYPE_CHECKING:
    from megascale_ops.link import BlockingLink

# 500 names: candidates for a mistyped one.
MOST_KNOWN = 500


class NothingHappenedError(MegascaleError):
    """There is no incident."""


class History(Protocol):
    """A source of what happened: a controller or a journal."""

    def incidents(self, job: str | None = None, limit: int | None = None, before: str = "") -> Incidents:
        """Return incidents, newest last: so many, older than the one named ``before`` where that is given."""

    def incident(self, incident_id: str) -> Incident:
        """Return one incident with everything known about it.

        Raises:
            RefusedError: there is none of this name.
        """

    def hardware(self) -> BadHardwareList:
        """Return the GPUs that are remembered as bad, the newest last."""


class Journal:
    """A finished run's journal, read without a controller; nothing in it is changed."""

    def __init__(self, path: Path) -> None:
        from megascale_ops.controller.journal.store import open_store

        self._path = path
        self._store = open_store(f"sqlite:///{path}", readonly=True)

    def jobs(self) -> dict[str, bytes]:
        """Return every job's state as the controller encoded it."""
        return self._store.jobs()

    def incidents(self, job: str | None = None, limit: int | None = None, before: str = "") -> Incidents:
        """See ``History.incidents``."""
        if before and self._store.incident(before) is None:
            raise RefusedError(f"no incident {before!r} in {self._path}")
        # One more than requested shows whether there are older ones.
        found = self._store.incidents(job, limit + 1 if limit else None, before)
        older = bool(limit) and len(found) > (limit or 0)
        return Incidents(incidents=tuple(found[1:] if older else found), older=older)

    def incident(self, incident_id: str) -> Incident:
        """See ``History.incident``."""
        found = self._store.incident(incident_id)
        if found is None:
            raise RefusedError(f"no incident {incident_id!r} in {self._path}")
        return found

    def hardware(self) -> BadHardwareList:
        """See ``History.hardware``."""
        return BadHardwareList(tuple(sorted(self._store.hardware(), key=lambda one: one.last_wall_s)))

    def close(self) -> None:
        """Close the journal."""
        self._store.close()


@contextmanager
def open_history(wanted: Wanted, token_file: str | None) -> Iterator[History]:
    """Yield the controller or the journal that has the history; closed again on leaving.

    Raises:
        ControllerUnreachableError: there is none; the message names where was looked.
    """
    with open_place(find_place(wanted, journal_too=True), token_file) as history:
        yield history


@contextmanager
def open_place(place: Place, token_file: str | None) -> "Iterator[Journal | BlockingLink]":
    """Yield the journal or the controller of a place; closed again on leaving."""
    if place.journal is not None:
        journal = Journal(place.journal)
        try:
            yield journal
        finally:
            journal.close()
        return
    from megascale_ops.link import BlockingLink

    with BlockingLink(place.url, read_token(token_file, place)) as link:
        yield link


def find_incident(history: History, incident_id: str | None, job: str | None) -> Incident:
    """Return the incident of this name, or the newest when no name is given.

    Raises:
        UsageError: there is none of this name; the nearest that exists is named.
        NothingHappenedError: no name was given and nothing has happened.
    """
    known = [incident.id for incident in history.incidents(job, MOST_KNOWN).incidents]
    if incident_id is None:
        if not known:
            raise NothingHappenedError("there is nothing to explain: no incident has happened")
        return history.incident(known[-1])
    try:
        return history.incident(incident_id)
    except RefusedError as error:
        if incident_id in known:
            raise
        raise UsageError(unknown("incident", incident_id, known)) from error
