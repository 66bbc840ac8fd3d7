# SPDX-License-Identifier: Apache-2.0
"""What ended a rank outranks an older exception, which is told with its own step."""

import signal

import pytest

from megascale_ops.diagnosis.exits.classify import Ended
from megascale_ops.diagnosis.exits.first_cause import judge_exits
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.progress import RankError, RankReport

END_S = 100.0
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9"
THREAD = "Thread-1 (upload)"


def _error(
    kind: str = "ValueError", text: str = "harmless", *, step: int = 10, thread: str = THREAD, ago_s: float = 30.0
) -> RankError:
    return RankError(kind, text, "train.py:3 upload", step, thread, END_S - ago_s)


def _judge(
    code: int,
    error: RankError | None,
    *,
    step: int = 40,
    by_us: bool = False,
    words: tuple[str, ...] = (),
    reported: RankError | None = None,
    tail: str = "",
) -> Verdict:
    """Judge rank 1, that ended so; its runner stopped rank 0 then."""
    exit_ = RankExit(
        1, 1, 9, code, END_S, by_us=by_us, step=step, phase="forward", steps_seen=step + 1, error=error,
        last_words=words, stderr_tail=tail,
    )  # fmt: skip
    other = RankExit(0, 0, 8, -signal.SIGTERM, END_S, by_us=True, step=step, phase="forward", steps_seen=step + 1)
    reports = {1: RankReport(1, 1, 9, 3, error=reported)} if reported is not None else {}
    return judge_exits(
        [Ended("n0", exit_, 0.1), Ended("n0", other, 0.0)],
        world_size=2, missing=(), reports=reports, hosts={}, round_=3, wall_s=1e6,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (-signal.SIGKILL, "killed"),
        (-signal.SIGTERM, "killed"),
        (-signal.SIGSEGV, "segfault"),
        (-signal.SIGABRT, "aborted"),
        (3, "exit_code"),
    ],
)
@pytest.mark.parametrize(
    "error",
    [
        _error(),
        _error("BrokenPipeError", "[Errno 32] Broken pipe"),
        _error("MemoryError", ""),
        _error("RuntimeError", GLOO),
        _error(step=-1),
        _error(thread=""),
    ],
)
def test_what_a_rank_survived_is_told_and_blamed_for_nothing(code: int, fault: str, error: RankError) -> None:
    """30 steps after a thread died (or a hook was told of what was caught), the end is what its status says."""
    verdict = _judge(code, error)

    assert (verdict.fault, verdict.culprits, verdict.since_step) == (fault, (1,), 40)
    (told,) = [finding for finding in verdict.evidence if finding.name == "older_error"]
    assert error.type in told.text
    assert ("after step 10" if error.step >= 0 else "before its first step") in told.text
    assert error.type not in verdict.reason


@pytest.mark.parametrize(
    ("code", "error", "fault"),
    [
        (1, _error(step=40, thread=""), "exception"),
        (-signal.SIGKILL, _error(step=40, thread=""), "exception"),  # it was on its way out
        (-signal.SIGABRT, _error(step=40, thread=""), "exception"),
        (1, _error(step=40, ago_s=0.2), "exception"),  # the main thread gave up when its thread had died
        (5, _error(step=40, ago_s=9.0), "exception"),
        (5, _error(step=40, ago_s=11.0), "exit_code"),
        (-signal.SIGKILL, _error(step=40, ago_s=0.2), "killed"),  # Python answers no exception with a signal
        (1, _error("KeyboardInterrupt", "", step=40, thread=""), "killed"),
        (-signal.SIGINT, _error("KeyboardInterrupt", "", step=40, thread=""), "killed"),
    ],
)
def test_what_fits_the_end_is_its_cause(code: int, error: RankError, fault: str) -> None:
    """The negative control: an exception of the main thread, and one of a thread just before a code of its own."""
    assert (_judge(code, error).fault, _judge(code, error).culprits) == (fault, (1,))


def test_an_older_writers_record_counts_as_the_main_threads() -> None:
    """Without a thread and a time only the step tells, and a rank that made none since died of it."""
    old = RankError("ValueError", "x", "train.py:3 f", 40)

    assert _judge(1, old).fault == "exception"
    assert _judge(-signal.SIGKILL, old, step=41).fault == "killed"


def test_a_thread_that_died_before_the_main_thread_is_told_too() -> None:
    """The box shows the newest; its agent had seen the one before."""
    verdict = _judge(1, _error("RuntimeError", "loss is nan", step=40, thread=""), reported=_error())

    assert verdict.reason.startswith("rank 1 on n0: RuntimeError: loss is nan")
    (told,) = [finding.text for finding in verdict.evidence if finding.name == "older_error"]
    assert told == (
        "a thread of rank 1 (Thread-1 (upload)) had met ValueError: harmless at train.py:3 upload after step 10, "
        "30.0 s before; the rank itself went on"
    )


def test_a_rank_that_ended_well_is_no_cause() -> None:
    """Exit status 0 and a thread that had died: it left early, and says so."""
    exits = [
        RankExit(1, 1, 9, 0, END_S, step=40, phase="forward", steps_seen=41, error=_error(step=40, ago_s=0.1)),
        RankExit(0, 0, 8, 1, END_S, step=40, error=RankError("RuntimeError", GLOO, step=40)),
    ]

    verdict = judge_exits(
        [Ended("n0", one, 0.1) for one in exits],
        world_size=2, missing=(), reports={}, hosts={}, round_=3, wall_s=1e6,
    )  # fmt: skip

    assert (verdict.fault, verdict.culprits) == ("exited_early", (1,))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("BrokenPipeError", "[Errno 32] Broken pipe"),
        ("urllib.error.URLError", "<urlopen error [Errno 111] Connection refused>"),
        ("requests.exceptions.ConnectionError", "Failed to connect: Connection reset by peer"),
        ("TimeoutError", "Timed out waiting for lock"),
    ],
)
def test_a_scripts_own_connection_makes_no_victim(kind: str, text: str) -> None:
    """Any library speaks of refused connections; only torch's own exceptions mean a peer by it."""
    verdict = _judge(1, _error(kind, text, step=40, thread=""))

    assert (verdict.fault, verdict.culprits) == ("exception", (1,))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("RuntimeError", "Connection refused"),
        ("torch.distributed.DistNetworkError", "failed to connect to n0:29500"),
        ("train.StepFailed", f"step 40 failed (from RuntimeError: {GLOO})"),
        ("RuntimeError", "[Rank 0]: Ranks 2 failed to pass monitoredBarrier in 6000 ms"),
    ],
)
def test_torchs_connections_do(kind: str, text: str) -> None:
    """The negative control: a peer's death reads so in torch, also where the script wraps it."""
    assert _judge(1, _error(kind, text, step=40, thread="")).fault == "unknown"


def test_what_a_script_caught_and_printed_is_not_what_ended_it() -> None:
    """With a black box that holds no exception, a traceback in the output was caught; the code is the script's own."""
    verdict = _judge(3, None, words=("exception",), tail="ValueError: retried\ngiving up: no data left\n")

    assert verdict.fault == "exit_code"
    assert "it last wrote: giving up: no data left" in verdict.reason


def test_last_words_of_what_was_survived_speak_for_nothing() -> None:
    """A thread's MemoryError in the output does not make a SIGKILL 30 steps later the kernel's."""
    survived = _judge(-signal.SIGKILL, _error("MemoryError", ""), words=("host_out_of_memory",))
    plain = _judge(-signal.SIGKILL, None, words=("host_out_of_memory",))

    assert (survived.fault, plain.fault) == ("killed", "out_of_memory")
