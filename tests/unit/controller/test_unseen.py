# SPDX-License-Identifier: Apache-2.0
"""What the arrival-skew engine can't see is reported: collectives that a group counts and no record times."""

import pytest

from megascale_ops.diagnosis.skew.unseen import Unseen
from megascale_ops.schema.collectives import CollectiveSample
from megascale_ops.schema.progress import CollectivePosition


def _heard(counted: int, told: int, *, host_timed: bool = True, ranks: int = 2, lost: int = 0) -> Unseen:
    """Return what is known after so many collectives, of which so many were told."""
    unseen = Unseen()
    for rank in range(ranks):
        unseen.know(rank, CollectivePosition(100, 99, "pg 0"))
        for _ in range(4):
            unseen.ingest_sample(CollectiveSample(rank, finished=told // 4, lost=lost // 4, host_timed=host_timed))
        unseen.know(rank, CollectivePosition(100 + counted, 99 + counted, "pg 0"))
    return unseen


@pytest.mark.parametrize(
    ("unseen", "share"),
    [
        (_heard(400, 0), 1.0),  # DDP alone
        (_heard(400, 200), 0.5),  # with a loss that is averaged in Python
        (_heard(400, 380), 0.05),
        (_heard(400, 300, lost=80), 0.05),  # what was lost on the way was seen
        (_heard(400, 4_000), 0.0),  # other groups' too
        (_heard(400, 0, host_timed=False), 0.0),  # NCCL's profiler sees all of them
        (_heard(19, 0), 0.0),  # too few to judge
        (Unseen(), 0.0),
    ],
)
def test_the_share_is_what_is_counted_and_not_told(unseen: Unseen, share: float) -> None:
    """And a sentence says so, unless nearly all is seen."""
    assert unseen.share == pytest.approx(share)
    assert bool(unseen.sentence()) == (share > 0.1)
    assert unseen.sentence().startswith(f"{share:.0%} of the collectives are started below Python") or share < 0.1


def test_a_group_that_begins_anew_is_counted_anew() -> None:
    """Its number goes back, or another group's is told: nothing follows from the difference."""
    unseen = _heard(400, 0, ranks=1)

    unseen.know(0, CollectivePosition(10, 9, "pg 0"))
    again = unseen.share
    unseen.know(0, CollectivePosition(900, 899, "pg 5"))

    assert (again, unseen.share) == (0.0, 0.0)


def test_a_few_ranks_speak_for_all() -> None:
    """Every rank of a group counts the same; thousands need not be kept. Ranks without a count say nothing."""
    unseen = Unseen()
    unseen.know(0, None)
    unseen.know(1, CollectivePosition())

    assert unseen.share == 0.0
    assert _heard(400, 0, ranks=1000).share == 1.0
