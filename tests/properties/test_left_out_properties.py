# SPDX-License-Identifier: Apache-2.0
"""Ranks past a collective, over drawn scripts, bugs and paces: who is named has left it out, and a late rank is not.

And trails out of drawn bytes.
"""

from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from megascale_ops.blackbox.layout import PASSAGES, PHASES
from megascale_ops.blackbox.records import CollectiveRecord
from megascale_ops.blackbox.trails import trail_of
from megascale_ops.diagnosis.exits.left_out import left_out
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.ranges import fit
from tests.fakes.walks import Bug, Call, Script, Sometimes, walk
from tests.matrix import some

# A usual step; what a step may be made of, in any order; what a rank may do alone while others wait: no training.
USUAL = ("data", "forward", "backward", "optimizer")
MADE_OF = ("data", "forward", "backward", "optimizer", "other", "mine")
ALONE = ("data", "forward", "eval", "checkpoint", "other")
drawn = settings(
    max_examples=some(75),  # 20 ms each
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


# The last is what is left out oftenest: a mean over all ranks, to be printed.
calls = st.builds(Call, *[st.booleans()] * 2, *[st.sampled_from((False, False, True))] * 2) | st.just(Call())
ranks = st.integers(0, 5)
worlds = st.integers(3, 6)
seeds = st.integers(0, 1 << 30)


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Draw what ranks do: a step, what all do in some steps, what one does alone, and whether stages differ."""
    is_wild = draw(st.booleans())
    phases = st.lists(st.sampled_from(MADE_OF), min_size=1, max_size=6)
    pieces: list[str | Call] = list(draw(phases) if is_wild else USUAL)
    for call in draw(st.lists(calls, max_size=3 if is_wild else 1)):
        pieces.insert(draw(st.integers(0, len(pieces))), call)
    places, periods = st.integers(0, len(pieces)), st.integers(2, 7)
    some = st.lists(st.sampled_from(MADE_OF) | calls, min_size=1, max_size=3)
    sometimes = draw(st.lists(st.builds(Sometimes, periods, places, some.map(tuple)), max_size=2))
    sometimes.append(Sometimes(draw(periods), draw(places), (draw(calls),)))
    own = st.lists(st.sampled_from(ALONE), min_size=1, max_size=3).map(tuple)
    sometimes += draw(st.lists(st.builds(Sometimes, periods, places, own, st.tuples(ranks)), max_size=2 * is_wild))
    turned = draw(st.sampled_from(((), (1, 3, 5)))) if is_wild else ()
    return Script(tuple(pieces), tuple(sometimes), turned)


def a_call(data: st.DataObject, script: Script, rank: int) -> tuple[int, int]:
    """Draw a step from the first seventeen in which a rank makes calls, and which of them it is.

    In step 0 it makes one: each script has something that all ranks do sometimes.
    """
    steps = {
        number: made
        for number in range(17)
        if (made := sum(isinstance(piece, Call) for piece in script.step(number, rank)))
    }
    step = data.draw(st.sampled_from(sorted(steps)))
    return step, data.draw(st.integers(0, steps[step] - 1))


@drawn
@given(scripts(), worlds, seeds, st.data())
def test_who_is_named_has_left_a_call_out(
    tmp_path: Path, script: Script, world: int, seed: int, data: st.DataObject
) -> None:
    """Whatever the phases' order, who else is late, and which ranks do something of their own besides."""
    buggy = data.draw(st.integers(0, world - 1))

    exits, wrong = walk(tmp_path, script, world, 20, seed, Bug((buggy,), *a_call(data, script, buggy)))

    found = left_out(exits)

    event(f"named {bool(found)} of {bool(wrong)}")
    assert found.keys() <= set(wrong)


@drawn
@given(scripts(), worlds, seeds)
def test_nobody_is_named_where_ranks_are_only_late(tmp_path: Path, script: Script, world: int, seed: int) -> None:
    """The same scripts without a bug, stopped at any moment."""
    steps = 3 + seed % 15
    exits, wrong = walk(tmp_path, script, world, steps, seed)

    assert not wrong
    assert not left_out(exits)


def minorities(world: int) -> list[tuple[int, ...]]:
    """Return all that are fewer than half of every group which a call may be made in: the world, even and odd ranks."""
    groups = [set(range(world)), set(range(0, world, 2)), set(range(1, world, 2))]
    return [
        chosen
        for size in range(1, world)
        for chosen in combinations(range(world), size)
        if all(2 * len(group.intersection(chosen)) < len(group) for group in groups)
    ]


@drawn
@given(scripts(), st.integers(5, 6), seeds, st.data())
def test_nobody_is_named_where_a_minority_calls_once_too_often(
    tmp_path: Path, script: Script, world: int, seed: int, data: st.DataObject
) -> None:
    """All others have gone past a call that they never had to make. Fewer than five ranks have no such minority."""
    buggy = data.draw(st.sampled_from(minorities(world)))
    bug = Bug(buggy, *a_call(data, script, buggy[0]), is_extra=True)
    exits, _ = walk(tmp_path, script, world, 20, seed, bug)

    assert not left_out(exits)


@pytest.mark.parametrize("first", [-1, 4711])
def test_of_a_script_that_all_run_alike_the_rank_is_found_though_others_are_late(tmp_path: Path, first: int) -> None:
    """Negative control of all that names nobody: a usual script, of whose ends many show who it was."""
    script = Script(
        ("data", "forward", "backward", Call(is_named=False), "other", "optimizer"),
        (Sometimes(3, 0, (Call(),)), Sometimes(5, 0, ("checkpoint", Call(), "other"))),
    )

    found = [
        left_out(walk(tmp_path, script, 5, 25, seed, Bug((3,), first + 10 - (first + 10) % 3, 0), first)[0]).keys()
        for seed in range(100)
    ]

    assert set().union(*found) == {3}
    assert sum(map(len, found)) > 25


@given(
    st.binary(max_size=PASSAGES.size), st.binary(max_size=PHASES.size), st.lists(st.integers(0, 1 << 32), max_size=5)
)
def test_any_bytes_give_a_trail_that_can_be_sent(words: bytes, phases: bytes, passages: list[int]) -> None:
    """A box may be garbage: what is read from it is within what a message may hold."""
    calls = [CollectiveRecord(f"{at}", "all_reduce", at, 0, 1, passage=number) for at, number in enumerate(passages)]

    trail = trail_of(words, phases, calls, are_all=False)

    assert fit(RankExit(0, 0, 1, 1, 0.0, trail=trail))[1] == ()


@given(
    st.lists(st.tuples(st.integers(0, 1 << 25), st.integers(0, 30)), max_size=PASSAGES.slots), st.integers(1, 1 << 32)
)
def test_nearly_right_words_give_a_trail_that_can_be_sent(places: list[tuple[int, int]], first: int) -> None:
    """Numbers follow each other, and steps and phases are whatever they are."""
    words = bytearray(PASSAGES.size)
    for number, (step, phase) in enumerate(places, first):
        at = number % (1 << 32) % PASSAGES.slots * 8
        words[at : at + 8] = (number % (1 << 32) | step % (1 << 24) << 32 | phase << 56).to_bytes(8, "little")

    trail = trail_of(bytes(words), b"data\0" * 8, [], are_all=True)

    assert fit(RankExit(0, 0, 1, 1, 0.0, trail=trail))[1] == ()
    assert len(trail.path) <= PASSAGES.slots
