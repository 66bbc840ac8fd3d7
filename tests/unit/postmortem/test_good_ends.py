# SPDX-License-Identifier: Apache-2.0
"""A job that ended well blames nobody, whatever it survived; what only looks like a good end excuses nothing."""

import pytest

from megascale_ops.diagnosis.exits.last_traceback import read
from megascale_ops.diagnosis.exits.last_words import heard_in
from megascale_ops.postmortem.exits import judge_logs
from megascale_ops.postmortem.kernel import faults_in

RAISED = 'Traceback (most recent call last):\n  File "/w/d.py", line 3, in get\n    read()\nOSError: torn record\n'


@pytest.mark.parametrize(
    "sentence",
    [
        "training finished, 1100 steps",
        "Training complete in 44m 12s",
        "`Trainer.fit` stopped: `max_steps=1000` reached.",
        "{'train_runtime': 181.3, 'train_loss': 1.02}",
        "[2026-03-12 10:40:33,004] [INFO] [launch.py:351:main] Process 3101 exits successfully.",
        "PyTorchJob vit is successfully completed.",
    ],
)
def test_what_a_job_survived_blames_nobody(sentence: str) -> None:
    """An error of a rank that went on, in a job that says that it is complete."""
    verdict = judge_logs({0: f"step 900 loss 2.0\n{sentence}\n", 1: f"{RAISED}step 900 loss 2.0\n"})

    assert (verdict.fault, verdict.culprits) == ("unknown", ())
    assert "ended well" in verdict.reason


@pytest.mark.parametrize(
    ("of_0", "of_1", "launchers"),
    [
        ("step 9 loss 2\nwaits until training is finished\n", RAISED, ""),  # it is not
        ("step 9 loss 2\ntraining finished\n", RAISED, ""),  # rank 1 did not go on
        ("step 9 loss 2\ntraining finished\n", f"step 8 loss 2\n{RAISED}", ""),
        ("training finished\nConnection closed by remote peer n1<99>\nncclRemoteError: x\n", RAISED, ""),
        ("training finished\n", RAISED, "srun: error: n1: task 1: Exited with exit code 1\n"),
    ],
)
def test_what_only_looks_like_a_good_end_excuses_nothing(of_0: str, of_1: str, launchers: str) -> None:
    """A sentence about another time, a rank that fell silent behind its error, a peer that was lost, a status."""
    verdict = judge_logs({0: of_0, 1: of_1}, launchers)

    assert verdict.culprits == (1,), verdict.reason


@pytest.mark.parametrize(
    ("behind", "is_end"),
    [
        ("WARNING:root:skipped 1 of 40960 samples", False),
        ("read failed, attempt 2 of 5", False),
        ("falling back to the local copy", False),
        ("read failed, giving up after attempt 5 of 5", True),
        ("retries exhausted, attempt 5/5", True),
        ("too many errors, no sample was skipped this often", True),
        ("Sending process 71 closing signal SIGTERM", True),
    ],
)
def test_the_line_behind_an_error_says_whether_the_program_goes_on(behind: str, is_end: bool) -> None:
    """Where it skips, tries again or falls back, the error was survived; where no try is left it was not."""
    text = f"{RAISED}{behind}\n"

    assert (read(text) is not None) is is_end
    assert any(one.row.fault == "exception" for one in heard_in(text)) is is_end


@pytest.mark.parametrize(("level", "is_end"), [("WARNING", False), ("warn", False), ("ERROR", True), ("INFO", True)])
def test_a_warning_with_a_traceback_folded_into_it_ended_nothing(level: str, is_end: bool) -> None:
    """Shippers call all of a container's output "info", so that alone excuses nothing."""
    folded = RAISED.replace("\n", "\\n").replace('"', '\\"')

    text = f'{{"level": "{level}", "msg": "read failed", "exc": "{folded}"}}\n'

    assert (read(text) is not None) is is_end
    assert bool(heard_in(text)) is is_end


@pytest.mark.parametrize(
    ("number", "is_fault"), [(63, False), (92, False), (48, True), (64, True), (79, True), (45, True)]
)
def test_an_xid_of_what_was_mended_is_no_fault(number: int, is_fault: bool) -> None:
    """A row that was remapped, many corrected errors; not an error that could not be corrected, nor a lost GPU."""
    line = f"[Wed Jun  3 12:41:55 2026] NVRM: Xid (PCI:0000:17:00): {number}, pid=8112, name=python3, words"

    assert bool(faults_in(line)) is is_fault


LOGGED = "ERROR:root:could not send metrics\n"


@pytest.mark.parametrize(
    ("of_1", "launchers", "culprits"),
    [
        (f"{LOGGED}{RAISED}step 20 loss 2.0\n", "", ()),
        (f"{RAISED}step 20 loss 2.0\n", "", (1,)),  # what a process has in its buffer comes behind its last words
        (f"{LOGGED}{RAISED}", "", (1,)),
        (f"{LOGGED}{RAISED}step 20 loss 2.0\n", "W0 api.py:900] Sending process 7 closing signal SIGTERM\n", (1,)),
        (f"{LOGGED}{RAISED}step 20 loss 2.0\n{RAISED}", "", (1,)),
    ],
)
def test_what_a_logger_recorded_was_survived_where_the_rank_went_on(
    of_1: str, launchers: str, culprits: tuple[int, ...]
) -> None:
    """By a step behind it, and where nothing tells that ranks were stopped."""
    verdict = judge_logs({0: "step 20 loss 2.0\n", 1: of_1}, launchers)

    assert verdict.culprits == culprits, verdict.reason


@pytest.mark.parametrize(
    ("above", "is_end"),
    [
        ("ERROR:asyncio:Task exception was never retrieved\nfuture: <Task finished name='T-9' coro=<x()>>\n", False),
        ("Exception ignored in: <function _Iter.__del__ at 0x7f>\n", False),
        ("Exception in thread Thread-4 (_run):\n", True),
        ("step 9 loss 2.0\n", True),
    ],
)
def test_what_python_only_reports_ended_nothing(above: str, is_end: bool) -> None:
    """Of a coroutine that nobody waited for, or of a destructor."""
    text = f"{above}{RAISED}"

    assert (read(text) is not None) is is_end
    assert bool(heard_in(text)) is is_end
