# SPDX-License-Identifier: Apache-2.0
"""Thousands of leaders killed, paused and cut off, in virtual time: no order is lost, and none is given twice.

Three controllers share a database of the journal's real tables, with its real transactions, fence and rule of
succession. What is modelled: the lock, which a session holds as PostgreSQL's does; and that a process may stop between
any two of its steps, so also between having read that an order is due, having written it and having handed it out.

A need (a rank that died) comes again and again; a leader that reads none of its orders in the journal gives one. The
job's runner obeys each order by its name, once, and no leader of a lower number than it has heard.
"""

import random
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
import sqlalchemy as sa

from megascale_ops.controller.journal.fence import DeposedError, Fence, Leader, read_epoch, take_epoch
from megascale_ops.controller.journal.rows import Batch, write
from megascale_ops.controller.journal.tables import JOBS, META, TABLES
from megascale_ops.controller.leadership.rule import LOOK_S, Seen, Step, Succession


class _Database:
    """The tables, the lock, and whether they can be reached."""

    def __init__(self) -> None:
        self.engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
        TABLES.create_all(self.engine)
        self.holder: _Controller | None = None
        self.pid = 0
        self.word = 0
        self.is_away = False
        self.leader: Leader | None = None

    def seen(self, now_s: float) -> Seen | None:
        if self.is_away:
            return None
        with self.engine.connect() as connection:
            epoch = read_epoch(connection)
        holder = self.pid if self.holder is not None else 0
        return Seen(holder, str(self.word), self.leader, epoch, up_s=now_s + 1e6, standbys={})

    def lock(self, who: "_Controller") -> bool:
        if self.holder is not None:
            return False
        self.holder, self.pid = who, self.pid + 1
        return True


class _Runner:
    """Obeys orders, and says which need it has now."""

    def __init__(self) -> None:
        self.need = 0
        self.epoch = 0
        self.obeyed: dict[str, int] = {}
        self.done: Counter[int] = Counter()

    def hear(self, order: str, need: int, epoch: int) -> None:
        if epoch < self.epoch:
            return
        self.epoch = epoch
        if order in self.obeyed:
            return
        self.obeyed[order] = need
        self.done[need] += 1
        self.need = max(self.need, need + 1)


class _Controller:
    """One process: it looks, leads or waits, one small step at a time."""

    def __init__(self, name: str, database: _Database, runner: _Runner, *, is_fenced: bool) -> None:
        self.name, self._database, self._runner, self._is_fenced = name, database, runner, is_fenced
        self.succession = Succession()
        self.paused_until_s = 0.0
        self.leading: Iterator[None] | None = None

    def turn(self, now_s: float) -> None:
        """Do one step of what is to be done."""
        database = self._database
        if self.leading is not None:
            if database.holder is self and not database.is_away:
                database.word += 1
            try:
                next(self.leading)
            except (DeposedError, StopIteration):
                self.die()
            return
        seen = database.seen(now_s)
        step = self.succession.look(seen, now_s)
        if step is Step.FORCE:
            database.holder = None
        if step is not Step.WAIT and database.lock(self):
            self.leading = self._lead()

    def die(self) -> None:
        """Be killed, and be started again with nothing in memory."""
        if self._database.holder is self:
            self._database.holder = None
        self.succession, self.leading = Succession(), None

    def _lead(self) -> Iterator[None]:
        database, runner = self._database, self._runner
        while database.is_away:
            yield
        with database.engine.begin() as connection:
            leader = Leader(self.name, f"http://{self.name}:1")
            fence = Fence(take_epoch(connection, leader, 0))
        database.leader = leader
        yield
        with database.engine.connect() as connection:
            body = connection.scalar(sa.select(JOBS.c.body).where(JOBS.c.job == "job"))
        given: dict[int, str] = {int(k): v for k, v in msgspec.json.decode(body)["given"].items()} if body else {}
        while True:
            yield
            need = runner.need
            order = given.get(need)
            if order is None:
                yield  # it has read that an order is due, and is about to write it
                order = given[need] = f"job:{need}.{fence.epoch}"
                while not self._write(fence, given):
                    yield
                yield  # it is written, and not handed out
            runner.hear(order, need, fence.epoch)

    def _write(self, fence: Fence, given: dict[int, str]) -> bool:
        if self._database.is_away:
            return False
        newest = dict(sorted(given.items())[-3:])
        with self._database.engine.begin() as connection:
            if self._is_fenced:
                fence.hold(connection)
            write(connection, [Batch(job="job", record=msgspec.json.encode({"given": newest}), binding=True)])
        return True


