# SPDX-License-Identifier: Apache-2.0
"""The journal's two threads: a clerk that answers in time, and a hand that writes and may be stuck.

The clerk takes batches in order and gives all that has piled up to the hand as one transaction. When that is safe, each
batch's ``done`` is called: the barrier behind "journal first, act second".

Training must go on when writing fails (disk full, server away) and when it does not end (a server that is frozen, a
network that swallows everything): after ``PATIENCE_S`` the clerk logs it, keeps what is not known to be safe in memory,
bounded, and calls ``done`` all the same, from then on at once. What is kept is written as soon as that is possible.

Where several controllers share the journal, each transaction holds the fence first (``journal.fence``). One that finds
another leader writes nothing, and no ``done`` is called any more. While the database is away, ``done`` is called only
as long as no other controller can have become the leader.

A commit whose answer was lost may have been made. So each transaction in PostgreSQL leaves its name, and events that
were in one that counts as failed are left out when the server knows its name after all: no event comes twice.
"""

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from megascale_ops.controller.journal.fence import DeposedError, Fence
from megascale_ops.controller.journal.retention import Retention
from megascale_ops.controller.journal.rows import (
    Batch,
    newest_checks,
    newest_hardware,
    newest_nodes,
    newest_parts,
    write,
)
from megascale_ops.controller.journal.tables import META
from megascale_ops.distribution import Distribution
from megascale_ops.schema.events import Event, Incident
from megascale_ops.schema.metrics import METRICS

log = logging.getLogger(__name__)

# 10,000 events: an hour of a job that fails every second, 3 MB; and as many incidents as the loop has at hand.
KEPT_EVENTS = 10_000
KEPT_INCIDENTS = 500
RETRY_S = 1.0
# 2 s: no disk that is well takes so long for a commit, and a restart that waits for longer is one that people notice.
PATIENCE_S = 2.0
# 0.2 s for one that fails: a disk that has room again has written by then, and one that has not is not waited for.
FAILING_PATIENCE_S = 0.2
# 5 s: how often an idle connection is tested; /healthz is at most so old.
PROBE_S = 5.0
CLOSE_S = 5.0
_TRANSACTION = "last_transaction"


class _Doubt(NamedTuple):
    """A transaction that failed in its commit: its name, and the events that may have been written by it."""

    name: str
    events: tuple[Event, ...]


class Flight:
    """One transaction in the hand's hands."""

    def __init__(self, batches: list[Batch], doubts: tuple[_Doubt, ...]) -> None:
        self.batches = batches
        self.doubts = doubts
        self.ended = threading.Event()
        self.error = ""  # "" when it has ended and is safe
        self.is_deposed = False  # another controller leads
        self.in_doubt: _Doubt | None = None


