# SPDX-License-Identifier: Apache-2.0
"""What a controller asks the database about leadership: who holds the lock, and to have it.

The lock is PostgreSQL's advisory one, held by a connection of its own for as long as that lives; no row and no file
has to be cleaned up after a crash. The word that a leader says on it is a query that writes nothing, so a full disk
does not end its leadership. Every question has a deadline: a server that is frozen takes connections and stays silent.

The lock belongs to a connection. A pooler that gives transactions to other connections (PgBouncer's transaction mode)
breaks it, which the leader notices with its next word.
"""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from megascale_ops.controller.journal.engine import engine_of, sentence_of
from megascale_ops.controller.journal.fence import EPOCH, LEADER, Leader, read_given_way, read_leader
from megascale_ops.controller.leadership.hearing import Petition
from megascale_ops.controller.leadership.rule import Seen
from megascale_ops.foreign import UNREADABLE

log = logging.getLogger(__name__)

# 2 s: a look takes a millisecond; a server that needs longer is as good as away.
ANSWER_S = 2.0
APPLICATION = "megascale-ops "
STANDBY = "standby:"
PETITION = "petition:"
_CLASS = 0x4D53_4F50  # "MSOP", beside other programs' locks in the same database
# The lock of the schema that the tables are in: several journals may share a database.
_KEY = f"{_CLASS}, hashtext(coalesce(current_schema(), ''))"
_HELD = f"""
    SELECT l.pid FROM pg_locks l JOIN pg_database d ON d.oid = l.database
    WHERE l.locktype = 'advisory' AND d.datname = current_database() AND l.granted AND l.objsubid = 2
    AND l.classid = {_CLASS} AND l.objid::bigint = (hashtext(coalesce(current_schema(), ''))::bigint & 4294967295)
    LIMIT 1
"""  # noqa: S608  constants of this file
_LOOK = sa.text(f"""
    SELECT coalesce(held.pid, 0), coalesce(a.state_change::text, ''), pg_is_in_recovery(),
           extract(epoch FROM clock_timestamp() - pg_postmaster_start_time()), to_regclass('meta') IS NOT NULL,
           pg_backend_pid()
    FROM (SELECT 1) one LEFT JOIN ({_HELD}) held ON true LEFT JOIN pg_stat_activity a ON a.pid = held.pid
""")  # noqa: S608  same
_ROWS = sa.text(f"SELECT key, value FROM meta WHERE key IN ('{EPOCH}', '{LEADER}') OR key LIKE '{STANDBY}%'")  # noqa: S608  same
_NAMES = sa.text(
    "SELECT DISTINCT application_name FROM pg_stat_activity WHERE datname = current_database() "
    "AND application_name LIKE :pattern"
)
_TRY = sa.text(f"SELECT pg_try_advisory_lock({_KEY})")
_UNLOCK = sa.text(f"SELECT pg_advisory_unlock({_KEY})")
_CLOCK = sa.text("SELECT extract(epoch FROM clock_timestamp())")
_PETITIONS = sa.text(
    f"SELECT key, value, extract(epoch FROM clock_timestamp()) AS now_s FROM meta WHERE key LIKE '{PETITION}%'"  # noqa: S608  a constant of this file
)
_PUT_PETITION = sa.text(
    "INSERT INTO meta (key, value) VALUES (:key, extract(epoch FROM clock_timestamp())::text || ' ' || :nodes)"
)
# Those of standbys that are gone go as well: each process has a name of its own.
_NO_PETITION = sa.text(
    f"DELETE FROM meta WHERE key = :key OR (key LIKE '{PETITION}%' AND NOT EXISTS (SELECT 1 FROM pg_stat_activity "  # noqa: S608  same
    f"WHERE datname = current_database() AND application_name = '{APPLICATION}' || substr(key, {len(PETITION) + 1})))"
)
_END = sa.text(
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() "
    "AND pid <> pg_backend_pid() AND (pid = :pid OR (application_name = :name AND :name <> ''))"
)


class AwayError(Exception):
    """The database gave no answer that can be used; the text says why."""


