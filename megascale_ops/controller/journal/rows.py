# SPDX-License-Identifier: Apache-2.0
"""What is journaled at once, and the rows that it becomes."""

from collections.abc import Callable
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from megascale_ops.controller.journal.parts import Part
from megascale_ops.controller.journal.seal import seal
from megascale_ops.controller.journal.tables import CHECKS, EVENTS, HARDWARE, INCIDENTS, JOBS, NODES, PARTS, key_of
from megascale_ops.schema.events import Event, Incident
from megascale_ops.schema.health import BadHardware, NodeMove, SelfCheckView


class Batch(msgspec.Struct, frozen=True):
    """What belongs together: events, and the new state of one job, of incidents, of bad hardware, of nodes."""

    events: tuple[Event, ...] = ()
    job: str = ""
    record: bytes = b""  # the job's state without its parts, encoded by its owner
    parts: tuple[Part, ...] = ()  # what has changed of that which grows in the job's record
    incidents: tuple[Incident, ...] = ()
    hardware: tuple[BadHardware, ...] = ()  # ``count`` 0: it was repaired, or has been dropped
    nodes: tuple[NodeMove, ...] = ()  # ``event`` "": it is not kept any longer
    checks: tuple[SelfCheckView, ...] = ()  # the newest of a node; ``check`` None: it is not kept any longer
    binding: bool = False  # orders or names follow from it: it must survive a power cut before they are given


def write(connection: sa.Connection, batches: list[Batch]) -> int:
    """Write batches as rows: all events, and of everything else the newest word; return how many bytes these have."""
    written = _Written(connection)
    events = [event_row(event) for batch in batches for event in batch.events]
    if events:
        connection.execute(sa.insert(EVENTS), written.count(events))
    records = {batch.job: batch.record for batch in batches if batch.job}
    jobs = [{"job": job, "body": sealed(JOBS, (job,), record)} for job, record in records.items()]
    written.replace(JOBS, jobs)
    _write_parts(written, newest_parts(batches))
    incidents = {incident.id: incident for batch in batches for incident in batch.incidents}
    written.replace(INCIDENTS, [incident_row(incident) for incident in incidents.values()])
    _write_hardware(written, newest_hardware(batches))
    _write_nodes(written, newest_nodes(batches))
    _write_checks(written, newest_checks(batches))
    return written.bytes


class _Written:
    """The rows of one transaction, counted."""

    def __init__(self, connection: sa.Connection) -> None:
        self.connection = connection
        self.bytes = 0

    def count(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows, counted."""
        self.bytes += sum(len(row["body"]) for row in rows)
        return rows

    def replace(self, table: sa.Table, rows: list[dict[str, Any]]) -> None:
        """Insert rows; one of the same key gives way."""
        if not rows:
            return
        statement = _upsert(self.connection)(table)
        changed = {column.name: statement.excluded[column.name] for column in table.c if not column.primary_key}
        keys = list(table.primary_key)
        self.connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed), self.count(rows))

    def forget(self, table: sa.Table, rows: list[dict[str, Any]]) -> None:
        """Delete the rows of these keys."""
        if rows:
            mine = sa.and_(*(column == sa.bindparam(f"_{column.name}") for column in table.primary_key))
            keys = [{f"_{name}": value for name, value in row.items()} for row in rows]
            self.connection.execute(sa.delete(table).where(mine), keys)


def _write_parts(written: _Written, parts: tuple[Part, ...]) -> None:
    gone = [{"job": one.job, "kind": one.kind, "key": one.key} for one in parts if one.body is None]
    kept = [
        {"job": one.job, "kind": one.kind, "key": one.key, "body": sealed(PARTS, one[:3], one.body)}
        for one in parts
        if one.body is not None
    ]
    written.forget(PARTS, gone)
    written.replace(PARTS, kept)


def _write_hardware(written: _Written, entries: tuple[BadHardware, ...]) -> None:
    written.replace(HARDWARE, [hardware_row(one) for one in entries if one.count])
    written.forget(HARDWARE, [{"uuid": one.uuid, "reason": one.reason} for one in entries if not one.count])


def _write_nodes(written: _Written, moves: tuple[NodeMove, ...]) -> None:
    written.replace(NODES, [node_row(one) for one in moves if one.event])
    written.forget(NODES, [{"number": one.number} for one in moves if not one.event])


def _write_checks(written: _Written, views: tuple[SelfCheckView, ...]) -> None:
    written.replace(CHECKS, [check_row(one) for one in views if one.check is not None])
    written.forget(CHECKS, [{"node": one.node} for one in views if one.check is None])


def _upsert(connection: sa.Connection) -> Callable[[sa.Table], Any]:
    """Return the dialect's INSERT that knows ON CONFLICT; PostgreSQL's costs 35 ms to import, so only when needed."""
    if connection.dialect.name == "sqlite":
        return sqlite.insert
    from sqlalchemy.dialects import postgresql

    return postgresql.insert


def newest_hardware(batches: list[Batch]) -> tuple[BadHardware, ...]:
    """Return the newest word on each GPU and reason."""
    return tuple({(one.uuid, one.reason): one for batch in batches for one in batch.hardware}.values())


def newest_nodes(batches: list[Batch]) -> tuple[NodeMove, ...]:
    """Return the newest word on each move of a node."""
    return tuple({one.number: one for batch in batches for one in batch.nodes}.values())


def newest_checks(batches: list[Batch]) -> tuple[SelfCheckView, ...]:
    """Return the newest word on the self-check of each node."""
    return tuple({one.node: one for batch in batches for one in batch.checks}.values())


def newest_parts(batches: list[Batch]) -> tuple[Part, ...]:
    """Return the newest word on each piece of a job's record."""
    return tuple({one[:3]: one for batch in batches for one in batch.parts}.values())


def sealed(table: sa.Table, key: tuple[str | float, ...], body: bytes) -> str:
    """Return a body as its column takes it."""
    return seal(key_of(table, key), body).decode()


def event_row(event: Event) -> dict[str, Any]:
    """Return an event as a row."""
    return {
        "job": event.job,
        "incident": event.incident,
        "wall_s": event.wall_s,
        "kind": event.kind,
        "body": sealed(EVENTS, (event.job, event.incident), msgspec.json.encode(event)),
    }


def number_of(incident_id: str) -> int:
    """Return the number of an incident's name, ``<job>-<number>``; 0 where there is none."""
    digits = incident_id.rpartition("-")[2]
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def incident_row(incident: Incident) -> dict[str, Any]:
    """Return an incident as a row."""
    marks = incident.marks
    body = msgspec.json.encode(msgspec.structs.replace(incident, events=()))
    number, began = number_of(incident.id), marks.detected or marks.began
    return {
        "id": incident.id,
        "job": incident.job,
        "number": number,
        "began": began,
        "body": sealed(INCIDENTS, (incident.id, incident.job, number, began), body),
    }


def hardware_row(one: BadHardware) -> dict[str, Any]:
    """Return what is remembered of a GPU as a row."""
    body = sealed(HARDWARE, (one.uuid, one.reason), msgspec.json.encode(one))
    return {"uuid": one.uuid, "reason": one.reason, "body": body}


def node_row(one: NodeMove) -> dict[str, Any]:
    """Return a move of a node as a row."""
    body = sealed(NODES, (one.number, one.node), msgspec.json.encode(one))
    return {"number": one.number, "node": one.node, "body": body}


def check_row(one: SelfCheckView) -> dict[str, Any]:
    """Return the newest self-check of a node as a row."""
    return {"node": one.node, "body": sealed(CHECKS, (one.node,), msgspec.json.encode(one))}
