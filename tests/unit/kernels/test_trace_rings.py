# SPDX-License-Identifier: Apache-2.0
"""Rings give back what was recorded, in order, and slices draw what has no end as far as it is known."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from megascale_kernels.progress.board_format import (
    LAUNCH_BEGIN,
    NOTIFY,
    RING_EVENTS,
    RING_WORDS,
    TILE_BEGIN,
    TILE_END,
    WAIT_BEGIN,
    WAIT_END,
)
from megascale_kernels.tracing.rings import Event, Ring, decode_ring, decode_rings
from megascale_kernels.tracing.slices import BEGIN_LOST, UNFINISHED, Slice, slices_of

from tests.fakes.boards import FakeRing

BEGAN_NS = 1_750_000_000_000_000_000


def numbered(count: int, first: int = 0, began_ns: int = BEGAN_NS) -> list[tuple[int, int, int, int]]:
    """Events that can be told apart."""
    return [(began_ns + 10 * number, TILE_BEGIN, number, 1) for number in range(first, first + count)]


def tiles_of(ring: Ring | None) -> list[int]:
    """The tiles of a ring's events."""
    assert ring is not None
    return [event.tile for event in ring.events]


def test_a_closed_ring_tells_where_it_ran() -> None:
    """Role, SM and operator stand in the header; times are 64 bits."""
    fake = FakeRing().marks(numbered(3)).close(role=1, operator="gemm_ar", sm=99)

    ring = decode_ring(fake.words, cta=5, role=1)

    assert ring is not None
    assert ring[:4] == (5, "communicate", 99, "gemm_ar")
    assert (ring.lost, ring.closed) == (0, True)
    assert ring.events[1] == Event(BEGAN_NS + 10, TILE_BEGIN, 1, 1)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 2 * RING_EVENTS + 10))
def test_the_newest_events_come_back_and_the_lost_are_counted(count: int) -> None:
    """A ring that wrapped has lost its oldest events and says how many."""
    ring = decode_ring(FakeRing().marks(numbered(count)).close().words, 0, 0)

    assert ring is not None
    assert tiles_of(ring) == list(range(max(0, count - RING_EVENTS), count))
    assert (ring.lost, ring.closed) == (max(0, count - RING_EVENTS), True)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2 * RING_EVENTS), st.integers(1, RING_EVENTS - 1))
def test_a_killed_kernels_events_are_found_by_their_times(before: int, after: int) -> None:
    """The header is that of an earlier launch; what was recorded since is there."""
    fake = FakeRing().marks(numbered(before))
    if before:
        fake.close()
    fake.marks(numbered(after, before))

    ring = decode_ring(fake.words, 0, 0)

    assert ring is not None
    assert tiles_of(ring) == list(range(max(0, before + after - RING_EVENTS), before + after))
    assert (ring.lost, ring.closed) == (max(0, before + after - RING_EVENTS), False)


def test_leftovers_of_a_longer_launch_are_left_alone() -> None:
    """A kernel that begins each launch at the start of its ring leaves older events behind the new ones."""
    old, new = numbered(100), numbered(40, 500)
    for closed in (True, False):
        fake = FakeRing().marks(old).close()
        fake.cursor = 0
        fake.marks(new)
        if closed:
            fake.close()

        ring = decode_ring(fake.words, 0, 0)

        assert tiles_of(ring) == list(range(500, 540))
        assert ring is not None
        assert ring.closed is closed


def test_empty_rings_are_skipped_and_places_are_counted() -> None:
    """The third ring is the first role of the second CTA."""
    words = [0] * (2 * RING_WORDS) + FakeRing().marks(numbered(1)).close().words

    assert [(ring.cta, ring.role) for ring in decode_rings(words)] == [(1, "compute")]


ODD = st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(0, 9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, RING_WORDS - 1), ODD), max_size=80), st.integers(0, 1 << 64))
def test_garbage_never_crashes(stores: Sequence[tuple[int, int]], last_ns: int) -> None:
    """Any words give a ring whose slices do not end before they begin, or none."""
    words = [0] * RING_WORDS
    for at, word in stores:
        words[at] = word

    ring = decode_ring(words, 0, 0)

    if ring is not None:
        assert len(ring.events) <= RING_EVENTS
        assert len([one for one in slices_of(ring, last_ns) if one.kind == "tile" and not one.flaw]) <= len(ring.events)


