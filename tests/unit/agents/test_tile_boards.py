# SPDX-License-Identifier: Apache-2.0
"""The agent reads the kernels' progress boards as the kernels' own reader does, and finds them by their process."""

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megascale_agents.counters import Tally
from megascale_agents.metrics import page
from megascale_agents.ranks.rounds import Rounds
from megascale_agents.ranks.tile_boards import Board, Boards, parse, start_of
from megascale_kernels.progress import board_format, publish
from megascale_kernels.progress.text import tiles_done
from megascale_kernels.progress.view import BOARD_BYTES, process_started, read_board

from megascale_ops.blackbox import boards as tile_boards
from megascale_ops.exposition import encoded
from megascale_ops.schema import environment
from tests.fakes.boards import FakeBoard
from tests.fakes.node import FakeNode
from tests.fakes.scraped import samples, values


def packed(board: FakeBoard) -> bytes:
    """Return a board as bytes."""
    return struct.pack(f"<{len(board.words)}I", *(word & 0xFFFFFFFF for word in board.words))


def put(path: Path, board: FakeBoard) -> None:
    """Write a board as its owner does: whole pages, renamed into place."""
    beside = path.with_suffix(".beside")
    beside.write_bytes(packed(board).ljust(36864, b"\0"))
    beside.rename(path)


def own(board: FakeBoard, pid: int) -> FakeBoard:
    """Say that a living process made it."""
    board.host(pid, process_started(pid) or 0)
    return board


def test_the_map_is_that_of_the_kernels() -> None:
    """The agent imports no kernels, so it has the numbers by itself."""
    assert tile_boards.MAGIC == board_format.PROGRESS_MAGIC
    assert tile_boards.OPERATORS == board_format.OPERATORS
    assert tile_boards.BOARD_BYTES == BOARD_BYTES
    assert (tile_boards.MOST_CTAS, tile_boards.LINE_BYTES) == (board_format.MAX_CTAS, board_format.LINE * 4)
    assert (tile_boards.ROLE_BYTES, tile_boards.HOST_BYTE) == (board_format.ROLE_WORDS * 4, board_format.HOST_WORD * 4)
    assert (tile_boards.TILE_BITS, tile_boards.SIGNATURE_BITS) == (board_format.TILE_BITS, board_format.SIGNATURE_BITS)
    assert (tile_boards.ALL_TILES_DONE, tile_boards.WAITING) == (board_format.ALL_TILES_DONE, board_format.WAITING)
    assert tile_boards.GAVE_UP == board_format.GAVE_UP
    assert (board_format.HOST_FIELDS, board_format.GROUP_WORD) == (
        ("pid", "started", "copied_s"),
        board_format.HOST_WORD + 3,
    )
    assert board_format.MEMBERS_WORD == board_format.GROUP_WORD + 1
    assert tile_boards.HOST.size == (4 + board_format.MAX_RANKS) * 4
    assert publish.FOLDER_VARIABLE == environment.BOX_DIR


def test_progress_and_who_waits_for_whom() -> None:
    """Four CTAs, 16 tiles: one done, one in its third tile, two that wait for rank 3."""
    board = FakeBoard("ag_gemm")
    board.done(0)
    board.tile(1, 9)
    for cta in (2, 3):
        board.tile(cta, cta)
        board.wait(cta, cta, peer=3, channel=0, seen=40)
    board.wait(1, 9, peer=0, channel=4, seen=40)  # for another part of its tile, from rank 0 itself

    assert parse(packed(board)) == Board("ag_gemm", 6 / 16, {3: 2})


def test_what_an_earlier_launch_left_says_nothing() -> None:
    """Neither its tiles nor its waits."""
    board = FakeBoard("gemm_rs", launch=41)
    board.done(0, launch=40)
    board.tile(1, 5, launch=41)
    board.wait(1, 5, peer=2, channel=0, launch=40)

    assert parse(packed(board)) == Board("gemm_rs", 1 / 16, {})


def test_no_board_and_no_launch_are_nothing() -> None:
    """Short files, others' files, a board before its first launch."""
    assert parse(b"") is None
    assert parse(bytes(BOARD_BYTES)) is None
    assert parse(packed(FakeBoard(launch=0))) is None
    assert parse(packed(FakeBoard("all_gather", 3))) == Board("all_gather", None, {})


_ROLES = st.tuples(
    st.integers(0, 3), st.integers(0, 1), st.sampled_from(["tile", "done", "wait", "gave up", "done waiting"]),
    st.integers(0, 17), st.integers(0, 3), st.sampled_from([40, 41, 42]), st.sampled_from([0, 40, 41]),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(board_format.OPERATORS), st.lists(_ROLES, max_size=10), st.integers(0, 20))
