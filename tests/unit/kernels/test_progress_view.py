# SPDX-License-Identifier: Apache-2.0
"""A board is read word by word, without belief that any two belong together."""

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megascale_kernels.progress import blame, describe, read_board, writer_lives
from megascale_kernels.progress.board_format import ARRIVED, DONE, GAVE_UP, MAX_CTAS, PROGRESS_MAGIC, PROGRESS_WORDS
from megascale_kernels.progress.view import Wait, process_started

from tests.fakes.boards import FakeBoard


def role_of(board: FakeBoard, cta: int = 0, role: str = "compute") -> tuple[str, int | None, Wait | None]:
    """State, tile and wait of one role."""
    found = next(one for one in read_board(board.words).roles if (one.cta, one.role) == (cta, role))
    return found.state, found.tile, found.wait


def test_the_header_says_what_runs() -> None:
    """Operator, launch, rank and sizes come from the header."""
    board = FakeBoard("gemm_rs", 9, rank=3, world_size=8, ctas=132, tiles=1792)

    view = read_board(board.words)

    assert (view.operator, view.launch, view.rank, view.world_size) == ("gemm_rs", 9, 3, 8)
    assert (view.ctas, view.tiles, view.m, view.n, view.k, view.slot) == (132, 1792, 2048, 7168, 8192, 1)
    assert view.roles == ()


def test_a_tile_in_hand_and_an_end() -> None:
    """A role runs with a tile in hand until it is done; the state word of an earlier launch means nothing."""
    board = FakeBoard()
    board.tile(0, 0)
    board.words[33] = DONE
    board.done(1, sm=99)

    view = read_board(board.words)

    assert [(one.state, one.tile, one.sm) for one in view.roles] == [("running", 0, None), ("done", None, 99)]


def test_a_wait_is_told_in_full() -> None:
    """Who waits for whom, for what, and since when."""
    board = FakeBoard()
    board.tile(2, 6)
    board.wait(2, 6, peer=3, channel=1, seen=39, since_ns=1_750_000_000_123_456_789)

    found = role_of(board, 2)

    assert found == ("waiting", 6, Wait(6, 3, 1, 41, 39, mismatch=False, since_ns=1_750_000_000_123_456_789))


@pytest.mark.parametrize(
    ("state", "launch", "told"),
    [
        (ARRIVED, 41, "running"),
        (GAVE_UP, 41, "gave up"),
        (GAVE_UP, 39, "running"),
        (2, 39, "running"),
        (77, 41, "running"),
    ],
)
def test_a_state_word_counts_for_its_own_launch_only(state: int, launch: int, told: str) -> None:
    """What a role waited for in an earlier launch is not news."""
    board = FakeBoard()
    board.tile(0, 4)
    board.wait(0, 4, 2, 0, state=state, launch=launch)

    assert role_of(board)[0] == told


def test_who_gave_up_stays_known_after_the_end() -> None:
    """A kernel that gave up returns: its role is over, and the wait that it gave up on is still told."""
    board = FakeBoard()
    board.wait(0, 4, 2, 1, state=GAVE_UP)
    board.done(0)

    state, tile, wait = role_of(board)

    assert (state, tile) == ("gave up", None)
    assert wait is not None
    assert (wait.tile, wait.peer) == (4, 2)


def test_a_role_that_has_ended_and_waits_is_told_as_waiting() -> None:
    """Two warpgroups share a role: one has no work left while the other still waits for a peer."""
    board = FakeBoard()
    board.wait(0, 4, 2, 1)
    board.done(0)

    state, tile, wait = role_of(board)

    assert (state, tile) == ("waiting", None)
    assert wait is not None
    assert (wait.tile, wait.peer) == (4, 2)
    board.wait(0, 4, 2, 1, state=ARRIVED)
    assert role_of(board)[0] == "done"


def test_a_flag_that_just_arrived_is_no_wait() -> None:
    """The word seen is newer than the state word."""
    board = FakeBoard()
    board.tile(0, 4)
    board.wait(0, 4, 2, 0, seen=41)

    assert role_of(board)[0] == "running"


def test_another_signature_is_a_mismatch() -> None:
    """The same launch number with another signature is another operator or other sizes."""
    board = FakeBoard()
    board.tile(0, 4)
    board.wait(0, 4, 2, 0)
    board.words[32 + 6] = 41 << 12 | 0x456

    wait = role_of(board)[2]

    assert wait is not None
    assert wait.mismatch


