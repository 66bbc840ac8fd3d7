# SPDX-License-Identifier: Apache-2.0
"""One candidate's turns, taken one by one: what is written while it looks, and a lock that goes back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest

from megascale_ops.controller.journal.fence import Leader
from megascale_ops.controller.leadership import candidate as module
from megascale_ops.controller.leadership.candidate import Candidate
from megascale_ops.controller.leadership.rule import Seen

if TYPE_CHECKING:
    import sqlalchemy as sa

    from megascale_ops.controller.leadership.session import Session

ME = Leader("a", "http://a:1")


class Database:
    """Holds a lock and a number; each session is a connection to it."""

    def __init__(self) -> None:
        self.epoch, self.holder, self.pid = 0, 0, 7
        self.meanwhile: Callable[[], object] = lambda: None

    def look(self) -> Seen:
        """Return what there was when the look began."""
        leader = ME if self.epoch else None
        seen = Seen(self.holder, str(self.epoch), leader, self.epoch, up_s=1e6, standbys={})
        self.meanwhile()
        return seen

    def try_lock(self) -> bool:
        """Take it where it is free."""
        self.holder = self.holder or self.pid
        return self.holder == self.pid

    def put_standby(self, *, is_waiting: bool) -> None:
        """There is none to be found."""

    def close(self) -> None:
        """The lock ends with its connection."""
        self.holder = 0
        self.pid += 1

    @contextmanager
    def begin(self) -> Iterator["Database"]:
        """Stand for an engine."""
        yield self

    def execute(self, _statement: object) -> None:
        """Stand for a connection."""


class Alone:
    """The only candidate of a database; its turns are taken by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.database = Database()
        self.elected, self.deposed = 0, list[str]()
        self.candidate = Candidate(
            cast("Session", self.database), ME, lambda _: False, elected=self.note, deposed=self.deposed.append
        )
        monkeypatch.setattr(module, "take_epoch", self.take)

    def note(self) -> None:
        """It has the lock."""
        self.elected += 1

    def take(self, _connection: object, _me: Leader, highest: int) -> int:
        """Write a number above all before."""
        self.database.epoch = max(self.database.epoch, highest) + 1
        return self.database.epoch

    def elect(self) -> None:
        """Become the leader, as the program's own thread does it."""
        self.candidate.elect(cast("sa.Engine", self.database))

    def turn(self, meanwhile: Callable[[], Any] = lambda: None) -> None:
        """Take a turn, in the midst of whose look something happens."""
        self.database.meanwhile = meanwhile
        self.candidate._turn()
        self.database.meanwhile = lambda: None


def test_a_leader_that_is_elected_while_it_looks_stays_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the look has seen is the number before: nothing is lost. From the next one on a lower number is."""
    alone = Alone(monkeypatch)
    alone.turn()
    alone.turn(meanwhile=alone.elect)
    alone.turn()
    assert (alone.elected, alone.deposed, alone.candidate.is_leading) == (1, [], True)

    alone.database.epoch = 0
    alone.turn()
    assert ["has lost what was written" in why for why in alone.deposed] == [True]
    assert not alone.candidate.is_leading


def test_who_leads_no_more_gives_the_lock_back_and_can_be_elected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody could lead: it would wait for its own lock, and go on speaking as whoever holds it."""
    alone = Alone(monkeypatch)
    alone.turn()
    alone.elect()
    alone.database.epoch = 0
    for _ in range(3):
        alone.turn()

    assert len(alone.deposed) == 1
    assert alone.elected == 2
    alone.elect()
    assert alone.database.epoch == 2, "above all that it has seen"