class _World:
    """Three controllers, and what befalls them."""

    def __init__(self, seed: int, *, is_fenced: bool, is_heard: bool) -> None:
        self.chance = random.Random(seed)  # noqa: S311  drawn disasters
        self.database, self.runner = _Database(), _Runner()
        if not is_heard:
            self.runner.hear = self._hear_all  # type: ignore[method-assign]  # the control
        self.every = [_Controller(str(number), self.database, self.runner, is_fenced=is_fenced) for number in range(3)]
        self.counts: Counter[str] = Counter()
        self.now_s = self.back_s = 0.0

    def _hear_all(self, order: str, need: int, epoch: int) -> None:
        _Runner.hear(self.runner, order, need, max(epoch, self.runner.epoch))

    def disaster(self) -> None:
        """Let one happen, to the leader where there is one."""
        chance, database = self.chance, self.database
        kind = chance.choices(("kill", "pause", "cut", "away"), (6, 6, 2, 1))[0]
        self.counts[kind] += 1
        who = next((one for one in self.every if one.leading is not None), chance.choice(self.every))
        if kind == "kill":
            who.die()
        elif kind == "pause":
            who.paused_until_s = self.now_s + chance.choice((1.0, 9.0, 40.0))
        elif kind == "cut" and database.holder is who:
            database.holder = None  # an administrator has ended the connection; the process goes on
        elif kind == "away":
            database.is_away, database.holder = True, None
            self.back_s = self.now_s + chance.choice((2.0, 60.0))

    def turn(self) -> None:
        """Let half a second pass."""
        self.now_s += LOOK_S
        self.database.is_away &= self.now_s < self.back_s
        for one in self.chance.sample(self.every, len(self.every)):
            if self.now_s >= one.paused_until_s:
                one.turn(self.now_s)


def _run(seed: int, *, disasters: int, is_fenced: bool = True, is_heard: bool = True) -> tuple[_Runner, Counter[str]]:
    """Let disasters happen, and a while of peace after them."""
    world = _World(seed, is_fenced=is_fenced, is_heard=is_heard)
    for _ in range(disasters):
        for _ in range(world.chance.choice((1, 2, 6, 24))):
            world.turn()
        world.disaster()
    for _ in range(120):
        world.turn()
    world.database.engine.dispose()
    return world.runner, world.counts


@pytest.mark.parametrize("seed", range(4))
def test_no_order_is_lost_or_doubled(seed: int) -> None:
    """Each need has exactly one order, and the newest need is met soon after the last disaster."""
    runner, counts = _run(seed, disasters=600)

    assert sum(counts.values()) == 600
    assert min(counts.values()) > 10
    assert set(runner.done.values()) == {1}, [need for need, count in runner.done.items() if count > 1]
    assert sorted(runner.done) == list(range(runner.need))
    assert runner.need > 400


def test_without_fence_and_number_orders_are_doubled() -> None:
    """The control: the same disasters, and nothing that holds a paused leader back."""
    doubled = sum(
        count > 1
        for seed in range(2)
        for count in _run(seed, disasters=600, is_fenced=False, is_heard=False)[0].done.values()
    )

    assert doubled > 0


def test_the_tables_are_those_of_the_journal() -> None:
    """What the model writes is what a controller reads."""
    database = _Database()
    with database.engine.begin() as connection:
        epoch = take_epoch(connection, Leader("a", "http://a:1"), 0)
    with database.engine.connect() as connection:
        keys = set(connection.scalars(sa.select(META.c.key)))
    database.engine.dispose()

    assert epoch == 1
    assert keys == {"leader", "leader_epoch"}
