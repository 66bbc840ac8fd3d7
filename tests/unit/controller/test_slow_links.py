# SPDX-License-Identifier: Apache-2.0
"""Whose link is slow, by whose data waits in its send queues while all the others wait."""

import pytest

from megascale_ops.diagnosis.stragglers.send_queues import LinkWatch, Sender, Slow, find
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
    """Whatever is common to several ranks accuses no rank."""
    assert find(_ranks(sending), None, {}) == (Slow((named,), ("n",)) if named is not None else None)


def test_a_full_queue_that_nobody_waits_for_is_nothing() -> None:
    """A rank that copies a file over the network beside training holds no rank up."""
    assert find(_ranks((0.0, 0.9, 0.0, 0.0), waiting=0.05), None, {}) is None


def test_a_name_is_kept_longer_than_it_takes_to_give_it() -> None:
    """A link at the limit does not come and go with every look."""
    ranks = _ranks((0.0, 0.3, 0.0, 0.0), waiting=0.15)

    before = Slow((1,), ("n",))

    assert find(ranks, None, {}) is None
    assert find(ranks, before, {}) == before


PLACES = {"10.0.0.1": "a", "10.0.0.2": "b", "10.0.0.3": "c"}
ADDRESSES = {node: address for address, node in PLACES.items()}


def _nodes(*sending: tuple[str, float, str]) -> dict[int, Sender]:
    """Two ranks a node, in order: node, share of looks, and the node for which data waited."""
    return {rank: Sender(node, share, 0.5, ADDRESSES.get(to, to)) for rank, (node, share, to) in enumerate(sending)}


def test_a_link_that_is_slow_both_ways_names_both_ends() -> None:
    """A ring over two nodes: what rank 1 sends to b and what rank 3 sends to a waits, and nothing else does."""
    ring = _nodes(("a", 0.0, ""), ("a", 0.7, "b"), ("b", 0.05, "b"), ("b", 0.6, "a"))

    assert find(ring, None, PLACES) == Slow((1, 3), ("a", "b"))


def test_a_node_whose_link_is_slow_to_several_others_is_named_alone() -> None:
    """It is in both pairs; of the ranks with full queues only its own are named."""
    ring = _nodes(("a", 0.0, ""), ("a", 0.7, "b"), ("b", 0.0, ""), ("b", 0.6, "c"), ("c", 0.0, ""), ("c", 0.0, ""))

    assert find(ring, None, PLACES) == Slow((3,), ("b",))


@pytest.mark.parametrize(
    "ring",
    [
        (("a", 0.7, "a"), ("a", 0.7, "b"), ("b", 0.0, ""), ("b", 0.0, "")),  # one of them within its node
        (("a", 0.7, "192.168.0.9"), ("a", 0.7, "b"), ("b", 0.0, ""), ("b", 0.0, "")),  # one to an unknown address
        (("a", 0.7, "b"), ("a", 0.7, "b"), ("b", 0.7, "a"), ("b", 0.0, "")),  # more than half: the network
        (("a", 0.7, "b"), ("a", 0.0, ""), ("c", 0.7, "d"), ("c", 0.0, "")),  # two links
    ],
)
def test_full_queues_that_no_one_link_explains_accuse_nobody(ring: tuple[tuple[str, float, str], ...]) -> None:
    """The negative controls."""
    assert find(_nodes(*ring), None, {**PLACES, "d": "d"}) is None


def test_the_watch_says_since_when_and_what_it_costs() -> None:
    """The moment is that of the first look that named it; the cost is what the median rank waits."""
    watch = LinkWatch()
    work = (StepWork(step=7, wall_s=0.2, waiting_s=0.12),)
    for rank in range(4):
        watch.ingest_sending(rank, f"n{rank}", 0.7 if rank == 2 else 0.0, work)

    first = watch.poll_queues(10.0, 1000.0, 7, 3, dict)
    later = watch.poll_queues(12.0, 1002.0, 9, 3, dict)

    assert first is not None
    assert later is not None
    assert (first.fault, first.culprits, first.nodes, first.round) == ("slow_link", (2,), ("n2",), 3)
    assert (later.since_wall_s, later.since_step) == (1000.0, 7)
    assert later.cost == pytest.approx(0.6)
    assert "waits in TCP queues in 70% of looks, that of the others in 0%" in later.reason


def test_the_warning_ends_with_the_queue() -> None:
    """Empty again: no rank is named."""
    watch = LinkWatch()
    work = (StepWork(step=7, wall_s=0.2, waiting_s=0.12),)
    for rank in range(4):
        watch.ingest_sending(rank, "n", 0.7 if rank == 2 else 0.0, work)
    assert watch.poll_queues(10.0, 1000.0, 7, 1, dict) is not None

    watch.ingest_sending(2, "n", 0.0, work)

    assert watch.poll_queues(12.0, 1002.0, 8, 1, dict) is None


def _heard(watch: LinkWatch, sending: float, *works: tuple[float, float], ranks: int = 4) -> None:
    """Let all ranks report; rank 1's queue is as full as that. A pair a step: seconds that rank 1 and others waited."""
    for rank in range(ranks):
        steps = tuple(
            StepWork(step=at, wall_s=10.0, waiting_s=own if rank == 1 else others)
            for at, (own, others) in enumerate(works)
        )
        watch.ingest_sending(rank, "n", sending if rank == 1 else 0.0, steps, "127.0.0.1" if rank == 1 else "")


def test_a_rank_that_uploads_while_the_others_wait_for_it_has_no_slow_link() -> None:
    """Neither while it does, nor as its long step ends, nor as long as the last looks still tell of the upload."""
    watch = LinkWatch()
    _heard(watch, 0.0, (3.2, 3.2))  # a machine on which all wait a third of the time anyway
    waiting = ((3.2, 3.2),)
    during = [(sending, ()) for sending in (0.1, 0.25, 0.5, 0.75)]
    after = [(sending, waiting) for sending in (0.7, 0.5, 0.3, 0.1)]
    named = []
    for now_s, (sending, works) in enumerate([*during, (0.75, ((0.0, 9.9),)), *after], 1):
        _heard(watch, sending, *works)
        named.append(watch.poll_queues(float(now_s), 1000.0 + now_s, 7, 1, dict))

    assert named == [None] * 9

    _heard(watch, 0.75, (3.2, 3.2))  # its queue was empty meanwhile: that is another matter
    assert watch.poll_queues(20.0, 1020.0, 8, 1, dict) is not None


def test_a_slow_link_is_named_as_soon_as_a_step_has_ended_over_it() -> None:
    """The control: the rank waits in its collective like the others."""
    watch = LinkWatch()
    _heard(watch, 0.75)
    before = watch.poll_queues(1.0, 1000.0, 7, 1, dict)
    _heard(watch, 0.75, (6.0, 6.5))

    after = watch.poll_queues(2.0, 1001.0, 7, 1, dict)

    assert before is None
    assert after is not None
    assert after.culprits == (1,)


def test_a_slow_link_is_named_beside_an_upload() -> None:
    """Rank 1's queue is the fuller one, and its own affair."""
    watch = LinkWatch()
    _heard(watch, 0.9, (0.2, 6.0), ranks=5)
    watch.ingest_sending(3, "n", 0.55, (StepWork(step=1, wall_s=10.0, waiting_s=6.0),))

    told = watch.poll_queues(1.0, 1000.0, 7, 1, dict)

    assert told is not None
    assert told.culprits == (3,)
