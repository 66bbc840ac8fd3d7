# SPDX-License-Identifier: Apache-2.0
"""The fence: of two controllers on one journal, the one that was replaced writes nothing and orders nothing."""

import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from megascale_ops.controller.journal import fence as fences
from megascale_ops.controller.journal import writer
from megascale_ops.controller.journal.fence import Fence, Leader
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import Store, open_store
from megascale_ops.controller.leadership.session import application_of, end_connections
from megascale_ops.schema.events import Event
from tests.fakes.postgres import PostgresServer
from tests.fakes.servers import until


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ops.db"
    postgres: PostgresServer = request.getfixturevalue("postgres")
    return postgres.url


class Elected:
    """A store whose opener has become the leader."""

    def __init__(self, url: str, name: str, highest: int = 0) -> None:
        self.told: list[str] = []
        self.may_act = True
        self._name, self._highest = name, highest
        self.store: Store = open_store(url, elect=self._elect)

    def _elect(self, engine: sa.Engine) -> Fence:
        with engine.begin() as connection:
            epoch = fences.take_epoch(connection, Leader(self._name, f"http://{self._name}:1"), self._highest)
        return Fence(epoch, lambda _since_s: self.may_act, self.told.append)

    def submit(self, kind: str) -> threading.Event:
        """Submit an event and a job's record; the answer is set when it may be acted upon."""
        done = threading.Event()
        self.store.submit(
            Batch((Event(1.0, "job", kind),), job="job", record=b'{"last":"%s"}' % kind.encode()), done.set
        )
        return done


def test_the_leader_before_writes_nothing_and_orders_nothing(url: str) -> None:
    """The newer one writes; the older finds out with its next batch, and nobody acts upon that or a later one."""
    old = Elected(url, "old")
    assert old.submit("first").wait(30)
    new = Elected(url, "new")

    late = old.submit("late")
    until(lambda: bool(old.told), "the old leader to find out")
    later = old.submit("later")
    assert new.submit("second").wait(30)
    events, jobs = new.store.events("job"), new.store.jobs()
    old.store.close()
    new.store.close()

    assert not late.is_set()
    assert not later.is_set()
    assert [event.kind for event in events] == ["first", "second"]
    assert jobs == {"job": b'{"last":"second"}'}
    assert "number 2" in old.told[0]
    assert len(old.told) == 1


def test_the_only_leader_goes_on(url: str) -> None:
    """A fence that nobody else has passed refuses nothing."""
    one = Elected(url, "one")

    done = [one.submit(str(number)).wait(30) for number in range(20)]
    events = one.store.events("job")
    one.store.close()

    assert all(done)
    assert len(events) == 20
    assert not one.told


def test_numbers_grow_with_each_leader_and_past_those_that_were_seen(url: str) -> None:
    """Also where the database has lost the newest one."""
    epochs = []
    for highest in (0, 0, 41, 0):
        one = Elected(url, "one", highest)
        assert one.store.fence is not None
        epochs.append(one.store.fence.epoch)
        one.store.close()

    assert epochs == [1, 2, 42, 43]


def test_a_transaction_under_way_is_awaited_by_the_next_leader(postgres: PostgresServer) -> None:
    """Whoever leads next reads what it has written: it can't end after that."""
    engine = sa.create_engine(postgres.url)
    old = Elected(postgres.url, "old")
    assert old.store.fence is not None
    made: list[Elected] = []

    with engine.begin() as connection:
        old.store.fence.hold(connection)
        taking = threading.Thread(target=lambda: made.append(Elected(postgres.url, "new")))
        taking.start()
        with engine.connect() as other:
            waits = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
            until(lambda: other.scalar(waits), "the next leader to wait")
        was_made = bool(made)
    taking.join(30)
    for one in (old, *made):
        one.store.close()
    engine.dispose()

    assert not was_made
    assert made


def test_what_is_not_written_is_acted_upon_only_where_nobody_else_can_lead(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen database: one controller alone acts after its patience; one that may have been replaced waits."""
    monkeypatch.setattr(writer, "PATIENCE_S", 0.3)  # nothing is learned from the other 1.7 s
    one = Elected(postgres.url, "one")
    assert one.submit("before").wait(30)
    one.may_act = False

    postgres.freeze()
    held = one.submit("held")
    until(lambda: bool(one.store.failing), "the outage to be told")
    behind = one.submit("behind")
    was_held = not held.wait(0.6)  # a store that fails is patient for 0.2 s
    one.may_act = True
    released = held.wait(30), behind.wait(30)
    one.may_act = False
    last = one.submit("last")
    is_held_again = not last.wait(0.6)
    postgres.thaw()
    written = last.wait(60)
    events = one.store.events("job")
    one.store.close()

    assert was_held
    assert released == (True, True)
    assert is_held_again
    assert written
    assert [event.kind for event in events if event.kind != "first"][-4:] == ["before", "held", "behind", "last"]


@pytest.mark.parametrize("leader", [None, Leader("old", "http://old:1")])
def test_only_connections_of_the_leader_before_are_ended(postgres: PostgresServer, leader: Leader | None) -> None:
    """Other programs share the database, most of them without a name; theirs go on, whomever the leader was."""
    others = sa.create_engine(postgres.url, isolation_level="AUTOCOMMIT")
    of_old = sa.create_engine(
        postgres.url, isolation_level="AUTOCOMMIT", connect_args={"application_name": application_of("old")}
    )
    with others.connect() as other, of_old.connect() as mine, others.connect() as asking:
        end_connections(asking, 0, leader)

        assert other.scalar(sa.text("SELECT 1")) == 1
        if leader is None:
            assert mine.scalar(sa.text("SELECT 1")) == 1
        else:
            with pytest.raises(sa.exc.OperationalError):
                mine.scalar(sa.text("SELECT 1"))
            mine.invalidate()
    others.dispose()
    of_old.dispose()
