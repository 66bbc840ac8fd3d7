# SPDX-License-Identifier: Apache-2.0
"""The database of ``killed_leaders`` as a real PostgreSQL: lock, sessions, and transactions that are torn."""

from contextlib import suppress
from itertools import count

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from megascale_ops.controller.journal.engine import engine_of
from megascale_ops.controller.journal.fence import Fence, Leader, resign, take_epoch
from megascale_ops.controller.journal.tables import TABLES
from megascale_ops.controller.leadership.hearing import Heir
from megascale_ops.controller.leadership.rule import Seen
from megascale_ops.controller.leadership.session import AwayError, Session, application_of
from tests.fakes.killed_leaders import Controller, Database

_lives = count()


class _Life:
    """One process of a controller: its connections end with it."""

    def __init__(self, who: Controller, url: str) -> None:
        self.me = Leader(f"{who.name}.{next(_lives)}", f"http://{who.name}:1")
        self.session = Session(url, self.me)
        self.engine = engine_of(url, readonly=False, application=application_of(self.me.id), poolclass=sa.NullPool)
        # All run in one thread: whoever waits for another one's transaction would wait for itself.
        sa.event.listen(self.engine, "connect", lambda one, _record: one.execute("SET lock_timeout = '500ms'"))

    def end(self) -> None:
        """Be killed."""
        self.session.close()
        self.engine.dispose()


class ServerDatabase(Database):
    """A database of a server."""

    is_torn = True

    def __init__(self, url: str) -> None:
        super().__init__()
        self.engine.dispose()
        self._url = url
        self._lives: dict[Controller, _Life] = {}
        engine = engine_of(url, readonly=False)
        TABLES.create_all(engine)
        engine.dispose()

    def _life(self, who: Controller) -> _Life:
        if who not in self._lives:
            self._lives[who] = _Life(who, self._url)
        return self._lives[who]

    def identity(self, who: Controller) -> str:
        """Return by what a controller is known to the others."""
        return self._life(who).me.id

    def give_way(self, who: Controller, fence: Fence, heir: Heir, now_s: float) -> None:
        """Write that a leader gives way, as ``Candidate.resign`` does, and end its connection for the lock."""
        life = self._life(who)
        me = msgspec.structs.replace(life.me, heir=heir.id, why=heir.reason)
        with life.engine.begin() as connection:
            connection.execute(sa.text("SET LOCAL lock_timeout = '1s'"))
            resign(connection, fence, me, now_wall_s=now_s)
        self.cut(who)

    def engine_of(self, who: Controller) -> sa.Engine:
        """Return what a controller writes the journal by."""
        return self._life(who).engine

    def seen(self, who: Controller, now_s: float) -> Seen | None:
        """Return what a controller sees; the server is as old as the world."""
        if self.is_away:
            return None
        with suppress(AwayError):
            seen = self._life(who).session.look()
            return seen._replace(up_s=now_s + 1e6, standbys=self.standbys_of(who))
        return None

    def say(self, who: Controller) -> None:
        """Let the leader say its word, if the lock is its."""
        if self.holder is who and not self.is_away:
            try:
                self._life(who).session.look()
            except AwayError:  # another one has ended this connection
                self.holder = None

    def force(self, who: Controller, seen: Seen) -> None:
        """End the connections of the leader."""
        with suppress(AwayError):
            self._life(who).session.end_connections(seen.holder, seen.leader)

    def lock(self, who: Controller) -> bool:
        """Take the lock if it is free."""
        with suppress(AwayError):
            if self._life(who).session.try_lock():
                self.holder = who
                return True
        return False

    def cut(self, who: Controller) -> None:
        """End a controller's connection for the lock."""
        super().cut(who)
        self._life(who).session.close()

    def lose_all(self) -> None:
        """Be away: all connections end."""
        super().lose_all()
        for life in self._lives.values():
            life.end()

    def elect(self, who: Controller) -> int:
        """Write that a controller leads, as ``Candidate.elect`` does."""
        life = self._life(who)
        with suppress(AwayError):
            before = life.session.look().leader
            if before is not None and before.id != life.me.id:
                life.session.end_connections(0, before)
        with life.engine.begin() as connection:
            connection.execute(sa.text("SET LOCAL lock_timeout = '3s'"))
            return take_epoch(connection, life.me, 0)

    def died(self, who: Controller) -> None:
        """End a process."""
        super().died(who)
        life = self._lives.pop(who, None)
        if life is not None:
            with suppress(SQLAlchemyError):
                life.end()

    def close(self) -> None:
        """End all."""
        for who in list(self._lives):
            self.died(who)
