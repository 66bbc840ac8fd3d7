# SPDX-License-Identifier: Apache-2.0
"""Incidents as people turn over their pages: the newest from memory, the older ones from the journal.

The loop has the newest incidents at hand, some of them newer than the journal has them; the journal has all. Reading it
has a deadline: a database that does not answer costs the older pages, not the newest one.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from megascale_ops.controller.journal.rows import number_of
from megascale_ops.controller.journal.store import Store, without_texts
from megascale_ops.errors import NotFoundError, UsageError
from megascale_ops.schema.events import Incident, Incidents

log = logging.getLogger(__name__)
T = TypeVar("T")

# 500: as many as the loop has at hand; a page of 1,000 is read in 45 ms.
DEFAULT_LIMIT = 500
MOST_LISTED = 1000
# 3 s: a page of incidents is read in milliseconds.
READ_S = 3.0
# 4: what waits for a database that hangs; others are answered from memory.
_MOST_READERS = 4


class IncidentPages:
    """Answers about incidents, from memory and journal."""

    def __init__(self, book: Mapping[str, Incident], store: Store) -> None:
        self._book = book
        self._store = store
        self._readers = 0

    async def incidents(self, job: str | None, limit: int = 0, before: str = "") -> Incidents:
        """Return one page, the newest last; without ``limit`` and ``before`` all that is at hand.

        Args:
            job: only of this one.
            limit: at most so many, up to MOST_LISTED.
            before: only older ones than this.

        Raises:
            NotFoundError: ``before`` names no incident.
        """
        mine = [one for one in self._book.values() if job is None or one.job == job]
        if not limit and not before:
            return Incidents(incidents=tuple(without_texts(one) for one in mine))
        count = limit or DEFAULT_LIMIT
        edge = await self._edge(job, before) if before else None
        # One more than requested shows whether there are older ones.
        stored = await self._read(lambda: self._store.incidents(job, count + 1, before))
        known = {one.id: one for one in stored or ()} | {one.id: without_texts(one) for one in mine}
        if edge is not None:
            known = {name: one for name, one in known.items() if _place(one) < _place(edge)}
        found = sorted(known.values(), key=_place)
        return Incidents(incidents=tuple(found[-count:]), older=len(found) > count)

    async def _edge(self, job: str | None, name: str) -> Incident:
        """Return the incident to list older ones than; for one job, another job's incident is refused."""
        edge = self._book.get(name) or await self._read(lambda: self._store.incident(name))
        if edge is None or (job is not None and edge.job != job):
            of_job = f" of job {job!r}" if job is not None else ""
            raise NotFoundError(f"there is no incident {name!r}{of_job} to list older ones than")
        return edge

    async def incident(self, name: str) -> Incident | None:
        """Return one incident with its events, or None when there is none of this name."""
        known = self._book.get(name)
        stored = await self._read(lambda: self._store.incident(name))
        if known is not None and stored is not None:
            return msgspec.structs.replace(known, events=stored.events)
        return known or stored

    async def _read(self, read: Callable[[], T]) -> T | None:
        """Return what the journal has, None when it can't be asked now."""
        if self._store.failing or self._readers >= _MOST_READERS:
            return None
        events = asyncio.get_running_loop()
        answered = asyncio.Event()
        found: list[T] = []

        def tell() -> None:
            self._readers -= 1
            answered.set()

        def ask() -> None:
            # A thread of its own, not of a pool that the controller's end would wait for.
            with contextlib.suppress(UsageError):
                found.append(read())
            with contextlib.suppress(RuntimeError):  # the loop has ended
                events.call_soon_threadsafe(tell)

        self._readers += 1
        threading.Thread(target=ask, name="journal-reader", daemon=True).start()
        try:
            await asyncio.wait_for(answered.wait(), READ_S)
        except TimeoutError:
            log.warning("the journal has not answered for %.0f s: older incidents can't be shown now", READ_S)
        return found[0] if found else None


def _place(incident: Incident) -> tuple[float, int, str]:
    """Return where an incident stands among all, as the journal orders them."""
    marks = incident.marks
    return marks.detected or marks.began, number_of(incident.id), incident.id
