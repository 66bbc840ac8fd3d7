# SPDX-License-Identifier: Apache-2.0
"""The journal: what happened and where every job stands, in SQLite (WAL) or PostgreSQL.

One thread writes, in order, one transaction for all that has piled up; a batch's ``done`` is called when it is safe, or
when it is plain that it will not be soon (``journal.writer``). That is the barrier behind "journal first, act second":
an action is passed as ``done``.

``synchronous=NORMAL`` in WAL mode survives the death of the process without an fsync for each commit. A batch that
orders or names follow from (``binding``) is written with ``FULL``, so that a power cut does not take it either.

Every row carries a checksum (``journal.seal``). What is damaged when the journal is opened is put aside and described
in ``loss``; what becomes damaged later is left out of what is read.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from megascale_ops.controller.journal.checking import put_rows_aside
from megascale_ops.controller.journal.engine import (
    await_server,
    engine_of,
    give_pages_back,
    sentence_of,
    set_pragmas,
    shown_of,
    sqlite_path,
)
from megascale_ops.controller.journal.fence import Fence
from megascale_ops.controller.journal.parts import join
from megascale_ops.controller.journal.reading import Row, asked, decoded, taken
from megascale_ops.controller.journal.retention import Retention
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.salvage import Salvaged, find_damage, put_aside
from megascale_ops.controller.journal.seal import DamagedRowError
from megascale_ops.controller.journal.tables import CHECKS, EVENTS, HARDWARE, INCIDENTS, JOBS, NODES, PARTS, claim
from megascale_ops.controller.journal.upgrade import take_apart, upgrade
from megascale_ops.controller.journal.writer import Clerk
from megascale_ops.distribution import Distribution
from megascale_ops.errors import UsageError, VersionError
from megascale_ops.schema.events import AuditEntry, Event, Incident
from megascale_ops.schema.health import BadHardware, NodeMove, SelfCheckView
from megascale_ops.schema.metrics import METRICS

log = logging.getLogger(__name__)

_FLUSH_S = 5.0


# Under this name, which no job can have, the journal has who ordered what.
AUDIT_JOB = "~audit"


def _nothing() -> None:
    """Do nothing when the batch is safe."""


class Store:
    """The journal's one owner. ``submit`` never waits; reading may be done from any thread.

    Every reading method raises UsageError when the database can't be read.
    """

    def __init__(self, engine: sa.Engine, *, limit_bytes: int = 0, readonly: bool, fence: Fence | None = None) -> None:
        self._engine = engine
        self.fence = fence
        self.loss = ""  # what the journal had lost when it was opened; "" for nothing
        self._clerk: Clerk | None = None
        if not readonly:
            self._clerk = Clerk(engine, Retention(engine, limit_bytes) if limit_bytes else None, fence)
        self.write_times = (
            self._clerk.write_times
            if self._clerk is not None
            else Distribution(METRICS["megascale_controller_journal_write_seconds"].buckets)
        )

    @property
    def kept(self) -> int:
        """How many batches wait in memory because they could not be written."""
        return self._clerk.kept if self._clerk is not None else 0

    @property
    def failing(self) -> str:
        """Why what was submitted is not written; "" when all is."""
        return self._clerk.failing if self._clerk is not None else ""

    @property
    def dropped_events(self) -> int:
        """How many events were lost because the journal could not be written for too long."""
        return self._clerk.dropped_events if self._clerk is not None else 0

    @property
    def write_errors(self) -> int:
        """How often writing has failed."""
        return self._clerk.write_errors if self._clerk is not None else 0

    def submit(self, batch: Batch, done: Callable[[], None] = _nothing) -> None:
        """Write ``batch`` after all that was submitted before; ``done`` is called by the writer's thread."""
        assert self._clerk is not None, "a journal that was opened for reading is not written to"
        self._clerk.submit(batch, done)

    def flush(self) -> None:
        """Wait until all that was submitted is written or kept; at most as long as closing may take."""
        written = threading.Event()
        self.submit(Batch(), written.set)
        written.wait(_FLUSH_S)

    def resign(self, write: Callable[[sa.Engine], None]) -> None:
        """Have ``write`` note in the journal that its leader ends; what was submitted before is written by then."""
        write(self._engine)

    def close(self) -> None:
        """Write what is left and close."""
        if self._clerk is not None:
            self._clerk.close()
        self._engine.dispose()

    def jobs(self) -> dict[str, bytes]:
        """Return every job's state as its owner encoded it, put together with what grows in it."""
        with self._reading() as connection:
            cores = {row.key[0]: row.body for row in _whole(connection, JOBS)}
            pieces: dict[str, list[tuple[str, str, bytes]]] = {}
            if self._has(PARTS):
                for row in _whole(connection, PARTS):
                    pieces.setdefault(row.key[0], []).append((row.key[1], row.key[2], row.body))
        return {job: join(core, pieces.get(job, ())) for job, core in cores.items()}

    def incidents(self, job: str | None = None, limit: int | None = None, before: str = "") -> list[Incident]:
        """Return incidents, newest last, without events and evidence texts.

        Args:
            job: of this job only.
            limit: the newest so many only.
            before: older ones than the incident of this name only; nothing when there is none.
        """
        return [without_texts(one) for one in self._newest(job, limit, before)]

    def newest_incidents(self, limit: int) -> list[Incident]:
        """Return the newest incidents, newest last, with their evidence but without events."""
        return self._newest(None, limit, "")

    def _newest(self, job: str | None, limit: int | None, before: str) -> list[Incident]:
        order = (INCIDENTS.c.began, INCIDENTS.c.number, INCIDENTS.c.id)
        narrowed: list[sa.ColumnElement[bool]] = [INCIDENTS.c.job == job] if job is not None else []
        with self._reading() as connection:
            if before:
                known = connection.execute(sa.select(*order).where(INCIDENTS.c.id == before)).first()
                if known is None:
                    return []
                narrowed.append(sa.tuple_(*order) < sa.tuple_(*(sa.literal(value) for value in known)))
            rows = _whole(connection, INCIDENTS, *narrowed, order=[one.desc() for one in order], limit=limit)
            return [*decoded(rows, Incident)][::-1]

    def highest_incidents(self) -> dict[str, int]:
        """Return the highest number that an incident of each job has in the journal."""
        query = sa.select(INCIDENTS.c.job, sa.func.max(INCIDENTS.c.number)).group_by(INCIDENTS.c.job)
        with self._reading() as connection:
            return {job: int(number or 0) for job, number in connection.execute(query)}

    def hardware(self) -> tuple[BadHardware, ...]:
        """Return what is remembered of GPUs; nothing in a journal that was never written to by a program that does."""
        if not self._has(HARDWARE):
            return ()
        with self._reading() as connection:
            return tuple(decoded(_whole(connection, HARDWARE), BadHardware))

    def node_moves(self) -> tuple[NodeMove, ...]:
        """Return all moves of nodes that are kept, oldest first; none in a journal of a program that knew none."""
        if not self._has(NODES):
            return ()
        with self._reading() as connection:
            return tuple(decoded(_whole(connection, NODES, order=[NODES.c.number]), NodeMove))

    def node_checks(self) -> tuple[SelfCheckView, ...]:
        """Return the newest self-check of each node; none in a journal of a program that kept none."""
        if not self._has(CHECKS):
            return ()
        with self._reading() as connection:
            return tuple(decoded(_whole(connection, CHECKS), SelfCheckView))

    def incident(self, incident_id: str) -> Incident | None:
        """Return one incident with everything known of it, or None."""
        with self._reading() as connection:
            found = [*decoded(_whole(connection, INCIDENTS, INCIDENTS.c.id == incident_id), Incident)]
            if not found or found[0].id != incident_id:
                return None
            rows = _whole(connection, EVENTS, EVENTS.c.incident == incident_id, order=[EVENTS.c.id])
            return msgspec.structs.replace(found[0], events=tuple(decoded(rows, Event)))

    def events(self, job: str) -> list[Event]:
        """Return all events of a job that are kept, oldest first."""
        with self._reading() as connection:
            return [*decoded(_whole(connection, EVENTS, EVENTS.c.job == job, order=[EVENTS.c.id]), Event)]

    def audit(self, limit: int, before: int = 0, job: str = "") -> list[AuditEntry]:
        """Return who ordered what, newest last.

        Args:
            limit: the newest so many.
            before: older ones than this number only; 0: all.
            job: of this job only; "": of all jobs and nodes.
        """
        narrowed: list[sa.ColumnElement[bool]] = [EVENTS.c.job == AUDIT_JOB]
        if before:
            narrowed.append(EVENTS.c.id < before)
        if job:
            narrowed.append(EVENTS.c.body.contains(f'"job":{msgspec.json.encode(job).decode()}', autoescape=True))
        query = sa.select(EVENTS.c.id, EVENTS.c.body).where(*narrowed).order_by(EVENTS.c.id.desc()).limit(limit)
        with self._reading() as connection:
            rows = connection.execute(query).all()
        entries = []
        for number, body in rows:
            event = msgspec.json.decode(body, type=Event)
            told = {"number": number, "wall_s": event.wall_s, "text": event.text, "node": event.node, **event.data}
            entries.append(msgspec.convert(told, AuditEntry))
        return entries[::-1]

    def _has(self, table: sa.Table) -> bool:
        """Return whether the journal has a table that those of older programs lack."""
        with self._reading() as connection:
            return sa.inspect(connection).has_table(table.name)

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            shown = shown_of(self._engine)
            raise UsageError(f"store {shown} can't be read: {sentence_of(error)}") from error


