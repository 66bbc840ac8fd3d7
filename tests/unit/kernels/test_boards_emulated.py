# SPDX-License-Identifier: Apache-2.0
"""What real kernels leave on their boards, read as an agent reads it and followed as a judge follows it."""

import struct

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

from megascale_kernels.emulate import Notify  # noqa: E402
from megascale_kernels.planning.config import Config  # noqa: E402 - after the skips

from megascale_ops.blackbox.boards import fact_of, parse  # noqa: E402
from megascale_ops.diagnosis.hangs.tile_graph import Edge, edges_of, follow, standing  # noqa: E402
from megascale_ops.schema.tiles import TileFact  # noqa: E402
from tests.fakes.emulated_ranks import EmulatedRanks  # noqa: E402
from tests.fakes.launched import launched, prepared, put  # noqa: E402
from tests.fakes.products import Case  # noqa: E402

DEADLINE_US = 200_000
CASES = {
    "ag_gemm": Case(4, 32, 32, 32, config=Config(16, 32, 32, group_m=2, splits=2)),
    "gemm_rs": Case(4, 16, 64, 32),
    "gemm_ar": Case(4, 16, 64, 32),
}


def facts_of(ranks: EmulatedRanks) -> dict[int, TileFact]:
    """What each rank's board says."""
    found = {}
    for rank, workspace in enumerate(ranks.workspaces):
        words = [int(word) & 0xFFFFFFFF for word in workspace.board.tolist()]
        board = parse(struct.pack(f"<{len(words)}I", *words))
        if board is not None:
            found[rank] = fact_of(board, len(ranks.workspaces))
    return found


def ends_of(facts: dict[int, TileFact]) -> tuple[dict[int, list[Edge]], tuple[int, ...]]:
    """Who waits for whom, and for whom all wait in the end."""
    edges = {rank: found for rank, fact in facts.items() if (found := edges_of(rank, [fact]))}
    return edges, follow(edges, lambda rank: [edge.peer for edge in edges.get(rank, ())]).ranks


@pytest.mark.parametrize("operator", list(CASES))
def test_a_rank_that_never_launches_is_at_the_end_of_all_chains(operator: str) -> None:
    """The boards of the three others name operator, launch, tile and the fourth, which shows no launch."""
    case = CASES[operator]
    ranks = EmulatedRanks(4, seed=2, deadline_us=DEADLINE_US)
    given, outs = prepared(operator, case, seed=0)
    put(operator, case, ranks, given, outs, only=[0, 1, 3])
    ranks.run()

    facts = facts_of(ranks)
    edges, ends = ends_of(facts)

    assert edges
    assert ends == (2,)
    for found in edges.values():
        assert all((edge.fact.operator, edge.fact.launch) == (operator, 1) for edge in found)
        assert all(0 <= edge.wait.tile < edge.fact.tiles for edge in found)
        assert all(edge.wait.gave_up for edge in found)
        text, explains = standing([facts[2]] if 2 in facts else (), found[0])
        assert text.startswith(f"has not come to {operator} launch 1")
        assert explains


@pytest.mark.parametrize("operator", list(CASES))
def test_a_lost_notification_is_told_with_doubt_or_by_where_the_sender_stands(operator: str) -> None:
    """Rank 2 sent, and its flag for rank 0 got lost in launch 2: rank 0's board names rank 2, nobody else is an end."""

    def lost(notify: Notify) -> bool:
        return (notify.source, notify.target, notify.channel, notify.stamp >> 12) == (2, 0, 1, 2)

    done = launched(operator, CASES[operator], launches=2, seed=1, deadline_us=DEADLINE_US, drop=lost, ctas=3)
    facts = facts_of(done.ranks)

    edges, ends = ends_of(facts)

    assert 2 in {edge.peer for edge in edges[0]}
    assert ends == (2,)
    assert not standing([facts[2]], next(edge for edge in edges[0] if edge.peer == 2))[0].startswith("has not come")


@pytest.mark.parametrize("operator", list(CASES))
def test_ranks_that_are_done_wait_for_nobody(operator: str) -> None:
    """Negative control: after a launch that went well boards show its end, and no wait of it or the one before."""
    facts = facts_of(launched(operator, CASES[operator], launches=2, seed=1, ctas=3).ranks)

    assert sorted(facts) == [0, 1, 2, 3]
    assert all((fact.launch, fact.is_over, fact.waits) == (2, True, ()) for fact in facts.values())
    assert {fact.done for fact in facts.values()} == {facts[0].tiles}
