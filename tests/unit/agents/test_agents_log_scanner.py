# SPDX-License-Identifier: Apache-2.0
"""A log is followed as it grows, is cut, is replaced, and whatever is written into it."""

import os
from pathlib import Path

from megascale_agents.ranks import stderr_scanner
from megascale_agents.ranks.stderr_scanner import LogScanner

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step()
ValueError: loss is not finite
"""
PEER_TRACEBACK = """[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]:     loss.backward()
[rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:4242
"""


def append(path: Path, text: str) -> None:
    """Write more."""
    with path.open("a") as file:
        file.write(text)


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    """A line is judged once, however often is looked, also when it comes in two pieces."""
    log = tmp_path / "stderr.log"
    scanner = LogScanner(str(log))

    assert scanner.poll_stderr() == stderr_scanner.Look()  # not there yet
    append(log, "Segmentation")
    assert scanner.poll_stderr().matched == ()
    append(log, " fault\n")
    assert scanner.poll_stderr().matched == ("segfault",)
    assert scanner.poll_stderr().matched == ()
    assert [words.pattern for words in scanner.last_words] == ["segfault"]


def test_the_line_that_ends_a_traceback_is_the_last_word(tmp_path: Path) -> None:
    """The traceback's other lines say nothing; its end is a cause and is told as new once."""
    log = tmp_path / "stderr.log"
    log.write_text(TRACEBACK)
    scanner = LogScanner(str(log))

    look = scanner.poll_stderr()
    append(log, TRACEBACK)
    again = scanner.poll_stderr()

    assert look.matched == ("exception",)
    assert look.new_cause
    assert again.matched == ("exception",)
    assert not again.new_cause
    assert scanner.last_words[0].line == "ValueError: loss is not finite"
    assert scanner.last_words[0].fault == "exception"


def test_a_survivors_traceback_is_a_consequence(tmp_path: Path) -> None:
    """A rank whose peer died writes a traceback too; it is no cause and not urgent."""
    log = tmp_path / "stderr.log"
    log.write_text(PEER_TRACEBACK)
    scanner = LogScanner(str(log))

    look = scanner.poll_stderr()

    assert look.matched == ("gloo_peer_closed",)
    assert not look.new_cause
    assert scanner.last_words[0].fault == "peer_lost"


def test_words_carry_their_age(tmp_path: Path) -> None:
    """The steps that the rank had made, and whether a hundred lines came since; a newer line begins anew."""
    log = tmp_path / "stderr.log"
    scanner = LogScanner(str(log), None, lambda: 7)
    append(log, "free(): invalid pointer\n" + "reads a shard\n" * 100)
    scanner.poll_stderr()
    (young,) = scanner.last_words

    append(log, "reads a shard\n")
    scanner.poll_stderr()
    (old,) = scanner.last_words
    append(log, "free(): invalid pointer\n")
    scanner.poll_stderr()

    assert (young.steps_seen, young.stale, old.stale) == (7, False, True)
    assert not scanner.last_words[0].stale


def test_what_is_caught_or_harmless_is_not_told(tmp_path: Path) -> None:
    """No heartbeat is sent early for a tuner's limit or for a loss that the script survived."""
    log = tmp_path / "stderr.log"
    log.write_text("OutOfMemoryError: out of resource: triton_mm\nfree(): invalid pointer, ignored\n")

    assert LogScanner(str(log)).poll_stderr() == stderr_scanner.Look()


def test_a_new_kind_takes_the_place_of_one_that_is_too_old(tmp_path: Path) -> None:
    """Eight kinds are kept; a long life may have met more."""
    log = tmp_path / "stderr.log"
    kinds = [
        "Bus error",
        "Killed",
        "Aborted",
        "free(): invalid",
        "CUDA error: x",
        "NCCL error",
        "[Errno 28]",
        "EADDRINUSE",
    ]
    log.write_text("\n".join([*kinds, "EADDRINUSE", ""]) + "reads a shard\n" * 200)
    scanner = LogScanner(str(log))
    scanner.poll_stderr()

    append(log, "Detected 1 oom_kill event\n")
    scanner.poll_stderr()

    assert len(scanner.last_words) == 8
    assert scanner.last_words[-1].pattern == "oom_killer"


def test_a_line_like_an_exception_outside_of_a_traceback_means_nothing(tmp_path: Path) -> None:
    """Programs print ``Name: text`` all the time."""
    log = tmp_path / "stderr.log"
    log.write_text("Epoch: 3\nloss\nValueError: caught and handled\n")

    assert LogScanner(str(log)).poll_stderr().matched == ()


def test_the_newest_two_hundred_lines_are_kept(tmp_path: Path) -> None:
    """The end of a log is what a person wants; a line without its end belongs to it."""
    log = tmp_path / "stderr.log"
    log.write_text("".join(f"line {n}\n" for n in range(500)) + "unfinished")
    scanner = LogScanner(str(log))

    scanner.poll_stderr()

    tail = scanner.tail()
    assert len(tail) == stderr_scanner.KEPT_LINES
    assert tail[0] == "line 301"
    assert tail[-2:] == ["line 499", "unfinished"]


def test_long_lines_and_progress_bars_are_bounded(tmp_path: Path) -> None:
    """A progress bar that draws over itself for an hour is one short line; a dump of a tensor is cut."""
    log = tmp_path / "stderr.log"
    log.write_text("\r".join(f"{n}%" for n in range(1000)) + "\n" + "x" * 50_000 + "\n")
    scanner = LogScanner(str(log))

    scanner.poll_stderr()

    assert scanner.lines[0] == "999%"
    assert len(scanner.lines[1]) == 1000


def test_a_log_that_grows_too_fast_is_followed_at_its_end(tmp_path: Path) -> None:
    """What is passed over is counted, and last words at the end are still found."""
    log = tmp_path / "stderr.log"
    log.write_bytes(b"noise noise noise\n" * 200_000 + b"Segmentation fault\n")
    scanner = LogScanner(str(log))

    look = scanner.poll_stderr()

    assert look.skipped_bytes > 3_000_000
    assert "segfault" in look.matched


def test_a_truncated_log_is_read_from_its_start(tmp_path: Path) -> None:
    """``> stderr.log`` by hand does not blind the agent."""
    log = tmp_path / "stderr.log"
    log.write_text("old old old old old\n")
    scanner = LogScanner(str(log))
    scanner.poll_stderr()

    log.write_text("Bus error\n")

    assert scanner.poll_stderr().matched == ("segfault",)


def test_what_is_no_file_is_never_read(tmp_path: Path) -> None:
    """What stands in a pipe belongs to who reads it; it has no end that could be asked for, and that is no failure."""
    pipe = tmp_path / "stderr.log"
    os.mkfifo(pipe)
    scanner = LogScanner(str(pipe))
    assert scanner.poll_stderr() is stderr_scanner.NOTHING_NEW

    writer = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    os.write(writer, b"Bus error\n")
    seen = scanner.poll_stderr()
    left = os.read(writer, 100)
    os.close(writer)
    scanner.close()

    assert (seen, left) == (stderr_scanner.NOTHING_NEW, b"Bus error\n")


def test_a_rotated_log_is_followed_to_the_new_file(tmp_path: Path) -> None:
    """Log rotation renames the file and makes a new one; its start is read."""
    log = tmp_path / "stderr.log"
    log.write_text("before\n")
    scanner = LogScanner(str(log))
    scanner.poll_stderr()

    log.rename(tmp_path / "stderr.log.1")
    log.write_text("Segmentation fault\n")
    scanner.follow()

    assert scanner.poll_stderr().matched == ("segfault",)
    assert list(scanner.lines) == ["before", "Segmentation fault"]


def test_bytes_that_are_no_text_are_read(tmp_path: Path) -> None:
    """Binary noise in a log is no error."""
    log = tmp_path / "stderr.log"
    log.write_bytes(os.urandom(10_000) + b"\nSegmentation fault\n")

    assert "segfault" in LogScanner(str(log)).poll_stderr().matched


def test_kinds_of_last_words_are_bounded(tmp_path: Path) -> None:
    """A heartbeat carries at most eight kinds for each rank."""
    log = tmp_path / "stderr.log"
    log.write_text(
        "Segmentation fault\nKilled\nAborted\nCUDA error: x\nncclSystemError\nNo space left on device\n"
        "std::bad_alloc\nXid (PCI:0000:3b:00): 79\nOut of memory: Killed process 1\ninsufficient shared memory (shm)\n"
    )
    scanner = LogScanner(str(log))

    scanner.poll_stderr()

    assert len(scanner.last_words) == 8


def test_last_words_carry_no_control_characters_and_few_bytes(tmp_path: Path) -> None:
    """Colours and other scripts must not make a heartbeat larger than its receiver takes."""
    log = tmp_path / "stderr.log"
    log.write_text("\x1b[31mSegmentation fault " + "\x01" * 400 + "\nKilled\nCUDA error: " + "\u00fc" * 400 + "\n")
    scanner = LogScanner(str(log))

    scanner.poll_stderr()

    for words in scanner.last_words:
        assert words.line.isprintable()
        assert len(words.line.encode()) <= 300
