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
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from megascale_ops.controller.salvage import Salvaged, find_damage, put_aside
from megascale_ops.errors import UsageError, VersionError
from megascale_ops.exposition import Distribution
from megascale_ops.schema.events import Event, Incident
from megascale_ops.schema.health import BadHardware
from megascale_ops.schema.metrics import METRICS
from megascale_ops.schema.version import JOURNAL_VERSION, check_version

log = logging.getLogger(__name__)

APPLICATION = "megascale-ops"
# 10,000 events: an hour of a job that fails every second, 3 MB.
KEPT_EVENTS = 10_000
RETRY_S = 1.0
_CLOSE_S = 5.0

_tables = sa.MetaData()
_meta = sa.Table("meta", _tables, sa.Column("key", sa.String(64), primary_key=True), sa.Column("value", sa.Text))
_jobs = sa.Table("jobs", _tables, sa.Column("job", sa.String(100), primary_key=True), sa.Column("body", sa.Text))
_incidents = sa.Table(
    "incidents",
    _tables,
    sa.Column("id", sa.String(120), primary_key=True),
    sa.Column("job", sa.String(100), index=True),
    sa.Column("number", sa.Integer),
    sa.Column("began", sa.Float),
    sa.Column("body", sa.Text),
)
_events = sa.Table(
    "events",
    _tables,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("job", sa.String(100), index=True),
    sa.Column("incident", sa.String(120), index=True),
    sa.Column("wall_s", sa.Float),
    sa.Column("kind", sa.String(64)),
    sa.Column("body", sa.Text),
)
# What is remembered of GPUs; journals of older programs do not have it, and get it when they are written to.
_hardware = sa.Table(
    "hardware",
    _tables,
    sa.Column("uuid", sa.String(100), primary_key=True),
    sa.Column("reason", sa.String(100), primary_key=True),
    sa.Column("body", sa.Text),
)


class Batch(msgspec.Struct, frozen=True):
    """What belongs together: events, and the new state of one job, of incidents and of bad hardware."""

    events: tuple[Event, ...] = ()
    job: str = ""
    record: bytes = b""  # the job's state, encoded by its owner
    incidents: tuple[Incident, ...] = ()
    hardware: tuple[BadHardware, ...] = ()  # ``count`` 0: it was mended, or is forgotten


def _nothing() -> None:
    """Do nothing when the batch is safe."""


