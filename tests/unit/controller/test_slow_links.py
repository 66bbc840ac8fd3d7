# SPDX-License-Identifier: Apache-2.0
"""Whose link is slow, by whose data waits in its send queues while all the others wait."""

import pytest

from megascale_ops.controller.slow_links import LinkWatch, Sender, find
from megascale_ops.schema.progress import StepWork


def _ranks(sending: tuple[float, ...], waiting: float = 0.5) -> dict[int, Sender]:
    return {rank: Sender("n", share, waiting) for rank, share in enumerate(sending)}


@pytest.mark.parametrize(
    ("sending", "named"),
    [
        ((0.0, 0.75, 0.05, 0.0), 1),
        ((0.05, 0.0, 0.0, 0.4, 0.1), 3),
        ((0.0, 0.35, 0.0, 0.0), None),  # too seldom
        ((0.5, 0.75, 0.0, 0.0), None),  # two of four: more than one link, or the network
        ((0.6, 0.7, 0.6, 0.65), None),  # the network is slow for all
        ((0.0, 0.75), None),  # two ranks have no majority
        ((0.0, 0.75, -1.0, 0.0), None),  # one is not known
        ((0.0, 0.0, 0.0, 0.0), None),
    ],
)
def test_only_one_full_queue_among_empty_ones_names_its_rank(sending: tuple[float, ...], named: int | None) -> None:
    """Whatever is common to several ranks accuses nobody."""
    assert find(_ranks(sending), None) == named


def test_a_full_queue_that_nobody_waits_for_is_nothing() -> None:
    """A rank that copies a file over the network beside training holds nobody up."""
    assert find(_ranks((0.0, 0.9, 0.0, 0.0), waiting=0.05), None) is None


def test_a_name_is_kept_longer_than_it_takes_to_give_it() -> None:
    """A link at the limit does not come and go with every look."""
    ranks = _ranks((0.0, 0.3, 0.0, 0.0), waiting=0.15)

    assert find(ranks, None) is None
    assert find(ranks, 1) == 1


def test_the_watch_says_since_when_and_what_it_costs() -> None:
    """The moment is that of the first look that named it; the cost is what the median rank waits."""
    watch = LinkWatch()
    work = (StepWork(step=7, wall_s=0.2, waiting_s=0.12),)
    for rank in range(4):
        watch.take(rank, f"n{rank}", 0.7 if rank == 2 else 0.0, work)

    first = watch.look(10.0, 1000.0, 7, 3)
    later = watch.look(12.0, 1002.0, 9, 3)

    assert first is not None
    assert later is not None
    assert (first.fault, first.culprits, first.nodes, first.round) == ("slow_link", (2,), ("n2",), 3)
    assert (later.since_wall_s, later.since_step) == (1000.0, 7)
    assert later.cost == pytest.approx(0.6)
    assert "waits in its TCP queues in 70% of looks, that of the others in 0%" in later.reason


def test_the_warning_ends_with_the_queue() -> None:
    """Empty again: nobody is named."""
    watch = LinkWatch()
    work = (StepWork(step=7, wall_s=0.2, waiting_s=0.12),)
    for rank in range(4):
        watch.take(rank, "n", 0.7 if rank == 2 else 0.0, work)
    assert watch.look(10.0, 1000.0, 7, 1) is not None

    watch.take(2, "n", 0.0, work)

    assert watch.look(12.0, 1002.0, 8, 1) is None
