# SPDX-License-Identifier: Apache-2.0
"""A leader alone is cut off from a real database, which the standby has; and both are."""

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from megascale_ops.controller.journal.store import open_store
from tests.fakes.postgres import PostgresServer
from tests.fakes.relay import Relay
from tests.fakes.standing_controllers import JOB, Cluster, Standing
from tests.processes.launch import until

pytestmark = pytest.mark.processes


class Two:
    """A leader behind a relay, and a standby behind another one."""

    def __init__(self, server: PostgresServer) -> None:
        self.cluster = Cluster()
        self.relays: list[Relay] = []
        self.members: list[Standing] = []
        for name in ("first", "second"):
            folder = server.folder / f"{server.database}-{name}"
            folder.mkdir()
            self.relays.append(Relay(server.socket, listen_at=str(folder / server.socket_name)))
            url = f"postgresql+psycopg://ops@/{server.database}?host={folder}"
            self.members.append(Standing(name, url, self.cluster))
            until(lambda: self.members[0].is_serving, "the first to lead")
        self.first, self.second = self.members
        until(lambda: self.second.candidate.has_taken_part, "the second to wait")
        # The leader knows of its standby from its next look on.
        until(lambda: self.first.candidate.seen and self.first.candidate.seen.standbys, "the standby to be known")

    def close(self) -> None:
        """End all."""
        for relay in self.relays:
            relay.heal()
        self.cluster.close()
        for relay in self.relays:
            relay.close()


@pytest.fixture
def two(postgres: PostgresServer) -> Iterator[Two]:
    """A leader and a standby."""
    made = Two(postgres)
    yield made
    made.close()


def _journaled(server: PostgresServer) -> list[str]:
    store = open_store(server.url, readonly=True)
    kinds = [event.kind for event in store.events(JOB)]
    store.close()
    return kinds


@pytest.mark.parametrize("how", ["cut", "hold"])
def test_a_leader_that_alone_loses_the_database_gives_way_and_orders_nothing(
    postgres: PostgresServer, two: Two, how: str
) -> None:
    """Connections are reset, or swallowed: what the first wanted never leaves, and is not written once it is back.

    For some seconds both may answer (a lock that was freed is taken after 1.5 s, a leader is unsure after 4): what the
    first hands out then was journaled while it led.
    """
    first, second = two.first, two.second
    assert first.order("before").wait(30)

    getattr(two.relays[0], how)()
    first.order("cut off")
    until(lambda: second.is_serving, "the standby to lead")
    assert second.order("after").wait(30)
    left = list(first.handed_out)
    two.relays[0].heal()
    until(lambda: first.deposed and not first.candidate.is_leading, "the first to find that it is replaced")
    until(lambda: first.candidate.seen is not None and first.store is None, "the first to wait for its turn")

    assert left == first.handed_out == ["before"]
    assert (second.epoch, second.handed_out) == (2, ["after"])
    assert _journaled(postgres) == ["before", "after"]


def test_a_database_that_answers_and_takes_no_writes_holds_no_order_back(postgres: PostgresServer, two: Two) -> None:
    """It is full, as a rule: the lock is the leader's, so nobody else can order; all is written later."""
    engine = sa.create_engine(postgres.url)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE events ADD CONSTRAINT no_room CHECK (false) NOT VALID"))
    left = two.first.order("unwritten").wait(120)
    # On a busy machine it is "has not answered for 2.0 s" at first.
    until(lambda: two.first.store is not None and "no_room" in two.first.store.failing, "the refusal to be told")
    written = _journaled(postgres)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE events DROP CONSTRAINT no_room"))
    engine.dispose()
    until(lambda: _journaled(postgres) == ["unwritten"], "the journal to be written")

    assert left
    assert written == []
    assert (two.first.epoch, two.first.deposed, two.second.epoch) == (1, [], 0)


def test_a_leader_that_loses_the_database_like_all_others_goes_on(postgres: PostgresServer, two: Two) -> None:
    """The control: the standby has lost it as well, so orders leave unwritten, and are written afterwards."""
    for relay in two.relays:
        relay.cut()
    until(lambda: two.first.candidate.away and two.second.candidate.away, "both to notice")
    left = two.first.order("unwritten").wait(30)
    serving = two.first.is_serving
    for relay in two.relays:
        relay.heal()
    until(lambda: "unwritten" in _journaled(postgres), "the journal to be written")
    until(lambda: two.first.is_serving and not two.first.candidate.away, "the first to be sure again")

    assert left
    assert serving
    assert (two.first.epoch, two.first.deposed, two.second.epoch) == (1, [], 0)
