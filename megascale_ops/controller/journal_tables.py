# SPDX-License-Identifier: Apache-2.0
"""The journal's tables, and whether a database carries them: ours, of a version that we speak, or somebody else's."""

import sqlalchemy as sa

from megascale_ops.errors import UsageError
from megascale_ops.schema.version import JOURNAL_VERSION, check_version

APPLICATION = "megascale-ops"

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
# What is remembered of GPUs; journals of older programs do not have it, and get it when they are written to.
HARDWARE = sa.Table(
    "hardware",
    TABLES,
    sa.Column("uuid", sa.String(100), primary_key=True),
    sa.Column("reason", sa.String(100), primary_key=True),
    sa.Column("body", sa.Text),
)


def claim(engine: sa.Engine, shown: str, *, readonly: bool) -> None:
    """Make sure that the database is ours and of a version we speak; an empty one becomes ours."""
    names = set(sa.inspect(engine).get_table_names())
    ours = set(TABLES.tables) - {HARDWARE.name}
    if not names and not readonly:
        with engine.begin() as connection:
            TABLES.create_all(connection)
            rows = [{"key": "application", "value": APPLICATION}, {"key": "version", "value": str(JOURNAL_VERSION)}]
            connection.execute(sa.insert(META), rows)
        return
    stamp: dict[str, str] = {}
    if ours <= names and {column["name"] for column in sa.inspect(engine).get_columns("meta")} == {"key", "value"}:
        with engine.connect() as connection:
            stamp = {row.key: row.value for row in connection.execute(sa.select(META))}
    if stamp.get("application") != APPLICATION:
        raise UsageError(f"store {shown} is a database of something else: give another file or database")
    version = stamp.get("version", "")
    if not version.isdigit():
        raise UsageError(f"store {shown} carries no version: give another file or database")
    check_version(f"store {shown}", int(version), JOURNAL_VERSION)
    if HARDWARE.name not in names and not readonly:
        HARDWARE.create(engine, checkfirst=True)
