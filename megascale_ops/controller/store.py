# SPDX-License-Identifier: Apache-2.0
"""The journal: what happened and where every job stands, in SQLite (WAL) or PostgreSQL.

One thread writes, in order, one transaction for all that has piled up; a batch's ``done`` is called when it is safe.
That is the barrier behind "journal first, act second": whoever wants to act passes the act as ``done``.

When writing fails (disk full, server away), training must go on: what could not be written is kept in memory, bounded,
``done`` is called all the same, the trouble is told (log, metric, ``/healthz``), and writing is retried each second.

``synchronous=NORMAL`` in WAL mode survives the death of the process without an fsync for each commit; a power cut may
take the last moments, which the runners' repeated joins and full heartbeats bring back.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from megascale_ops.controller.journal_engine import engine_of, set_pragmas, sqlite_path
from megascale_ops.controller.journal_rows import Batch, newest_hardware, write
from megascale_ops.controller.journal_tables import EVENTS, HARDWARE, INCIDENTS, JOBS, claim
from megascale_ops.controller.salvage import Salvaged, find_damage, put_aside
from megascale_ops.errors import UsageError, VersionError
from megascale_ops.exposition import Distribution
from megascale_ops.schema.events import Event, Incident
from megascale_ops.schema.health import BadHardware
from megascale_ops.schema.metrics import METRICS

log = logging.getLogger(__name__)

# 10,000 events: an hour of a job that fails every second, 3 MB.
KEPT_EVENTS = 10_000
RETRY_S = 1.0
_CLOSE_S = 5.0


def _nothing() -> None:
    """Do nothing when the batch is safe."""


class Store:
    """The journal's one owner. ``submit`` never waits; reading may be done from any thread."""

    def __init__(self, engine: sa.Engine, *, readonly: bool) -> None:
        self._engine = engine
        self._queue: queue.SimpleQueue[tuple[Batch, Callable[[], None], float] | None] = queue.SimpleQueue()
        self._kept: list[Batch] = []
        self.failing = ""  # why the last write failed; "" when all is written
        self.loss = ""  # what the journal had lost when it was opened; "" for nothing
        self.dropped_events = 0
        self.write_times = Distribution(METRICS["megascale_controller_journal_write_seconds"].buckets)
        self.write_errors = 0
        self._thread: threading.Thread | None = None
        if not readonly:
            self._thread = threading.Thread(target=self._write_forever, name="journal", daemon=True)
            self._thread.start()

    @property
    def kept(self) -> int:
        """How many batches wait in memory because they could not be written."""
        return len(self._kept)

    def submit(self, batch: Batch, done: Callable[[], None] = _nothing) -> None:
        """Write ``batch`` after all that was submitted before; ``done`` is called by the writer's thread."""
        self._queue.put((batch, done, time.monotonic()))

    def flush(self) -> None:
        """Wait until all that was submitted is written or kept; at most as long as closing may take."""
        written = threading.Event()
        self.submit(Batch(), written.set)
        written.wait(_CLOSE_S)

    def close(self) -> None:
        """Write what is left and close."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=_CLOSE_S)
            self._thread = None
        self._engine.dispose()

    def jobs(self) -> dict[str, bytes]:
        """Return every job's state as its owner encoded it."""
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(JOBS.c.job, JOBS.c.body))
            return {job: body.encode() for job, body in rows}

    def incidents(self, job: str | None = None) -> list[Incident]:
        """Return incidents, newest last, without events and evidence texts."""
        query = sa.select(INCIDENTS.c.body).order_by(INCIDENTS.c.began, INCIDENTS.c.number)
        if job is not None:
            query = query.where(INCIDENTS.c.job == job)
        with self._engine.connect() as connection:
            return [without_texts(_read_incident(body)) for (body,) in connection.execute(query)]

    def newest_incidents(self, limit: int) -> list[Incident]:
        """Return the newest incidents, newest last, with their evidence but without events."""
        query = sa.select(INCIDENTS.c.body).order_by(INCIDENTS.c.began.desc(), INCIDENTS.c.number.desc()).limit(limit)
        with self._engine.connect() as connection:
            return [_read_incident(body) for (body,) in connection.execute(query)][::-1]

    def hardware(self) -> tuple[BadHardware, ...]:
        """Return what is remembered of GPUs; nothing in a journal that was never written to by a program that does."""
        if not sa.inspect(self._engine).has_table(HARDWARE.name):
            return ()
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(HARDWARE.c.body))
            return tuple(msgspec.json.decode(body, type=BadHardware) for (body,) in rows)

    def incident(self, incident_id: str) -> Incident | None:
        """Return one incident with everything known of it, or None."""
        with self._engine.connect() as connection:
            body = connection.scalar(sa.select(INCIDENTS.c.body).where(INCIDENTS.c.id == incident_id))
            if body is None:
                return None
            query = sa.select(EVENTS.c.body).where(EVENTS.c.incident == incident_id).order_by(EVENTS.c.id)
            events = tuple(msgspec.json.decode(row[0], type=Event) for row in connection.execute(query))
        return msgspec.structs.replace(_read_incident(body), events=events)

    def events(self, job: str) -> list[Event]:
        """Return all events of a job, oldest first."""
        query = sa.select(EVENTS.c.body).where(EVENTS.c.job == job).order_by(EVENTS.c.id)
        with self._engine.connect() as connection:
            return [msgspec.json.decode(row[0], type=Event) for row in connection.execute(query)]

    def _write_forever(self) -> None:
        closing = False
        while not closing:
            batches, dones, closing, since_s = self._take()
            if (batches or self._kept) and self._write(batches):
                done_s = time.monotonic()
                for one_s in since_s:
                    self.write_times.observe(done_s - one_s)
            for done in dones:
                done()

    def _take(self) -> tuple[list[Batch], list[Callable[[], None]], bool, list[float]]:
        """Wait for something to write and return all that has piled up, whether it is the last, and since when."""
        batches: list[Batch] = []
        dones: list[Callable[[], None]] = []
        since_s: list[float] = []
        try:
            item = self._queue.get(timeout=RETRY_S if self._kept else None)
            while item is not None:
                batches.append(item[0])
                dones.append(item[1])
                since_s.append(item[2])
                item = self._queue.get_nowait()
        except queue.Empty:
            return batches, dones, False, since_s
        return batches, dones, True, since_s

    def _write(self, batches: list[Batch]) -> bool:
        """Write what is kept and more; tell whether it is safe now."""
        everything = [*self._kept, *batches]
        try:
            with self._engine.begin() as connection:
                write(connection, everything)
        except (SQLAlchemyError, OSError) as error:
            self._keep(everything)
            why = str(error.orig) if isinstance(error, DBAPIError) else str(error)
            if not self.failing:
                log.error("the journal can't be written (%s): it is kept in memory, training goes on", why)  # noqa: TRY400  the sentence says it all
            self.failing = why or "unknown"
            self.write_errors += 1
            return False
        if self.failing:
            log.warning("the journal can be written again; %d events were lost", self.dropped_events)
        self._kept, self.failing = [], ""
        return True

    def _keep(self, batches: list[Batch]) -> None:
        """Keep unwritten batches as one: the newest states, and the newest events up to the bound."""
        events = [event for batch in batches for event in batch.events]
        if len(events) > KEPT_EVENTS:
            self.dropped_events += len(events) - KEPT_EVENTS
            events = events[-KEPT_EVENTS:]
        records = {batch.job: batch.record for batch in batches if batch.job}
        incidents = {incident.id: incident for batch in batches for incident in batch.incidents}
        self._kept = [Batch(job=job, record=record) for job, record in records.items()]
        hardware = newest_hardware(batches)
        self._kept.append(Batch(events=tuple(events), incidents=tuple(incidents.values()), hardware=hardware))


