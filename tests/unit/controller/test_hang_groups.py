# SPDX-License-Identifier: Apache-2.0
"""Hangs of jobs with many groups: tensor, data and pipeline parallel ones at a time, each with numbers of its own.

All jobs train in steps of 50 ms; patience for a step is 5 s, and silence has lasted 3 s unless a test says otherwise.
"""

from megascale_ops.controller.hangs import Judgement
from megascale_ops.schema.messages import CollectiveFact, EvidenceItem
from tests.fakes.hung_job import judge_job, rank_view, said_of, stack_of

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
    """Where everybody is."""
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
    """Nobody's flight recorder answers: three wait in group a for the fourth, which waits in group b for them."""
    most = ring(("all_reduce", "c", 7, False), ("all_reduce", "b", 4, True), ("all_reduce", "a", 5, False))
    last = ring(("all_reduce", "c", 7, False), ("all_reduce", "a", 4, True), ("all_reduce", "b", 5, False))

    found = judge((most,), (most,), (most,), (last,))

    assert (found.verdict.fault, found.verdict.culprits) == ("collective_order", (3,))
