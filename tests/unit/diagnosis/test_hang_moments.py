# SPDX-License-Identifier: Apache-2.0
"""Ranks of which only files are left: what nobody saw proves nothing, and records of several moments name nobody."""

import msgspec

from megascale_ops.diagnosis.hangs import questions
from megascale_ops.diagnosis.hangs.causes import cause_of
from megascale_ops.diagnosis.hangs.evidence import Position, gather
from megascale_ops.diagnosis.hangs.moments import met_by_all, taken_before
from megascale_ops.diagnosis.hangs.rank_wait import RankWait
from megascale_ops.schema.collectives import GroupMembers, members_of
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


ENDED, OPEN = (CollectiveFact(function="all_reduce", group="0", seq=seq, done=seq == 4) for seq in (4, 5))


def members(*ranks: int) -> tuple[GroupMembers, ...]:
    """Return who belongs to group 0, as torch notes it."""
    told = members_of("0", ranks)
    assert told is not None
    return (told,)


def left(rank: int, *calls: CollectiveFact, of: tuple[int, ...] = (0, 1), state: str = UNSEEN) -> RankWait:
    """Return a rank whose record has these calls of group 0, oldest first, whose members are these."""
    report = msgspec.structs.replace(rank_view(rank).report, process=ProcessReading(state=state))
    look = gather([EvidenceItem("flight_recorder", ok=True, rank=rank, collectives=calls, groups=members(*of))])[rank]
    inside = next((call for call in calls if not call.done), None)
    positions = (Position("0", calls[-1].seq, inside),) if calls else ()
    return RankWait(rank, rank_view(rank)._replace(report=report), look, positions, inside, waits=inside is not None)


def test_a_call_that_all_have_come_to_and_that_hangs_is_nobodys_who_is_missing_elsewhere() -> None:
    """It is the oldest that each of its members has open. One that is missing, or a full ring, shows nothing."""
    assert met_by_all([left(0, ENDED, OPEN), left(1, ENDED, OPEN)]) == OPEN
    assert met_by_all([left(0, ENDED, OPEN), left(1, ENDED)]) is None
    assert met_by_all([left(0, ENDED, OPEN, of=(0, 1, 2)), left(1, ENDED, OPEN, of=(0, 1, 2))]) is None
    assert met_by_all([left(0, ENDED, OPEN), left(1, OPEN)]) is None


def test_of_two_ranks_that_left_no_file_neither_is_named_and_one_alone_is() -> None:
    """Files are lost by chance; an agent that never told of its ranks is missing for a reason."""
    of = (0, 1, 2, 3)
    two = questions.all_wait([left(0, ENDED, OPEN, of=of), left(1, ENDED, OPEN, of=of)], 4)
    one = questions.all_wait([left(rank, ENDED, OPEN, of=of) for rank in (0, 1, 2)], 4)
    live = questions.all_wait([left(0, ENDED, OPEN, of=of, state="S"), left(1, ENDED, OPEN, of=of, state="S")], 4)

    assert two is not None
    assert list(two.culprits) == []
    assert one is not None
    assert (list(one.culprits), one.confidence) == ([3], 0.6)
    assert live is not None
    assert list(live.culprits) == [2, 3]


def test_a_stack_at_work_without_a_record_does_not_show_a_rank_that_the_others_wait_for() -> None:
    """A host that runs ahead stands there too. What a look shows to be elsewhere is named."""
    of = (0, 1, 2)
    waiting = [left(rank, ENDED, OPEN, of=of) for rank in (0, 2)]
    at_work, loads = stands_in(UNSEEN), stands_in(UNSEEN)
    loads = loads._replace(look=loads.look._replace(marks=frozenset({"in_data_loader"})))

    assert questions.missing([waiting[0], at_work, waiting[1]]) is None
    found = questions.missing([waiting[0], loads, waiting[1]])
    assert found is not None
    assert (found.fault, list(found.culprits)) == ("data_stall", [1])


def test_who_is_still_inside_what_others_have_finished_is_named_live_and_not_from_files() -> None:
    """Of files the others' records are younger."""
    later = CollectiveFact(function="all_reduce", group="1", seq=2)
    over = CollectiveFact(function="all_reduce", group="0", seq=5, done=True)

    def judged(state: str) -> questions.Answer | None:
        ahead = [
            left(rank, over, of=(0, 1, 2), state=state)._replace(
                positions=(Position("1", 2, later), Position("0", 5)), inside=later, waits=True
            )
            for rank in (1, 2)
        ]
        return questions.all_wait([left(0, ENDED, OPEN, of=(0, 1, 2), state=state), *ahead], 3)

    files, live = judged(UNSEEN), judged("S")

    assert files is not None
    assert list(files.culprits) == []
    assert live is not None
    assert list(live.culprits) == [0]


def test_many_of_whom_nothing_tells_what_they_do_are_not_named_by_the_wait_of_a_few() -> None:
    """Of a live job they are suspects, at 50 %; from files nobody is."""

    def judged(state: str) -> questions.Answer | None:
        silent = [left(rank, ENDED, state=state) for rank in (1, 2, 3)]
        call = CollectiveFact(function="recv", group="0", seq=-1, peer=1)
        waits = left(0, call, state=state)._replace(inside=None, waits=True)
        return questions.nobody_waits([waits, *silent], frozenset({1, 2, 3}))

    files, live = judged(UNSEEN), judged("S")

    assert files is not None
    assert list(files.culprits) == []
    assert live is not None
    assert (list(live.culprits), live.confidence) == ([1, 2, 3], 0.5)


def test_who_is_only_known_by_calls_is_not_singled_out_of_a_crowd_and_a_look_does_it() -> None:
    """Of four that are silent one has a record: it is no surer by that. Where it is seen elsewhere, it is named."""
    call = CollectiveFact(function="recv", group="0", seq=-1, peer=1)
    waits = left(0, call)._replace(inside=None, waits=True)
    at_work = [stands_in(UNSEEN)._replace(rank=rank) for rank in (2, 3, 4)]
    recorded_one = left(1, ENDED)
    loads = recorded_one._replace(look=recorded_one.look._replace(marks=frozenset({"in_data_loader"})))

    by_calls = questions.nobody_waits([waits, recorded_one, *at_work], frozenset({1, 2, 3, 4}))
    by_look = questions.nobody_waits([waits, loads, *at_work], frozenset({1, 2, 3, 4}))

    assert by_calls is not None
    assert list(by_calls.culprits) == []
    assert by_look is not None
    assert (by_look.fault, list(by_look.culprits)) == ("data_stall", [1])
