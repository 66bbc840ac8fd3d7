# SPDX-License-Identifier: Apache-2.0
"""Leaders killed, paused and cut off by the thousand, in virtual time: a model around what is real.

Three controllers share a database of the journal's real tables, with its real transactions, fence and rule of
succession. A process may stop between any two of its steps, so also between having read that an order is due, having
written it and having handed it out. ``Database`` is SQLite in memory, and models the lock, which a session holds as
PostgreSQL's does; ``server_database.py`` beside it is a real server with real sessions.

Agents of three nodes ask whichever controller they reach: the leader if they can, else the others, which refuse them. A
leader that none of them reaches gives way by the real rule, and by the real transaction.

A need (a rank that died) comes again and again; a leader that reads none of its orders in the journal gives one. The
job's runner obeys each order by its name, once, and no leader of a lower number than it has heard.
"""

import random
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import suppress

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from megascale_ops.controller.journal.fence import (
    DeposedError,
    Fence,
    Leader,
    read_given_way,
    resign,
    take_epoch,
)
from megascale_ops.controller.journal.rows import Batch, write
from megascale_ops.controller.journal.tables import JOBS, TABLES
from megascale_ops.controller.leadership.hearing import (
    STEADY_S,
    Hearing,
    Heir,
    Petition,
    heir_of,
    may_give_way,
)
from megascale_ops.controller.leadership.rule import LOOK_S, Seen, Step, Succession

NODES = ("a", "b", "c")
# As in ``candidate``: a loop that has not turned for so long was away; who gave way does not lead for so long.
_AWAY_S, _AFTERWARDS_S = 5.0, 20.0


class Database:
    """The tables, the lock, and whether they can be reached."""

    is_torn = False  # whether a process may stop inside a transaction

    def __init__(self) -> None:
        self.engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
        TABLES.create_all(self.engine)
        self.holder: Controller | None = None
        self.pid = 0
        self.word = 0
        self.is_away = False
        self.leader: Leader | None = None
        self.epoch = 0  # as it is written
        self.petitions: dict[Controller, tuple[frozenset[str], float]] = {}

    def identity(self, who: "Controller") -> str:
        """Return by what a controller is known to the others."""
        return who.name

    def petitions_for(self, who: "Controller", now_s: float) -> list[Petition]:
        """Return what the standbys beside a leader have written."""
        return [
            Petition(self.identity(one), f"http://{one.name}:1", nodes, now_s - at_s)
            for one, (nodes, at_s) in self.petitions.items()
            if one is not who
        ]

    def give_way(self, who: "Controller", fence: Fence, heir: Heir, now_s: float) -> None:
        """Write that a leader gives way, and free the lock."""
        self.leader = Leader(self.identity(who), f"http://{who.name}:1", heir=heir.id, why=heir.reason)
        with self.engine_of(who).begin() as connection:
            resign(connection, fence, self.leader, now_wall_s=now_s)
        self.leader = msgspec.structs.replace(self.leader, resigned=True)
        self.cut(who)

    def given_way_ages_s(self, who: "Controller", now_s: float) -> list[float]:
        """Return how long ago leaders have given way."""
        with self.engine_of(who).connect() as connection:
            return [now_s - at_s for at_s in read_given_way(connection)]

    def engine_of(self, _who: "Controller") -> sa.Engine:
        """Return what a controller writes the journal by."""
        return self.engine

    def seen(self, who: "Controller", now_s: float) -> Seen | None:
        """Return what a controller sees."""
        if self.is_away:
            return None
        holder = self.pid if self.holder is not None else 0
        return Seen(holder, str(self.word), self.leader, self.epoch, up_s=now_s + 1e6, standbys=self.standbys_of(who))

    def standbys_of(self, who: "Controller") -> dict[str, str]:
        """Return those that are there beside one, and are asked by nodes."""
        return {self.identity(one): f"http://{one.name}:1" for one in self.petitions if one is not who}

    def say(self, who: "Controller") -> None:
        """Let the leader say its word, if the lock is its."""
        if self.holder is who and not self.is_away:
            self.word += 1

    def force(self, _who: "Controller", _seen: Seen) -> None:
        """End the connection that holds the lock."""
        self.holder = None

    def lock(self, who: "Controller") -> bool:
        """Take the lock if it is free."""
        if self.holder is not None:
            return False
        self.holder, self.pid = who, self.pid + 1
        return True

    def cut(self, who: "Controller") -> None:
        """End a controller's connection for the lock: an administrator has, and the process goes on."""
        if self.holder is who:
            self.holder = None

    def lose_all(self) -> None:
        """Be away: all connections end."""
        self.is_away, self.holder = True, None

    def elect(self, who: "Controller") -> int:
        """Write that a controller leads."""
        leader = Leader(who.name, f"http://{who.name}:1")
        with self.engine_of(who).begin() as connection:
            epoch = take_epoch(connection, leader, 0)
        self.leader, self.epoch = leader, epoch
        return epoch

    def died(self, who: "Controller") -> None:
        """Take note that a process was killed: its connections end."""
        if self.holder is who:
            self.holder = None

    def close(self) -> None:
        """End it."""
        self.engine.dispose()


