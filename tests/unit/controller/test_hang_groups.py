# SPDX-License-Identifier: Apache-2.0
"""Hangs of jobs with many groups: tensor, data and pipeline parallel ones at a time, each with numbers of its own.

All jobs train in steps of 50 ms; patience for a step is 5 s, and silence has lasted 3 s unless a test says otherwise.
"""

import pytest

from megascale_ops.diagnosis.hangs.verdict import Judgement
from megascale_ops.schema.messages import CollectiveFact, EvidenceItem
from tests.fakes.hung_job import judge_job, made_calls, rank_view, said_of, stack_of

ASLEEP = stack_of("in_syscall", frames=("sleep (train.py:3)",))
RECEIVING = stack_of("in_collective", frames=("recv (torch/distributed/distributed_c10d.py:2700)",))


def recorded(**groups: int) -> EvidenceItem:
    """A flight recorder: the last collective of each group that the rank has entered, a negative one not ended."""
    ended = [CollectiveFact(group, abs(last) - (last < 0), "all_reduce", done=True) for group, last in groups.items()]
    inside = [CollectiveFact(group, -last, "all_reduce") for group, last in groups.items() if last < 0]
    return EvidenceItem("flight_recorder", ok=True, collectives=(*ended, *inside))


def ring(*calls: tuple[str, str, int, bool]) -> EvidenceItem:
    """A black box: function, group, number and end of each call."""
    facts = [CollectiveFact(group, seq, function, done=done) for function, group, seq, done in calls]
    return EvidenceItem("collectives", ok=True, collectives=tuple(facts))


def judge(*told: tuple[EvidenceItem, ...], waits: bool = True, silent_s: float = 3.0, size: int = 0) -> Judgement:
    """Judge a job by what is told of each of its ranks."""
    views = [rank_view(rank, waits=waits, silent_s=silent_s) for rank in range(len(told))]
    return judge_job(views, [item for rank, items in enumerate(told) for item in said_of(rank, *items)], size)


def places(found: Judgement) -> str:
    """Where every rank is."""
    return next(finding.text for finding in found.verdict.evidence if finding.name == "places")


def test_who_waits_for_a_neighbour_of_the_pipeline_forms_no_group() -> None:
    """Gloo's recorder knows no receives: all that it knows has ended, and the stack says that the rank waits."""
    receives = ring(("all_reduce", "0", 40, True), ("recv", "0", -1, False))

    found = judge(
        (recorded(**{"0": 40}), ring(("send", "0", -1, True)), ASLEEP),
        (recorded(**{"0": 40}), receives, RECEIVING),
        (recorded(**{"0": 40}), receives, RECEIVING),
        waits=False,
        silent_s=61.0,
    )

    assert (found.verdict.fault, found.verdict.culprits) == ("sleeping", (0,))
    assert "while ranks 1-2 wait in a send or a receive: it sleeps" in found.verdict.reason
    assert places(found).startswith("1-2: recv of group 0; 0: ")


def test_a_send_in_the_background_is_no_waiting_once_other_calls_have_followed() -> None:
    """The black box never sees the end of what was begun with ``isend``; only the last call can be waited in."""
    sent = ring(("send", "pp", -1, False), ("all_reduce", "0", 40, True))
    waits = ring(("send", "pp", -1, False), ("all_reduce", "0", 41, False))

    found = judge((waits,), (sent, ASLEEP), (waits,), (waits,))

    assert (found.verdict.fault, found.verdict.culprits) == ("sleeping", (1,))


def test_black_boxes_alone_tell_of_all_groups_of_a_rank() -> None:
    """No flight recorder answers: three wait in group a for the fourth, which waits in group b for them."""
    most = ring(("all_reduce", "c", 7, False), ("all_reduce", "b", 4, True), ("all_reduce", "a", 5, False))
    last = ring(("all_reduce", "c", 7, False), ("all_reduce", "a", 4, True), ("all_reduce", "b", 5, False))

    found = judge((most,), (most,), (most,), (last,))

    assert (found.verdict.fault, found.verdict.culprits) == ("collective_order", (3,))


def test_a_circle_of_three_groups_is_seen() -> None:
    """Each waits in one group for the next, who waits in another: no group is whole, so no library is to blame."""
    found = judge((recorded(a=-5, c=4),), (recorded(b=-5, a=4),), (recorded(c=-5, b=4),))

    assert (found.verdict.fault, found.verdict.culprits) == ("collective_order", (0, 1, 2))
    assert found.verdict.confidence == 0.5
    assert "in a circle (all_reduce #5 of group a, all_reduce #5 of group b" in found.verdict.reason


def test_a_circle_that_a_crowd_waits_for_is_found_behind_it() -> None:
    """Four wait in the data parallel group for two, who wait for each other: the crowd is not part of it."""
    crowd = (recorded(dp=-9),)

    found = judge(crowd, (recorded(dp=8, tp=-5, ep=6),), (recorded(dp=8, ep=-7, tp=4),), crowd, crowd, crowd)

    assert (found.verdict.fault, found.verdict.culprits) == ("collective_order", (1, 2))


def test_a_group_that_is_whole_and_does_not_end_is_told_behind_those_who_wait_for_it() -> None:
    """All are in; two are in a collective of their own that all of its group have entered, and the others wait."""
    crowd, pair = (recorded(dp=-9),), (recorded(dp=8, tp=-5),)

    found = judge(crowd, pair, pair, crowd, crowd)

    assert (found.verdict.fault, found.verdict.culprits) == ("silent", ())
    assert "all ranks wait for ranks 1-2 inside all_reduce #5 of group tp" in found.verdict.reason
    assert "and all of that group have entered it" in found.verdict.reason


