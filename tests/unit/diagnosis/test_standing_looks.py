# SPDX-License-Identifier: Apache-2.0
"""Who is looked at again while thousands wait: whom another look may show something new of, and no other rank."""

import msgspec
import pytest

from megascale_ops.diagnosis.hangs.evidence import Look, gather
from megascale_ops.diagnosis.hangs.standing import WHOLE_EVERY, WHOLE_LOOKS, asked_again, is_whole
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.schema.messages import EvidenceItem, StuckConnection
from megascale_ops.schema.progress import CollectivePosition, ProcessReading, Progress, RankReport
from megascale_ops.schema.tiles import TileFact
from tests.fakes.hung_job import ABSENT, WAITING, rank_view, said_of, stack_of

SIZE, CULPRIT, ODD = 6, 1, 4
WAITS = stack_of("in_collective", frames=("wait (distributed.py:9)",))


def _views() -> list[RankView]:
    return [rank_view(rank, waits=rank != CULPRIT, silent_s=30.0) for rank in range(SIZE)]


def _looks(*odd: EvidenceItem, leave_out: int = -1) -> dict[int, Look]:
    """Return two looks at all; ``odd`` is said beside of one that waits."""
    items: list[EvidenceItem] = []
    for _ in range(2):
        for rank in range(SIZE):
            if rank != leave_out:
                items += said_of(rank, ABSENT if rank == CULPRIT else WAITING)
                items += said_of(rank, stack_of("in_syscall") if rank == CULPRIT else WAITS)
    return gather([*items, *said_of(ODD, *odd)])


def _asked(looks: dict[int, Look], now: list[RankView] | None = None, named: tuple[int, ...] = (CULPRIT,)) -> set[int]:
    before = _views()
    return asked_again(now or before, looks, {view.report.rank: view for view in before}, named)


def test_who_waits_and_has_told_nothing_new_is_not_asked() -> None:
    """Only the rank that is named is; a heartbeat later, with another beat of each recorder, too."""
    later = [view._replace(silent_s=view.silent_s + 9.0, report=_beaten(view, 9.0)) for view in _views()]

    assert _asked(_looks()) == {CULPRIT}
    assert _asked(_looks(), later) == {CULPRIT}


def test_who_does_not_wait_is_asked_though_another_is_named() -> None:
    """The rank that is absent by its stack may not be the one that is blamed."""
    assert _asked(_looks(), named=(0,)) == {0, CULPRIT}


@pytest.mark.parametrize(
    "odd",
    [
        EvidenceItem("process", ok=True, connections=(StuckConnection("10.0.0.1:4000", "10.0.0.2:5000"),)),
        EvidenceItem("collectives", ok=True, tiles=(TileFact("ws", "ag_gemm", 3, 4, 8),)),
        EvidenceItem("stacks", ok=False, marks=("no_answer",)),
    ],
    ids=["data does not leave it", "tiles", "no answer"],
)
def test_who_shows_what_another_look_decides_is_asked(odd: EvidenceItem) -> None:
    """What was not answered, or counts only by looks in a row."""
    assert _asked(_looks(odd)) == {CULPRIT, ODD}


def test_who_gave_no_evidence_is_asked() -> None:
    """Its agent may not have heard the order."""
    assert _asked(_looks(leave_out=ODD)) == {CULPRIT, ODD}


@pytest.mark.parametrize(
    "change",
    [
        {"collective": CollectivePosition(42, 41, "pg 0")},
        {"pid": 9999},
        {"process": ProcessReading(state="T")},
        {"progress": Progress(state="running", step=21)},
        {"progress": Progress(state="running", step=20, moved_mono_s=99.0)},
        {"tile_peer": 3},
    ],
    ids=["another collective", "another process", "stopped", "another step", "it moved", "waits for a tile"],
)
def test_of_whom_a_heartbeat_tells_something_new_is_asked(change: dict[str, object]) -> None:
    """It is not where it was seen, whatever the look said."""
    now = _views()
    now[ODD] = now[ODD]._replace(report=msgspec.structs.replace(now[ODD].report, **change))

    assert _asked(_looks(), now) == {CULPRIT, ODD}


def test_a_recorder_that_was_silent_and_beats_again_is_news() -> None:
    """The interpreter's lock was held when it was looked at, and is free."""
    before = _views()
    before[ODD] = before[ODD]._replace(report=_beaten(before[ODD], -60.0))
    now = [view._replace(silent_s=view.silent_s + 9.0) for view in _views()]
    known = {view.report.rank: view for view in before}

    assert asked_again(now, _looks(), known, (CULPRIT,)) == {CULPRIT, ODD}
    assert asked_again(before, _looks(), known, (CULPRIT,)) == {CULPRIT}


def test_a_rank_that_was_never_looked_at_is_asked() -> None:
    """It joined the picture after the last look."""
    known = {view.report.rank: view for view in _views() if view.report.rank != ODD}

    assert asked_again(_views(), _looks(), known, (CULPRIT,)) == {CULPRIT, ODD}


def test_first_looks_and_each_eighth_are_at_all_and_each_while_no_rank_is_named() -> None:
    """The counts of looks taken before."""
    whole = [taken for taken in range(2 * WHOLE_EVERY + 1) if is_whole(taken, (CULPRIT,))]

    assert whole == [*range(WHOLE_LOOKS), WHOLE_EVERY, 2 * WHOLE_EVERY]
    assert all(is_whole(taken, ()) for taken in range(20))


def _beaten(view: RankView, later_s: float) -> RankReport:
    progress = view.report.progress
    assert isinstance(progress, Progress)
    return msgspec.structs.replace(
        view.report, progress=msgspec.structs.replace(progress, beat_mono_s=progress.beat_mono_s + later_s)
    )
