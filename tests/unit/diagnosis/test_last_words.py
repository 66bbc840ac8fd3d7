# SPDX-License-Identifier: Apache-2.0
"""Which of a rank's words speak for its end: what was caught and what it lived on after do not."""

import signal

import pytest

from megascale_ops.diagnosis.exits.exit_status import signal_of, told_by
from megascale_ops.diagnosis.exits.last_words import STALE_LINES, LineReader, end_of, heard, heard_in, row_of_error
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.progress import LastWords, RankReport

FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
LOST = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:99"
FRAMES = "".join(f"frame #{at}: c10::Error::Error() + 0x{at} (0x7f in libc10.so)\n" for at in range(300))


def _names(text: str) -> list[str]:
    return [one.row.name for one in heard_in(text)]


def _exit(tail: str = "", *, steps_seen: int = 100) -> RankExit:
    return RankExit(0, 0, 9, -signal.SIGABRT, 0.0, steps_seen=steps_seen, stderr_tail=tail)


def _report(*words: LastWords) -> RankReport:
    return RankReport(0, 0, 9, 1, last_words=words)


@pytest.mark.parametrize(
    ("after", "counts"),
    [
        ("", True),
        ("saving what there is\n" * STALE_LINES, True),
        ("reads the next shard\n" * (STALE_LINES + 1), False),
        (FRAMES, True),
        ("wandb:   loss 2.31\n" * 300, True),
        ("step 11 loss 2.3\n", True),
        ("step 11 loss 2.3\nstep 12 loss 2.2\n", False),
        ("  3%|3  | 30/1000 [00:10<00:00, 9.9it/s]\n  4%|4  | 40/1000 [00:11<00:00, 9.9it/s]\n", True),
    ],
    ids=["last", "few-lines", "many-lines", "stack", "summary", "one-step", "two-steps", "indented-bars"],
)
def test_words_age_by_what_came_after_them(after: str, *, counts: bool) -> None:
    """A stack and a tracker's summary belong to the end; a hundred other lines, or progress, do not."""
    assert _names(f"{FULL}\n{after}") == (["cuda_out_of_memory"] if counts else [])


@pytest.mark.parametrize(
    "line",
    [
        f"WARNING {LOST} (caught, retrying)",
        f"WARNING {FULL} Skipping this batch.",
        f"{LOST}, ignored",
        f"{FULL} Falling back to a smaller batch",
        f"{LOST}: attempt 2 of 5",
    ],
)
def test_a_line_that_says_that_somebody_goes_on_never_counts(line: str) -> None:
    """However near to the end it stands."""
    assert _names(line) == []


def test_the_words_before_a_long_stack_are_kept() -> None:
    """Three hundred frames would fill what a runner tells of an end."""
    text = f"what():  CUDA error: unspecified launch failure\n{FRAMES}[rank3]: {FRAMES}"

    assert end_of(text, 4000) == "what():  CUDA error: unspecified launch failure\n"
    assert end_of("x" * 5000, 4000) == "x" * 4000


def test_a_watchdogs_catch_is_none() -> None:
    """Torch says "caught" of a time-out over which it ends the process."""
    assert _names("[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=17)") == ["nccl_timeout"]


def test_what_python_ignores_is_no_last_word() -> None:
    """An exception in a destructor is printed and ends nothing; the same one raised does."""
    raised = 'Traceback (most recent call last):\n  File "x", line 1, in f\nMemoryError: x\n'

    assert _names("Exception ignored in: <function f at 0x7f>\n" + raised) == []
    assert _names(raised) == ["host_out_of_memory"]


def test_steps_since_make_an_agents_word_too_old() -> None:
    """Two steps: the one in which it was written may still have ended."""
    for seen, counts in ((100, True), (99, True), (98, False), (-1, True)):
        word = LastWords("gloo_peer_closed", "peer_lost", LOST, seen)

        assert bool(heard(_exit(), _report(word))) == counts
        assert bool(heard(_exit(f"{LOST}\n"), _report(word))) == counts


def test_a_newer_line_of_the_same_kind_counts_by_itself() -> None:
    """The agent has told the old one; the runner reads another one at the end."""
    old = LastWords("gloo_peer_closed", "peer_lost", LOST, 3)

    (found,) = heard(_exit(f"{LOST[:-2]}41\n"), _report(old))

    assert found.line.endswith("41")


def test_what_the_agent_calls_stale_does_not_count() -> None:
    """It has read the hundred lines that the runner's 4,000 bytes do not hold."""
    assert heard(_exit(), _report(LastWords("disk_full", "disk_full", "x", stale=True))) == []


def test_of_several_lines_of_an_exception_the_first_row_of_the_table_counts() -> None:
    """NCCL's last error stands below its general words."""
    text = "NCCL error in: x.cpp:1\nncclUnhandledCudaError: x\nLast error:\nCuda failure 2 'out of memory'"

    assert row_of_error("torch.distributed.DistBackendError", text).fault == "out_of_memory"


@pytest.mark.parametrize(
    ("code", "number"),
    [(-9, 9), (137, 9), (139, 11), (143, 15), (134, 6), (1, 0), (127, 0), (129, 0), (255, 0), (0, 0)],
)
def test_a_shells_code_tells_of_a_signal(code: int, number: int) -> None:
    """128 + N for the signals that end programs; any other code is the program's own."""
    assert signal_of(code) == number
    assert bool(told_by(code)) == (code > 0 and number > 0)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('  File "/x/attention.py", line 77, in forward\n    assert q\nAssertionError\n', ["assertion"]),
        ("    raise Exception(\nException: the scale is at its least\n", ["exception"]),
        # A stack that somebody printed, and went on: what follows is no exception.
        ('  File "/x/attention.py", line 77, in forward\n    y = f(x)\nINFO: shapes are printed\n', []),
        ('  File "/x/attention.py", line 77 in forward\nDone\n', []),
        ("    raised two flags\nException: none\n", []),
    ],
)
def test_a_traceback_is_known_without_its_beginning(text: str, names: list[str]) -> None:
    """A tail is cut anywhere, and ranks write into each other."""
    assert _names(text) == names


def test_a_traceback_that_a_logger_folded_into_one_line_is_unfolded() -> None:
    """Loggers of JSON and of key=value pairs escape its line ends."""
    trace = 'Traceback (most recent call last):\\n  File \\"t.py\\", line 3, in f\\n    g()\\n'
    full = trace + 'torch.OutOfMemoryError: CUDA out of memory.", "rank": 3}'
    caught = trace + 'ValueError: no row", "action": "retrying"}'

    assert _names('{"level": "error", "exc_info": "' + full + "\n") == ["cuda_out_of_memory"]
    assert _names('level=error msg="' + caught + "\n") == ["exception"]
    assert _names('{"event": "a path C:\\new", "note": "no Traceback here"}\n') == []


@pytest.mark.parametrize(
    "seed", ["a.", "NET/IB : ", '\\"', "nrt_a", "E1234: ", "Traceback (most recent call last):\\n", "File ", "Error"]
)
def test_a_line_of_any_length_is_read(seed: str) -> None:
    """A row of quadratic time would never come to the end of these."""
    assert LineReader().read(seed * (300_000 // len(seed))) is None
