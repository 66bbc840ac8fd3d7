# SPDX-License-Identifier: Apache-2.0
"""Make spans of time from events: begin and end, even where one of the two is missing.

A killed kernel never ends its tile; a wait that expires leaves its tile in the middle; a ring that wrapped has lost how
its oldest tile began. Such a slice is drawn as far as is known, with the reason in its `flaw`: nothing is dropped,
because the slice without an end is the one that matters.
"""

from collections.abc import Iterator
from typing import NamedTuple

from megascale_kernels.progress.board_format import LAUNCH_BEGIN, NOTIFY, TILE_BEGIN, TILE_END, WAIT_BEGIN, WAIT_END
from megascale_kernels.progress.view import operator_name
from megascale_kernels.tracing.rings import Event, Ring

UNFINISHED = "unfinished"
BEGIN_LOST = "begin lost"


class Slice(NamedTuple):
    """A span of time on one track.

    Attributes:
        role: "compute", "communicate" or "copy engine".
        cta: the CTA, of a copy engine the peer.
        kind: "tile", "wait", "notify", "push" (of a unit by a CTA) or "copy" (of a unit by the copy engine).
        operator: what ran.
        launch: its number; None when the ring does not hold it.
        tile: tile or unit; of notifications and waits of GEMM + reduce-scatter, the flag.
        peer: the rank concerned.
        begin_ns: on this rank's clock.
        end_ns: likewise.
        flaw: "" or what is missing: "unfinished", "begin lost".
    """

    role: str
    cta: int
    kind: str
    operator: str
    launch: int | None
    tile: int
    peer: int
    begin_ns: int
    end_ns: int
    flaw: str = ""


class _Track:
    """The state of one ring while its events are read: at most one tile and one wait are open."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.operator = ring.operator
        self.launch: int | None = None
        self.tile: Event | None = None
        self.wait: Event | None = None
        self.free_ns = ring.events[0].time_ns  # nothing that is drawn may begin earlier: slices of a track nest

    def slice(self, kind: str, what: Event, begin_ns: int, end_ns: int, flaw: str = "") -> Slice:
        return Slice(
            self.ring.role,
            self.ring.cta,
            kind,
            self.operator,
            self.launch,
            what.tile,
            what.peer,
            begin_ns,
            end_ns,
            flaw,
        )

    def begin_wait(self, time_ns: int, event: Event | None) -> Iterator[Slice]:
        """A wait that is still open ends where the next thing begins."""
        if self.wait is not None:
            yield self.slice("wait", self.wait, self.wait.time_ns, time_ns, UNFINISHED)
        self.wait = event

    def end_wait(self, event: Event) -> Iterator[Slice]:
        begun, self.wait = self.wait, None
        if begun is None:
            floor = self.free_ns if self.tile is None else max(self.free_ns, self.tile.time_ns)
            yield self.slice("wait", event, floor, event.time_ns, BEGIN_LOST)
        else:
            yield self.slice("wait", begun, begun.time_ns, event.time_ns)
        if self.tile is None:
            self.free_ns = event.time_ns

    def end_tile(self, event: Event) -> Iterator[Slice]:
        yield from self.begin_wait(event.time_ns, None)
        begun, self.tile = self.tile, None
        if begun is None:
            yield self.slice("tile", event, self.free_ns, event.time_ns, BEGIN_LOST)
        else:
            yield self.slice("tile", begun, begun.time_ns, event.time_ns)
        self.free_ns = event.time_ns

    def leave_open(self, time_ns: int) -> Iterator[Slice]:
        """Whatever is open has no end of its own."""
        for kind, begun in (("wait", self.wait), ("tile", self.tile)):
            if begun is not None:
                yield self.slice(kind, begun, begun.time_ns, max(time_ns, begun.time_ns), UNFINISHED)
                self.free_ns = max(time_ns, begun.time_ns)
        self.tile = self.wait = None

    def notify(self, event: Event) -> Iterator[Slice]:
        if self.ring.role == "communicate" and self.tile is None:
            yield self.slice("push", event, self.free_ns, event.time_ns)
            self.free_ns = event.time_ns
        else:
            yield self.slice("notify", event, event.time_ns, event.time_ns)


def slices_of(ring: Ring, last_ns: int) -> list[Slice]:
    """The slices of one ring.

    Args:
        ring: the events.
        last_ns: the last time known of this rank. What a ring without an end had in hand, it still had then.
    """
    track = _Track(ring)
    found: list[Slice] = []
    before_ns = track.free_ns
    for event in ring.events:
        if event.kind == LAUNCH_BEGIN:
            found += track.leave_open(before_ns)
            track.launch, track.operator, track.free_ns = event.tile, operator_name(event.peer), event.time_ns
        elif event.kind == TILE_BEGIN:
            found += track.leave_open(event.time_ns)
            track.tile = event
        elif event.kind == WAIT_BEGIN:
            found += track.begin_wait(event.time_ns, event)
        elif event.kind == WAIT_END:
            found += track.end_wait(event)
        elif event.kind == TILE_END:
            found += track.end_tile(event)
        elif event.kind == NOTIFY:
            found += track.notify(event)
        before_ns = event.time_ns
    found += track.leave_open(before_ns if ring.closed else max(last_ns, before_ns))
    return found
