# SPDX-License-Identifier: Apache-2.0
"""Read the rings that kernels record into: events in order, however the kernel ended.

A ring's header is written when its CTA ends (`close_ring`). Until then, and for ever when the kernel was killed,
the cursor there is that of an earlier launch, and the events behind it are found by their times: the newest event is
the last one, and going back from it times only fall, up to an empty place or to the jump where the ring was
overwritten. A ring that wrapped has lost its oldest events; how many is known from the cursor.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megascale_kernels.progress.board_format import EVENT_WORDS, LAUNCH_BEGIN, MAX_CTAS, RING_EVENTS, RING_WORDS, ROLES
from megascale_kernels.progress.view import operator_name


class Event(NamedTuple):
    """One thing that a CTA did.

    Attributes:
        time_ns: when, nanoseconds of the GPU's clock.
        kind: what (`board_format.KINDS`).
        peer: the rank concerned; of a launch, the operator.
        tile: the tile or, of a role that communicates, the unit; of a launch, its number.
    """

    time_ns: int
    kind: int
    peer: int
    tile: int


class Ring(NamedTuple):
    """What one role of one CTA recorded.

    Attributes:
        cta: its number.
        role: "compute" or "communicate".
        sm: the streaming multiprocessor it ran on last.
        operator: what it ran last.
        events: oldest first.
        lost: events that were overwritten (at least so many, when the ring is not closed).
        closed: the CTA has ended; False when it was killed or is running.
    """

    cta: int
    role: str
    sm: int
    operator: str
    events: tuple[Event, ...]
    lost: int
    closed: bool


def decode_rings(words: Sequence[int]) -> list[Ring]:
    """The rings of a workspace (`Workspace.trace_words` as integers) that hold any event."""
    places = [(cta, role) for cta in range(MAX_CTAS) for role in range(len(ROLES))]
    count = min(len(words) // RING_WORDS, len(places))
    rings = (decode_ring(words[at * RING_WORDS : (at + 1) * RING_WORDS], *places[at]) for at in range(count))
    return [ring for ring in rings if ring is not None]


def decode_ring(words: Sequence[int], cta: int, role: int) -> Ring | None:
    """One ring from its `board_format.RING_WORDS` words, signed or not; None when it holds no event."""
    if not any(words):
        return None
    unsigned = [word & 0xFFFFFFFF for word in words]
    header, body = unsigned[:EVENT_WORDS], unsigned[EVENT_WORDS:]
    times = [high << 32 | low for low, high in zip(body[0::EVENT_WORDS], body[1::EVENT_WORDS], strict=True)]
    cursor = 0 if header[0] >> 31 else header[0]
    first, count, lost, closed = _extent(times, cursor)
    events = []
    for number in range(first, first + count):
        at = number % RING_EVENTS
        what, tile = body[at * EVENT_WORDS + 2], body[at * EVENT_WORDS + 3]
        if times[at]:
            events.append(Event(times[at], what >> 16, what & 0xFFFF, tile - (1 << 32) if tile >> 31 else tile))
    if not events:
        return None
    launches = [event.peer for event in events if event.kind == LAUNCH_BEGIN]
    operator = operator_name(launches[-1] if launches else header[3])
    return Ring(cta, ROLES[role], header[1], operator, tuple(events), lost, closed)


def _extent(times: Sequence[int], cursor: int) -> tuple[int, int, int, bool]:
    """First event, number of events, events lost, and whether the cursor is the true one."""
    size = len(times)
    newest = max(times)
    if cursor and times[(cursor - 1) % size] == newest:
        count = min(cursor, size)
        return cursor - count, count, cursor - count, True
    end = times.index(newest) + 1
    while end < size and times[end] == newest:
        end += 1
    count = 1
    while count < size and 0 < times[(end - 1 - count) % size] <= times[(end - count) % size]:
        count += 1
    lost = max(0, cursor + (end - cursor) % size - size) if count == size else 0
    return end - count + size, count, lost, False
