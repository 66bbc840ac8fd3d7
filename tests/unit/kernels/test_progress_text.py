# SPDX-License-Identifier: Apache-2.0
"""What a person reads from boards, compared with golden files: MEGASCALE_UPDATE_GOLDEN=1 writes them anew."""

import os
from pathlib import Path

import pytest
from megascale_kernels.progress import blame, describe, read_board
from megascale_kernels.progress.board_format import GAVE_UP
from megascale_kernels.progress.text import ranges, tiles_done

from tests.fakes.boards import FakeBoard

GOLDEN = Path(__file__).parents[2] / "golden" / "kernels"
NOW_NS = 1_750_000_003_200_000_000
BEGAN_NS = 1_750_000_000_000_000_000


def waiting_gather() -> FakeBoard:
    """132 CTAs of which 19 wait for rank 2."""
    board = FakeBoard(ctas=132, tiles=1792)
    board.tile(0, 3, role=1)
    for cta in range(132):
        board.tile(cta, 7 * 132 + cta)
        if cta < 18 or cta == 40:
            board.wait(cta, 7 * 132 + cta, peer=2, channel=3, seen=39, since_ns=BEGAN_NS + cta)
    return board


def given_up_scatter() -> FakeBoard:
    """Every CTA gave up: most on rank 1, one of them when its peer ran something else."""
    board = FakeBoard("gemm_rs", 12, rank=3, ctas=4, tiles=16, sizes=(512, 512, 256))
    for cta in range(4):
        board.wait(cta, 12 + cta, peer=1 if cta else 0, channel=cta, state=GAVE_UP, since_ns=7)
        board.done(cta)
    board.words[32 + 6] = 12 << 12 | 0x999
    return board


def check_golden(name: str, text: str) -> None:
    """Compare with the golden file, or write it when asked to."""
    path = GOLDEN / name
    if os.environ.get("MEGASCALE_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_one_rank() -> None:
    """The culprit stands in the line that folds all who wait for it."""
    check_golden("progress_waiting.txt", describe(read_board(waiting_gather().words), NOW_NS) + "\n")


def test_who_waits_for_parts_from_its_own_rank_waits_for_whom_those_wait_for() -> None:
    """Seven CTAs add what three others lend, and these wait for rank 2's rows: rank 2 is the suspect, not rank 0."""
    board = FakeBoard(ctas=10, tiles=200)
    for cta in range(10):
        lends = cta < 3
        board.tile(cta, 190 + cta, role=1)
        board.wait(cta, 190 + cta, peer=2 if lends else 0, channel=cta, role=1, since_ns=BEGAN_NS)
    view = read_board(board.words)

    text = describe(view, NOW_NS)

    assert "CTAs 3-9: wait for this rank's own CTAs, parts 3-9 (tiles 193-199)" in text
    assert "CTAs 0-2: wait for rank 2, units 0-2 (tiles 190-192)" in text
    found = blame([view, read_board(FakeBoard(rank=2).words)])
    assert (found.waits[0], found.suspects) == ((2,), (2,))


def test_a_rank_that_gave_up() -> None:
    """After the end the waits given up on are told; a clock that is not Unix time tells no age."""
    view = read_board(given_up_scatter().words)

    check_golden("progress_gave_up.txt", describe(view, NOW_NS, writer_alive=False) + "\n")


def test_no_launch_yet() -> None:
    """A fresh board says so."""
    board = FakeBoard("none", 0)

    assert describe(read_board(board.words)) == "rank 0 of 4: no launch yet"


def chain() -> list[FakeBoard]:
    """0 and 3 wait for 1, 1 waits for 2, 2 multiplies."""
    boards = [FakeBoard(rank=rank) for rank in range(4)]
    for rank, peer in ((0, 1), (3, 1), (1, 2)):
        for cta in range(4):
            boards[rank].tile(cta, 8 + cta)
            boards[rank].wait(cta, 8 + cta, peer, 0)
    for cta in range(4):
        boards[2].tile(cta, cta)
    return boards


def test_the_chain_ends_at_the_first_suspect() -> None:
    """Who waits for nobody and is waited for through others is named first."""
    found = blame(read_board(board.words) for board in chain())

    assert found.waits == {0: (1,), 1: (2,), 2: (), 3: (1,)}
    assert found.suspects == (2,)
    check_golden("progress_chain.txt", "\n".join(found.lines) + "\n")


def test_a_rank_without_a_board_can_be_the_suspect() -> None:
    """A dead rank may have left no file."""
    found = blame([read_board(chain()[1].words)])

    assert found.suspects == (2,)
    assert found.lines[-1] == "rank 1 waits for rank 2; no board of rank 2 was given"


def test_a_circle_has_no_suspect() -> None:
    """Ranks that wait for each other are named together."""
    boards = chain()
    boards[2].wait(0, 0, 0, 0)

    found = blame(read_board(board.words) for board in boards)

    assert found.suspects == ()
    assert found.lines[0] == "no first suspect: ranks 0, 1, 2, 3 wait in a circle"


def test_two_boards_of_one_rank_are_refused() -> None:
    """Boards of different jobs do not make a chain."""
    with pytest.raises(ValueError, match="two of these boards are of rank 0"):
        blame([read_board(FakeBoard().words)] * 2)


def test_done_tiles_are_counted_from_the_tiles_in_hand() -> None:
    """Every CTA takes every n-th tile; CTAs that only copy take none."""
    board = FakeBoard(ctas=5, tiles=16)
    board.tile(0, 1, role=1)
    assert tiles_done(read_board(board.words)) == 0

    board.tile(1, 8)  # has done 0 and 4
    board.tile(2, 1)  # has done none
    board.done(3)  # has done 2, 6, 10, 14
    board.wait(4, 7, 2, 0, state=GAVE_UP)
    board.done(4)  # has done 3, and stopped at 7

    assert tiles_done(read_board(board.words)) == 7


def test_what_does_not_fit_is_not_counted() -> None:
    """A tile that its CTA cannot have in hand, or an operator without tiles: no number instead of a wrong one."""
    board = FakeBoard(ctas=4)
    board.tile(0, 3)

    assert tiles_done(read_board(board.words)) is None
    assert tiles_done(read_board(FakeBoard("meet").words)) is None


def test_ranges() -> None:
    """Neighbours are joined, and a long list is cut with its length told."""
    assert ranges([3, 1, 2, 40]) == "1-3,40"
    assert ranges(range(0, 40, 2)) == "0,2,4,6,8,10,... 20 in all"