def without_texts(incident: Incident) -> Incident:
    """Return the incident as a list shows it."""
    evidence = tuple(msgspec.structs.replace(item, text="") for item in incident.evidence)
    return msgspec.structs.replace(incident, evidence=evidence, events=())


def _read_incident(body: str) -> Incident:
    return msgspec.json.decode(body, type=Incident)


def open_store(url: str, *, readonly: bool = False) -> Store:
    """Open the journal at ``url``, creating it unless ``readonly``.

    Args:
        url: ``sqlite:///FILE`` or ``postgresql+psycopg://USER@HOST/DATABASE``.
        readonly: change nothing; the journal must exist.

    Raises:
        UsageError: it can't be opened, or is a database of something else.
        VersionError: it was written by a program that is too new or too old.
    """
    engine = engine_of(url, readonly=readonly)
    shown = engine.url.render_as_string(hide_password=True)
    salvaged = _salvage(engine) if not readonly else None
    try:
        claim(engine, shown, readonly=readonly)
    except DBAPIError as error:
        engine.dispose()
        why = str(error.orig).strip().splitlines()[0] if str(error.orig).strip() else type(error.orig).__name__
        raise UsageError(f"store {shown} can't be used: {why}") from error
    except (UsageError, VersionError):
        engine.dispose()
        raise
    if engine.dialect.name == "sqlite" and not readonly:
        # Only now that it is known to be ours: the journal mode is written into the file.
        sa.event.listen(engine, "connect", set_pragmas)
        engine.dispose()
    store = Store(engine, readonly=readonly)
    if salvaged is not None:
        log.error("%s", salvaged.loss)
        store.loss = salvaged.loss
        for job, record in salvaged.jobs.items():
            store.submit(Batch(job=job, record=record))
        store.submit(Batch(incidents=salvaged.incidents, events=salvaged.events, hardware=salvaged.hardware))
        store.flush()
    return store


def _salvage(engine: sa.Engine) -> Salvaged | None:
    """Put a damaged journal aside and return what could be read from it; None when there is no damage."""
    if engine.dialect.name != "sqlite":
        return None
    path = sqlite_path(engine)
    try:
        damage = find_damage(path)
        return put_aside(path, damage) if damage else None
    except OSError as error:
        raise UsageError(f"store {path} is damaged and can't be put aside: {error}") from error
