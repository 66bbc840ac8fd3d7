# SPDX-License-Identifier: Apache-2.0
"""The watchdog's words say where a rank was, in the numbers of the black boxes; where they do not fit nothing."""

import pytest

from megascale_ops.diagnosis.exits.watchdog_words import Given, given_up, reached, with_positions
from megascale_ops.schema.messages import CollectiveFact, RankExit

WORK = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=17, OpType=_ALLGATHER_BASE, NumelIn=1)"
PLACES = {
    "PG ID 0 PG GUID 0(default_pg)": "0",
    "PG ID 2 PG GUID 9": "9",
    "PG ID 12 PG GUID 99(EXPERT_MODEL_PARALLEL_GROUP)": "99",
    "PG 0 (default_pg)": "0",
    "PG 1": "1",
}


def _exit(rank: int, tail: str = "", calls: tuple[CollectiveFact, ...] = ()) -> RankExit:
    return RankExit(rank, rank, 9, -6, 0.0, stderr_tail=tail, calls=calls)


def _past(last: int, group: str = "0") -> tuple[CollectiveFact, ...]:
    return tuple(CollectiveFact(group, seq, "all_reduce", done=True) for seq in range(max(1, last - 4), last + 1))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "words",
    [
        "Timeout at NCCL work: 17, last enqueued NCCL work: 19, last completed NCCL work: 16.",
        "Exception detected by watchdog at work: 17, last enqueued NCCL work: 19, last completed NCCL work: 16.",
        " failure detected by watchdog at work sequence id: 17 last enqueued work: 19, last completed work: 16",
    ],
)
def test_every_versions_words_are_read(place: str, words: str) -> None:
    """Torch has told group and numbers in three ways, and named groups in five."""
    text = f"[Rank 3] {WORK}\n[{place} Rank 3] {words}\n"

    assert given_up(text) == Given(PLACES[place], 17, "all_gather")
    assert reached(text) == [CollectiveFact(PLACES[place], 19, "")]


def test_the_call_that_was_given_up_is_the_one_that_others_missed() -> None:
    """NCCL's calls are queued: what stands behind it in the queue waits as well, and names nothing."""
    text = f"[Rank 3] {WORK}\n[PG ID 0 PG GUID 0(default_pg) Rank 3] watchdog at work: 17, last enqueued work: 19\n"

    victim, _ = with_positions([_exit(0, text, _past(19)), _exit(1)])

    assert victim.calls[-1] == CollectiveFact("0", 17, "all_gather")
    assert max(fact.seq for fact in victim.calls) == 17


@pytest.mark.parametrize(
    ("others", "group"),
    [(_past(16), "0"), (_past(16, "tp"), "tp"), ((*_past(16), *_past(30, "tp")), ""), (_past(900), ""), ((), "")],
    ids=["one-group", "another", "two-groups", "far", "no-calls"],
)
def test_a_group_that_is_not_told_is_taken_from_the_only_one_it_can_be(
    others: tuple[CollectiveFact, ...], group: str
) -> None:
    """Numbers of different groups must not be compared: a rank would be behind by hundreds."""
    victim, _ = with_positions([_exit(0, f"[Rank 3] {WORK}\n"), _exit(1, calls=others)])

    assert [fact.group for fact in victim.calls] == ([group] if group else [])


def test_ends_without_a_watchdog_stay_as_they_are() -> None:
    """Numbers of other texts, and of none."""
    exits = [_exit(0, "SeqNum=3", _past(4)), _exit(1)]

    assert with_positions(exits) == exits