class Runner:
    """Obeys orders, and says which need it has now."""

    def __init__(self) -> None:
        self.need = 0
        self.epoch = 0
        self.obeyed: dict[str, int] = {}
        self.done: Counter[int] = Counter()

    def hear(self, order: str, need: int, epoch: int) -> None:
        """Obey an order, once, of a leader that is none of yesterday's."""
        if epoch < self.epoch:
            return
        self.epoch = epoch
        if order in self.obeyed:
            return
        self.obeyed[order] = need
        self.done[need] += 1
        self.need = max(self.need, need + 1)


class Controller:
    """One process: it looks, leads or waits, one small step at a time."""

    def __init__(self, name: str, database: Database, runner: Runner, *, is_fenced: bool) -> None:
        self.name, self._database, self._runner, self._is_fenced = name, database, runner, is_fenced
        self.succession = Succession(database.identity(self))
        self.paused_until_s = self.cut_off_until_s = self._not_before_s = self._turned_s = self.now_s = 0.0
        self.leading: Generator[None, None, None] | None = None
        self.hearing = Hearing(0.0)
        self.fence: Fence | None = None
        self.gives_way = True
        self.gave_way: list[tuple[float, str]] = []

    @property
    def is_reached(self) -> bool:
        """Whether agents and runners reach it."""
        return self.now_s >= self.cut_off_until_s

    def answer(self, node: str, now_s: float) -> bool:
        """Take a node's request; return whether it was answered, and by a leader."""
        if now_s < self.paused_until_s or now_s < self.cut_off_until_s:
            return False
        self.hearing.note(node, now_s)
        return self.leading is not None and self.fence is not None

    def turn(self, now_s: float) -> None:
        """Do one step of what is to be done."""
        database, self.now_s = self._database, now_s
        if now_s - self._turned_s > _AWAY_S:
            self.hearing.begin_anew(now_s)
        self._turned_s = now_s
        if self.leading is not None:
            database.say(self)
            try:
                if self._must_give_way(now_s):
                    self.leading.close()
                    self._stand_by(now_s)
                    self._not_before_s = now_s + _AFTERWARDS_S
                    return
                next(self.leading)
                if self._is_replaced(now_s):
                    self.die()
            except (DeposedError, StopIteration, SQLAlchemyError):
                self.die()
            return
        seen = database.seen(self, now_s)
        step = self.succession.look(seen, now_s)
        if seen is not None:
            database.petitions[self] = frozenset(self.hearing.nodes(now_s, STEADY_S)), now_s
        if seen is None or step is Step.WAIT or now_s < self._not_before_s:
            return
        if step is Step.FORCE:
            database.force(self, seen)
            self.succession = Succession(database.identity(self))
        if database.lock(self):
            self.leading, self.hearing = self._lead(), Hearing(now_s)
            database.petitions.pop(self, None)

    def _is_replaced(self, now_s: float) -> bool:
        """Look, as a leader does each second, after what it has just done."""
        is_time = now_s % 1.0 < LOOK_S and self._is_fenced and self.fence is not None
        seen = self._database.seen(self, now_s) if is_time else None
        return seen is not None and self.fence is not None and seen.epoch != self.fence.epoch

    def _must_give_way(self, now_s: float) -> bool:
        """Return whether it leads no more in favour of another one, which is written then."""
        database, fence = self._database, self.fence
        if fence is None or database.is_away or not self.gives_way:
            return False
        unheard_s = self.hearing.unheard_elsewhere_s(now_s)
        heir = heir_of(unheard_s, self.hearing.nodes(now_s), NODES, database.petitions_for(self, now_s))
        if heir is None or not may_give_way(database.given_way_ages_s(self, now_s)):
            return False
        database.give_way(self, fence, heir, now_s)
        self.gave_way.append((now_s, heir.reason))
        return True

    def _stand_by(self, now_s: float) -> None:
        self.succession, self.leading, self.fence = Succession(self._database.identity(self)), None, None
        self.hearing = Hearing(now_s)

    def die(self) -> None:
        """Be killed, and be started again with nothing in memory."""
        if self.leading is not None:
            self.leading.close()
        self._database.died(self)
        self._database.petitions.pop(self, None)
        self._stand_by(self.now_s)

    def _lead(self) -> Generator[None, None, None]:
        database, runner = self._database, self._runner
        while database.is_away:
            yield
        fence = self.fence = Fence(database.elect(self))
        self.hearing.begin_anew(self.now_s)
        yield
        with database.engine_of(self).connect() as connection:
            body = connection.scalar(sa.select(JOBS.c.body).where(JOBS.c.job == "job"))
        given: dict[int, str] = {int(k): v for k, v in msgspec.json.decode(body)["given"].items()} if body else {}
        while True:
            yield
            while not self.is_reached:
                yield
            need = runner.need
            order = given.get(need)
            if order is None:
                yield  # it has read that an order is due, and is about to write it
                order = given[need] = f"job:{need}.{fence.epoch}"
                while not (yield from self._write(fence, given)):
                    yield
                yield  # it is written, and not handed out
            if self.is_reached:
                runner.hear(order, need, fence.epoch)

    def _write(self, fence: Fence, given: dict[int, str]) -> Generator[None, None, bool]:
        """Write one transaction; return whether it was written."""
        database = self._database
        if database.is_away:
            return False
        newest = dict(sorted(given.items())[-3:])
        batch = Batch(job="job", record=msgspec.json.encode({"given": newest}), binding=True)
        connection = database.engine_of(self).connect()
        is_whole = False
        try:
            with connection.begin():
                if self._is_fenced:
                    fence.hold(connection)
                if database.is_torn:
                    yield
                write(connection, [batch])
                if database.is_torn:
                    yield
            is_whole = True
        except SQLAlchemyError:
            return False
        finally:
            with suppress(SQLAlchemyError):
                if not is_whole and database.is_torn:
                    connection.invalidate()  # as when the process is killed: nobody rolls back but the server
                connection.close()
        return True


