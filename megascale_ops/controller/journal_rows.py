# SPDX-License-Identifier: Apache-2.0
"""What is journaled at once, and the rows that it becomes."""

from collections.abc import Callable
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from megascale_ops.controller.journal_tables import EVENTS, HARDWARE, INCIDENTS, JOBS
from megascale_ops.schema.events import Event, Incident
from megascale_ops.schema.health import BadHardware


class Batch(msgspec.Struct, frozen=True):
    """What belongs together: events, and the new state of one job, of incidents and of bad hardware."""

    events: tuple[Event, ...] = ()
    job: str = ""
    record: bytes = b""  # the job's state, encoded by its owner
    incidents: tuple[Incident, ...] = ()
    hardware: tuple[BadHardware, ...] = ()  # ``count`` 0: it was mended, or is forgotten


def write(connection: sa.Connection, batches: list[Batch]) -> None:
    """Write batches as rows: all events, and of jobs, incidents and hardware the newest word."""
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
        connection.execute(sa.insert(EVENTS), events)
    if records:
        rows = [{"job": job, "body": body} for job, body in records.items()]
        _replace(connection, JOBS, rows)
    if incidents:
        _replace(connection, INCIDENTS, [_incident_row(incident) for incident in incidents.values()])
    _write_hardware(connection, newest_hardware(batches))


def _write_hardware(connection: sa.Connection, entries: tuple[BadHardware, ...]) -> None:
    rows = [
        {"uuid": one.uuid, "reason": one.reason, "body": msgspec.json.encode(one).decode()}
        for one in entries
        if one.count
    ]
    if rows:
        _replace(connection, HARDWARE, rows)
    for one in entries:
        if not one.count:
            mine = (HARDWARE.c.uuid == one.uuid) & (HARDWARE.c.reason == one.reason)
            connection.execute(sa.delete(HARDWARE).where(mine))


def _replace(connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    statement = _upsert(connection)(table)
    keys = list(table.primary_key)
    changed = {column.name: statement.excluded[column.name] for column in table.c if not column.primary_key}
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed), rows)


def _upsert(connection: sa.Connection) -> Callable[[sa.Table], Any]:
    """Return the dialect's INSERT that knows ON CONFLICT; PostgreSQL's costs 35 ms to import, so only when needed."""
    if connection.dialect.name == "sqlite":
        return sqlite.insert
    from sqlalchemy.dialects import postgresql

    return postgresql.insert


def newest_hardware(batches: list[Batch]) -> tuple[BadHardware, ...]:
    """Return the newest word on each GPU and reason."""
    return tuple({(one.uuid, one.reason): one for batch in batches for one in batch.hardware}.values())


def _incident_row(incident: Incident) -> dict[str, Any]:
    marks = incident.marks
    return {
        "id": incident.id,
        "job": incident.job,
        "number": int(incident.id.rpartition("-")[2]),
        "began": marks.detected or marks.began,
        "body": msgspec.json.encode(msgspec.structs.replace(incident, events=())).decode(),
    }
