# SPDX-License-Identifier: Apache-2.0
"""Check every row before the journal is used: a row that is not what was written is put aside, and reported.

A row whose checksum does not fit moves into the table ``damaged`` as it is, so that a person may look at it; all others
are used. A row whose body is whole and whose columns are not is filed anew by its body: nothing is lost by that.

All rows are read, which takes 9 us each: half a million (400 MB) are read in five seconds.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from megascale_ops.controller.journal.reading import asked, mended, taken
from megascale_ops.controller.journal.seal import DamagedRowError
from megascale_ops.controller.journal.tables import (
    CHECKS,
    DAMAGED,
    EVENTS,
    HARDWARE,
    INCIDENTS,
    JOBS,
    KEYS,
    NODES,
    PARTS,
)

CHECKED = (JOBS, PARTS, INCIDENTS, EVENTS, HARDWARE, NODES, CHECKS)
_AT_ONCE = 1000
_WORDS = {
    "jobs": "the state of a job",
    "parts": "a piece of a job's record",
    "incidents": "an incident",
    "events": "an event",
    "hardware": "a GPU that was bad",
    "nodes": "a move of a node",
    "checks": "the newest self-check of a node",
}


class Odd(NamedTuple):
    """A row that is not what was written, and where it is."""

    table: sa.Table
    address: str
    why: str
    values: tuple[Any, ...]


def put_rows_aside(engine: sa.Engine) -> str:
    """Put damaged rows aside one by one; return the sentence about them, "" where all are whole."""
    if engine.dialect.name == "sqlite":
        _set_types_right(engine)
    with engine.connect() as connection:
        odd = [one for table in CHECKED for one in _odd_rows(connection, table)]
    lost: Counter[str] = Counter()
    for one in odd:
        anew = mended(one.table, one.values)
        if anew is None or not _file_anew(engine, one, anew):
            _put_aside(engine, one)
            lost[one.table.name] += 1
    if not lost:
        return ""
    first = next(one for one in odd if lost[one.table.name])
    what = ", ".join(f"{count} times {_WORDS[name]}" if count > 1 else _WORDS[name] for name, count in lost.items())
    return (
        f"{sum(lost.values())} rows of the journal were damaged and are kept in its table {DAMAGED.name!r}: {what} "
        f"({_name(first)}: {first.why}); everything else is used"
    )


def _set_types_right(engine: sa.Engine) -> None:
    """Make text again what one flipped bit has made bytes: it reads the same, and is not found by its name."""
    with engine.begin() as connection:
        for table in CHECKED:
            texts = [one.name for one in KEYS[table.name] if isinstance(one.type, sa.String)]
            changes = ", ".join(f'"{name}" = CAST("{name}" AS TEXT)' for name in texts)
            wrong = " OR ".join(f"typeof(\"{name}\") = 'blob'" for name in texts)
            connection.exec_driver_sql(f'UPDATE OR IGNORE "{table.name}" SET {changes} WHERE {wrong}')  # noqa: S608  names from the schema


def _odd_rows(connection: sa.Connection, table: sa.Table) -> Iterator[Odd]:
    for address, *values in _rows(connection, table):
        try:
            taken(table, values)
        except DamagedRowError as error:
            yield Odd(table, str(address), str(error), tuple(values))


def _rows(connection: sa.Connection, table: sa.Table) -> Iterable[Sequence[Any]]:
    address: sa.ColumnElement[Any] = sa.literal_column("rowid")
    if connection.dialect.name == "postgresql":
        address = sa.literal_column("CAST(ctid AS text)")
    query = sa.select(address, *asked(table, connection.dialect.name)).select_from(table)
    if connection.dialect.name == "sqlite":
        query = query.order_by(sa.literal_column("rowid"))
    return connection.execution_options(yield_per=_AT_ONCE).execute(query)


def _name(odd: Odd) -> str:
    keys = [one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one) for one in odd.values[:-1]]
    return f"{odd.table.name} {' '.join(key for key in keys if key)[:80]!r}"


def _mine(connection: sa.Connection, odd: Odd) -> sa.ColumnElement[bool]:
    if connection.dialect.name == "postgresql":
        return sa.literal_column("ctid") == sa.text(f"CAST('{odd.address}' AS tid)")
    return sa.literal_column("rowid") == int(odd.address)


def _file_anew(engine: sa.Engine, odd: Odd, row: dict[str, Any]) -> bool:
    """Set a row's columns from its body; return whether that was possible."""
    try:
        with engine.begin() as connection:
            connection.execute(sa.update(odd.table).where(_mine(connection, odd)).values(**row))
    except IntegrityError:
        return False  # another row has this name
    return True


def _put_aside(engine: sa.Engine, odd: Odd) -> None:
    raw = odd.values[-1]
    body = raw if isinstance(raw, bytes) else str(raw).encode()
    row = {"source": odd.table.name, "why": f"{_name(odd)}: {odd.why}", "body": body, "wall_s": time.time()}
    with engine.begin() as connection:
        connection.execute(sa.insert(DAMAGED), row)
        connection.execute(sa.delete(odd.table).where(_mine(connection, odd)))
