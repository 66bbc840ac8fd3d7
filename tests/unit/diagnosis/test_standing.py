# SPDX-License-Identifier: Apache-2.0
"""A judgement of a wait stands while only time passes: until when it says, and not a moment longer than it may."""

from collections.abc import Callable

import msgspec
import pytest

from megascale_ops.diagnosis import watchdog
from megascale_ops.diagnosis.hangs import standing
from megascale_ops.diagnosis.hangs.evidence import Look, gather
from megascale_ops.diagnosis.hangs.standing import LATE_S, MOST_HELD_S, has_changed, holds_s
from megascale_ops.diagnosis.hangs.suspicion import Suspicion
from megascale_ops.diagnosis.hangs.verdict import Judgement, judge
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.schema.messages import EvidenceItem
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition, ProcessReading, RankError, RankReport
from tests.fakes.hung_job import ABSENT, WAITING, rank_view, said_of, stack_of

POLICY = JobPolicy()
ASLEEP = stack_of("in_syscall", frames=("sleep (loader.py:31)",))
SIZE, CULPRIT = 4, 1


def _views(silent_s: float, **culprit: object) -> list[RankView]:
    """Return a job in which one rank does not come, and all have been silent for so long."""
    return [
        rank_view(rank, waits=rank != CULPRIT, silent_s=silent_s, **(culprit if rank == CULPRIT else {}))  # type: ignore[arg-type]  # fields of rank_view
        for rank in range(SIZE)
    ]


def _looks(*items: EvidenceItem) -> dict[int, Look]:
    others = [
        one for rank in range(SIZE) if rank != CULPRIT for one in said_of(rank, WAITING, stack_of("in_collective"))
    ]
    return gather([*others, *said_of(CULPRIT, ABSENT, *items)])


def _judged(views: list[RankView], looks: dict[int, Look]) -> tuple[Suspicion, Judgement]:
    suspicion = watchdog.judge(views, POLICY, 1e6)
    assert suspicion is not None
    return suspicion, judge(suspicion, views, looks, SIZE, POLICY)


def _held_s(views: list[RankView], looks: dict[int, Look]) -> float:
    suspicion, judged = _judged(views, looks)
    return holds_s(views, suspicion, judged, looks, POLICY)


def _of(judged: tuple[Suspicion, Judgement]) -> tuple[object, ...]:
    """Return all that is acted upon."""
    suspicion, known = judged
    verdict = known.verdict
    return (
        *(suspicion.lost, suspicion.is_told, suspicion.patience_s, verdict.fault, verdict.culprits, verdict.confidence),
        *(verdict.sure_of, known.patience_s, known.is_proven, known.is_outrun, suspicion.age_s >= known.patience_s),
    )


@pytest.mark.parametrize(
    "culprit",
    [
        {},
        {"busy": 1.0},
        {"phase": "checkpoint", "phase_s": 1801.0},
        {"busy": 1.0, "wandered": 9, "wandered_ago_s": 8.0},
    ],
)
@pytest.mark.parametrize("silent_s", [2.6, 4.0, 8.0, 14.0, 28.0, 55.0, 59.0, 120.0, 535.0, 539.5, 600.0, 1795.0])
def test_within_its_time_another_judgement_comes_to_the_same(silent_s: float, culprit: dict[str, object]) -> None:
    """Whatever the rank does, for however long: with ages grown by less than that, what is acted upon is as it was."""
    looks = _looks(ASLEEP)
    views = _views(silent_s, **culprit)

    held_s = _held_s(views, looks)

    assert 0.0 <= held_s <= MOST_HELD_S
    for share in (0.3, 0.99):
        older_s = share * held_s
        later = [rank._replace(silent_s=rank.silent_s + older_s, phase_s=rank.phase_s + older_s) for rank in views]
        assert _of(_judged(later, looks)) == _of(_judged(views, looks))


def test_the_end_of_patience_is_not_slept_through() -> None:
    """540 s are granted: at 530 s it stands for 9 s, since a heartbeat may be late, and at 539.5 s for none."""
    looks = _looks(ASLEEP)

    far, near, there = (_held_s(_views(silent_s), looks) for silent_s in (100.0, 530.0, 539.5))

    assert far == MOST_HELD_S
    assert near == pytest.approx(540.0 - 530.0 - LATE_S)
    assert there == 0.0
    assert _of(_judged(_views(539.5), looks)) != _of(_judged(_views(540.5), looks))


