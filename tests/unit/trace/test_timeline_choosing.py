# SPDX-License-Identifier: Apache-2.0
"""Which ranks are drawn of a job, and why."""

import pytest

from megascale_ops.blackbox.records import StepRecord
from megascale_ops.errors import UsageError
from megascale_ops.trace.choosing import MOST_CHOSEN, Known, choose, own_work_s, sentence

WORLD = ("host", "0")


def job(ranks: int, slow: int = -1) -> list[Known]:
    """Return ranks of 8 a node, in groups of 8 (tp) and in the world; one may be slower."""
    return [
        Known(rank, f"n{rank // 8}", 0.12 if rank == slow else 0.1, frozenset({WORLD, ("host", f"tp{rank // 8}")}))
        for rank in range(ranks)
    ]


def test_the_culprit_its_nearest_peers_and_a_healthy_rank_elsewhere() -> None:
    """Of 1,024 ranks sixteen: the one that is blamed, its tensor-parallel group first, a control on another node."""
    chosen = choose("auto", job(1024), culprits=(19,))

    why = {one.rank: one.why for one in chosen}
    assert len(chosen) == MOST_CHOSEN
    assert chosen[0].rank == 19
    assert why[19] == "culprit"
    assert set(range(16, 24)) <= set(why)
    (control,) = (rank for rank, reason in why.items() if reason == "healthy control")
    assert control // 8 != 2
    assert sum(reason == "shares a communicator" for reason in why.values()) == 14


def test_without_a_verdict_the_slowest_takes_its_place() -> None:
    """Slowest by its own work, without what it waited; the sentence says by how much."""
    chosen = choose("auto", job(64, slow=40))

    assert (chosen[0].rank, chosen[0].why) == (40, "slowest: 120.0 ms of own work a step")
    assert sentence(chosen).startswith("rank 40 (slowest: 120.0 ms of own work a step); rank ")


def test_own_work_is_without_waiting_and_checkpoints() -> None:
    """The median of the last steps, so that one bad batch is not a slow rank."""
    steps = [StepRecord(step, 0.0, 1.0, checkpoint_s=0.3, waiting_s=0.5) for step in range(5)]
    steps[3] = StepRecord(3, 0.0, 9.0)

    assert own_work_s(steps, 20) == pytest.approx(0.2)
    assert own_work_s([], 20) == -1.0


def test_a_verdict_that_blames_a_rank_without_a_box_chooses_as_without_one() -> None:
    """Its node is gone with its box; the slowest of the others is still worth a look."""
    chosen = choose("auto", job(8, slow=3), culprits=(70,))

    assert chosen[0].rank == 3


def test_ranks_that_have_seen_no_step_are_chosen_by_number() -> None:
    """At start-up there is nothing else to go by."""
    chosen = choose("auto", [Known(rank, "a", -1.0) for rank in range(4)])

    assert [one.rank for one in chosen] == [0, 1, 2, 3]
    assert chosen[0].why == "no step seen, the lowest"


@pytest.mark.parametrize(("wanted", "ranks"), [("3", [3]), ("0,3-5,4", [0, 3, 4, 5]), (" 1 , 2 ", [1, 2])])
def test_a_list_is_taken_as_it_is(wanted: str, ranks: list[int]) -> None:
    """Numbers and ranges, each rank once."""
    assert [one.rank for one in choose(wanted, job(8))] == ranks


def test_all_are_all() -> None:
    """However many there are."""
    assert len(choose("all", job(100))) == 100


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ("9", "there is no black box of rank 9 here; there are those of ranks 0-7"),
        ("6-9", "there is no black box of rank 9 here; there are those of ranks 0-7"),
        ("0-99999999999", "there is no black box of rank 99999999999 here; there are those of ranks 0-7"),
        ("5-2", "--ranks '5-2' can't be read: give auto, all, or ranks such as 0,3-5"),
        ("three", "--ranks 'three' can't be read: give auto, all, or ranks such as 0,3-5"),
        ("1,,2", "--ranks '1,,2' can't be read: give auto, all, or ranks such as 0,3-5"),
        ("-1", "--ranks '-1' can't be read: give auto, all, or ranks such as 0,3-5"),
        ("1-", "--ranks '1-' can't be read: give auto, all, or ranks such as 0,3-5"),
    ],
)
def test_a_list_that_cannot_be_is_one_sentence(wanted: str, sentence: str) -> None:
    """It names what was given, and which ranks there are."""
    with pytest.raises(UsageError) as caught:
        choose(wanted, job(8))

    assert str(caught.value) == sentence
