# SPDX-License-Identifier: Apache-2.0
"""One controller's thread, turn by turn on a virtual clock: it gives way, lets go, and stays where it should.

And what a standby takes for a request of an agent, over real HTTP.
"""

import socket
from collections.abc import Iterator
from functools import partial
from typing import cast

import aiohttp
import pytest
import sqlalchemy as sa

from megascale_ops.controller.access import Access
from megascale_ops.controller.journal.fence import Fence, Leader
from megascale_ops.controller.leadership import candidate as module
from megascale_ops.controller.leadership.candidate import Candidate
from megascale_ops.controller.leadership.hearing import MOST_AN_HOUR, STEADY_S, UNHEARD_S
from megascale_ops.controller.leadership.session import Session
from megascale_ops.controller.server import standby
from megascale_ops.controller.server.listen import Served, listening
from megascale_ops.controller.server.standing import Standing
from megascale_ops.schema.tokens import Grant, issue, new_token
from tests.fakes.lock_session import LockSession

ME, OTHER = Leader("me", "http://me:1"), Leader("other", "http://other:1")


class Turns:
    """A candidate that turns each second of a clock which the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(module, "take_epoch", lambda *_: 1)
        self.session = LockSession()
        self.told: list[str] = []
        self.candidate = Candidate(
            cast("Session", self.session), ME, lambda _url: False, elected=lambda: None, deposed=self.told.append
        )

    def turn(self, seconds: int = 1, *, heard: str = "", is_own_machine: bool = False, is_hung: bool = False) -> None:
        """Let time pass; ``heard``: a node that asks each second."""
        for _ in range(seconds):
            self.now_s += 1.0
            if not is_hung:
                self.candidate.turned()
            if heard:
                self.candidate.heard(heard, is_own_machine=is_own_machine)
            self.candidate._turn()  # what its thread does

    def lead(self) -> Fence:
        """Let it lead a job on three nodes, beside a standby."""
        self.turn()
        engine = sa.create_engine("sqlite://")
        fence = self.candidate.elect(engine)
        engine.dispose()
        self.session.epoch = fence.epoch
        self.session.standbys = {"other": OTHER.url}
        self.candidate.expect(("a", "b", "c"))
        return fence


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    """A candidate."""
    monkeypatch.setattr(sa.Connection, "execute", lambda *_args, **_more: None)  # SQLite knows no lock_timeout
    return Turns(monkeypatch)


def test_it_answers_nobody_once_it_gives_way_and_lets_go_when_all_is_written(turns: Turns) -> None:
    """Not before its time, once, with the reason; for 20 s it does not take the lock again though it is free."""
    turns.lead()
    turns.session.asked = {"other": ("a", "b")}
    turns.turn(int(UNHEARD_S) - 1)
    before = turns.candidate.gives_way
    turns.turn(2)
    suspended = turns.candidate.is_suspended
    turns.candidate.give_up()
    turns.turn(15)
    free = turns.session.is_held

    assert not before
    assert suspended
    assert turns.candidate.gave_way == len(turns.told) == 1
    assert "is asked by 2 of the 3 nodes" in turns.told[0]
    assert not free
    assert not turns.candidate.is_leading


def test_one_that_can_not_write_what_it_has_lets_go_all_the_same(turns: Turns) -> None:
    """Its main thread does not come to it: after ten seconds the lock is free."""
    turns.lead()
    turns.session.asked = {"other": ("a", "b")}
    turns.turn(int(UNHEARD_S) + 1)
    held = turns.session.is_held
    turns.turn(13)

    assert held
    assert not turns.session.is_held


@pytest.mark.parametrize(
    ("heard", "is_own_machine", "asked"),
    [
        pytest.param("c", False, ("a", "b"), id="one node on another machine reaches it"),
        pytest.param("b", True, ("a", "b"), id="of its nodes one on its own machine, and one asks the other"),
        pytest.param("", False, ("a",), id="one of three asks the other"),
        pytest.param("", False, (), id="nobody asks anybody"),
    ],
)
def test_it_stays_for_hours(turns: Turns, heard: str, asked: tuple[str, ...], *, is_own_machine: bool) -> None:
    """The controls."""
    turns.lead()
    turns.session.asked = {"other": asked}
    turns.turn(7200, heard=heard, is_own_machine=is_own_machine)

    assert turns.candidate.is_leading
    assert (turns.told, turns.candidate.gave_way) == ([], 0)


def test_a_node_on_its_own_machine_keeps_no_leader_that_the_others_do_not_reach(turns: Turns) -> None:
    """It crosses no network: two of three are heard elsewhere, and not here."""
    turns.lead()
    turns.session.asked = {"other": ("a", "b")}
    turns.turn(int(UNHEARD_S) + 1, heard="c", is_own_machine=True)

    assert turns.candidate.gives_way


def test_too_many_within_an_hour_change_nothing_and_it_is_told_once(
    turns: Turns, caplog: pytest.LogCaptureFixture
) -> None:
    """A network that comes and goes is not mended by leaders that come and go."""
    turns.lead()
    turns.session.asked = {"other": ("a", "b", "c")}
    turns.session.ages_s = [60.0] * MOST_AN_HOUR
    turns.turn(600)
    told = [one for one in caplog.messages if "too many have given way" in one]

    assert turns.candidate.is_leading
    assert turns.told == []
    assert len(told) == 1


def test_a_loop_that_stood_still_begins_anew_and_accuses_nobody(turns: Turns) -> None:
    """It has heard nobody for 25 s since it did not listen; agents have the usual time to be heard again."""
    turns.lead()
    turns.session.asked = {"other": ("a", "b", "c")}
    turns.turn(25, is_hung=True)
    hung = turns.candidate.gives_way
    turns.turn(int(UNHEARD_S) - 1)
    soon = turns.candidate.gives_way
    turns.turn(2)

    assert (hung, soon) == (False, False)
    assert turns.candidate.gives_way


def test_a_standby_writes_who_goes_on_asking_and_takes_it_back(turns: Turns) -> None:
    """Not whom it heard once, and nothing as long as nobody asks."""
    turns.session.others_pid = 9
    turns.session.leader = OTHER
    turns.turn(30)
    quiet = list(turns.session.written)
    turns.candidate.refused.note("once", turns.now_s)
    for _ in range(int(STEADY_S) + 5):
        turns.candidate.refused.note("a", turns.now_s)
        turns.turn()
    asked = turns.session.written[-1]
    turns.turn(30)

    assert quiet == []
    assert asked == ("a",)
    assert turns.session.written[-1] == ()
    assert turns.session.written.count(()) == 1


async def test_only_agents_count_that_may_speak_for_their_node() -> None:
    """Each is refused with the same 503, whatever it sends."""
    own = new_token()
    me = Candidate(
        Session("postgresql+psycopg://u@127.0.0.1:9/d", ME),
        ME,
        lambda _url: False,
        elected=lambda: None,
        deposed=lambda _why: None,
    )
    sent = [
        (own, b'{"node":"good","agent_id":"x","seq":1}'),
        (issue(own, Grant("operate", node="derived")), b'{"node":"derived"}'),
        (issue(own, Grant("operate", node="derived")), b'{"node":"another"}'),
        (issue(own, Grant("read")), b'{"node":"reader"}'),
        (new_token(), b'{"node":"stranger"}'),
        (own, b'{"node":7}'),
        (own, b"\xff{"),
        (own, b'{"node":"' + b"n" * 300_000 + b'"}'),
    ]
    statuses = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        served = Served(partial(standby.application, Standing(me), Access(own, lambda: 0.0)))
        async with listening(served, listener), aiohttp.ClientSession() as client:
            for token, body in sent:
                headers = {"Authorization": f"Bearer {token}"}
                async with client.post(f"http://127.0.0.1:{port}/v1/heartbeat", data=body, headers=headers) as answer:
                    statuses.append(answer.status)
    found = me.refused.nodes(module.time.monotonic())
    me.close()

    assert statuses == [503] * len(sent)
    assert found == ["derived", "good"]
