# SPDX-License-Identifier: Apache-2.0
"""Hangs in which two ranks alone disagree, or hosts run ahead of their GPUs: what groups alike and the order tell.

Jobs of six or eight ranks: group 0 has all of them, ``a`` to ``d`` have a pair each. A call is told as
"group:number:function:sizes"; those behind a "|" have not ended, the first of them is the one that is waited in.
"""

import msgspec
import pytest

from megascale_ops.diagnosis.hangs.verdict import Judgement
from megascale_ops.schema.messages import CollectiveFact, EvidenceItem
from tests.fakes.hung_job import judge_job, rank_view, said_of, stack_of


def calls(text: str) -> EvidenceItem:
    """What a rank's flight recorder holds, in the order in which the rank called it."""
    over, _, queued = text.partition("|")
    facts = [_call(one, done=True) for one in over.split()] + [_call(one, done=False) for one in queued.split()]
    return EvidenceItem("flight_recorder", ok=True, collectives=tuple(facts))


def _call(text: str, *, done: bool) -> CollectiveFact:
    """Read a collective ("a:4:all_reduce:8"), or one of a pair ("p:recv:3")."""
    group, seq, *rest = text.split(":")
    if seq in ("send", "recv"):
        return CollectiveFact(group, -1, seq, "[[8]]", "Float", done=done, peer=int(rest[0]))
    return CollectiveFact(group, int(seq), rest[0], f"[[{rest[1] if len(rest) > 1 else 8}]]", "Float", done=done)


def judge(*told: str) -> Judgement:
    """Judge a job by the calls of its ranks: "" where no dump came, "storage" in front of those of one in storage."""
    evidence = []
    for rank, text in enumerate(told):
        absent = text.startswith("storage")
        marks = ("in_storage",) if absent else ("in_collective",)
        items = [calls(text.removeprefix("storage")), stack_of(*marks, frames=("load (train.py:12)",))]
        evidence += said_of(rank, *items) if text else []
    views = [rank_view(rank, waits=not text.startswith("storage"), known=False) for rank, text in enumerate(told)]
    return judge_job(views, evidence)


def judged(*told: str) -> tuple[str, tuple[int, ...], float]:
    """Class, ranks and confidence."""
    verdict = judge(*told).verdict
    return verdict.fault, verdict.culprits, verdict.confidence


def like(group: str, text: str) -> str:
    """The same calls in another pair."""
    return text.replace("a:", f"{group}:")


def test_ranks_that_run_ahead_have_called_everything_and_wait_for_each_other_all_the_same() -> None:
    """Rank 3 left out group 0's second call and has queued another since: its GPU waits in its pair, first."""
    right = "0:1:all_reduce a:1:all_gather a:2:all_gather | 0:2:all_reduce a:3:all_gather"
    odd = "0:1:all_reduce b:1:all_gather b:2:all_gather | b:3:all_gather 0:2:all_reduce"

    assert judged(right, right, like("b", right), odd, like("c", right), like("c", right)) == (
        "collective_order",
        (3,),
        0.9,
    )


def test_hosts_that_run_ahead_in_one_order_blame_nobody() -> None:
    """All have queued the same behind the call that does not end: the network does not deliver."""
    right = "0:1:all_reduce a:1:all_gather a:2:all_gather | 0:2:all_reduce a:3:all_gather"

    assert judged(right, right, like("b", right), like("b", right)) == ("silent", (), 0.3)


def test_what_the_gpu_has_begun_is_in_no_queue() -> None:
    """One has another call before it, and its GPU is in both: two streams, whose order says nothing."""
    right = calls("0:1:all_reduce a:1:all_gather | 0:2:all_reduce a:2:all_gather")
    other = calls("0:1:all_reduce a:1:all_gather | a:2:all_gather 0:2:all_reduce")
    both = [
        msgspec.structs.replace(
            item,
            collectives=tuple(
                fact if fact.done else msgspec.structs.replace(fact, begun=True) for fact in item.collectives
            ),
        )
        for item in (right, right, other)
    ]
    evidence = [one for rank, item in enumerate(both) for one in said_of(rank, item, stack_of("in_collective"))]

    found = judge_job([rank_view(rank, known=False) for rank in range(3)], evidence).verdict

    assert (found.fault, found.culprits) == ("silent", ())


@pytest.mark.parametrize(("one", "other", "culprit"), [("8", "16", 1), ("16", "8", 0)])
def test_of_two_alone_the_one_is_right_that_does_as_other_pairs_do(one: str, other: str, culprit: int) -> None:
    """Their own steps so far tell nothing: it is the first call of its kind."""
    before = "a:1:all_gather a:2:all_reduce"
    ours = [f"{before} | a:3:broadcast:{sizes}" for sizes in (one, other)]
    others = [like(pair, f"{before} a:3:broadcast:8 | 0:1:all_reduce") for pair in "bcbc"]

    assert judged(*ours, *others) == ("collective_mismatch", (culprit,), 0.95)


