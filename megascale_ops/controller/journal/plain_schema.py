# SPDX-License-Identifier: Apache-2.0
"""Read a database whose schema is damaged, by what is left of its tables' descriptions.

One flipped bit in the text that describes a table makes SQLite refuse the whole file, or call a column by another name.
In a copy they can be written anew, plain, without keys and indices: reading row by row needs none.
"""

import difflib
import sqlite3
from collections.abc import Iterable
from contextlib import suppress

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

# 0.8: descriptions of two tables are alike by at most 0.78 (`meta` and `jobs`); one with some flipped bytes is
# more like its own than that.
_ALIKE = 0.8


def describe_anew(connection: sqlite3.Connection, tables: Iterable[sa.Table]) -> None:
    """Give a copy of a journal descriptions of its tables that SQLite takes; to be opened anew after it."""
    wanted = {table.name.encode(): table for table in tables}
    connection.text_factory = bytes
    connection.execute("PRAGMA writable_schema=ON")
    found: dict[bytes, int] = {}
    for root, name, text in _descriptions(connection):
        known = name if name in wanted else _nearest(text, wanted)
        if known and found.setdefault(known, root) != root:
            found[known] = 0  # claimed by two: neither is believed
    connection.execute("DELETE FROM sqlite_master")
    for name, root in found.items():
        if root:
            columns = ", ".join(f'"{column.name}"' for column in wanted[name].c)
            plain = name.decode()
            connection.execute(
                "INSERT INTO sqlite_master VALUES ('table', ?, ?, ?, ?)",
                (plain, plain, root, f'CREATE TABLE "{plain}" ({columns})'),
            )
    connection.commit()


def has_our_schema(connection: sqlite3.Connection, tables: Iterable[sa.Table]) -> bool:
    """Return whether our tables are there as they are described; more tables and more columns may be a newer program's.

    A table that is missing while there is one of an unknown name has lost its own.
    """
    connection.text_factory = bytes
    names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    ours = {table.name.encode(): table for table in tables}
    strangers = names - ours.keys() - {b"sqlite_sequence"}
    if strangers and ours.keys() - names:
        return False
    return all(
        _columns(ours[name]) <= {tuple(row[1:3]) for row in connection.execute(f'PRAGMA table_info("{name.decode()}")')}
        for name in names & ours.keys()
    )


def _columns(table: sa.Table) -> set[tuple[bytes, bytes]]:
    dialect = sqlite.dialect()
    return {(column.name.encode(), str(column.type.compile(dialect)).encode()) for column in table.c}


def _descriptions(connection: sqlite3.Connection) -> list[tuple[int, bytes, bytes]]:
    """Return root page, name and text of every table that is described, as far as they can be read."""
    found = []
    with suppress(sqlite3.DatabaseError):
        for root, name, text in connection.execute("SELECT rootpage, name, sql FROM sqlite_master"):
            if isinstance(root, int) and isinstance(text, bytes) and b"INDEX" not in text[:16]:
                found.append((root, name if isinstance(name, bytes) else b"", text))
    return found


def _nearest(text: bytes, wanted: dict[bytes, sa.Table]) -> bytes:
    """Return the name of the table whose description ``text`` once was; b"" for none."""
    best, name = max(
        (difflib.SequenceMatcher(None, _described(table), text.decode("latin-1"), autojunk=False).ratio(), name)
        for name, table in wanted.items()
    )
    return name if best >= _ALIKE else b""


def _described(table: sa.Table) -> str:
    dialect = sqlite.dialect()
    return str(sa.schema.CreateTable(table).compile(dialect=dialect)).strip()
