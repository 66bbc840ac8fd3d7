# SPDX-License-Identifier: Apache-2.0
"""When a standby takes over: told what it sees and when, twice a second."""

from collections.abc import Callable

import pytest

from megascale_ops.controller.journal.fence import Leader
from megascale_ops.controller.leadership.rule import LOOK_S, Seen, Step, Succession

_LEADER = Leader("a", "http://a:1")
_LEAST_S, _MOST_S = 1.0, 10.0


def _seen(holder: int = 0, word: str = "", leader: Leader | None = _LEADER, *, up_s: float = 1e6) -> Seen:
    return Seen(holder=holder, word=word, leader=leader, epoch=1, up_s=up_s, standbys={})


def _speaks(now_s: float) -> Seen:
    return _seen(holder=7, word=str(int(now_s)))


def _first(
    what: Callable[[float], Seen | None], succession: Succession, *, begin_s: float = 0.0, for_s: float = 60.0
) -> tuple[Step, float]:
    """Look every half second; return the first step that is none of waiting, and after how long."""
    for number in range(int(for_s / LOOK_S)):
        now_s = begin_s + number * LOOK_S
        step = succession.look(what(now_s), now_s)
        if step is not Step.WAIT:
            return step, now_s - begin_s
    return Step.WAIT, for_s


def test_a_new_database_and_a_leader_that_resigned_are_waited_for_by_nobody() -> None:
    """The first look is enough."""
    resigned = Leader("a", "http://a:1", resigned=True)

    assert _first(lambda _: _seen(leader=None), Succession()) == (Step.TAKE, 0.0)
    assert _first(lambda _: _seen(leader=resigned), Succession()) == (Step.TAKE, 0.0)


def test_a_killed_leader_is_replaced_soon_but_not_at_once() -> None:
    """Its lock is free; a connection that was merely cut is given a moment to come back."""
    succession = Succession()
    assert _first(_speaks, succession, for_s=20.0)[0] is Step.WAIT

    step, after_s = _first(lambda _: _seen(), succession, begin_s=20.0)

    assert step is Step.TAKE
    assert _LEAST_S < after_s < _MOST_S


def test_a_paused_leader_is_replaced_by_force() -> None:
    """Its connection holds the lock and says nothing any more."""
    succession = Succession()
    assert _first(_speaks, succession, for_s=20.0)[0] is Step.WAIT

    step, after_s = _first(lambda _: _seen(holder=7, word="last"), succession, begin_s=20.0)

    assert step is Step.FORCE
    assert 4.0 < after_s < _MOST_S


@pytest.mark.parametrize("every_s", [1.0, 3.0, 5.0])
def test_a_slow_leader_that_speaks_is_never_replaced(every_s: float) -> None:
    """One word in five seconds is enough, for as long as it comes."""
    step, _ = _first(lambda now_s: _seen(holder=7, word=str(now_s // every_s)), Succession(), for_s=3600.0)

    assert step is Step.WAIT


def test_a_leader_whose_words_can_not_be_seen_is_never_replaced() -> None:
    """Another role's connection shows nothing: that is no silence."""
    assert _first(lambda _: _seen(holder=7, word=""), Succession(), for_s=3600.0)[0] is Step.WAIT


def test_a_standby_that_was_paused_itself_accuses_nobody() -> None:
    """What was last heard ten minutes ago, at its own last look, begins anew."""
    succession = Succession()
    succession.look(_seen(holder=7, word="same"), 0.0)

    assert succession.look(_seen(holder=7, word="same"), 600.0) is Step.WAIT
    assert succession.look(_seen(holder=7, word="same"), 600.5) is Step.WAIT


def test_after_an_outage_the_leader_comes_first() -> None:
    """The lock of a database that was away is free, and the leader may know of orders that only it has."""
    succession = Succession()
    assert _first(_speaks, succession, for_s=5.0)[0] is Step.WAIT
    assert _first(lambda _: None, succession, begin_s=5.0, for_s=60.0)[0] is Step.WAIT

    step, after_s = _first(lambda _: _seen(up_s=1.0), succession, begin_s=65.0)

    assert step is Step.TAKE
    assert 5.5 < after_s < _MOST_S


def test_a_leader_that_comes_back_after_an_outage_stays() -> None:
    """Its lock is held again before the time is over."""
    succession = Succession()
    _first(_speaks, succession, for_s=5.0)
    _first(lambda _: None, succession, begin_s=5.0, for_s=60.0)
    assert _first(lambda _: _seen(up_s=1.0), succession, begin_s=65.0, for_s=5.0)[0] is Step.WAIT

    assert _first(_speaks, succession, begin_s=70.0, for_s=3600.0)[0] is Step.WAIT


def test_a_controller_that_starts_beside_a_database_that_just_started_waits_as_well() -> None:
    """It has not seen the outage, but the database says for how long it has been up."""
    young = _first(lambda now_s: _seen(up_s=1.0 + now_s), Succession())
    old = _first(lambda _: _seen(), Succession())

    assert young[0] is old[0] is Step.TAKE
    assert old[1] < 3.0 < young[1] < _MOST_S


def test_a_lock_that_was_free_for_a_moment_only_is_no_death() -> None:
    """A leader whose connection is cut again and again keeps its place."""
    succession = Succession()

    step, _ = _first(lambda now_s: _seen() if int(now_s) % 3 == 0 else _speaks(now_s), succession, for_s=600.0)

    assert step is Step.WAIT