class World:
    """Three controllers, and what befalls them."""

    def __init__(self, seed: int, database: Database, *, is_fenced: bool, is_heard: bool) -> None:
        self.chance = random.Random(seed)  # noqa: S311  drawn disasters
        self.database, self.runner = database, Runner()
        if not is_heard:
            self.runner.hear = self._hear_all  # type: ignore[method-assign]  # the control
        self.every = [Controller(str(number), self.database, self.runner, is_fenced=is_fenced) for number in range(3)]
        self.counts: Counter[str] = Counter()
        self.now_s = self.back_s = 0.0

    def _hear_all(self, order: str, need: int, epoch: int) -> None:
        Runner.hear(self.runner, order, need, max(epoch, self.runner.epoch))

    def disaster(self) -> None:
        """Let one happen, to the leader where there is one."""
        chance, database = self.chance, self.database
        kind = chance.choices(("kill", "pause", "cut", "away", "unheard"), (6, 6, 2, 1, 2))[0]
        self.counts[kind] += 1
        who = next((one for one in self.every if one.leading is not None), chance.choice(self.every))
        if kind == "kill":
            who.die()
        elif kind == "pause":
            who.paused_until_s = self.now_s + chance.choice((1.0, 9.0, 40.0))
        elif kind == "cut":
            database.cut(who)
        elif kind == "unheard":
            who.cut_off_until_s = self.now_s + chance.choice((5.0, 60.0, 600.0))
            for _ in range(90):  # nothing else for a while, or it is killed before anybody can tell
                self.turn()
        elif kind == "away":
            database.lose_all()
            self.back_s = self.now_s + chance.choice((2.0, 60.0))

    def turn(self) -> None:
        """Let half a second pass."""
        self.now_s += LOOK_S
        self.database.is_away &= self.now_s < self.back_s
        for node in NODES:
            leading = [one for one in self.every if one.leading is not None]
            answers = [one.answer(node, self.now_s) for one in leading]
            if not any(answers):
                for one in self.every:
                    if one not in leading:
                        one.answer(node, self.now_s)
        for one in self.chance.sample(self.every, len(self.every)):
            if self.now_s >= one.paused_until_s:
                one.turn(self.now_s)


def run(
    seed: int,
    *,
    disasters: int,
    is_fenced: bool = True,
    is_heard: bool = True,
    database: Callable[[], Database] = Database,
) -> tuple[Runner, Counter[str]]:
    """Let disasters happen, and a while of peace after them; those that gave way are counted as well."""
    world = World(seed, database(), is_fenced=is_fenced, is_heard=is_heard)
    try:
        for _ in range(disasters):
            for _ in range(world.chance.choice((1, 2, 6, 24))):
                world.turn()
            world.disaster()
        for one in world.every:
            one.cut_off_until_s = 0.0
        for _ in range(120):
            world.turn()
        newest = [one for one in world.every if one.fence is not None and one.fence.epoch == world.runner.epoch]
        assert len(newest) == 1, "one leader, once all is well"
    finally:
        world.database.close()
    world.counts["gave way"] = sum(len(one.gave_way) for one in world.every)
    return world.runner, world.counts
