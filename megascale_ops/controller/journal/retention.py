# SPDX-License-Identifier: Apache-2.0
"""A bound on the journal: when it is full, the oldest goes first, a little at a time.

Events go before incidents: an incident of a year ago is a line in a list, its events are what ``why`` and ``policy
replay`` read of late. When nothing but the newest events is left, the oldest incidents that are over go, too. What jobs
live by (their records, what is remembered of GPUs) is never given up; it does not grow with what happens.

Looked at each time that 16 MB were written. Each turn gives up a thousand rows at most, so that no order waits long,
and hands the file's free pages back to its file system.
"""

from typing import Any

import sqlalchemy as sa

from megascale_ops.controller.journal.tables import EVENTS, INCIDENTS

# 16 MB: some 2,500 incidents; measuring takes a scan of the tables in PostgreSQL.
LOOK_EACH_BYTES = 16_000_000
# 90 %: so that not every look finds it full again.
LOW_WATER = 0.9
# 20,000 events: some 2,000 incidents with all that was decided, 20 MB.
KEPT_EVENTS = 20_000
# 1,000,000: a year of a cluster with some thousand incidents.
KEPT_AUDIT = 1_000_000
ROWS_A_TURN = 1000
# 100 incidents: with all evidence that one may have 200 MB, mostly a thousandth of that.
INCIDENTS_A_TURN = 100
# 2,000 pages: 8 MB.
PAGES_A_TURN = 2000
# What a row costs beside its body: columns, and places in indices. 130 bytes in SQLite as measured, in PostgreSQL it
# has a longer head.
_BESIDE_BYTES = 200
_OVER = ("recovered", "ended", "harmless", "over")


class Retention:
    """Keeps a journal below ``limit_bytes``. Owned by the journal's writer."""

    def __init__(self, engine: sa.Engine, limit_bytes: int) -> None:
        self._engine = engine
        self._limit_bytes = limit_bytes
        self._unseen_bytes = LOOK_EACH_BYTES  # look at once
        self._is_full = False
        self.forgotten_events = 0
        self.forgotten_incidents = 0

    def wrote(self, count: int) -> None:
        """Take note that so many bytes were written."""
        self._unseen_bytes += count

    @property
    def is_due(self) -> bool:
        """There is something to do."""
        return self._is_full or self._unseen_bytes >= LOOK_EACH_BYTES

    def turn(self) -> None:
        """Look how large the journal is, and give up a little of it when it is too large."""
        with self._engine.begin() as connection:
            if not self._is_full:
                self._unseen_bytes = 0
                self._is_full = size_bytes(connection) > self._limit_bytes
            elif size_bytes(connection) <= self._limit_bytes * LOW_WATER or not self._give_up(connection):
                self._is_full = False
        if self._engine.dialect.name == "sqlite":
            self._tidy()

    def _give_up(self, connection: sa.Connection) -> int:
        """Delete the oldest rows; return how many."""
        newest = connection.scalar(sa.select(sa.func.max(EVENTS.c.id))) or 0
        # Who ordered what is kept longer than what happened.
        is_old = sa.or_(EVENTS.c.kind != "audit", EVENTS.c.id <= newest - KEPT_AUDIT)
        events = sa.select(EVENTS.c.id).where(EVENTS.c.id <= newest - KEPT_EVENTS, is_old).order_by(EVENTS.c.id)
        gone = connection.execute(sa.delete(EVENTS).where(EVENTS.c.id.in_(events.limit(ROWS_A_TURN)))).rowcount
        self.forgotten_events += gone
        if gone:
            return gone
        # Half of what is there at most, so that the newest always stay.
        count = connection.scalar(sa.select(sa.func.count()).select_from(INCIDENTS)) or 0
        is_over = sa.or_(*(INCIDENTS.c.body.contains(f'"state":"{state}"') for state in _OVER))
        oldest = sa.select(INCIDENTS.c.id).where(is_over).order_by(INCIDENTS.c.began, INCIDENTS.c.number)
        over = connection.scalars(oldest.limit(min(INCIDENTS_A_TURN, count // 2))).all()
        if over:
            connection.execute(sa.delete(INCIDENTS).where(INCIDENTS.c.id.in_(over)))
            connection.execute(sa.delete(EVENTS).where(EVENTS.c.incident.in_(over)))
        self.forgotten_incidents += len(over)
        return len(over)

    def _tidy(self) -> None:
        """Give free pages back, and keep the write-ahead log short; readers are not waited for."""
        with self._engine.connect() as connection:
            # SQLite gives one page back for each step of this statement, and a cursor steps once where no rows come.
            driver: Any = connection.connection.driver_connection
            driver.executescript(f"PRAGMA incremental_vacuum({PAGES_A_TURN});")
            connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def size_bytes(connection: sa.Connection) -> int:
    """Return how much room the journal needs, without pages that are free."""
    if connection.dialect.name == "sqlite":
        pages, free, size = (
            int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size
    total = 0
    for table in (INCIDENTS, EVENTS):
        query = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(sa.func.octet_length(table.c.body)), 0))
        count, bodies = connection.execute(query.select_from(table)).one()
        total += int(bodies) + int(count) * _BESIDE_BYTES
    return total
