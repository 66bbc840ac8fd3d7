# SPDX-License-Identifier: Apache-2.0
"""The way to the database: from ``sqlite:///FILE`` or ``postgresql+psycopg://...`` to an engine, or one sentence."""

import logging
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError, SQLAlchemyError

from megascale_ops.errors import UsageError

log = logging.getLogger(__name__)

# libpq's limits for a server that is away: 3 s to connect (a frozen one takes connections and stays silent), and an
# unanswered packet, or three unanswered keep-alives, ends a connection within 15 s.
_SERVER = {
    "keepalives_idle": "5",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
}
# 64 MB: what a write-ahead log may keep of its file once its pages are in the journal.
_LOG_BYTES = 64 * 1024 * 1024
_ASK_AGAIN_S = 1.0
_INCREMENTAL = 2


def engine_of(
    url: str,
    *,
    readonly: bool,
    application: str = "",
    connect_timeout: str = "3",
    **options: Any,  # noqa: ANN401  SQLAlchemy's own
) -> sa.Engine:
    """Return an engine for ``url``; nothing is opened yet.

    Args:
        url: of an SQLite file or a PostgreSQL database.
        readonly: a file must exist.
        application: how a server's list of connections names ours.
        connect_timeout: seconds that a server has to take a connection.
        options: of ``create_engine``.

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
        asked = {**_SERVER, "connect_timeout": connect_timeout}
        given = {name: value for name, value in asked.items() if name not in parsed.query}
        if application:
            given["application_name"] = application
        if _is_of_several(parsed) and "target_session_attrs" not in parsed.query:
            given["target_session_attrs"] = "read-write"
        try:
            return sa.create_engine(parsed, pool_pre_ping=True, connect_args=given, **options)
        except (NoSuchModuleError, ImportError) as error:
            raise UsageError("a PostgreSQL store needs `pip install megascale-ops[store]`") from error
    raise UsageError(
        f"store kind {kind!r} can't be used: take sqlite:///FILE or postgresql+psycopg://USER@HOST/DATABASE"
    )


def is_server(url: str) -> bool:
    """Return whether ``url`` names a server, which several controllers may share; of a wrong one, False."""
    try:
        return sa.make_url(url).get_backend_name() == "postgresql"
    except ArgumentError:
        return False


def _is_of_several(url: sa.URL) -> bool:
    """Return whether an address names a server and those that replace it: ``?host=A:5432&host=B:5432``."""
    hosts = url.query.get("host", ())
    return "," in hosts if isinstance(hosts, str) else len(hosts) > 1


def shown_of(engine: sa.Engine) -> str:
    """Return an engine's address as a person would give it: without its password, and without our options."""
    if engine.dialect.name == "sqlite":
        return f"sqlite:///{sqlite_path(engine)}"
    return engine.url.render_as_string(hide_password=True)


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
    cursor.execute(f"PRAGMA journal_size_limit={_LOG_BYTES}")
    cursor.close()


def give_pages_back(engine: sa.Engine) -> None:
    """Let a journal hand free pages back to its file system; one that was made without that is written anew, once.

    SQLite writes a whole journal anew for it (1 GB takes some seconds, and as much room); where there is no room, it
    stays as large as it ever was and uses its free pages itself.
    """
    with engine.connect() as connection:
        if connection.exec_driver_sql("PRAGMA auto_vacuum").scalar() == _INCREMENTAL:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return
        try:
            connection.exec_driver_sql(f"PRAGMA auto_vacuum={_INCREMENTAL}")
            connection.exec_driver_sql("VACUUM")
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except SQLAlchemyError as error:
            log.warning("the journal can't be packed now, and keeps the size that it has: %s", error)


def await_server(engine: sa.Engine, shown: str, wait_s: float) -> None:
    """Wait until a server takes connections, at most ``wait_s``.

    Raises:
        UsageError: it did not in that time.
    """
    deadline_s = time.monotonic() + wait_s
    told = False
    while True:
        try:
            with engine.connect():
                return
        except OperationalError as error:
            why = sentence_of(error)
            if time.monotonic() + _ASK_AGAIN_S > deadline_s:
                waited = f" within {wait_s:.0f} s" if wait_s else ""
                raise UsageError(f"store {shown} can't be used: it does not answer{waited} ({why})") from error
        if not told:
            log.warning("store %s does not answer (%s): it is waited for, at most %.0f s", shown, why, wait_s)
            told = True
        time.sleep(_ASK_AGAIN_S)


def reach_server(url: str, wait_s: float) -> None:
    """Wait until the server at ``url`` takes connections.

    Raises:
        UsageError: it did not within ``wait_s``, or the address can't be used.
    """
    engine = engine_of(url, readonly=False)
    try:
        await_server(engine, shown(url), wait_s)
    except DBAPIError as error:
        raise UsageError(f"store {shown(url)} can't be used: {sentence_of(error)}") from error
    finally:
        engine.dispose()


def shown(url: str) -> str:
    """Return an address as it may be shown: without its password."""
    try:
        return sa.make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return url


def sentence_of(error: SQLAlchemyError) -> str:
    """Return what a driver said, as one line."""
    said = str(getattr(error, "orig", None) or error).strip()
    return said.splitlines()[0] if said else type(error).__name__
