# SPDX-License-Identifier: Apache-2.0
"""A rank that is past a call is named, one that is late for it or of which it is not known is not."""

import signal

import msgspec
import pytest

from megascale_ops.diagnosis.exits.classify import Ended
from megascale_ops.diagnosis.exits.first_cause import judge_exits
from megascale_ops.diagnosis.exits.left_out import left_out
from megascale_ops.schema.messages import CollectiveFact, RankExit
from megascale_ops.schema.progress import Trail

PHASES = ("other", "data", "forward", "backward", "optimizer", "eval")
SEQ = 38


def _end(rank: int, path: str, *, group: str = "0", done: bool = False) -> RankExit:
    """Return how a rank ended whose trail is two calls and three steps until 15, and then ``path``; "0" is the call."""
    is_in, ends = "0" in path, path.count("A")
    trail = Trail("A0bcdeA0bcdeAbcdeA" + path, PHASES, (group,), (SEQ if is_in else 31,), 15 + ends, 1)
    return _of(rank, trail, group, is_in=is_in, done=done)


def _of(rank: int, trail: Trail | None, group: str = "0", *, is_in: bool = False, done: bool = False) -> RankExit:
    """Return how a rank ended that was in a call before, and in the one in question where ``is_in``."""
    calls = [CollectiveFact(group, 31, "all_gather", done=True)]
    if is_in:
        calls.append(CollectiveFact(group, SEQ, "all_reduce", bytes_moved=4, done=done))
    step = trail.step if trail is not None else 15
    return RankExit(
        rank, rank, 9, -15, 0.0, by_us=True, step=step, phase="backward", steps_seen=step,
        calls=tuple(calls), trail=trail,
    )  # fmt: skip


# In the call, not yet in it, beyond it.
IN, LATE, PAST = "0", "", "bcd"


def _named(*paths: str, group: str = "0") -> set[int]:
    return set(left_out([_end(rank, path, group=group) for rank, path in enumerate(paths)]))


def test_the_one_that_is_past_is_named_and_not_the_one_that_is_late() -> None:
    """The verdict is of a call that was left out, and says where the rank is and who was in the call."""
    ends = [_end(rank, path) for rank, path in enumerate((IN, LATE, IN, PAST))]
    ends[2] = msgspec.structs.replace(ends[2], code=-signal.SIGABRT, by_us=False, last_words=("gloo_mismatch",))

    verdict = judge_exits(
        [Ended("n", end, 0.1) for end in ends], world_size=4, missing=(), reports={}, hosts={}, round_=1, wall_s=1e6
    )

    assert (verdict.fault, verdict.culprits) == ("not_joined", (3,))
    assert verdict.reason.startswith(
        "rank 3 left all_reduce #38 of group 0 out: it went on to phase backward without it, while ranks 0,2 were in it"
    )


def test_a_call_that_met_another_is_told_as_left_out_where_the_trail_shows_that() -> None:
    """The count of a beat shows that rank 3 is in some call of that number; why it is, its trail shows."""
    ends = [_end(rank, path) for rank, path in enumerate((IN, IN, IN, PAST))]
    ends[0] = msgspec.structs.replace(ends[0], code=-signal.SIGABRT, by_us=False, last_words=("gloo_mismatch",))
    counted = msgspec.structs.replace(ends[3], calls=(*ends[3].calls, CollectiveFact("0", SEQ, "")))

    told = [
        judge_exits(
            [Ended("n", end, 0.1) for end in (*ends[:3], last)],
            world_size=4, missing=(), reports={}, hosts={}, round_=1, wall_s=1e6,
        )
        for last in (counted, msgspec.structs.replace(counted, trail=None))
    ]  # fmt: skip

    assert [(verdict.fault, verdict.culprits) for verdict in told] == [("not_joined", (3,)), ("collective_order", (3,))]


@pytest.mark.parametrize("past", ["bcd", "bcde", "bcdeA", "bcdeAb", "bcdeAbcdeAbcdeA"])
def test_a_rank_may_be_any_way_past(past: str) -> None:
    """Once it has begun to learn from what it read since, in this step or a later one."""
    assert _named(IN, LATE, IN, past) == {3}


@pytest.mark.parametrize("past", ["b", "bc"])
def test_what_may_be_an_evaluation_of_its_own_is_no_step(past: str) -> None:
    """A rank may evaluate while others wait for it; that nothing is learned from its batch is known only later."""
    assert _named(IN, LATE, IN, past) == set()


@pytest.mark.parametrize("past", ["f", "fa", "bcf", "bfd", "d", "bcdf", "bcdebcd", "bcdeAd", "bcdeAbcdAb"])
def test_who_does_something_new_is_not_named(past: str) -> None:
    """It may be what this rank alone has to do before it comes to the call."""
    assert _named(IN, LATE, IN, past) == set()


def test_ranks_that_are_only_late_are_not_named() -> None:
    """However many they are, and whether the others still wait or not."""
    assert _named(IN, LATE, IN, LATE) == set()
    assert _named(IN, IN, IN, LATE) == set()


def test_what_is_over_for_all_accuses_nobody() -> None:
    """Nobody waits in it, so it is not what went wrong."""
    ends = [_end(0, IN, done=True), _end(1, LATE), _end(2, IN, done=True), _end(3, PAST)]

    assert not left_out(ends)
    assert set(left_out([msgspec.structs.replace(ends[0], calls=_end(0, IN).calls), *ends[1:]])) == {3}