def test_launches_are_never_mixed() -> None:
    """A word of another launch than the header's says so, across the wrap of its twelve bits too."""
    board = FakeBoard(launch=4096)
    board.tile(0, 5, launch=4095)
    board.tile(1, 5, launch=4096)
    board.tile(2, 5, launch=4097)
    board.wait(0, 5, 2, 0, launch=4095)

    view = read_board(board.words)

    assert [one.state for one in view.roles] == ["earlier launch", "running", "later launch"]
    assert [one.wait for one in view.roles] == [None] * 3
    assert [one.cta for one in view.current] == [1]


def test_ctas_beyond_the_grid_are_not_shown() -> None:
    """A smaller launch leaves the lines of a larger one behind it alone."""
    board = FakeBoard(ctas=2)
    board.tile(1, 1)
    board.tile(2, 2)

    assert [one.cta for one in read_board(board.words).roles] == [1]


def words_to_bytes(words: list[int]) -> bytes:
    """The words as they lie in a file."""
    return struct.pack(f"<{len(words)}I", *words)


def test_a_file_reads_like_its_words(tmp_path: Path) -> None:
    """A file of the words and the words show the same."""
    board = FakeBoard()
    board.tile(3, 7)
    (tmp_path / "board").write_bytes(words_to_bytes(board.words))

    assert read_board(tmp_path / "board") == read_board(board.words)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "it has 0 bytes"),
        (words_to_bytes(FakeBoard().words)[:-1], "it has 32895 bytes"),
        (bytes(4 * PROGRESS_WORDS), "begins with 0x00000000 instead of 0x4d534b31"),
    ],
)
def test_what_is_no_board_says_why(tmp_path: Path, data: bytes, sentence: str) -> None:
    """A short file and a foreign file are refused in one sentence with the name."""
    path = tmp_path / "board"
    path.write_bytes(data)

    with pytest.raises(ValueError, match=sentence) as caught:
        read_board(path)

    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_says_why(tmp_path: Path) -> None:
    """A missing file, a folder and a FIFO are refused without hanging."""
    os.mkfifo(tmp_path / "fifo")

    for path, sentence in (
        (tmp_path / "missing", "No such file"),
        (tmp_path, "not a regular"),
        (tmp_path / "fifo", "not a regular"),
    ):
        with pytest.raises(ValueError, match=sentence):
            read_board(path)


def test_the_writer_is_known_by_its_start() -> None:
    """A process number alone could have been given away again."""
    board = FakeBoard()
    assert writer_lives(read_board(board.words)) is None

    board.host(os.getpid(), process_started(os.getpid()) or 0)
    assert writer_lives(read_board(board.words)) is True

    board.host(os.getpid(), (process_started(os.getpid()) or 0) + 1)
    assert writer_lives(read_board(board.words)) is False


SMALL = st.integers(0, 5) | st.integers(0, 0xFFFFFFFF)


@settings(max_examples=60, deadline=None)
@given(st.lists(SMALL, min_size=31, max_size=31), st.lists(st.tuples(st.integers(32, 300), SMALL), max_size=60))
def test_garbage_is_shown_and_never_crashes(header: list[int], words: list[tuple[int, int]]) -> None:
    """Whatever stands behind the magic number, board, text and blame come out."""
    board = [PROGRESS_MAGIC, *header, *[0] * (PROGRESS_WORDS - 32)]
    for at, word in words:
        board[at] = word

    view = read_board(board)

    assert all(one.cta < MAX_CTAS for one in view.roles)
    assert describe(view, 10**18).startswith(f"rank {view.rank} of")
    assert blame([view]).lines


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 0xFFFFF),
    st.dictionaries(
        st.integers(0, 20), st.tuples(st.integers(0, 0xFFFF0), st.integers(0, 7), st.booleans()), min_size=1
    ),
)
def test_what_is_written_is_read(launch: int, tiles: dict[int, tuple[int, int, bool]]) -> None:
    """Every tile and every wait of the launch comes back."""
    board = FakeBoard(launch=launch, ctas=21)
    for cta, (tile, peer, waits) in tiles.items():
        board.tile(cta, tile)
        if waits:
            board.wait(cta, tile, peer, 3, since_ns=tile << 33 | 1)

    view = read_board(board.words)

    assert {one.cta: one.tile for one in view.current} == {cta: tile for cta, (tile, _, _) in tiles.items()}
    waits = {one.cta: (one.wait.peer, one.wait.since_ns) for one in view.roles if one.wait is not None}
    assert waits == {cta: (peer, tile << 33 | 1) for cta, (tile, peer, does) in tiles.items() if does}