def drawn(
    events: list[tuple[int, int, int, int]], *, closed: bool = True, last_ns: int = 0, role: int = 0
) -> list[Slice]:
    """The slices of some events."""
    fake = FakeRing().marks(events)
    ring = decode_ring((fake.close(role) if closed else fake).words, 3, role)
    assert ring is not None
    return slices_of(ring, last_ns)


def spans(slices: list[Slice]) -> list[tuple[str, int, int, int, str]]:
    """What matters of slices."""
    return [(one.kind, one.tile, one.begin_ns, one.end_ns, one.flaw) for one in slices]


def test_waits_lie_inside_their_tiles() -> None:
    """Begin and end meet, and the launch mark says what ran."""
    events = [
        (5, LAUNCH_BEGIN, 41, 4),
        (10, TILE_BEGIN, 6, 2),
        (11, WAIT_BEGIN, 6, 2),
        (15, WAIT_END, 6, 2),
        (18, NOTIFY, 6, 1),
        (20, TILE_END, 6, 2),
    ]

    found = drawn(events)

    assert spans(found) == [("wait", 6, 11, 15, ""), ("notify", 6, 18, 18, ""), ("tile", 6, 10, 20, "")]
    assert {(one.launch, one.operator, one.cta, one.role) for one in found} == {(41, "gemm_rs", 3, "compute")}


def test_a_killed_kernel_waits_until_the_last_known_time() -> None:
    """What was in hand is drawn to the end of what is known of the rank."""
    found = drawn([(10, TILE_BEGIN, 6, 2), (11, WAIT_BEGIN, 6, 2)], closed=False, last_ns=90)

    assert spans(found) == [("wait", 6, 11, 90, UNFINISHED), ("tile", 6, 10, 90, UNFINISHED)]


def test_an_expired_wait_leaves_its_tile_unfinished() -> None:
    """The CTA has ended, so nothing lasted longer than its last event."""
    found = drawn([(10, TILE_BEGIN, 6, 2), (11, WAIT_BEGIN, 6, 2), (60, WAIT_END, 6, 2)], last_ns=90)

    assert spans(found) == [("wait", 6, 11, 60, ""), ("tile", 6, 10, 60, UNFINISHED)]


def test_a_lost_begin_is_drawn_from_the_first_known_time() -> None:
    """A ring that wrapped in the middle of a tile."""
    found = drawn([(15, WAIT_END, 6, 2), (20, TILE_END, 6, 2), (21, TILE_BEGIN, 9, 0), (30, TILE_END, 9, 0)])

    assert spans(found) == [("wait", 6, 15, 15, BEGIN_LOST), ("tile", 6, 15, 20, BEGIN_LOST), ("tile", 9, 21, 30, "")]


def test_a_new_launch_ends_what_the_last_one_left() -> None:
    """The tile that gave up ends with the last thing its launch recorded, not in the pause between."""
    found = drawn([(10, TILE_BEGIN, 6, 2), (15, WAIT_END, 6, 2), (99, LAUNCH_BEGIN, 42, 3), (100, TILE_BEGIN, 0, 0)])

    assert spans(found)[1:] == [("tile", 6, 10, 15, UNFINISHED), ("tile", 0, 100, 100, UNFINISHED)]


def test_a_second_worker_of_a_cta_notifies_inside_its_tiles() -> None:
    """Where both roles compute, the second one's notifications are no pushes: slices of a track nest."""
    found = drawn([(10, TILE_BEGIN, 6, 2), (15, NOTIFY, 6, 2), (20, TILE_END, 6, 2)], role=1)

    assert spans(found) == [("notify", 6, 15, 15, ""), ("tile", 6, 10, 20, "")]


def test_pushes_last_from_one_announcement_to_the_next() -> None:
    """A CTA that copies has no begin of its own."""
    found = drawn([(5, LAUNCH_BEGIN, 41, 3), (10, NOTIFY, 0, 2), (18, NOTIFY, 1, 2)], role=1)

    assert spans(found) == [("push", 0, 5, 10, ""), ("push", 1, 10, 18, "")]
