# SPDX-License-Identifier: Apache-2.0
"""How several ranks share one output: whole lines, live bars, prompts that stay."""

import random

import pytest

from megascale_ops.runner.output.screen_line import ScreenLine


def shown(line: ScreenLine, *words: tuple[int, bytes], now_s: float = 0.0) -> bytes:
    """Return what is written when ranks say ``words`` in turn, all at once."""
    return b"".join(line.show(rank, b"[%d] " % rank, said, now_s) for rank, said in words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([(0, b"a\nb\n"), (1, b"c\n")], b"[0] a\n[0] b\n[1] c\n"),
        ([(0, b"\n\n")], b"[0] \n[0] \n"),
        ([(0, b"name: "), (0, b"thanks\n")], b"[0] name: thanks\n"),
        ([(0, b"name: "), (1, b"x\n"), (0, b"thanks\n")], b"[0] name: \n[1] x\n[0] thanks\n"),
        ([(0, b"\r10%"), (0, b"\r20%"), (0, b"\n")], b"\r[0] 10%\r[0] 20%\n"),
        ([(0, b"10%\r"), (0, b"20%\r"), (1, b"x\n")], b"[0] 10%\r[0] 20%\r\n[1] x\n"),
        ([(0, b"\r10%"), (1, b"\r30%"), (0, b"\r20%")], b"\r[0] 10%\n\r[1] 30%\n\r[0] 20%"),
        ([(0, b"a\r\nb\r\n")], b"[0] a\r\n[0] b\r\n"),
        ([(0, b"\x00\xff\xc3\n")], b"[0] \x00\xff\xc3\n"),
    ],
)
def test_what_a_pipe_is_given(words: list[tuple[int, bytes]], expected: bytes) -> None:
    """Every byte in order, a prefix where a line begins, a newline where another rank's line stands unfinished."""
    assert shown(ScreenLine(), *words) == expected


def test_a_pipe_is_given_every_byte_of_each_rank() -> None:
    """Whatever is written, in whatever pieces: without prefixes and the newlines between ranks nothing is missing."""
    chance = random.Random(20260131)  # noqa: S311  a test
    for _ in range(200):
        line, said, written = ScreenLine(), {0: b"", 1: b""}, {0: b"", 1: b""}
        for _ in range(30):
            rank = chance.randrange(2)
            words = b"".join(chance.choice([b"x", b"y", b"\n", b"\r", b"\r\n"]) for _ in range(chance.randrange(1, 6)))
            said[rank] += words
            written[rank] += line.show(rank, b"", words, 0.0)

        for rank in (0, 1):
            kept, rest = said[rank], written[rank]
            # What was added is newlines only, each before the rank's own words.
            position = 0
            for byte in rest:
                if position < len(kept) and byte == kept[position]:
                    position += 1
                else:
                    assert byte == ord("\n"), (kept, rest)
            assert position == len(kept), (kept, rest)


def test_a_bar_on_a_terminal_makes_room_for_a_line() -> None:
    """The line stands where the bar was, and the bar's next picture below it."""
    line = ScreenLine(80)

    assert shown(line, (0, b"\r10%"), (1, b"hello\n"), (0, b"\r20%")) == b"\r[0] 10%\r\x1b[K[1] hello\n\r[0] 20%"


def test_a_prompt_on_a_terminal_is_not_wiped_away() -> None:
    """A prompt stays readable when another rank prints."""
    assert shown(ScreenLine(80), (0, b"(Pdb) "), (1, b"hello\n")) == b"[0] (Pdb) \n[1] hello\n"


def test_two_bars_on_a_terminal_do_not_take_turns_on_one_line() -> None:
    """One is drawn; the other's end is shown; it is drawn itself once the first has not moved for a second."""
    line = ScreenLine(80)

    assert shown(line, (0, b"\r10%"), (1, b"\r30%"), (0, b"\r20%")) == b"\r[0] 10%\r[0] 20%"
    assert shown(line, (1, b"\n")) == b"\r\x1b[K\r[1] 30%\n"
    shown(line, (0, b"\r30%"))
    assert shown(line, (1, b"\r50%"), now_s=5.0) == b"\r\x1b[K\r[1] 50%"


def test_a_bar_as_wide_as_the_terminal_stays_on_its_line() -> None:
    """With a prefix in front it would wrap, and every picture would leave a line behind."""
    assert shown(ScreenLine(20), (0, b"\r" + b"#" * 19)) == b"\r[0] " + b"#" * 15


def test_our_own_lines_begin_on_a_line_of_their_own() -> None:
    """A rank's prompt does not stand before what the runner says."""
    line = ScreenLine()

    asked = shown(line, (0, b"name: "))
    told = line.show("runner", b"", b"rank 1 is silent\n", 0.0)

    assert asked + told == b"[0] name: \nrank 1 is silent\n"