class Store:
    """The journal's one owner. ``submit`` never waits; reading may be done from any thread."""

    def __init__(self, engine: sa.Engine, *, readonly: bool) -> None:
        self._engine = engine
        self._upsert: Callable[[sa.Table], Any] = _upsert_of(engine)
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
            rows = connection.execute(sa.select(_jobs.c.job, _jobs.c.body))
            return {job: body.encode() for job, body in rows}

    def incidents(self, job: str | None = None) -> list[Incident]:
        """Return incidents, newest last, without events and evidence texts."""
        query = sa.select(_incidents.c.body).order_by(_incidents.c.began, _incidents.c.number)
        if job is not None:
            query = query.where(_incidents.c.job == job)
        with self._engine.connect() as connection:
            return [without_texts(_read_incident(body)) for (body,) in connection.execute(query)]

    def newest_incidents(self, limit: int) -> list[Incident]:
        """Return the newest incidents, newest last, with their evidence but without events."""
        query = (
            sa.select(_incidents.c.body).order_by(_incidents.c.began.desc(), _incidents.c.number.desc()).limit(limit)
        )
        with self._engine.connect() as connection:
            return [_read_incident(body) for (body,) in connection.execute(query)][::-1]

    def hardware(self) -> tuple[BadHardware, ...]:
        """Return what is remembered of GPUs; nothing in a journal that was never written to by a program that does."""
        if not sa.inspect(self._engine).has_table(_hardware.name):
            return ()
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(_hardware.c.body))
            return tuple(msgspec.json.decode(body, type=BadHardware) for (body,) in rows)

    def incident(self, incident_id: str) -> Incident | None:
        """Return one incident with everything known of it, or None."""
        with self._engine.connect() as connection:
            body = connection.scalar(sa.select(_incidents.c.body).where(_incidents.c.id == incident_id))
            if body is None:
                return None
            query = sa.select(_events.c.body).where(_events.c.incident == incident_id).order_by(_events.c.id)
            events = tuple(msgspec.json.decode(row[0], type=Event) for row in connection.execute(query))
        return msgspec.structs.replace(_read_incident(body), events=events)

    def events(self, job: str) -> list[Event]:
        """Return all events of a job, oldest first."""
        query = sa.select(_events.c.body).where(_events.c.job == job).order_by(_events.c.id)
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
                self._execute(connection, everything)
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

    def _execute(self, connection: sa.Connection, batches: list[Batch]) -> None:
        events = [
            {
                "job": event.job,
                "incident": event.incident,
                "wall_s": event.wall_s,
                "kind": event.kind,
                "body": msgspec.json.encode(event).decode(),
            }
            for batch in batches
            for event in batch.events
        ]
        records = {batch.job: batch.record.decode() for batch in batches if batch.job}
        incidents = {incident.id: incident for batch in batches for incident in batch.incidents}
        if events:
            connection.execute(sa.insert(_events), events)
        if records:
            rows = [{"job": job, "body": body} for job, body in records.items()]
            self._replace(connection, _jobs, rows)
        if incidents:
            self._replace(connection, _incidents, [_incident_row(incident) for incident in incidents.values()])
        self._write_hardware(connection, _newest_hardware(batches))

    def _write_hardware(self, connection: sa.Connection, entries: tuple[BadHardware, ...]) -> None:
        rows = [
            {"uuid": one.uuid, "reason": one.reason, "body": msgspec.json.encode(one).decode()}
            for one in entries
            if one.count
        ]
        if rows:
            self._replace(connection, _hardware, rows)
        for one in entries:
            if not one.count:
                mine = (_hardware.c.uuid == one.uuid) & (_hardware.c.reason == one.reason)
                connection.execute(sa.delete(_hardware).where(mine))

    def _replace(self, connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
        statement = self._upsert(table)
        keys = list(table.primary_key)
        changed = {column.name: statement.excluded[column.name] for column in table.c if not column.primary_key}
        connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed), rows)

    def _keep(self, batches: list[Batch]) -> None:
        """Keep unwritten batches as one: the newest states, and the newest events up to the bound."""
        events = [event for batch in batches for event in batch.events]
        if len(events) > KEPT_EVENTS:
            self.dropped_events += len(events) - KEPT_EVENTS
            events = events[-KEPT_EVENTS:]
        records = {batch.job: batch.record for batch in batches if batch.job}
        incidents = {incident.id: incident for batch in batches for incident in batch.incidents}
        self._kept = [Batch(job=job, record=record) for job, record in records.items()]
        hardware = _newest_hardware(batches)
        self._kept.append(Batch(events=tuple(events), incidents=tuple(incidents.values()), hardware=hardware))


def _newest_hardware(batches: list[Batch]) -> tuple[BadHardware, ...]:
    return tuple({(one.uuid, one.reason): one for batch in batches for one in batch.hardware}.values())


def _upsert_of(engine: sa.Engine) -> Callable[[sa.Table], Any]:
    """Return the dialect's INSERT that knows ON CONFLICT; PostgreSQL's costs 35 ms to import, so only when needed."""
    if engine.dialect.name == "sqlite":
        return sqlite.insert
    from sqlalchemy.dialects import postgresql

    return postgresql.insert


def without_texts(incident: Incident) -> Incident:
    """Return the incident as a list shows it."""
    evidence = tuple(msgspec.structs.replace(item, text="") for item in incident.evidence)
    return msgspec.structs.replace(incident, evidence=evidence, events=())


def _read_incident(body: str) -> Incident:
    return msgspec.json.decode(body, type=Incident)


def _incident_row(incident: Incident) -> dict[str, Any]:
    marks = incident.marks
    return {
        "id": incident.id,
        "job": incident.job,
        "number": int(incident.id.rpartition("-")[2]),
        "began": marks.detected or marks.began,
        "body": msgspec.json.encode(msgspec.structs.replace(incident, events=())).decode(),
    }


