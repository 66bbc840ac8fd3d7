# SPDX-License-Identifier: Apache-2.0
"""Members of a group in a few numbers: any set of ranks comes back, and one that is too uneven is left out."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.schema.collectives import MOST_RUNS, GroupMembers, RankRun, members_of


def test_groups_of_a_mesh_are_one_run() -> None:
    """A world of 12,288 ranks and a data-parallel group of it take three numbers each."""
    world = members_of("0", range(12_288))
    peers = members_of("dp", range(5, 12_288, 64))

    assert world == GroupMembers("0", (RankRun(0, 12_288),))
    assert peers == GroupMembers("dp", (RankRun(5, 192, 64),))
    assert len(msgspec.json.encode(peers)) < 60


@given(st.sets(st.integers(0, 5_000), min_size=1, max_size=60))
def test_any_few_ranks_come_back(ranks: set[int]) -> None:
    """Whatever their order, and however uneven."""
    told = members_of("g", list(ranks))

    assert told is not None
    assert list(told.ranks()) == sorted(ranks)
    assert msgspec.json.decode(msgspec.json.encode(told), type=GroupMembers) == told


def test_what_is_too_uneven_or_empty_is_left_out() -> None:
    """Squares have no stride in common; a group of nobody is none."""
    assert members_of("g", [number * number for number in range(4 * MOST_RUNS)]) is None
    assert members_of("g", []) is None
