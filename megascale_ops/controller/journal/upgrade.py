# SPDX-License-Identifier: Apache-2.0
"""From a journal of the version before to one of ours: seals on its rows, and in rows of its own what grows.

Nothing is left out: a row that can't be read stays as it is, and the check that follows puts it aside. An upgrade that
is cut short goes on at the next start, since sealed rows are passed over and the version is written last.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from megascale_ops.controller.journal.parts import FIELDS, join, split
from megascale_ops.controller.journal.reading import asked, taken
from megascale_ops.controller.journal.rows import Batch, sealed, write
from megascale_ops.controller.journal.seal import DamagedRowError, is_sealed
from megascale_ops.controller.journal.tables import EVENTS, HARDWARE, INCIDENTS, JOBS, PARTS
from megascale_ops.controller.record.job_record import JobRecord
from megascale_ops.foreign import UNREADABLE

_AT_ONCE = 1000


def upgrade(engine: sa.Engine) -> None:
    """Seal every row of a journal that has none."""
    for table in (INCIDENTS, EVENTS, HARDWARE):
        _seal_all(engine, table)
    take_apart(engine)


def take_apart(engine: sa.Engine) -> None:
    """Put what grows into rows of its own, where a program of the version before has written it into the record."""
    with engine.begin() as connection:
        dialect = connection.dialect.name
        parts = [_whole(PARTS, row) for row in connection.execute(sa.select(*asked(PARTS, dialect)))]
        for row in connection.execute(sa.select(*asked(JOBS, dialect))).all():
            found = _whole(JOBS, row)
            if found is None or not _has_parts(found[1]):
                continue
            (name,), core = found
            mine = [(key[1], key[2], body) for key, body in filter(None, parts) if key[0] == name]
            try:
                record = msgspec.json.decode(join(core, mine), type=JobRecord)
            except UNREADABLE:
                continue  # reported when the job is restored
            body, rows = split(record, None)
            write(connection, [Batch(job=name, record=body, parts=rows)])


def _has_parts(core: bytes) -> bool:
    """Return whether a record holds what rows of their own hold."""
    found: Any = msgspec.json.decode(core)
    return isinstance(found, dict) and not found.keys().isdisjoint(FIELDS.values())


def _whole(table: sa.Table, values: Sequence[Any]) -> tuple[tuple[str, ...], bytes] | None:
    try:
        row = taken(table, values)
    except DamagedRowError:
        return None
    return row.key, row.body


def _seal_all(engine: sa.Engine, table: sa.Table) -> None:
    """Seal the rows of a table, some at a time, in the order of its primary key."""
    places = list(table.primary_key)
    last: tuple[Any, ...] | None = None
    marked = sa.update(table).where(sa.and_(*(one == sa.bindparam(f"_{one.name}") for one in places)))
    while True:
        with engine.begin() as connection:
            columns = asked(table, connection.dialect.name)
            query = sa.select(*places, *columns).order_by(*places).limit(_AT_ONCE)
            if last is not None:
                query = query.where(sa.tuple_(*places) > sa.tuple_(*(sa.literal(value) for value in last)))
            rows = connection.execute(query).all()
            changes = []
            for row in rows:
                found = _whole(table, row[len(places) :])
                if found is not None and not is_sealed(_bytes(row[-1])):
                    body = sealed(table, found[0], found[1])
                    changes.append({f"_{one.name}": row[at] for at, one in enumerate(places)} | {"body": body})
            if changes:
                connection.execute(marked, changes)
        if len(rows) < _AT_ONCE:
            return
        last = tuple(rows[-1][: len(places)])


def _bytes(raw: object) -> bytes:
    return raw if isinstance(raw, bytes) else str(raw).encode()