def test_both_readers_say_the_same(
    operator: str, roles: list[tuple[int, int, str, int, int, int, int]], tiles: int
) -> None:
    """Whatever the words are, also those that no kernel would write."""
    board = FakeBoard(operator, 41, tiles=tiles)
    for cta, role, does, tile, peer, launch, seen in roles:
        if does in ("done", "done waiting"):
            board.done(cta, role=role, launch=launch)
        else:
            board.tile(cta, tile, role=role, launch=launch)
        if does != "tile":
            state = board_format.GAVE_UP if does == "gave up" else board_format.WAITING
            board.wait(cta, tile, peer, 0, role=role, state=state, launch=launch, seen=seen)
    theirs = read_board(board.words)
    waiting: dict[int, set[int]] = {}
    for one in theirs.current:
        if one.wait is not None and one.wait.peer != theirs.rank:
            waiting.setdefault(one.wait.peer, set()).add(one.cta)

    ours = parse(packed(board))

    done = tiles_done(theirs)
    assert ours is not None
    assert ours.kernel == theirs.operator
    assert ours.waiting == {peer: len(ctas) for peer, ctas in waiting.items()}
    assert ours.done == (None if done is None or not tiles else done / tiles)


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=4 * 6, max_size=1024), st.integers(0, 2**32 - 1))
def test_whatever_a_board_holds_is_no_error(noise: bytes, launch: int) -> None:
    """Any user may write there: a scrape must not fail for it."""
    head = struct.pack("<4I", board_format.PROGRESS_MAGIC, 0, 4, 3) + struct.pack("<I", launch)
    data = (head + noise * (BOARD_BYTES // len(noise) + 1))[:BOARD_BYTES]

    board = parse(data)

    assert board is None or all(ctas > 0 for ctas in board.waiting.values())


def test_boards_are_found_by_their_process_wherever_they_lie(tmp_path: Path) -> None:
    """In the job's folder or in shared memory; what only looks like one is passed over."""
    shared, job = tmp_path / "shm", tmp_path / "job"
    shared.mkdir()
    job.mkdir()
    first, second = FakeBoard("ag_gemm"), FakeBoard("gemm_rs")
    first.host(7, 70)
    second.host(8, 80)
    put(shared / "any name", first)
    put(job / "0.board", second)
    (shared / "as long").write_bytes(b"x" * 36864)
    (shared / "torch_1").write_bytes(packed(first).ljust(36864, b"\0"))
    (shared / "elsewhere").symlink_to(job / "0.board")
    os.mkfifo(shared / "fifo")

    found = Boards(str(shared)).poll_boards([str(job)])

    assert {key: [board.kernel for board in boards] for key, boards in found.items()} == {
        (7, 70): ["ag_gemm"],
        (8, 80): ["gemm_rs"],
    }
    assert Boards(str(tmp_path / "none")).poll_boards([]) == {}


def test_a_board_that_is_replaced_or_removed_is_seen_to_be(tmp_path: Path) -> None:
    """The next board of a name belongs to the next process."""
    boards = Boards(str(tmp_path))
    old, new = FakeBoard(), FakeBoard()
    old.host(7, 70)
    new.host(8, 80)
    put(tmp_path / "board", old)
    assert list(boards.poll_boards([])) == [(7, 70)]

    put(tmp_path / "board", new)
    after = list(boards.poll_boards([]))
    (tmp_path / "board").unlink()

    assert after == [(8, 80)]
    assert boards.poll_boards([]) == {}


def test_ranks_show_their_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two boards of a kernel the lesser progress and all who wait; a rank without a board shows none."""
    monkeypatch.setattr("megascale_agents.ranks.tile_boards.Boards.__init__.__defaults__", (str(tmp_path / "none"),))
    node = FakeNode(tmp_path)
    node.start_round(2)
    rounds = Rounds(str(node.root), node.node, lambda _: None)
    rounds.refresh(1.0)
    boards = [FakeBoard("ag_gemm"), FakeBoard("ag_gemm")]
    for cta in range(4):
        boards[0].done(cta)
        boards[1].tile(cta, cta)
        boards[1].wait(cta, cta, peer=1, channel=0)
    for name, board in enumerate(boards):
        put(node.job_folder / f"0.{name}.board", own(board, node.children[0].pid))
    collector = page.AgentCollector("node-a", rounds.ranks, lambda: None, Tally("node-a"))

    found = {
        (sample.name, *values(sample)): sample.value
        for sample in samples(encoded(collector.page()).body) if "tile" in sample.name
    }  # fmt: skip
    rounds.close()
    node.kill_all()

    at = ("job", "node-a", "0", "ag_gemm")
    assert found == {
        ("megascale_tile_progress_ratio", *at): 0.0,
        ("megascale_tile_waiting", *at, "1"): 4.0,
    }
    assert start_of(1 << 31 | 5) == 5
