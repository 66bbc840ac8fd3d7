# SPDX-License-Identifier: Apache-2.0
"""From black boxes to a timeline: choose the ranks, match their collectives across ranks, align the clocks."""

from collections.abc import Sequence

import msgspec

from megascale_ops.errors import MegascaleError
from megascale_ops.schema.events import Incident
from megascale_ops.trace.choosing import Chosen, Known, choose, own_work_s, sentence
from megascale_ops.trace.clocks import Clocks, align
from megascale_ops.trace.gather import Boxes
from megascale_ops.trace.matching import Key, Meeting, communicators_of, meet, newest_of
from megascale_ops.trace.rank_records import RankRecords
from megascale_ops.trace.timeline import Moment, Scope, Timeline

# What comes later (the next round's first step) would stretch the picture over minutes of which no box has a record.
MOMENTS = ("began", "detected", "named", "ordered", "stopped")


class Picture(msgspec.Struct, frozen=True):
    """All that a timeline is drawn from."""

    job: str
    chosen: tuple[Chosen, ...]
    all_records: dict[int, RankRecords]
    clocks: Clocks
    meetings: dict[Key, Meeting]
    seen: int  # ranks of which there is a black box
    incident: Incident | None = None

    def draw(self, ranks: Sequence[int], last: int) -> Timeline:
        """Return the timeline of some of the chosen ranks and of their last steps."""
        verdict = self.incident.verdict if self.incident else None
        marks = self.incident.marks if self.incident else None
        moments = [Moment(name, getattr(marks, name)) for name in MOMENTS if marks and getattr(marks, name)]
        return Timeline(
            [self.all_records[rank] for rank in ranks],
            self.clocks,
            Scope(
                last=last,
                meetings=self.meetings,
                culprits=verdict.culprits if verdict else (),
                incident=self.incident.id if self.incident else "",
                moments=moments,
                about=self._about(),
            ),
        )

    def _about(self) -> tuple[tuple[str, str | int | float], ...]:
        verdict = self.incident.verdict if self.incident else None
        about: list[tuple[str, str | int | float]] = [
            ("job", self.job),
            ("ranks", sentence(self.chosen)),
            ("waiting and moving", f"measured against all {self.seen} ranks of which there is a black box"),
            ("clocks", "; ".join(self.clocks.sentences())),
            ("clock residual p99, ns", self.clocks.residual_p99_ns),
        ]
        about += [(f"clock of {one.node}", f"{one.method}, {one.offset_ns} ns") for one in self.clocks.nodes[:64]]
        if self.incident is not None:
            about.append(("incident", self.incident.id))
        if verdict is not None:
            about.append(("verdict", f"{verdict.fault}: {verdict.reason}"))
        return tuple(about)


def compose(boxes: Boxes, wanted: str, last: int, incident: Incident | None = None) -> Picture:
    """Read the boxes and return the picture.

    Args:
        boxes: The job's black boxes.
        wanted: Which ranks: ``auto``, ``all``, or a list; see :func:`choosing.choose`.
        last: How many steps decide which rank is slow.
        incident: Whose verdict chooses the ranks, if there is one.

    Raises:
        UsageError: ``wanted`` can't be read, or names a rank without a black box.
        MegascaleError: no box can be read to its end.
    """
    known = [
        Known(
            records.identity.rank,
            records.identity.node,
            own_work_s(records.steps, last),
            frozenset(communicators_of(records)),
        )
        for records in boxes.records_of(boxes.ranks)
    ]
    if not known:
        raise MegascaleError(f"none of these black boxes can be read: {'; '.join(boxes.unreadable[:3])}")
    verdict = incident.verdict if incident else None
    chosen = choose(wanted, known, verdict.culprits if verdict else ())
    all_records = {records.identity.rank: records for records in boxes.records_of(one.rank for one in chosen)}
    chosen = tuple(one for one in chosen if one.rank in all_records)
    if not chosen:
        raise MegascaleError(f"the black boxes of these ranks can't be read any more: {'; '.join(boxes.unreadable)}")
    meetings: dict[Key, Meeting] = {}
    for rank, records in all_records.items():
        meet(meetings, rank, newest_of(records).items())
    for records in boxes.records_of(one.rank for one in known if one.rank not in all_records):
        wanted_keys = ((key, span) for key, span in newest_of(records).items() if key in meetings)
        meet(meetings, records.identity.rank, wanted_keys)
    clocks = align(list(all_records.values()))
    return Picture(boxes.job, chosen, all_records, clocks, meetings, len(known), incident)
