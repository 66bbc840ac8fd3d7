# SPDX-License-Identifier: Apache-2.0
"""Boards beside the black boxes: whose they are, which ranks they speak of, and what they are not believed."""

import os
import struct
from pathlib import Path

import pytest

from megascale_ops.blackbox import boards
from megascale_ops.blackbox.boards import fact_of, is_current, most_telling, of_process, parse
from megascale_ops.schema.tiles import TileFact, TileWait, describe
from tests.fakes.boards import FakeBoard

NOW_S = 2_000_000_000.0


def packed(board: FakeBoard) -> bytes:
    """Return a board as bytes."""
    return struct.pack(f"<{len(board.words)}I", *(word & 0xFFFFFFFF for word in board.words))


def waiting_board(*, group: int = 0xABCD1234, members: tuple[int, ...] = (8, 9, 10, 11)) -> FakeBoard:
    """Rank 1 of its group of four, CTA 0 done, 1 in a tile, 2 and 3 in wait for its rank 3."""
    board = FakeBoard("ag_gemm", 41, rank=1)
    board.host(7, 70)
    board.introduce(group, members)
    board.done(0)
    board.tile(1, 9)
    for cta in (2, 3):
        board.tile(cta, cta + 4)
        board.wait(cta, cta + 4, peer=3, channel=0, seen=40)
    return board


def known(board: FakeBoard) -> boards.Board:
    """Read it."""
    found = parse(packed(board))
    assert found is not None
    return found


def test_peers_are_the_jobs_ranks() -> None:
    """Kernels count within their group; who is accused has a number in the job."""
    fact = fact_of(known(waiting_board()), 16)

    assert fact == TileFact(
        "tiles of 8-11 (1234)", "ag_gemm", 41, done=8, tiles=16, in_hand=9, waits=(TileWait(11, 6, 2),),
        members=(8, 9, 10, 11),
    )  # fmt: skip
    assert describe(fact) == (
        "tiles of 8-11 (1234): ag_gemm launch 41, 8 of 16 tiles done, 2 thread blocks wait for rank 11 at tile 6"
    )


@pytest.mark.parametrize(("world_size", "peer"), [(4, 3), (16, -1)])
def test_a_board_that_names_no_members_is_believed_where_its_group_is_the_job(world_size: int, peer: int) -> None:
    """In a part of a larger job the ranks of its numbers are unknown: the wait is reported and accuses no rank."""
    fact = fact_of(known(waiting_board(group=0, members=())), world_size)

    assert [wait.peer for wait in fact.waits] == [peer]
    assert len(fact.waiting) == (peer >= 0)


def test_a_wait_for_its_own_parts_is_no_wait_for_anybody() -> None:
    """Programs of one rank lend each other sums."""
    board = waiting_board()
    board.wait(2, 6, peer=1, channel=0, seen=40)
    board.wait(3, 7, peer=1, channel=0, seen=40)

    assert fact_of(known(board), 16).waits == ()


def test_a_launch_that_all_have_ended_is_over() -> None:
    """It waits for no peer, and has no tile in hand."""
    board = FakeBoard("gemm_rs", 3)
    for cta in range(4):
        board.done(cta)

    fact = fact_of(known(board), 4)

    assert (fact.is_over, fact.done, fact.in_hand, fact.waits) == (True, 16, -1, ())


def test_before_the_first_launch_nothing_of_an_earlier_life_is_shown() -> None:
    """A launch number of 0 matches words that were never written."""
    fact = fact_of(known(FakeBoard("none", 0)), 4)

    assert (fact.launch, fact.waits, fact.is_over) == (0, (), False)
    assert describe(fact).endswith("no launch yet")


@pytest.mark.parametrize("damage", ["cut", "magic", "operator", "empty"])
def test_what_is_damaged_is_no_board(damage: str, tmp_path: Path) -> None:
    """A file cut short, another's file, a number that no operator has."""
    board = waiting_board()
    if damage == "magic":
        board.words[0] += 1
    if damage == "operator":
        board.words[3] = 99
    data = packed(board)[: {"cut": 4096, "empty": 0}.get(damage, 1 << 20)]
    (tmp_path / "1.0.board").write_bytes(data)

    assert parse(data) is None
    assert of_process(tmp_path, "1", 7, 70) == []


@pytest.mark.parametrize("words", [(1 << 31,), (0xFFFFFFFF, 5)])
def test_members_that_no_job_has_are_not_believed(words: tuple[int, ...]) -> None:
    """A rank of two thousand million is a damaged word."""
    board = waiting_board()
    board.introduce(5, tuple(word - 1 for word in words))

    assert fact_of(known(board), 4).members == (0, 1, 2, 3)
    assert fact_of(known(board), 16).members == ()


@pytest.mark.parametrize(
    ("pid", "start", "copied_s", "believed"),
    [
        (7, 70, 0, True),
        (7, 70 + (1 << 31), 0, True),  # a board has 31 bits of it
        (8, 70, 0, False),
        (7, 71, 0, False),  # the number was given out again
        (7, 70, int(NOW_S) - 1, True),
        (7, 70, int(NOW_S) - 60, False),  # the process that copied it has ended, or is stopped
    ],
)
def test_only_what_its_living_process_shows_now_is_believed(
    pid: int, start: int, copied_s: int, *, believed: bool
) -> None:
    """What an earlier run left, and a copy that is no longer made, accuse no rank."""
    board = waiting_board()
    board.host(7, 70, copied_s)

    assert is_current(known(board), pid, start, NOW_S) is believed


def test_of_many_workspaces_those_that_wait_are_told() -> None:
    """A message has room for a few of each rank: who waits first, then what is under way."""
    over = [TileFact(f"over {number}", "ag_gemm", 3, is_over=True) for number in range(9)]
    runs, waits = TileFact("runs", "ag_gemm", 3), TileFact("waits", "gemm_rs", 4, waits=(TileWait(1),))

    assert [fact.group for fact in most_telling([*over, runs, waits])][:3] == ["waits", "runs", "over 0"]
    assert len(most_telling([*over, runs, waits])) == boards.MOST_TOLD


def test_the_boards_of_a_process_are_found_beside_its_box(tmp_path: Path) -> None:
    """In the order of their numbers; not another rank's, nor what an earlier process of this rank has left."""
    left = waiting_board()
    left.host(6, 60)
    for name, board in (("1.0", left), ("1.10", FakeBoard("gemm_rs", 2)), ("1.2", waiting_board()), ("11.0", left)):
        if board is not left:
            board.host(7, 70)
        (tmp_path / f"{name}.board").write_bytes(packed(board))
    (tmp_path / "1.3.board").symlink_to(tmp_path / "1.2.board")
    os.mkfifo(tmp_path / "1.4.board")

    assert [board.operator for board in of_process(tmp_path, "1", 7, 70)] == ["ag_gemm", "gemm_rs"]
    assert len(of_process(tmp_path, "1", 7)) == 2
    assert of_process(tmp_path, "1", 7, 71) == []
    assert of_process(tmp_path / "none", "1", 7) == []
