# SPDX-License-Identifier: Apache-2.0
"""A progress board in which any word holds anything is read by the agent and told to a person, or it is none."""

import struct

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from megascale_agents.ranks import tile_boards
from megascale_kernels.progress import describe, read_board
from megascale_kernels.progress.board_format import OPERATORS
from megascale_kernels.progress.text import folds, shows, tiles_done

from megascale_ops.blackbox.boards import BOARD_BYTES, MOST_CTAS, fact_of
from megascale_ops.blackbox.boards import parse as parse_words
from megascale_ops.schema.ranges import encode
from megascale_ops.schema.tiles import TileFact
from tests.fakes.boards import FakeBoard
from tests.fakes.mutations import fuzzed, mutated, stored

# The header, the host's words, and the words of both roles of the first six CTAs.
PLACES = [*range(0, 76, 4), *(128 * line + 4 * word for line in range(1, 7) for word in range(32))]


def boards() -> list[bytes]:
    """One of each operator: some tiles in hand, one wait, one end."""
    found = []
    for operator in OPERATORS[1:]:
        board = FakeBoard(operator, 9, ctas=6, tiles=40)
        board.host(4711, 99)
        for cta in range(4):
            board.tile(cta, cta + 2)
        board.wait(2, 4, peer=3, channel=1, seen=8, since_ns=1_750_000_000_123_456_789)
        board.done(5)
        found.append(struct.pack(f"<{len(board.words)}I", *board.words))
    return found


BOARDS = boards()


def check(data: bytes) -> None:
    """Read it as an agent does and tell it as a tool does."""
    board = tile_boards.parse(data)
    if board is not None:
        assert board.kernel in OPERATORS
        assert board.done is None or 0 <= board.done <= 1
        assert sum(board.waiting.values()) <= 2 * MOST_CTAS
    known = parse_words(data)
    assert (known is None) or len(data) >= BOARD_BYTES
    if known is not None:
        fact = fact_of(known, 4)
        raw, changed = encode(fact)
        assert not changed, "a receiver takes whatever a board says"
        assert msgspec.json.decode(raw, type=TileFact) == fact
    words = struct.unpack(f"<{len(data) // 4}I", data[: len(data) // 4 * 4])
    try:
        view = read_board(words)
    except ValueError as error:
        told = str(error)
    else:
        done = tiles_done(view)
        assert done is None or done >= 0
        folds(view)
        told = "\n".join((describe(view, 2_000_000_000_000_000_000), describe(view), shows(view)))
    assert told.replace("\n", "").isprintable()
    assert len(told) < 200_000


@fuzzed
@given(data=st.sampled_from(BOARDS).flatmap(lambda whole: stored(whole, PLACES)))
def test_a_board_whose_words_hold_anything_is_told(data: bytes) -> None:
    """Shares lie between none and all, peers are counted, texts stay short."""
    check(data)


@fuzzed
@given(data=mutated(BOARDS, PLACES))
def test_a_board_that_was_cut_or_overwritten_is_told_or_refused(data: bytes) -> None:
    """Nothing is read beyond its end."""
    check(data)


def test_what_is_whole_is_read() -> None:
    """Negative control: every board of the corpus is one."""
    for data in BOARDS:
        board = tile_boards.parse(data)

        assert board is not None
        assert board.waiting
        check(data)