def test_neighbours_of_a_pipeline_that_all_receive_blame_nobody() -> None:
    """No rank sends: each is a victim by its evidence, so none of them is named."""
    receives = (recorded(**{"0": 40}), ring(("recv", "0", -1, False)), RECEIVING)

    found = judge(receives, receives, receives, waits=False, silent_s=61.0)

    assert (found.verdict.fault, found.verdict.culprits) == ("silent", ())
    assert "all ranks wait, ranks 0-2 in a send, a receive" in found.verdict.reason


def test_a_crowd_that_waits_for_a_receiver_has_not_all_entered() -> None:
    """Three are in a collective to which the fourth has not come: it receives what no rank sends."""
    crowd = (recorded(dp=-9),)
    receives = (recorded(dp=8), ring(("recv", "pp", -1, False)), RECEIVING)

    found = judge(crowd, crowd, crowd, receives)

    assert "have entered it" not in found.verdict.reason
    assert "all ranks wait, rank 3 in a send, a receive" in found.verdict.reason
    assert "all others wait for" in found.verdict.reason


def test_a_rank_that_was_never_reported_is_who_all_others_can_wait_for() -> None:
    """Seven of eight are in the same collective: whether all have entered it is open while one has not reported."""
    inside = (recorded(**{"0": -41}),)

    found = judge(*[inside] * 7, size=8)

    assert (found.verdict.fault, found.verdict.culprits) == ("not_joined", (7,))
    assert found.verdict.confidence < 0.9
    assert "of rank 7 nothing is known" in found.verdict.reason
    assert "all 7 that are known wait for others, 7 of them in all_reduce #41" in found.verdict.reason


def test_where_most_ranks_were_never_reported_none_of_them_is_named() -> None:
    """One agent of eight answers: that says something of the others, and nothing of any one rank."""
    found = judge((recorded(**{"0": -41}),), size=8)

    assert (found.verdict.fault, found.verdict.culprits) == ("silent", ())
    assert "of ranks 1-7 nothing is known" in found.verdict.reason


def test_a_missing_rank_is_missing_where_it_belongs() -> None:
    """Four wait in a group to which it does not belong, for a fifth, and only that one waits for it."""
    crowd, between = (recorded(dp=-7),), (recorded(dp=6, tp=-5),)

    found = judge(crowd, crowd, between, (recorded(tp=4), ASLEEP), crowd, crowd)

    assert found.verdict.culprits == (3,)
    assert "has not come to all_reduce #5 of group tp, where 1 rank waits (5 wait in all)" in found.verdict.reason


def test_two_missing_ranks_are_missing_in_a_group_each() -> None:
    """Both collectives are told, since neither of the two belongs to both groups."""
    crowd = (recorded(dp=-7),)
    told = [(recorded(dp=6, **{group: -5}),) for group in ("a", "b")]
    absent = [(recorded(**{group: 4}), ASLEEP) for group in ("a", "b")]

    found = judge(crowd, crowd, crowd, *told, *absent)

    assert found.verdict.culprits == (5, 6)
    assert "all_reduce #5 of group a and all_reduce #5 of group b, where 2 ranks wait" in found.verdict.reason


@pytest.mark.parametrize("odd", [0, 2])
def test_experts_that_bring_what_they_have_are_one_majority(odd: int) -> None:
    """Each rank of an all_to_all sends another number of tokens; only the one in another call is named, for sure."""
    told = [
        made_calls("all_to_all", "all_gather", group="ep")
        if rank == odd
        else made_calls("all_to_all", f"all_to_all:[[{rank}]]", group="ep")
        for rank in range(4)
    ]

    found = judge(*[(item,) for item in told])

    assert (found.verdict.fault, found.verdict.culprits) == ("collective_order", (odd,))
    assert found.verdict.confidence >= 0.9
    assert "majority" not in found.verdict.reason


def test_ranks_of_which_only_black_boxes_tell_count_for_the_majority() -> None:
    """Half of the flight recorders did not answer: those ranks are in the same call, of which no sizes are known."""

    def told(rank: int) -> tuple[EvidenceItem, ...]:
        names = ("all_reduce", "all_gather" if rank == 2 else "all_reduce")
        boxed = made_calls(*names, source="collectives")
        facts = [CollectiveFact(one.group, one.seq, one.function, done=one.done) for one in boxed.collectives]
        box = EvidenceItem("collectives", ok=True, collectives=tuple(facts))
        return (box, made_calls(*names)) if rank < 4 else (box,)

    found = judge(*[told(rank) for rank in range(8)])

    assert (found.verdict.fault, found.verdict.culprits) == ("collective_order", (2,))
    assert found.verdict.confidence >= 0.9


def test_who_has_not_come_to_the_call_in_question_is_nobodys_majority() -> None:
    """Two bring different sizes, and the third is still in the call before: nothing tells which of the two is right."""
    one, other = (made_calls(f"all_reduce:[[{size}]]", last=41) for size in (8, 16))

    found = judge((one,), (other,), (made_calls("all_reduce", last=40),))

    assert found.verdict.culprits == (0, 1)
    assert found.verdict.confidence == 0.5


def test_equal_numbers_of_different_groups_are_different_places() -> None:
    """Two all_reduces #5 that wait for each other are not one; of many groups their number is told."""
    circle = judge((recorded(a=-5, b=4),), (recorded(a=-5, b=4),), (recorded(b=-5, a=4),))
    many = judge(*[(recorded(**{f"tp{rank // 2}": -5}),) for rank in range(20)])

    assert places(circle) == "0-1: all_reduce #5 of group a; 2: all_reduce #5 of group b"
    assert places(many) == "0-19: all_reduce #5 of 10 groups"