def test_of_more_ranks_a_judgement_stands_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In proportion to what it costs; the end of patience is none of that."""
    monkeypatch.setattr(standing, "HELD_EACH_RANK_S", 10.0)
    looks = _looks(ASLEEP)

    far, near = (_held_s(_views(silent_s), looks) for silent_s in (100.0, 530.0))

    assert far == 10.0 * SIZE > MOST_HELD_S
    assert near == pytest.approx(540.0 - 530.0 - LATE_S)


@pytest.mark.parametrize(
    "odd",
    [
        lambda view: view._replace(heard_age_s=4.0),
        lambda view: _reported(view, process=ProcessReading(state="")),
        lambda view: _reported(view, rivals=(77,)),
        lambda view: _reported(view, error=RankError("ValueError", "x", thread="loader")),
    ],
    ids=["not heard", "gone", "claimed twice", "an error"],
)
def test_what_has_deadlines_of_its_own_is_judged_each_time(odd: Callable[[RankView], RankView]) -> None:
    """A node that is not heard, a rank that is gone, claimed twice or has an error: nothing stands."""
    looks = _looks(ASLEEP)
    views = _views(100.0)
    suspicion, judged = _judged(views, looks)

    assert holds_s([*views[:3], odd(views[3])], suspicion, judged, looks, POLICY) == 0.0
    assert holds_s(views, suspicion, judged, looks, POLICY) > 0.0


def test_a_rank_without_a_stack_whose_recorder_beats_is_judged_each_time() -> None:
    """Its beats may end with any heartbeat, and then its lock is held; one that has answered tells by its stack."""
    assert _held_s(_views(100.0), _looks()) == 0.0
    assert _held_s(_views(100.0, beat_age_s=50.0), _looks()) > 0.0
    assert _held_s(_views(100.0), _looks(ASLEEP)) > 0.0


def _reported(view: RankView, **changes: object) -> RankView:
    return view._replace(report=msgspec.structs.replace(view.report, **changes))


def _progressed(report: RankReport, **changes: object) -> RankReport:
    return msgspec.structs.replace(report, progress=msgspec.structs.replace(report.progress, **changes))


def test_a_report_of_a_rank_that_waits_tells_nothing_new() -> None:
    """Its recorder beats, its memory and CPU seconds differ, it runs for a moment: a judgement rests on none of it."""
    before = rank_view(0, beat_age_s=0.9).report
    process = ProcessReading(state="R", cpu_busy=0.1, cpu_s=9.0, rss_bytes=5, threads=3, starved=0.1)

    now = msgspec.structs.replace(_progressed(before, beat_mono_s=100.9), process=process)

    assert not has_changed(before, now, 101.0)


@pytest.mark.parametrize(
    "change",
    [
        *(
            {name: 1.5}
            for name in ("moved_mono_s", "phase_since_mono_s", "wandered_mono_s", "step_p99_s", "step_p50_s")
        ),
        *({name: 3} for name in ("step", "steps_seen", "wandered")),
        *({"phase": "eval"}, {"state": "exited"}, {"beat_mono_s": 110.0}),
    ],
    ids=str,
)
def test_progress_of_any_kind_is_news(change: dict[str, object]) -> None:
    """A movement, a phase, a wandering stack, a step; and a recorder that beats again after ten seconds of silence."""
    before = rank_view(0).report

    assert has_changed(before, _progressed(before, **change), 110.1)


@pytest.mark.parametrize(
    "change",
    [
        {"process": ProcessReading(state="T", stopped_since_mono_s=99.0)},
        {"process": ProcessReading(state="D")},
        {"process": ProcessReading(state="")},
        {"process": ProcessReading(state="S", cpu_busy=0.9)},
        {"collective": CollectivePosition(42, 41, "pg 0")},
        {"error": RankError("ValueError", "x")},
        {"rivals": (9,)},
        {"tile_peer": 2},
        {"pid": 3},
        {"progress": None},
    ],
    ids=str,
)
def test_what_a_judgement_rests_on_is_news(change: dict[str, object]) -> None:
    """Each field of a report that a judge of a wait reads."""
    before = rank_view(0).report

    assert has_changed(before, msgspec.structs.replace(before, **change), 100.1)
    assert has_changed(msgspec.structs.replace(before, **change), before, 100.1)