@pytest.mark.parametrize(
    "others",
    [
        ["b:1:all_gather b:2:broadcast b:3:broadcast:8 | 0:1:all_reduce"] * 2,
        ["b:2:all_reduce b:3:broadcast:8 | 0:1:all_reduce"] * 2,
        [
            "b:1:all_gather b:2:all_reduce b:3:broadcast:8 | 0:1:all_reduce",
            "c:1:all_gather c:2:all_reduce c:3:broadcast:16 | 0:1:all_reduce",
        ],
        ["b:1:all_gather b:2:all_reduce b:3:broadcast:32 | 0:1:all_reduce"] * 2,
        ["b:1:all_gather b:2:all_reduce b:3:broadcast:8 | 0:1:all_reduce"],
    ],
    ids=["they did otherwise before", "one call alone", "they disagree", "a third way", "one rank alone"],
)
def test_pairs_that_tell_nothing_leave_both_named(others: list[str]) -> None:
    """At a half."""
    ours = [f"a:1:all_gather a:2:all_reduce | a:3:broadcast:{sizes}" for sizes in (8, 16)]

    assert judged(*ours, *others) == ("collective_mismatch", (0, 1), 0.5)


def test_pairs_alike_tell_which_side_of_a_circle_is_early() -> None:
    """Rank 0 waits for rank 1 in their pair's third call, rank 1 with all others in group 0."""
    early = "0:1:all_reduce a:1:all_gather a:2:all_gather | a:3:all_gather"
    crowd = "0:1:all_reduce a:1:all_gather a:2:all_gather | 0:2:all_reduce"
    gone_on = "0:1:all_reduce a:1:all_gather a:2:all_gather a:3:all_gather | 0:2:all_reduce"

    assert judged(early, crowd, like("b", crowd), like("b", crowd), like("c", crowd), like("c", crowd)) == (
        "collective_order",
        (0,),
        0.9,
    )
    assert judged(early, crowd, like("b", gone_on), like("b", gone_on), like("c", gone_on), like("c", gone_on)) == (
        "collective_order",
        (1,),
        0.9,
    )
    assert judged(early, crowd, like("b", crowd), like("c", gone_on)) == ("collective_order", (0, 1), 0.5)


def test_pairs_of_which_each_has_one_early_rank_tell_nothing() -> None:
    """As many wait in their pairs as in group 0."""
    early = "0:1:all_reduce a:1:all_gather a:2:all_gather | a:3:all_gather"
    crowd = "0:1:all_reduce a:1:all_gather a:2:all_gather | 0:2:all_reduce"
    pairs = [like(pair, side) for pair in "abc" for side in (early, crowd)]

    assert judged(*pairs) == ("collective_order", (0, 1, 2, 3, 4, 5), 0.5)


def test_a_receive_before_a_barrier_that_all_others_call_first_is_the_receiver_s_fault() -> None:
    """Rank 3 left the barrier out: what it waits for its peer has queued behind it."""
    first = "0:1:all_reduce p:recv:1 | 0:2:barrier p:send:1"
    second = "0:1:all_reduce p:send:0 | 0:2:barrier p:recv:0"
    third, odd = "0:1:all_reduce q:recv:3 | 0:2:barrier q:send:3", "0:1:all_reduce q:send:2 | q:recv:2"

    found = judge(first, second, third, odd).verdict

    assert (found.fault, found.culprits, found.confidence) == ("collective_order", (3,), 0.9)
    assert "which has called barrier #2 of group 0 before the other half, as ranks 0-2 did" in found.reason


def test_of_a_pair_alone_it_is_not_known_which_order_is_meant() -> None:
    """No other rank has sends or receives."""
    found = judge(
        "0:1:all_reduce | 0:2:barrier",
        "0:1:all_reduce | 0:2:barrier",
        "0:1:all_reduce q:recv:3 | 0:2:barrier q:send:3",
        "0:1:all_reduce q:send:2 | q:recv:2",
    ).verdict

    assert (found.fault, found.culprits, found.confidence) == ("collective_order", (2, 3), 0.5)


def test_a_rank_of_which_nothing_is_known_is_not_named_beside_one_that_explains_the_hang() -> None:
    """No dump and no stack of rank 2 came; rank 1 is in storage."""
    found = judge("0:1:all_reduce | 0:2:all_reduce", "storage0:1:all_reduce", "", "0:1:all_reduce | 0:2:all_reduce")

    assert (found.verdict.fault, found.verdict.culprits) == ("storage_stall", (1,))


def test_alone_it_is_named() -> None:
    """All others wait."""
    waits = "0:1:all_reduce | 0:2:all_reduce"

    assert judged(waits, "", waits, waits) == ("not_joined", (1,), 0.9)


def test_a_circle_of_those_that_are_known_clears_it() -> None:
    """Rank 4 gave no evidence; what the others called keeps them from ever going on."""
    crowd, odd = "0:1:all_reduce a:1:all_reduce | 0:2:all_reduce", "0:1:all_reduce a:1:all_reduce | a:2:all_reduce"

    assert judged(crowd, crowd, crowd, odd, "", crowd) == ("collective_order", (3,), 0.9)
