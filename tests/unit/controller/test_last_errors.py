# SPDX-License-Identifier: Apache-2.0
"""A rank whose script has failed and whose process lives on is named by its error, and given a short grace."""

import pytest

from megascale_ops.diagnosis.exits.last_errors import EXIT_S, FAILED_AND_LIVES, GRACE_S, judge_failed
from megascale_ops.diagnosis.hangs.suspicion import Suspicion
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.diagnosis.watchdog import judge, looks_odd
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition, ProcessReading, Progress, RankError, RankReport

GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9"
NOW_S = 100.0


def _error(
    ago_s: float, kind: str = "ValueError", text: str = "bad row", *, step: int = 40, thread: str = ""
) -> RankError:
    return RankError(kind, text, "train.py:5 f", step, thread, NOW_S - ago_s)


def _rank(
    rank: int,
    error: RankError | None = None,
    *,
    moved_ago_s: float = 0.0,
    step: int = 40,
    state: str = "S",
    waits: bool = False,
) -> RankView:
    progress = Progress(
        state="running", step=step, steps_seen=step + 1, phase="forward", moved_mono_s=NOW_S - moved_ago_s,
        beat_mono_s=NOW_S, step_p50_s=0.05, step_p99_s=0.06,
    )  # fmt: skip
    report = RankReport(
        rank, rank, 50 + rank, 1, progress=progress, collective=CollectivePosition(9, 8 if waits else 9, "pg 0"),
        process=ProcessReading(state=state), error=error,
    )  # fmt: skip
    return RankView("n0", report, moved_ago_s, 0.0, 0.0, 0.0)


def _judge(*ranks: RankView) -> Suspicion | None:
    return judge(ranks, JobPolicy(), 1e6)


@pytest.mark.parametrize("waits", [False, True], ids=["asleep", "in-a-barrier-at-exit"])
def test_it_is_named_at_once_by_its_error_and_acted_upon_after_a_grace(waits: bool) -> None:
    """Whatever its process looks like meanwhile, also inside a collective that atexit calls."""
    soon = _judge(_rank(0, waits=True, moved_ago_s=3.0), _rank(1, _error(3.0), moved_ago_s=3.0, waits=waits))
    late = _judge(_rank(0, waits=True, moved_ago_s=16.0), _rank(1, _error(GRACE_S + 1), moved_ago_s=16.0, waits=waits))

    assert soon is not None
    assert late is not None
    assert (soon.lost, soon.held, late.lost) == (False, True, True)
    assert {(one.verdict.fault, one.verdict.culprits, one.verdict.since_step) for one in (soon, late)} == {
        ("exception", (1,), 40)
    }
    assert soon.verdict.reason == (
        "rank 1 on n0: ValueError: bad row at train.py:5 f; its process lives on for 3.0 s: something runs at its exit "
        "(a thread, atexit), for which 15 s are granted"
    )
    assert [finding.name for finding in soon.verdict.evidence] == [FAILED_AND_LIVES]


def test_ranks_that_were_asked_to_end_are_not_accused_of_it() -> None:
    """Ctrl-C raises KeyboardInterrupt in all ranks: while their runner stops them that is no incident."""
    asked = [_rank(rank, _error(20.0, "KeyboardInterrupt", ""), moved_ago_s=20.0) for rank in range(2)]
    stays = _rank(0, _error(41.0, "KeyboardInterrupt", ""), moved_ago_s=41.0)

    suspicion = _judge(stays, _rank(1, waits=True, moved_ago_s=41.0))

    assert judge_failed(asked, 1e6) is None
    assert suspicion is not None
    assert suspicion.verdict.culprits == (0,)


def test_its_class_is_that_of_its_error() -> None:
    """Memory and disks are named as at any end."""
    found = _judge(_rank(0), _rank(1, _error(5.0, "OSError", "[Errno 28] No space left on device")))

    assert found is not None
    assert found.verdict.fault == "disk_full"


def test_of_several_the_cause_comes_before_its_victims() -> None:
    """Rank 0's own exit hangs as well, after rank 1 had left it alone."""
    found = _judge(_rank(0, _error(9.0, "RuntimeError", GLOO)), _rank(1, _error(8.0)))

    assert found is not None
    assert found.verdict.culprits == (1,)


def test_victims_alone_accuse_nobody_before_the_grace_is_over() -> None:
    """The end of the peer they met is told of later than their errors are, on a busy machine."""
    victim = _rank(0, _error(3.0, "RuntimeError", GLOO))

    assert _judge(victim, _rank(1)) is None
    assert _judge(victim, _rank(1, state="Z")) is None


def test_victims_that_live_on_while_all_peers_live_are_stopped_without_a_culprit() -> None:
    """Their connection broke, and the cause is unknown: half as sure, and no rank is named."""
    found = _judge(_rank(0, _error(GRACE_S + 1, "RuntimeError", GLOO), moved_ago_s=16.0), _rank(1))

    assert found is not None
    assert (found.lost, found.verdict.fault, found.verdict.culprits) == (True, "exception", ())
    assert found.verdict.confidence == 0.5
    assert "no end of a peer is known of" in found.verdict.reason


@pytest.mark.parametrize(
    "rank",
    [
        _rank(1, _error(60.0, thread="Thread-1 (upload)")),
        _rank(1, _error(60.0), step=41),
        _rank(1, _error(EXIT_S - 0.5)),
        _rank(1, _error(60.0), state=""),
        _rank(1, RankError("ValueError", "of an older writer", step=40)),
    ],
    ids=["a-thread", "a-step-since", "just-now", "gone", "no-time"],
)
def test_who_goes_on_or_leaves_in_time_is_not_suspected(rank: RankView) -> None:
    """The negative controls: an exception that ended nothing, and an exit that is under way or over."""
    assert _judge(_rank(0), rank) is None


def test_a_rank_that_failed_before_its_first_steps_is_looked_at() -> None:
    """The patience of a start is for silence, not for errors."""
    failed = _rank(1, _error(3.0, step=-1), step=-1)

    assert looks_odd(failed, JobPolicy())
    assert not looks_odd(_rank(1, step=-1), JobPolicy())
