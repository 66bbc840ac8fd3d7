# SPDX-License-Identifier: Apache-2.0
"""The journal's tables, and whether a database carries them: ours, of a version we support, or another program's."""

import logging
import re
from collections.abc import Callable, Iterable
from typing import Any

import sqlalchemy as sa

from megascale_ops.errors import UsageError
from megascale_ops.schema.version import JOURNAL_VERSION, check_version

log = logging.getLogger(__name__)

APPLICATION = "megascale-ops"
_STAMP = "a journal of megascale-ops, version {}"

TABLES = sa.MetaData()
META = sa.Table("meta", TABLES, sa.Column("key", sa.String(64), primary_key=True), sa.Column("value", sa.Text))
JOBS = sa.Table("jobs", TABLES, sa.Column("job", sa.String(100), primary_key=True), sa.Column("body", sa.Text))
INCIDENTS = sa.Table(
    "incidents",
    TABLES,
    sa.Column("id", sa.String(120), primary_key=True),
    sa.Column("job", sa.String(100), index=True),
    sa.Column("number", sa.Integer),
    sa.Column("began", sa.Float),
    sa.Column("body", sa.Text),
)
EVENTS = sa.Table(
    "events",
    TABLES,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("job", sa.String(100), index=True),
    sa.Column("incident", sa.String(120), index=True),
    sa.Column("wall_s", sa.Float),
    sa.Column("kind", sa.String(64)),
    sa.Column("body", sa.Text),
)
# What is kept of GPUs.
HARDWARE = sa.Table(
    "hardware",
    TABLES,
    sa.Column("uuid", sa.String(100), primary_key=True),
    sa.Column("reason", sa.String(100), primary_key=True),
    sa.Column("body", sa.Text),
)
# Every move of a node's life, by its number.
NODES = sa.Table(
    "nodes",
    TABLES,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("node", sa.String(128)),
    sa.Column("body", sa.Text),
)
# The newest self-check of each node.
CHECKS = sa.Table(
    "checks",
    TABLES,
    sa.Column("node", sa.String(128), primary_key=True),
    sa.Column("body", sa.Text),
)
# What grows in a job's record, a row each (``journal.parts``).
PARTS = sa.Table(
    "parts",
    TABLES,
    sa.Column("job", sa.String(100), primary_key=True),
    sa.Column("kind", sa.String(20), primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("body", sa.Text),
)
# Rows that were not what was written, as they were found.
DAMAGED = sa.Table(
    "damaged",
    TABLES,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("source", sa.String(20)),
    sa.Column("why", sa.Text),
    sa.Column("body", sa.LargeBinary),
    sa.Column("wall_s", sa.Float),
)
# A page of the list of incidents is read by these, however many there are.
BY_TIME = (
    sa.Index("ix_incidents_began", INCIDENTS.c.began, INCIDENTS.c.number),
    sa.Index("ix_incidents_job_began", INCIDENTS.c.job, INCIDENTS.c.began, INCIDENTS.c.number),
)
# The columns that rows are found by; their seals cover them.
KEYS: dict[str, tuple[sa.Column[Any], ...]] = {
    JOBS.name: (JOBS.c.job,),
    PARTS.name: (PARTS.c.job, PARTS.c.kind, PARTS.c.key),
    INCIDENTS.name: (INCIDENTS.c.id, INCIDENTS.c.job, INCIDENTS.c.number, INCIDENTS.c.began),
    EVENTS.name: (EVENTS.c.job, EVENTS.c.incident),
    HARDWARE.name: (HARDWARE.c.uuid, HARDWARE.c.reason),
    NODES.name: (NODES.c.number, NODES.c.node),
    CHECKS.name: (CHECKS.c.node,),
}
# What journals of older programs may lack; they get it when they are written to.
_LATER = (HARDWARE, NODES, CHECKS, PARTS, DAMAGED)


def claim(engine: sa.Engine, shown: str, upgrade: Callable[[sa.Engine], None], *, readonly: bool) -> None:
    """Make sure that the database is ours and of a version we support; an empty one becomes ours.

    Args:
        engine: the way to it.
        shown: its address, for sentences.
        upgrade: makes the rows of the version before ours, unless ``readonly``.
        readonly: change nothing.
    """
    names = set(sa.inspect(engine).get_table_names())
    if not names and not readonly:
        with engine.begin() as connection:
            if engine.dialect.name == "sqlite":  # its driver would end a transaction with each table, and sync the disk
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            TABLES.create_all(connection)
            _stamp(connection)
        return
    ours = set(TABLES.tables) - {table.name for table in _LATER}
    if not ours <= names or not _has_our_columns(engine, ours):
        raise UsageError(f"store {shown} is a database of something else: give another file or database")
    version = _version(engine)
    if not version:
        raise UsageError(f"store {shown} carries no version: give another file or database")
    check_version(f"store {shown}", version, JOURNAL_VERSION)
    if readonly:
        return
    for table in _LATER:
        table.create(engine, checkfirst=True)
    for index in BY_TIME:
        index.create(engine, checkfirst=True)
    if version < JOURNAL_VERSION:
        log.warning("store %s is of version %s and becomes one of version %d", shown, version, JOURNAL_VERSION)
        upgrade(engine)
        with engine.begin() as connection:
            _stamp(connection)


def _has_our_columns(engine: sa.Engine, names: Iterable[str]) -> bool:
    """Return whether the tables of these names have our columns."""
    seen = sa.inspect(engine)
    return all(
        {column["name"] for column in seen.get_columns(name)} >= {column.name for column in TABLES.tables[name].c}
        for name in names
    )


def _stamp(connection: sa.Connection) -> None:
    """Write whose database it is, and of which version; the version twice, for one of the two may be damaged."""
    rows = {"application": APPLICATION, "version": str(JOURNAL_VERSION), "stamp": _STAMP.format(JOURNAL_VERSION)}
    connection.execute(sa.delete(META).where(META.c.key.in_(list(rows))))
    connection.execute(sa.insert(META), [{"key": key, "value": value} for key, value in rows.items()])


def _version(engine: sa.Engine) -> int:
    """Return the version of a journal of ours; 0 when it has none.

    Of a damaged stamp the other half is believed: tables with our names and our columns are no other program's.
    """
    key, value = META.c.key, META.c.value
    if engine.dialect.name == "sqlite":  # what is damaged may be no text
        key, value = sa.cast(key, sa.LargeBinary), sa.cast(value, sa.LargeBinary)  # type: ignore[assignment]  # as bytes
    with engine.connect() as connection:
        stamp = {_text(row[0]): _text(row[1]) for row in connection.execute(sa.select(key, value))}
    plain, whole = stamp.get("version", ""), re.fullmatch(_STAMP.format("([0-9]{1,4})"), stamp.get("stamp", ""))
    told = int(plain) if re.fullmatch("[0-9]{1,4}", plain) else 0
    other = int(whole[1]) if whole is not None else 0
    if told and other and (told ^ other).bit_count() == 1:
        return other  # one bit apart: the longer one is whole, so it is the short one that is damaged
    return told or other


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def key_of(table: sa.Table, values: Iterable[object]) -> str:
    """Return what a row's seal covers besides its body: its table, and the columns that it is found by."""
    return "|".join((table.name, *map(str, values)))
