# SPDX-License-Identifier: Apache-2.0
"""When a leader that no agent reaches gives way, and to whom: told what is heard here and there, and when."""

import pytest
import sqlalchemy as sa

from megascale_ops.controller.journal.fence import (
    DeposedError,
    Fence,
    Leader,
    read_given_way,
    resign,
    take_epoch,
)
from megascale_ops.controller.journal.tables import META
from megascale_ops.controller.leadership.hearing import (
    FRESH_S,
    HOUR_S,
    MOST_AN_HOUR,
    STEADY_S,
    UNHEARD_S,
    Hearing,
    Petition,
    heir_of,
    may_give_way,
)
from megascale_ops.controller.leadership.rule import HEIR_S, LOOK_S, Seen, Step, Succession
from tests.fakes.killed_leaders import Database

NODES = frozenset({"a", "b", "c", "d"})


def _asked(*nodes: str, standby: str = "s", age_s: float = 1.0) -> Petition:
    return Petition(standby, f"http://{standby}:1", frozenset(nodes), age_s)


def test_a_leader_that_nobody_reaches_gives_way_to_the_standby_that_most_nodes_ask() -> None:
    """The sentence has both sides in numbers."""
    heir = heir_of(21.0, (), NODES, [_asked("a", standby="t"), _asked("a", "b", "c")])

    assert heir is not None
    assert heir.id == "s"
    assert heir.reason == (
        "it has answered no agent or runner on another machine for 21 s, while the standby at http://s:1, which gets "
        "its place, is asked by 3 of the 4 nodes of its jobs"
    )


@pytest.mark.parametrize(
    ("unheard_s", "here", "petitions"),
    [
        pytest.param(UNHEARD_S - 0.1, (), [_asked(*NODES)], id="it was asked a moment ago"),
        pytest.param(1e6, (), [], id="all agents are gone, for days"),
        pytest.param(1e6, (), [_asked("a", "b")], id="half of the nodes, and no more"),
        pytest.param(1e6, (), [_asked("a", "b"), _asked("c", "d", standby="t")], id="half each"),
        pytest.param(1e6, ("a", "b"), [_asked("a", "b", "c")], id="of three two are answered here"),
        pytest.param(1e6, (), [_asked("x", "y", "z", "u", "v")], id="nodes of no job of its own"),
        pytest.param(1e6, (), [_asked(*NODES, age_s=FRESH_S + 0.1)], id="they asked long ago"),
    ],
)
def test_it_stays_otherwise(unheard_s: float, here: tuple[str, ...], petitions: list[Petition]) -> None:
    """Less than that is no reason for a change of leader."""
    assert heir_of(unheard_s, here, NODES, petitions) is None


def test_without_a_job_one_node_that_asks_is_enough() -> None:
    """A run can't begin where nobody hears it, and there is nothing to lose."""
    heir = heir_of(UNHEARD_S, (), (), [_asked("new")])

    assert heir is not None
    assert heir.reason.endswith("is asked by 1 node")
    assert heir_of(UNHEARD_S, (), (), [_asked()]) is None


def test_six_leaders_an_hour_may_give_way() -> None:
    """Beyond that a change mends nothing; those of the hour before do not count."""
    assert may_give_way([10.0] * (MOST_AN_HOUR - 1))
    assert not may_give_way([10.0] * MOST_AN_HOUR)
    assert may_give_way([HOUR_S + 1.0] * MOST_AN_HOUR)


def test_who_is_heard_once_does_not_count_and_who_goes_on_does() -> None:
    """Each agent asks all addresses when it starts; one whose leader is gone asks again and again, up to 7 s apart."""
    hearing = Hearing(0.0)
    hearing.note("started", 1.0)
    for number in range(4):
        hearing.note("goes on", 1.0 + 7.0 * number)

        if number < 2:
            assert hearing.nodes(1.0 + 7.0 * number, STEADY_S) == []

    assert hearing.nodes(16.0) == ["goes on", "started"]
    assert hearing.nodes(22.0, STEADY_S) == ["goes on"]
    assert hearing.nodes(60.0) == []


def test_who_comes_back_after_a_gap_begins_anew() -> None:
    """Two requests an hour apart are no hour of asking."""
    hearing = Hearing(0.0)
    hearing.note("a", 1.0)
    hearing.note("a", 3600.0)

    assert hearing.nodes(3601.0, STEADY_S) == []


def test_a_request_from_its_own_machine_proves_nothing_about_the_network() -> None:
    """It is told as heard, and counts as answered; whether others reach this controller it does not tell."""
    hearing = Hearing(0.0)
    hearing.note("there", 30.0)
    hearing.note("here", 50.0, is_own_machine=True)

    assert hearing.unheard_s(60.0) == 10.0
    assert hearing.unheard_elsewhere_s(60.0) == 30.0


def test_time_in_which_the_controller_was_away_itself_is_nobodys_silence() -> None:
    """Its loop stood still, or it was not sure of its place and refused all."""
    hearing = Hearing(0.0)
    hearing.note("a", 1.0)
    hearing.begin_anew(100.0)

    assert hearing.unheard_s(101.0) == hearing.unheard_elsewhere_s(101.0) == 1.0


def test_the_heir_takes_over_at_once_and_all_others_wait_for_it() -> None:
    """As long as it is there, for some seconds; without one, a leader that has resigned is waited for by nobody."""
    leader = Leader("old", "http://old:1", resigned=True, heir="heir", why="unheard")

    def taken_s(me: str, *, is_there: bool) -> float:
        # A standby does not see itself among the others.
        others = {"heir": "http://heir:1"} if is_there and me != "heir" else {}
        seen = Seen(holder=0, word="", leader=leader, epoch=1, up_s=1e6, standbys=others)
        succession, now_s = Succession(me), 0.0
        while succession.look(seen, now_s) is Step.WAIT:
            now_s += LOOK_S
        return now_s

    assert taken_s("heir", is_there=True) == 0.0
    assert taken_s("other", is_there=True) == HEIR_S
    assert taken_s("other", is_there=False) == 0.0


def test_giving_way_is_written_by_the_leader_alone() -> None:
    """With its heir and the reason, and when; one that was replaced meanwhile writes nothing."""
    database = Database()
    old, new = Leader("old", "http://old:1"), Leader("new", "http://new:1")
    gives = Leader("old", "http://old:1", heir="new", why="unheard")
    with database.engine.begin() as connection:
        fence = Fence(take_epoch(connection, old, 0))
        resign(connection, fence, gives, now_wall_s=7.0)
        written = connection.scalar(sa.select(META.c.value).where(META.c.key == "leader"))
        given_way = read_given_way(connection)
    with database.engine.begin() as connection:
        take_epoch(connection, new, 0)
    with database.engine.begin() as connection, pytest.raises(DeposedError):
        resign(connection, fence, gives, now_wall_s=8.0)
    with database.engine.connect() as connection:
        after = read_given_way(connection)
    database.close()

    assert written is not None
    assert '"resigned":true,"heir":"new","why":"unheard"' in written
    assert given_way == after == [7.0]