def _whole(
    connection: sa.Connection,
    table: sa.Table,
    *where: sa.ColumnElement[bool],
    order: Sequence[sa.ColumnElement[Any]] = (),
    limit: int | None = None,
) -> Iterator[Row]:
    """Yield the rows that are what was written; a damaged one is left out and logged."""
    query = sa.select(*asked(table, connection.dialect.name)).where(*where).order_by(*order).limit(limit)
    for values in connection.execute(query):
        try:
            yield taken(table, values)
        except DamagedRowError as error:
            log.warning("a row of the journal's table %s is damaged and left out: %s", table.name, error)


def without_texts(incident: Incident) -> Incident:
    """Return the incident as a list shows it."""
    evidence = tuple(msgspec.structs.replace(item, text="", check=None) for item in incident.evidence)
    return msgspec.structs.replace(incident, evidence=evidence, events=())


def open_store(
    url: str,
    *,
    readonly: bool = False,
    limit_bytes: int = 0,
    wait_s: float = 0.0,
    elect: Callable[[sa.Engine], Fence] | None = None,
    application: str = "",
) -> Store:
    """Open the journal at ``url``, creating it unless ``readonly``.

    Args:
        url: ``sqlite:///FILE`` or ``postgresql+psycopg://USER@HOST/DATABASE``.
        readonly: change nothing; the journal must exist.
        limit_bytes: how large it may become before the oldest is given up; 0: without bound.
        wait_s: how long to wait for a server that does not answer.
        elect: where several controllers share it: called once it is known to be ours and before anything is read, it
            makes the caller the leader.
        application: how our connections are called in a server's list of them.

    Raises:
        UsageError: it can't be opened, or is a database of something else.
        VersionError: it was written by a program that is too new or too old.
    """
    engine = engine_of(url, readonly=readonly, application=application)
    shown = shown_of(engine)
    losses: list[str] = []
    salvaged = _salvage(engine, losses) if not readonly else None
    try:
        if engine.dialect.name != "sqlite":
            await_server(engine, shown, wait_s)
        claim(engine, shown, lambda one: _upgrade(one, losses), readonly=readonly)
        fence = elect(engine) if elect is not None else None
        if not readonly:
            _make_ready(engine, losses)
    except DBAPIError as error:
        engine.dispose()
        raise UsageError(f"store {shown} can't be used: {sentence_of(error)}") from error
    except (UsageError, VersionError):
        engine.dispose()
        raise
    store = Store(engine, readonly=readonly, limit_bytes=limit_bytes, fence=fence)
    for loss in filter(None, losses):
        log.error("%s", loss)
    store.loss = "; ".join(filter(None, losses))
    if salvaged is not None:
        for batch in salvaged.batches():
            store.submit(batch)
        store.flush()
    return store


def _upgrade(engine: sa.Engine, losses: list[str]) -> None:
    losses.append(put_rows_aside(engine))
    upgrade(engine)


def _make_ready(engine: sa.Engine, losses: list[str]) -> None:
    """Bring a journal that is known to be ours into order: its mode, its size, its rows."""
    if engine.dialect.name == "sqlite":
        # Only once it is verified as a journal: the journal mode is written into the file.
        sa.event.listen(engine, "connect", set_pragmas)
        engine.dispose()
        give_pages_back(engine)
    losses.append(put_rows_aside(engine))
    take_apart(engine)


def _salvage(engine: sa.Engine, losses: list[str]) -> Salvaged | None:
    """Put a damaged journal aside and return what could be read from it; None when there is no damage."""
    if engine.dialect.name != "sqlite":
        return None
    path = sqlite_path(engine)
    try:
        damage = find_damage(path)
        if not damage.file:
            losses.append(damage.log)
            return None
        found = put_aside(path, damage)
    except OSError as error:
        raise UsageError(f"store {path} is damaged and can't be put aside: {error}") from error
    losses.append(found.loss)
    return found
