# SPDX-License-Identifier: Apache-2.0
"""Waits for tiles are followed to the rank that waits for none, and to a circle where there is no such rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.diagnosis.hangs.tile_graph import Edge, Ends, edges_of, follow, standing
from megascale_ops.schema.tiles import TileFact, TileWait

GROUP = "tiles of 0-3 (1)"


def fact(launch: int = 7, operator: str = "ag_gemm", **more: object) -> TileFact:
    """The newest launch of one rank."""
    return TileFact(GROUP, operator, launch, **more)  # type: ignore[arg-type]  # fields of the fact


@pytest.mark.parametrize(
    ("waits", "ends"),
    [
        ({0: [1], 2: [1], 3: [1]}, Ends((1,))),
        ({0: [1], 1: [2], 2: [3]}, Ends((3,))),
        ({0: [1, 2], 1: [], 2: [0]}, Ends((1,))),  # 0 and 2 wait for each other, and both for 1
        ({0: [1], 2: [3]}, Ends((1, 3))),
        ({0: [1], 1: [0]}, Ends((), (0, 1))),
        ({0: [1], 1: [2], 2: [1]}, Ends((), (1, 2))),  # 0 waits for a circle that it is not in
        ({}, Ends(())),
    ],
)
def test_a_chain_is_followed_to_its_end(waits: dict[int, list[int]], ends: Ends) -> None:
    """Who waits is a victim, however many wait for it."""
    assert follow(waits, lambda rank: waits.get(rank, ())) == ends


@given(st.dictionaries(st.integers(0, 7), st.lists(st.integers(0, 7), max_size=4), max_size=8))
def test_an_end_waits_for_nobody_and_a_circle_for_itself(waits: dict[int, list[int]]) -> None:
    """Whatever the waits are: a rank is named, by one of the two, where one waits."""
    waits = {rank: [peer for peer in peers if peer != rank] for rank, peers in waits.items()}

    ends = follow(waits, lambda rank: waits.get(rank, ()))

    assert all(not waits.get(rank) for rank in ends.ranks)
    assert all(set(waits[rank]) & set(ends.circle) for rank in ends.circle)
    assert bool(ends.ranks or ends.circle) is bool(waits)
    assert not (ends.ranks and ends.circle)


def test_whom_most_thread_blocks_wait_for_comes_first() -> None:
    """A rank that is not known by its number, and the rank itself, are not accused."""
    waits = (TileWait(2, 5, 1), TileWait(3, 6, 9), TileWait(-1, 7, 20), TileWait(0, 8, 30))

    found = edges_of(0, [fact(waits=waits)])

    assert [edge.peer for edge in found] == [3, 2]
    assert found[0].place == "ag_gemm launch 7"


@pytest.mark.parametrize(
    ("own", "text", "explains"),
    [
        ((), "has not come to ag_gemm launch 7, and shows no board of it", True),
        ((fact(0, "none"),), "has not come to ag_gemm launch 7 (it has launched nothing)", True),
        ((fact(6, "gemm_rs"),), "has not come to ag_gemm launch 7 (its last is gemm_rs launch 6)", True),
        ((fact(7, "gemm_rs"),), "runs gemm_rs as launch 7, where ag_gemm is waited in", True),
        ((fact(7, in_hand=4),), "stands in ag_gemm launch 7 at tile 4", True),
        ((fact(7, is_over=True),), "has ended ag_gemm launch 7, and what it sent has not arrived", False),
        ((fact(8),), "is past ag_gemm launch 7 (in ag_gemm launch 8)", False),
        ((TileFact("another", "ag_gemm", 9),), "has not come to ag_gemm launch 7, and shows no board of it", True),
    ],
)
def test_how_a_rank_stands_to_a_launch_is_said(own: tuple[TileFact, ...], text: str, *, explains: bool) -> None:
    """From not there at all to already through."""
    wait = TileWait(1, 3, 4)

    assert standing(own, Edge(0, 1, fact(waits=(wait,)), wait)) == (text, explains)