def test_a_minority_accuses_nobody() -> None:
    """Who waits in what others went past may have called once too often."""
    assert _named(IN, IN, IN, PAST, PAST) == {3, 4}
    assert _named(IN, IN, PAST, PAST) == set()
    assert _named(IN, LATE, LATE, PAST) == set()
    assert _named(IN, IN, LATE, LATE, PAST) == set()
    assert _named(IN, PAST) == set()


def test_a_call_of_a_part_of_the_ranks_is_held_against_its_members() -> None:
    """The other half goes the same way and is past the same place: it never had to call there."""
    own = [_end(rank, path, group="half") for rank, path in enumerate((IN, LATE, IN, PAST))]
    others = [_end(rank, PAST, group="other half") for rank in (4, 5, 6, 7)]

    assert set(left_out([*own, *others])) == {3}
    assert not left_out([*own[:3], *others])


def test_who_went_another_way_before_is_not_named() -> None:
    """A stage of a pipeline has an order of its own; so has a rank that evaluates alone, or that calls elsewhere."""
    for before in ("A0bdceA0bdceAbdceA", "A0bcdeA0bcdefAbcdeA", "A0bcdeAb0cdeAbcdeA", "A0bcdeAbcdeAbcdeA"):
        other = _of(3, Trail(before + PAST, PHASES, ("0",), (31,), 15, 1))

        assert not left_out([_end(0, IN), _end(1, LATE), _end(2, IN), other])


def test_half_of_the_group_must_have_come_the_same_way() -> None:
    """One that does something of its own now and then says nothing against a rank, and others have to speak."""
    own = _of(0, Trail("A0bcdefA0bcdeAbcdeA0", PHASES, ("0",), (SEQ,), 15, 1), is_in=True)

    assert set(left_out([own, _end(1, IN), _end(2, IN), _end(3, PAST)])) == {3}
    assert not left_out([own, _end(1, IN), _end(2, LATE), _end(3, PAST)])


def test_calls_of_one_number_in_other_places_are_not_the_same_call() -> None:
    """Who called too often before waits in what is the next call of others, and does not wait where they do."""
    early = _of(0, Trail("A0bcdeA0bcdeAbcdeA0", PHASES, ("0",), (SEQ,), 15, 1), is_in=True)
    right = [_of(rank, Trail("A0bcdeA0bcdeAbcdeAbcdeA0", PHASES, ("0",), (SEQ,), 16, 1), is_in=True) for rank in (1, 2)]
    right = [msgspec.structs.replace(exit_, steps_seen=16) for exit_ in right]

    assert not left_out([early, *right, _end(3, PAST)])
    assert not left_out([early, *right, _end(3, LATE)])


def test_steps_that_are_counted_from_elsewhere_are_not_laid_side_by_side() -> None:
    """The same number is another step where a process has counted from another one."""
    other = msgspec.structs.replace(_end(3, PAST), steps_seen=5)

    assert not left_out([_end(0, IN), _end(1, LATE), _end(2, IN), other])


@pytest.mark.parametrize("before", ["A", "A0bcdeA", "eA0bcdeA", "bcde"])
def test_a_short_trail_names_nobody(before: str) -> None:
    """Two whole steps have to be alike, of which each is known from its beginning on."""
    ends = [
        _of(rank, Trail(before + path, PHASES, ("0",), (SEQ if path == IN else 31,), 15, 1), is_in=path == IN)
        for rank, path in enumerate((IN, LATE, IN, PAST))
    ]

    assert not left_out(ends)


def test_a_rank_without_a_trail_is_not_named_and_speaks_for_nobody() -> None:
    """An older runner sends none, and a script without phases has none."""
    known = [_end(rank, path) for rank, path in enumerate((IN, LATE, IN, PAST))]

    assert not left_out([*known[:3], _of(3, None)])
    assert not left_out([_of(rank, None, is_in=True) for rank in (0, 1, 2)] + known[3:])
    assert not left_out([known[0], known[1], _of(2, None, is_in=True), known[3]])
    assert set(left_out([known[0], _end(1, IN), _of(2, None, is_in=True), known[3]])) == {3}


def test_a_call_of_another_thread_has_no_place_among_phases() -> None:
    """A trail has none of it: what the training thread did meanwhile tells nothing."""
    ends = [
        _of(rank, Trail("A0bcdeA0bcdeAbcdeA" + path, PHASES, ("0",), (31,), 15, 1), is_in=rank != 3)
        for rank, path in enumerate((LATE, LATE, LATE, PAST))
    ]

    assert not left_out(ends)


def test_who_has_called_again_since_is_not_named_here() -> None:
    """Its next call has the number of the one that it left out: that it is another is told by their difference."""
    again = _of(3, Trail("A0bcdeA0bcdeAbcdeA" + "bcd0", PHASES, ("0",), (SEQ,), 15, 1))

    assert not left_out([_end(0, IN), _end(1, LATE), _end(2, IN), again])


@pytest.mark.parametrize(
    "trail",
    [
        Trail("", (), ("0",), (SEQ,), 15, 1),
        Trail("0", PHASES, ("0",), (SEQ,), 15, 1),
        Trail("zzZİ0", ("data",), ("0",), (SEQ,)),
        Trail("A0é🙂A0", ("other",), ("0", "1"), (SEQ,), 15, 0),
        Trail("AAAAA0", ("other",), ("0",), (SEQ, 4), -1, 1 << 50),
    ],
)
def test_a_trail_that_makes_no_sense_is_no_error(trail: Trail) -> None:
    """It comes from another program."""
    ends = [_of(rank, trail, is_in=True) for rank in (0, 1, 2)]

    assert not left_out([*ends, _of(3, trail), _end(4, PAST)])