class Session:
    """One connection to the database of the journal, for the lock alone; used by one thread.

    Args:
        url: the journal's.
        me: this process; the name of its connections has its identity in it.
    """

    def __init__(self, url: str, me: Leader) -> None:
        self._me = me
        self._engine = engine_of(
            url,
            readonly=False,
            application=application_of(me.id),
            connect_timeout="2",
            poolclass=sa.NullPool,
            isolation_level="AUTOCOMMIT",
        )
        self._connection: sa.Connection | None = None
        self.pid = 0  # of the server's process behind the connection

    def look(self) -> Seen:
        """Return what there is to see.

        Raises:
            AwayError: the database does not answer, or takes no writes.
        """
        with self._asking() as connection:
            holder, word, is_replica, up_s, has_rows, self.pid = connection.execute(_LOOK).one()
            rows = {row.key: row.value for row in connection.execute(_ROWS)} if has_rows else {}
            names = {
                row[0].removeprefix(APPLICATION) for row in connection.execute(_NAMES, {"pattern": f"{APPLICATION}%"})
            }
        if is_replica:
            raise AwayError("it is a replica, which takes no writes")
        epoch = rows.get(EPOCH) or ""
        waiting = {key.removeprefix(STANDBY): url for key, url in rows.items() if key.startswith(STANDBY)}
        return Seen(
            holder=int(holder),
            word=str(word),
            leader=read_leader(rows[LEADER]) if LEADER in rows else None,
            epoch=int(epoch) if epoch.isascii() and epoch.isdigit() else 0,
            up_s=float(up_s),
            standbys={one: url for one, url in waiting.items() if one in names and one != self._me.id},
        )

    def try_lock(self) -> bool:
        """Take the lock where it is free; return whether this connection has it."""
        with self._asking() as connection:
            return bool(connection.scalar(_TRY))

    def unlock(self) -> None:
        """Give the lock back."""
        with self._asking() as connection:
            connection.execute(_UNLOCK)

    def end_connections(self, pid: int, leader: Leader | None) -> None:
        """End the connection of ``pid`` and all of that leader.

        Raises:
            AwayError: the database does not answer, or this role may not do it.
        """
        with self._asking() as connection:
            end_connections(connection, pid, leader)

    def put_standby(self, *, is_waiting: bool) -> None:
        """Write, or remove, the row by which a leader finds this standby."""
        key = STANDBY + self._me.id
        with self._asking() as connection:
            if not connection.scalar(sa.text("SELECT to_regclass('meta') IS NOT NULL")):
                return
            connection.execute(sa.text("DELETE FROM meta WHERE key = :key"), {"key": key})
            if is_waiting:
                connection.execute(
                    sa.text("INSERT INTO meta (key, value) VALUES (:key, :url)"), {"key": key, "url": self._me.url}
                )

    def put_petition(self, nodes: Sequence[str]) -> None:
        """Write which nodes ask this standby; none: nothing stays written."""
        key = PETITION + self._me.id
        with self._asking() as connection:
            connection.execute(_NO_PETITION, {"key": key})
            if nodes:
                listed = msgspec.json.encode(nodes).decode()
                connection.execute(_PUT_PETITION, {"key": key, "nodes": listed})

    def petitions(self, standbys: Mapping[str, str]) -> list[Petition]:
        """Return what standbys have written that are connected: address by identity."""
        with self._asking() as connection:
            rows = connection.execute(_PETITIONS).all()
        found = []
        for key, value, now_s in rows:
            standby = key.removeprefix(PETITION)
            at, _, nodes = value.partition(" ")
            if standby not in standbys:
                continue
            with contextlib.suppress(*UNREADABLE, ValueError):
                names = frozenset(msgspec.json.decode(nodes, type=list[str]))
                found.append(Petition(standby, standbys[standby], names, max(0.0, float(now_s) - float(at))))
        return found

    def given_way_ages_s(self) -> list[float]:
        """Return how long ago leaders gave way of late."""
        with self._asking() as connection:
            now_s = float(connection.scalar(_CLOCK) or 0.0)
            return [now_s - at_s for at_s in read_given_way(connection)]

    def close(self) -> None:
        """Close the connection; a lock that it holds is free then."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(SQLAlchemyError, OSError):
                connection.invalidate()
                connection.close()
        self._engine.dispose()

    @contextlib.contextmanager
    def _asking(self) -> Iterator[sa.Connection]:
        try:
            connection = self._connection
            if connection is None:
                connection = self._connection = self._engine.connect()
            with _answered(connection):
                yield connection
        except (SQLAlchemyError, OSError) as error:
            why = sentence_of(error) if isinstance(error, SQLAlchemyError) else str(error)
            self.close()
            raise AwayError(why) from error


def application_of(identity: str) -> str:
    """Return how the connections of a controller are called in the server's list."""
    return f"{APPLICATION}{identity}"


def end_connections(connection: sa.Connection, pid: int, leader: Leader | None) -> None:
    """End the connections of ``pid`` (0: of none) and of ``leader``, but for the one that asks."""
    name = application_of(leader.id) if leader is not None else ""
    connection.execute(_END, {"pid": pid, "name": name})


@contextlib.contextmanager
def _answered(connection: sa.Connection) -> Iterator[None]:
    """Shut the socket of a connection whose answer does not come, which ends the wait for it."""
    driver: Any = connection.connection.driver_connection
    timer = threading.Timer(ANSWER_S, _shut, (driver.fileno(),))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join(ANSWER_S)  # it must not shut what has this number next


def _shut(number: int) -> None:
    log.debug("the database gave no answer in %.0f s", ANSWER_S)
    with contextlib.suppress(OSError):
        copy = socket.socket(fileno=os.dup(number))
        try:
            copy.shutdown(socket.SHUT_RDWR)
        finally:
            copy.close()