class Hand:
    """Writes what it is given, one transaction after the other, for as long as each of them takes."""

    def __init__(self, engine: sa.Engine, retention: Retention | None, fence: Fence | None) -> None:
        self._engine = engine
        self._retention = retention
        self._fence = fence
        self._is_server = engine.dialect.name != "sqlite"
        self._queue: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="journal-hand", daemon=True)
        self._thread.start()

    def begin(self, flight: Flight) -> None:
        """Take a transaction; at most one at a time."""
        self._queue.put(flight)

    def close(self) -> None:
        """End after what is under way; one that is stuck, which the clerk has waited for, is left behind."""
        self._queue.put(None)
        self._thread.join(timeout=RETRY_S)

    def _run(self) -> None:
        while (flight := self._queue.get()) is not None:
            try:
                self._write(flight)
            except DeposedError as error:
                flight.error, flight.is_deposed = str(error), True
            except (SQLAlchemyError, OSError) as error:
                why = str(error.orig) if isinstance(error, DBAPIError) else str(error)
                flight.error = why.strip() or "unknown"
                if self._is_server:
                    self._engine.dispose()  # after a failover the connections that are open lead to the old server
            except Exception as error:
                # A batch that can't be written is a bug; without this thread nothing would be journaled again.
                log.exception("the journal met an error of its own")
                flight.error = str(error) or type(error).__name__
            flight.ended.set()
            if not flight.error:
                self._tidy()

    def _write(self, flight: Flight) -> None:
        name = uuid.uuid4().hex
        with self._engine.connect() as connection:
            if not self._is_server:
                # The cost of a commit that survives a power cut is paid where something follows from it.
                binding = any(batch.binding for batch in flight.batches)
                connection.exec_driver_sql(f"PRAGMA synchronous={'FULL' if binding else 'NORMAL'}")
            if self._fence is not None:
                self._fence.hold(connection)
            batches = _without_known(connection, flight) if flight.doubts else flight.batches
            count = write(connection, batches)
            if self._is_server:
                _leave_name(connection, name)
                flight.in_doubt = _Doubt(name, tuple(event for batch in flight.batches for event in batch.events))
            connection.commit()
        flight.in_doubt = None
        if self._retention is not None:
            self._retention.wrote(count)

    def _tidy(self) -> None:
        if self._retention is None or not self._retention.is_due:
            return
        try:
            self._retention.turn()
        except (SQLAlchemyError, OSError) as error:
            log.warning("the journal can't be tidied up now: %s", error)


def _leave_name(connection: sa.Connection, name: str) -> None:
    """Write the transaction's name into it."""
    mine = META.c.key == _TRANSACTION
    if not connection.execute(sa.update(META).where(mine).values(value=name)).rowcount:
        connection.execute(sa.insert(META), {"key": _TRANSACTION, "value": name})


def _without_known(connection: sa.Connection, flight: Flight) -> list[Batch]:
    """Return the batches without the events of a transaction that was made after all."""
    last = connection.scalar(sa.select(META.c.value).where(META.c.key == _TRANSACTION))
    known = {id(event) for doubt in flight.doubts if doubt.name == last for event in doubt.events}
    return [
        msgspec.structs.replace(batch, events=tuple(event for event in batch.events if id(event) not in known))
        for batch in flight.batches
    ]


class _Item(NamedTuple):
    """A submitted batch, its callback, and since when it waits (monotonic s)."""

    batch: Batch
    done: Callable[[], None]
    since_s: float


