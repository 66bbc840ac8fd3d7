# SPDX-License-Identifier: Apache-2.0
"""Thousands of ranks in one line."""

from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.schema.folding import fold, listed, named, named_missing, ranges


def test_neighbours_share_a_range() -> None:
    """Also when they come in any order or twice."""
    assert ranges([7, 0, 1, 2, 5, 4, 6, 2]) == "0-2,4-7"
    assert ranges([]) == ""


def test_ranks_are_named_in_singular_and_plural() -> None:
    """One rank, several, none."""
    assert named([3]) == "rank 3"
    assert named((0, 1, 2, 5)) == "ranks 0-2,5"
    assert named([]) == "no rank"


def test_stacks_fold_by_label() -> None:
    """The crowd first, then who is somewhere else."""
    labels = dict.fromkeys(range(8), "all_reduce") | {3: "DataLoader"}

    assert fold(labels) == "0-2,4-7: all_reduce; 3: DataLoader"


def test_twelve_thousand_ranks_fit_into_a_line() -> None:
    """Of many places the most frequent and the rarest are shown; all others are counted."""
    labels = {rank: f"place {rank % 100}" if rank < 300 else "all_reduce" for rank in range(12_288)}
    labels[5_000] = "DataLoader"

    line = fold(labels)

    assert line.startswith("300-4999,5001-12287: all_reduce; ")
    assert "5000: DataLoader" in line
    assert line.endswith("and 94 other places")
    assert len(ranges(range(0, 12_288, 2))) < 200
    assert ranges(range(0, 12_288, 2)).endswith(" and 6,120 more")


@given(st.sets(st.integers(0, 500)))
def test_ranges_lose_nobody(ranks: set[int]) -> None:
    """Read back, a range line holds exactly the ranks that were folded."""
    read: set[int] = set()
    for span in ranges(ranks, most=1000).split(","):
        first, _, last = span.partition("-")
        if first:
            read.update(range(int(first), int(last or first) + 1))

    assert read == ranks


def test_who_is_missing_is_told_without_counting_them_all() -> None:
    """It says what ``named`` says of the others, also where those would fill the memory; foreign ranks are none."""
    for here, size in [({0, 3}, 4), ({0, 1}, 3), (set(), 1), ({0}, 1), ({5, -1}, 4), (set(range(0, 99, 2)), 99)]:
        others = set(range(size)) - here

        assert named_missing(here, size) == (named(others) if others else "")

    assert named_missing({7}, 2**31 - 1) == f"ranks 0-6,8-{2**31 - 2}"
    assert named_missing({7}, -3) == ""


def test_things_are_listed_up_to_a_bound() -> None:
    """The rest is counted."""
    assert listed(["a", "b"]) == "a, b"
    assert listed(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert listed(range(2000), 2) == "0, 1 and 1,998 more"
    assert listed(()) == ""
