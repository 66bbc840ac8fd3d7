# SPDX-License-Identifier: Apache-2.0
"""What is to be drawn of one rank, and on which of its tracks; decided before anything is drawn. Pure.

The picture is cut into *windows*, one for each step number, so that a trace can be written piece by piece: a rank's
collective belongs to the step in which it began. What began after the last finished step is the *tail*.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from megascale_ops.blackbox.records import StepRecord
from megascale_ops.trace.matching import Key, is_shared, key_of, newest_of
from megascale_ops.trace.rank_records import NS, CollectiveSpan, RankRecords

# The window after the last step; no step has this number.
TAIL = 1 << 62


class Drawn(msgspec.Struct, frozen=True, gc=False):
    """A collective to be drawn: on lane ``lane`` of its communicator, until ``end_ns`` of the rank's clock."""

    span: CollectiveSpan
    lane: int
    end_ns: int
    key: Key | None  # None: it can't be compared with other ranks
    is_open: bool  # entered last of its communicator, of those that are timed, and its end was not seen


class Step(NamedTuple):
    """A finished step, and when it began on the rank's clock."""

    record: StepRecord
    begin_ns: int

    @property
    def end_ns(self) -> int:
        """Return when it ended."""
        return round(self.record.ended_mono_s * NS)


class RankPlan(NamedTuple):
    """One rank's part of the picture. ``offset_ns`` is subtracted from its clock."""

    rank: int
    records: RankRecords
    offset_ns: int
    steps: dict[int, Step]
    collectives: dict[int, list[Drawn]]  # by window
    lanes: dict[tuple[str, str], int]  # how many tracks each (source, communicator) needs
    drawn: dict[Key, CollectiveSpan]  # those that can be compared


def plan_ranks(all_records: Sequence[RankRecords], offsets: dict[str, int], last: int) -> list[RankPlan]:
    """Return the plans of all ranks for their last ``last`` steps, in the order of ranks.

    "Last" counts from the newest step of any of them, so that a rank that fell behind is drawn beside the others.
    """
    ordered = sorted(all_records, key=lambda records: records.identity.rank)
    runs = [_newest_run(records.steps) for records in ordered]
    newest = max((run[-1].step for run in runs if run), default=-1)
    shown = [[step for step in run if step.step > newest - last] for run in runs]
    begins = [
        began_ns(steps[0]) - offsets[records.identity.node]
        for records, steps in zip(ordered, shown, strict=True)
        if steps
    ]
    earliest_ns = min(begins, default=0)
    plans = []
    for records, steps in zip(ordered, shown, strict=True):
        offset_ns = offsets[records.identity.node]
        first_ns = began_ns(steps[0]) if steps else earliest_ns + offset_ns if begins else 0
        plans.append(_plan(records, offset_ns, steps, first_ns))
    return plans


def began_ns(step: StepRecord) -> int:
    """Return when a step began, on the rank's clock."""
    return round((step.ended_mono_s - step.wall_s) * NS)


def windows_of(plans: Iterable[RankPlan]) -> list[int]:
    """Return the windows in which anything happens, oldest first, the tail last."""
    return sorted({window for plan in plans for window in (*plan.steps, *plan.collectives)} | {TAIL})


def _newest_run(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the newest steps whose numbers and ends rise: a script may begin to count again, a record be damaged."""
    run = list(steps[-1:])
    for step in reversed(steps[:-1]):
        if step.step < run[-1].step and step.ended_mono_s <= run[-1].ended_mono_s:
            run.append(step)
    return run[::-1]


def _begins(steps: Sequence[StepRecord]) -> list[int]:
    """Return when steps began, on the rank's clock; by rounding or damage, one may seem to begin too early."""
    begins, free_ns = [], 0
    for step in steps:
        ended_ns = round(step.ended_mono_s * NS)
        begins.append(min(ended_ns, max(free_ns, began_ns(step))))
        free_ns = ended_ns
    return begins


def _plan(records: RankRecords, offset_ns: int, steps: Sequence[StepRecord], first_ns: int) -> RankPlan:
    newest = newest_of(records)
    last_of = {(span.source, span.communicator): span for span in records.spans if span.is_timed}
    begins = _begins(steps)
    after_ns = round(steps[-1].ended_mono_s * NS) if steps else 0
    lane_ends: dict[tuple[str, str], list[int]] = {}
    collectives: dict[int, list[Drawn]] = {}
    drawn: dict[Key, CollectiveSpan] = {}
    for span in records.spans:
        communicator = (span.source, span.communicator)
        is_open = not (span.ended_ns or span.is_over) and last_of.get(communicator) is span
        end_ns = span.ended_ns or (records.last_ns if is_open else span.started_ns)
        if end_ns < first_ns:
            continue
        lane = _lane(lane_ends.setdefault(communicator, []), span.started_ns, end_ns)
        window = TAIL
        if steps and span.started_ns < after_ns:
            window = steps[max(0, bisect_right(begins, span.started_ns) - 1)].step
        key = key_of(span) if is_shared(span) else None
        if key is not None and newest[key] is span:
            drawn[key] = span
        else:
            key = None
        collectives.setdefault(window, []).append(Drawn(span, lane, end_ns, key, is_open))
    lanes = {communicator: len(ends) for communicator, ends in lane_ends.items()}
    by_number = {step.step: Step(step, begin) for step, begin in zip(steps, begins, strict=True)}
    return RankPlan(records.identity.rank, records, offset_ns, by_number, collectives, lanes, drawn)


def _lane(ends: list[int], start_ns: int, end_ns: int) -> int:
    """Return the first lane that is free; slices of one track may not cross each other."""
    for lane, busy_until_ns in enumerate(ends):
        if busy_until_ns <= start_ns:
            ends[lane] = end_ns
            return lane
    ends.append(end_ns)
    return len(ends) - 1