class Clerk:
    """Takes batches, has them written, and calls their ``done``. ``submit`` never waits."""

    def __init__(self, engine: sa.Engine, retention: Retention | None = None, fence: Fence | None = None) -> None:
        self._fence = fence
        self._hand = Hand(engine, retention, fence)
        self._probes = engine.dialect.name != "sqlite"
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._flight: Flight | None = None
        self._kept: list[Batch] = []
        self._doubts: tuple[_Doubt, ...] = ()
        self._held: list[_Item] = []  # what may not be acted upon yet
        self.is_deposed = False  # another controller leads: nothing is written, and nothing acted upon
        self._tried_s = time.monotonic()
        self._failing_since_s = 0.0
        self.failing = ""  # why what was submitted is not safe; "" when all is written
        self.dropped_events = 0
        self.write_times = Distribution(METRICS["megascale_controller_journal_write_seconds"].buckets)
        self.write_errors = 0
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def kept(self) -> int:
        """How many batches wait in memory because they are not known to be safe."""
        flight = self._flight
        return len(self._kept) + (len(flight.batches) if flight is not None else 0)

    def submit(self, batch: Batch, done: Callable[[], None]) -> None:
        """Write ``batch`` after all that was submitted before; ``done`` is called by the clerk's thread."""
        self._queue.put(_Item(batch, done, time.monotonic()))

    def close(self) -> None:
        """Write what is left and end."""
        self._queue.put(None)
        self._thread.join(timeout=CLOSE_S + RETRY_S)
        self._hand.close()

    def _run(self) -> None:
        is_open = True
        while is_open:
            items, is_open = self._take()
            self._work([item.batch for item in items], is_last=not is_open)
            if not self.failing:
                now_s = time.monotonic()
                for item in items:
                    self.write_times.observe(now_s - item.since_s)
            self._release(items)

    def _release(self, items: list[_Item]) -> None:
        """Call what follows from batches that are safe, or that may be acted upon all the same; in order."""
        self._held += items
        if self.is_deposed:
            self._held.clear()
            return
        if self.failing and self._fence is not None and not self._fence.may_act_unwritten(self._failing_since_s):
            return
        held, self._held = self._held, []
        for item in held:
            item.done()

    def _take(self) -> tuple[list[_Item], bool]:
        """Wait for something to do; return all that has piled up, and whether there may be more."""
        items: list[_Item] = []
        timeout_s = RETRY_S if self.failing else PROBE_S if self._probes else None
        try:
            item = self._queue.get(timeout=timeout_s)
            while item is not None:
                items.append(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return items, True
        return items, False

    def _work(self, batches: list[Batch], *, is_last: bool) -> None:
        """Have everything written that is not safe; wait for it, but not for ever."""
        if self.is_deposed:
            return
        flight = self._flight
        if flight is not None:
            self._kept = _merged([*self._kept, *batches], self)
            if not flight.ended.wait(CLOSE_S if is_last else 0.0):
                return
            self._land(flight)
            batches = []
        is_idle = not batches and not self._kept
        if is_idle and not (self._probes and time.monotonic() - self._tried_s >= PROBE_S):
            return
        self._tried_s = time.monotonic()
        flight = self._flight = Flight([*self._kept, *batches], self._doubts)
        self._kept = []
        self._hand.begin(flight)
        patience_s = CLOSE_S if is_last else FAILING_PATIENCE_S if self.failing else PATIENCE_S
        if flight.ended.wait(patience_s):
            self._land(flight)
        else:
            self._tell(f"it has not answered for {patience_s:.1f} s")

    def _land(self, flight: Flight) -> None:
        """Take note of how a transaction ended."""
        self._flight = None
        if flight.is_deposed:
            self._end_leading(flight.error)
            return
        if flight.error:
            self._kept = _merged([*flight.batches, *self._kept], self)
            if flight.in_doubt is not None:
                self._doubts = (*self._doubts, flight.in_doubt)
            self.write_errors += 1
            self._tell(flight.error)
            return
        self._doubts = ()
        if self.failing and not self._kept:
            log.warning("the journal can be written again; %d events were lost", self.dropped_events)
            self.failing = ""

    def _end_leading(self, why: str) -> None:
        self.is_deposed, self.failing = True, why
        self._kept.clear()
        assert self._fence is not None
        self._fence.deposed(why)

    def _tell(self, why: str) -> None:
        if not self.failing:
            self._failing_since_s = time.monotonic()
            log.error("the journal can't be written (%s): it is kept in memory, training goes on", why)
        self.failing = why


def _merged(batches: list[Batch], clerk: Clerk) -> list[Batch]:
    """Return unwritten batches as few: the newest states, and the newest events and incidents up to their bounds."""
    events = [event for batch in batches for event in batch.events]
    if len(events) > KEPT_EVENTS:
        clerk.dropped_events += len(events) - KEPT_EVENTS
        events = events[-KEPT_EVENTS:]
    incidents: dict[str, Incident] = {}
    for batch in batches:
        for incident in batch.incidents:
            incidents.pop(incident.id, None)
            incidents[incident.id] = incident
    records = {batch.job: batch.record for batch in batches if batch.job}
    kept = [Batch(job=job, record=record, binding=True) for job, record in records.items()]
    newest = tuple(incidents.values())[-KEPT_INCIDENTS:]
    rest = Batch(
        tuple(events), parts=newest_parts(batches), incidents=newest, hardware=newest_hardware(batches),
        nodes=newest_nodes(batches), checks=newest_checks(batches),
    )  # fmt: skip
    return [*kept, rest] if rest != Batch() else kept
