# SPDX-License-Identifier: Apache-2.0
"""Ranks of which only files are left: what nobody saw proves nothing, and records of several moments name nobody."""

import msgspec

from megascale_ops.diagnosis.hangs.causes import cause_of
from megascale_ops.diagnosis.hangs.evidence import Position, gather
from megascale_ops.diagnosis.hangs.moments import taken_before
from megascale_ops.diagnosis.hangs.rank_wait import RankWait
from megascale_ops.schema.messages import CollectiveFact, EvidenceItem
from megascale_ops.schema.progress import UNSEEN, ProcessReading
from tests.fakes.hung_job import rank_view

IN_FORWARD = EvidenceItem("stacks", ok=True, rank=1, marks=(), frames=("forward (torch/nn/modules/linear.py:125)",))


def stands_in(state: str) -> RankWait:
    """Return a rank whose stack is in its forward pass, with a process in this state."""
    view = rank_view(1)
    report = msgspec.structs.replace(view.report, process=ProcessReading(state=state))
    return RankWait(1, view._replace(report=report), gather([IN_FORWARD])[1], (), None, waits=False)


def test_a_stack_that_somebody_took_does_not_say_that_a_rank_uses_no_cpu() -> None:
    """Of a live process /proc says so."""
    taken, live = cause_of(stands_in(UNSEEN)), cause_of(stands_in("S"))

    assert (taken.fault, taken.confidence) == ("sleeping", 0.7)
    assert "whether at work or asleep nobody saw" in taken.text
    assert (live.fault, live.confidence) == ("sleeping", 0.85)
    assert "it uses no CPU" in live.text


def recorded(rank: int, seq: int, *, seen_mono_s: float = 0.0, function: str = "all_reduce") -> RankWait:
    """Return a rank whose record has a call of group 0 that has ended, and that had come so far when it was taken."""
    call = CollectiveFact(function=function, group="0", seq=seq, done=True)
    look = gather([EvidenceItem("flight_recorder", ok=True, rank=rank, collectives=(call,))])[rank]
    at = Position("0", seq)
    return RankWait(rank, rank_view(rank), look._replace(seen_mono_s=seen_mono_s), (at,), None, waits=True)


def test_a_call_of_all_that_has_ended_shows_whose_record_is_older() -> None:
    """Rank 2 had come to call 4 where call 5 has ended on rank 1: it has gone on since."""
    ranks, call = taken_before([recorded(1, 5), recorded(2, 4)])

    assert ranks == [2]
    assert call is not None
    assert call.seq == 5


def test_records_of_one_moment_and_those_with_a_time_are_left_alone() -> None:
    """Nor does a broadcast show it, which ends on its root alone."""
    assert taken_before([recorded(1, 5), recorded(2, 5)])[0] == []
    assert taken_before([recorded(1, 5, seen_mono_s=9.0), recorded(2, 4, seen_mono_s=8.0)])[0] == []
    assert taken_before([recorded(1, 5, function="broadcast"), recorded(2, 4, function="broadcast")])[0] == []
