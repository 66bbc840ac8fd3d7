# SPDX-License-Identifier: Apache-2.0
"""What a rank said last is told though its log took nothing: from memory, with what is wrong with the log."""

import errno
import os
import sys
from pathlib import Path

import pytest

from megascale_ops.recorder.recording.kept_words import keep_last_words
from megascale_ops.runner.ranks.last_words import last_words
from megascale_ops.schema import environment

PID = 4321
WORDS = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nValueError: it is odd\n'


class Rank:
    """A rank with a log and a folder for what is kept in memory."""

    def __init__(self, folder: Path) -> None:
        self.log, self.boxes = folder / "stderr.log", folder / "boxes"
        self.boxes.mkdir()
        self.log.write_text("")

    def keep(self, words: str, pid: int = PID) -> None:
        """Leave words as the recorder does."""
        (self.boxes / "0.words").write_text(f"{pid}\n{words}")

    def said(self, code: int = 1) -> str:
        """Return what the runner hears."""
        return last_words(str(self.log), str(self.boxes), 0, PID, code)


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    """A rank whose log is empty."""
    return Rank(tmp_path)


def _refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def write(_handle: int, _data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_log_that_takes_no_more_is_named_with_what_the_kernel_says(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """In the verdict's words and in the runner's log."""
    _refuse(monkeypatch, number)

    said = rank.said()

    assert f"{rank.log} took no more: [Errno {number}] {os.strerror(number)}" in said
    assert str(rank.log) in caplog.text


def test_what_was_kept_in_memory_stands_for_what_the_log_lacks(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind what the log has, with the reason before it: a verdict looks at the last line."""
    rank.log.write_text("a warning\n")
    rank.keep(WORDS)
    _refuse(monkeypatch, errno.ENOSPC)

    said = rank.said()

    assert said.startswith("a warning\n(the log ")
    assert said.endswith("ValueError: it is odd\n")


def test_a_log_that_was_closed_is_completed_without_blaming_the_disk(rank: Rank) -> None:
    """The script has closed its own stderr: there is room enough."""
    rank.keep(WORDS)

    assert rank.said() == WORDS


@pytest.mark.parametrize("code", [1, -6])
def test_a_log_that_has_all_stays_as_it_is(rank: Rank, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Though the disk is full since: whoever got his words out did not die of that."""
    rank.log.write_text(WORDS)
    rank.keep(WORDS)
    _refuse(monkeypatch, errno.ENOSPC)

    assert rank.said(code) == WORDS


@pytest.mark.parametrize("code", [0, -9])
def test_the_silence_of_a_signal_needs_no_explanation(rank: Rank, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A killed rank says nothing on any disk."""
    _refuse(monkeypatch, errno.ENOSPC)

    assert rank.said(code) == ""


def test_silence_with_room_for_words_stays_silence(rank: Rank) -> None:
    """And nothing is left behind of finding that out."""
    before = sorted(rank.log.parent.iterdir())

    assert rank.said() == ""
    assert sorted(rank.log.parent.iterdir()) == before


def test_words_of_another_process_are_not_this_ones(rank: Rank) -> None:
    """The file of an earlier round may still be there."""
    rank.keep(WORDS, PID + 1)

    assert rank.said() == ""


@pytest.mark.parametrize("made", ["folder", "link", "noise", "nothing"])
def test_what_stands_in_its_place_is_passed_over(rank: Rank, made: str) -> None:
    """Anybody of this user may make names there."""
    path = rank.boxes / "0.words"
    if made == "folder":
        path.mkdir()
    elif made == "link":
        path.symlink_to(rank.log)
    elif made == "noise":
        path.write_bytes(bytes(range(256)))

    assert rank.said() == ""


def test_a_process_that_dies_of_an_exception_leaves_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the hook that was there before, and with its own number."""
    seen: list[str] = []
    monkeypatch.setenv(environment.BOX_DIR, str(tmp_path))
    monkeypatch.setattr(sys, "excepthook", lambda kind, _error, _trace: seen.append(kind.__name__))
    keep_last_words(3)
    error = ValueError("odd \ud800")

    sys.excepthook(ValueError, error, None)

    number, _, text = (tmp_path / "3.words").read_text().partition("\n")
    assert (int(number), seen) == (os.getpid(), ["ValueError"])
    assert text.startswith("ValueError: odd ")


def test_where_nothing_can_be_kept_the_script_dies_as_it_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No word of ours where there is no room for it."""
    monkeypatch.setenv(environment.BOX_DIR, str(tmp_path / "gone"))
    monkeypatch.setattr(sys, "excepthook", lambda *_three: None)
    keep_last_words(3)

    sys.excepthook(ValueError, ValueError("odd"), None)

    assert capsys.readouterr().err == ""