def open_store(url: str, *, readonly: bool = False) -> Store:
    """Open the journal at ``url``, creating it unless ``readonly``.

    Args:
        url: ``sqlite:///FILE`` or ``postgresql+psycopg://USER@HOST/DATABASE``.
        readonly: change nothing; the journal must exist.

    Raises:
        UsageError: it can't be opened, or is a database of something else.
        VersionError: it was written by a program that is too new or too old.
    """
    engine = _engine(url, readonly=readonly)
    shown = engine.url.render_as_string(hide_password=True)
    salvaged = _salvage(engine) if not readonly else None
    try:
        _check(engine, shown, readonly=readonly)
    except DBAPIError as error:
        engine.dispose()
        why = str(error.orig).strip().splitlines()[0] if str(error.orig).strip() else type(error.orig).__name__
        raise UsageError(f"store {shown} can't be used: {why}") from error
    except (UsageError, VersionError):
        engine.dispose()
        raise
    if engine.dialect.name == "sqlite" and not readonly:
        # Only now that it is known to be ours: the journal mode is written into the file.
        sa.event.listen(engine, "connect", _set_pragmas)
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


def sqlite_path(engine: sa.Engine) -> Path:
    """Return the file of an SQLite engine of ours."""
    return Path(unquote((engine.url.database or "").removeprefix("file:").partition("?")[0]))


def _engine(url: str, *, readonly: bool) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
    except ArgumentError as error:
        raise UsageError(f"store {url!r} can't be used: it looks like sqlite:///FILE") from error
    kind = parsed.get_backend_name()
    if kind == "sqlite" and parsed.database:
        return _sqlite_engine(parsed.database, readonly=readonly)
    if kind == "postgresql":
        try:
            return sa.create_engine(parsed, pool_pre_ping=True)
        except (NoSuchModuleError, ImportError) as error:
            raise UsageError("a PostgreSQL store needs `pip install megascale-ops[store]`") from error
    raise UsageError(
        f"store kind {kind!r} can't be used: take sqlite:///FILE or postgresql+psycopg://USER@HOST/DATABASE"
    )


def _sqlite_engine(file: str, *, readonly: bool) -> sa.Engine:
    path = Path(file).expanduser().absolute()
    if not path.parent.is_dir():
        raise UsageError(f"store {path} can't be used: there is no folder {path.parent}")
    if readonly and not path.is_file():
        raise UsageError(f"there is no journal {path}")
    database = f"file:{quote(str(path))}?mode={'ro' if readonly else 'rwc'}&uri=true"
    # 5 s: a reader never blocks a writer in WAL mode; a second writer may for a moment.
    return sa.create_engine(f"sqlite:///{database}", connect_args={"timeout": 5.0})


def _set_pragmas(connection: Any, _record: Any) -> None:  # noqa: ANN401  the driver's own type, given by SQLAlchemy
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()


def _check(engine: sa.Engine, shown: str, *, readonly: bool) -> None:
    """Make sure that the database is ours and of a version we speak; an empty one becomes ours."""
    names = set(sa.inspect(engine).get_table_names())
    ours = set(_tables.tables) - {_hardware.name}
    if not names and not readonly:
        with engine.begin() as connection:
            _tables.create_all(connection)
            rows = [{"key": "application", "value": APPLICATION}, {"key": "version", "value": str(JOURNAL_VERSION)}]
            connection.execute(sa.insert(_meta), rows)
        return
    stamp: dict[str, str] = {}
    if ours <= names and {column["name"] for column in sa.inspect(engine).get_columns("meta")} == {"key", "value"}:
        with engine.connect() as connection:
            stamp = {row.key: row.value for row in connection.execute(sa.select(_meta))}
    if stamp.get("application") != APPLICATION:
        raise UsageError(f"store {shown} is a database of something else: give another file or database")
    version = stamp.get("version", "")
    if not version.isdigit():
        raise UsageError(f"store {shown} carries no version: give another file or database")
    check_version(f"store {shown}", int(version), JOURNAL_VERSION)
    if _hardware.name not in names and not readonly:
        _hardware.create(engine, checkfirst=True)
