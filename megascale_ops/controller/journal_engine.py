# SPDX-License-Identifier: Apache-2.0
"""The way to the database: from ``sqlite:///FILE`` or ``postgresql+psycopg://...`` to an engine, or one sentence."""

from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from megascale_ops.errors import UsageError


def engine_of(url: str, *, readonly: bool) -> sa.Engine:
    """Return an engine for ``url``; nothing is opened yet.

    Raises:
        UsageError: it names no database that can be used.
    """
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


def sqlite_path(engine: sa.Engine) -> Path:
    """Return the file of an SQLite engine of ours."""
    return Path(unquote((engine.url.database or "").removeprefix("file:").partition("?")[0]))


def _sqlite_engine(file: str, *, readonly: bool) -> sa.Engine:
    path = Path(file).expanduser().absolute()
    if not path.parent.is_dir():
        raise UsageError(f"store {path} can't be used: there is no folder {path.parent}")
    if readonly and not path.is_file():
        raise UsageError(f"there is no journal {path}")
    database = f"file:{quote(str(path))}?mode={'ro' if readonly else 'rwc'}&uri=true"
    # 5 s: a reader never blocks a writer in WAL mode; a second writer may for a moment.
    return sa.create_engine(f"sqlite:///{database}", connect_args={"timeout": 5.0})


def set_pragmas(connection: Any, _record: Any) -> None:  # noqa: ANN401  the driver's own type, given by SQLAlchemy
    """Make an SQLite connection one of ours: readers and the writer do not block each other."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()
