# SPDX-License-Identifier: Apache-2.0
"""A rank's trail, through a real box: phases, steps and calls in their order, and only what is known for sure."""

import os
from pathlib import Path

import pytest

from megascale_ops.blackbox.layout import PASSAGES, PHASES
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity, CollectiveRecord
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.schema.progress import Trail


class Rank:
    """A rank with a box."""

    def __init__(self, folder: Path) -> None:
        identity = BoxIdentity(
            job="j", node="n", rank=0, local_rank=0, world_size=1, pid=os.getpid(), start_ticks=0, round=1
        )
        self.box = BoxWriter.create(folder, identity)
        self.path = folder / "0.box"
        self.calls: dict[str, int] = {}

    def call(self, group: str = "0", function: str = "all_reduce", *, by_thread: bool = False) -> None:
        """Call a collective, by default from the training thread."""
        seq = self.calls[group] = self.calls.get(group, 0) + (function != "send")
        self.box.add_collective(
            CollectiveRecord(group, function, seq, 4, 1, 1, passage=0 if by_thread else self.box.passages)
        )

    def steps(self, numbers: range, *phases: str) -> None:
        """Make steps of these phases, a call at the end of each but the first phase's name."""
        for number in numbers:
            for phase in phases:
                self.box.set_now(number - 1, phase)
            self.box.set_now(number, "other")

    def trail(self) -> Trail:
        """Read it."""
        with BoxReader(self.path) as box:
            return box.trail()


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    """Return a rank that has done nothing yet."""
    return Rank(tmp_path)


def test_phases_steps_and_calls_stand_in_their_order(rank: Rank) -> None:
    """A capital letter is the end of a step; a call stands behind the phase in which it was made."""
    rank.steps(range(7, 9), "data", "backward")
    rank.call()
    rank.box.set_now(8, "data")
    rank.call("pair", "broadcast")
    rank.call()

    assert rank.trail() == Trail("abCabC1a01", ("data", "backward", "other"), ("pair", "0"), (1, 2), 8, 1)


def test_a_box_in_which_nothing_happened_has_no_trail(rank: Rank) -> None:
    """Nor has a box of an older recorder, whose page is zeros."""
    assert rank.trail() == Trail()


def test_what_is_shown_again_is_no_passage(rank: Rank) -> None:
    """The recorder shows the same phase of the same step twice where two hooks see the same."""
    rank.box.set_now(3, "data")
    rank.box.set_now(3, "data")

    assert rank.trail().path == "a"


def test_calls_of_other_threads_are_left_out(rank: Rank) -> None:
    """They stand nowhere in the training thread's order; nor have sends and receives a number."""
    rank.box.set_now(3, "data")
    rank.call(by_thread=True)
    rank.call(function="send")
    rank.call("own")

    assert rank.trail() == Trail("a0", ("data",), ("own",), (1,), 3)


@pytest.mark.parametrize("by", [1, 10])
def test_steps_may_be_counted_by_any_number(rank: Rank, by: int) -> None:
    """A script that tells its tenth step as the tenth counts by ten."""
    for number in range(0, 5 * by, by):
        rank.box.set_now(number, "other")

    assert rank.trail() == Trail("aAAAA", ("other",), step=4 * by, stride=by)


def test_a_trail_begins_behind_a_number_that_jumps(rank: Rank) -> None:
    """What was counted otherwise before can't be laid beside the steps of another rank."""
    rank.steps(range(3), "data")
    rank.steps(range(100, 103), "data")

    assert rank.trail() == Trail("aBaBaB", ("data", "other"), step=102, stride=1)


def test_a_trail_begins_behind_a_phase_without_a_name(rank: Rank) -> None:
    """A script may make names up; there is room for 26 of them."""
    for number in range(PHASES.slots + 2):
        rank.box.set_now(0, f"made up {number}")
    assert rank.trail() == Trail(step=0)

    rank.box.set_now(0, "made up 3")
    rank.box.set_now(0, "made up 4")

    assert rank.trail() == Trail("ab", ("made up 3", "made up 4"), step=0)


def test_a_trail_begins_behind_the_oldest_call_of_a_full_ring(rank: Rank) -> None:
    """Of the calls before that nothing is known."""
    for number in range(100):
        rank.box.set_now(number, "other")
        for _ in range(20):
            rank.call()
    trail = rank.trail()

    assert trail.path == "A" + "0" * 20 + ("A" + "0" * 20) * 17
    assert (trail.seqs, trail.step) == ((2000,), 99)


def test_a_long_trail_is_cut_between_passages(rank: Rank) -> None:
    """Its newest 384 characters at most, and all of them of whole passages."""
    rank.steps(range(1000), "data", "forward", "backward")
    assert len(rank.trail().path) == PASSAGES.slots

    for number in range(1000, 1100):
        rank.box.set_now(number, "other")
        rank.call()
        rank.call()

    assert rank.trail().path.endswith("D00" * 99)
    assert len(rank.trail().path) in (PASSAGES.slots - 1, PASSAGES.slots)


def test_only_the_groups_that_were_called_last_are_told(rank: Rank) -> None:
    """Ten have a digit; calls of others are left out."""
    rank.box.set_now(0, "data")
    for group in (*map(str, range(12)), "3"):
        rank.call(group)

    trail = rank.trail()

    assert trail.groups == (*map(str, (2, *range(4, 12))), "3")
    assert trail.seqs == (1,) * 9 + (2,)
    assert trail.path == "a0912345678" + "9"
