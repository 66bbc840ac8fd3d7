# SPDX-License-Identifier: Apache-2.0
"""From records to the rows that a prediction replays: the collectives of the last steps that all ranks have whole.

A black box keeps the newest collectives and the newest steps of its rank. So each rank has a first step that it has
whole, and only steps that all have whole count. What some ranks leave before others have come (a broadcast, a send) is
left out: its time then counts as work of the rank that spent it. So does unrecorded time, and both are noted.

Pure.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from megascale_ops.errors import UsageError
from megascale_ops.schema.folding import named
from megascale_ops.trace.matching import is_point_to_point, is_shared
from megascale_ops.trace.rank_records import HOST, NCCL, NS, CollectiveSpan, RankRecords

# 3: the first has no beginning, and one of the two others may be the odd one.
FEWEST_STEPS = 3
# A tenth of what steps waited lies outside of the rows: then the prediction is of another job than this one.
_MUCH = 0.1


class Row(NamedTuple):
    """One collective on one rank; communicator and function are numbers into ``Rows``' lists."""

    rank: int
    communicator: int
    function: int
    seq: int
    start_ns: int
    end_ns: int
    step: int


class Rows(NamedTuple):
    """What a prediction needs, with what should be known of it."""

    rows: tuple[Row, ...]
    communicators: tuple[str, ...]
    first_step: int
    last_step: int
    stages: dict[int, int]  # pipeline stage by rank, where it is known
    sends: int = 0  # sends and receives of all ranks; they are not in ``rows``
    notes: tuple[str, ...] = ()


def rows_of(all_records: Sequence[RankRecords], last: int) -> Rows:
    """Return the rows of at most ``last`` steps, the newest that all ranks have whole.

    Raises:
        UsageError: there are fewer than three such steps, or fewer than three of them have collectives.
    """
    source = NCCL if all(any(span.source == NCCL for span in records.spans) for records in all_records) else HOST
    spans = {
        records.identity.rank: [span for span in records.spans if span.source == source] for records in all_records
    }
    empty = [rank for rank, some in spans.items() if not any(map(is_shared, some))]
    if empty:
        raise UsageError(f"{named(empty)} recorded no collective that ends for all at once: there is nothing to replay")
    first, final = _whole_steps(all_records, spans)
    if final - first + 1 < FEWEST_STEPS:
        raise UsageError(
            f"only {max(0, final - first + 1)} steps are recorded whole by all ranks, and a prediction needs three: "
            "let the job run a little longer"
        )
    first = max(first, final - last + 1)
    communicators: dict[str, int] = {}
    functions: dict[str, int] = {}
    rows: list[Row] = []
    passed_over: Counter[str] = Counter()
    sends = 0
    for records in all_records:
        rank, ends_ns = records.identity.rank, [round(step.ended_mono_s * NS) for step in records.steps]
        for span in spans[rank]:
            step = _step_at(records, ends_ns, span)
            if not first <= step <= final:
                continue
            if not is_shared(span) or not span.ended_ns:
                passed_over[span.function] += 1
                sends += is_point_to_point(span.function)
                continue
            communicator = communicators.setdefault(span.communicator, len(communicators))
            function = functions.setdefault(span.function, len(functions))
            rows.append(Row(rank, communicator, function, span.seq, span.started_ns, span.ended_ns, step))
    rows, alone = _met(rows)
    met = len({row.step for row in rows})
    if met < FEWEST_STEPS:
        raise UsageError(
            f"of steps {first} to {final} only {met} have a collective that all its ranks recorded, and a prediction "
            "needs three: give a larger --last, or let the job run a little longer"
        )
    notes = list(_notes(all_records, rows, range(first, final + 1), passed_over))
    if alone:
        notes.append(f"{alone} collectives that not all their ranks have recorded are left out")
    stages = {
        records.identity.rank: records.identity.mesh.pp for records in all_records if records.identity.mesh.pp >= 0
    }
    return Rows(tuple(rows), tuple(communicators), first, final, stages, sends, tuple(notes))


def _whole_steps(all_records: Sequence[RankRecords], spans: dict[int, list[CollectiveSpan]]) -> tuple[int, int]:
    """Return the first and the last step that all ranks have, with all their collectives."""
    first, final = 0, 1 << 62
    for records in all_records:
        if not records.steps:
            return 0, -1
        ends_ns = [round(step.ended_mono_s * NS) for step in records.steps]
        # The step of the oldest span may have lost collectives before it; the box's first step has no known beginning.
        oldest = _step_at(records, ends_ns, spans[records.identity.rank][0])
        first = max(first, records.steps[0].step + 1, oldest + 1)
        final = min(final, records.steps[-1].step)
    return first, final


def _step_at(records: RankRecords, ends_ns: Sequence[int], span: CollectiveSpan) -> int:
    """Return the step in which a span began; one behind the last for what came after it."""
    place = bisect_left(ends_ns, span.started_ns)
    return records.steps[place].step if place < len(records.steps) else records.steps[-1].step + 1


def _met(rows: list[Row]) -> tuple[list[Row], int]:
    """Return the rows of collectives that all ranks of their communicator recorded, and how many were not."""
    ranks: dict[int, set[int]] = {}
    present: Counter[tuple[int, int, int]] = Counter()
    for row in rows:
        ranks.setdefault(row.communicator, set()).add(row.rank)
        present[row[1:4]] += 1
    whole = {key for key, count in present.items() if count == len(ranks[key[0]])}
    return [row for row in rows if row[1:4] in whole], len(present) - len(whole)


def _notes(
    all_records: Sequence[RankRecords], rows: Sequence[Row], steps: range, passed_over: Counter[str]
) -> list[str]:
    notes = []
    if passed_over:
        names = ", ".join(f"{count} {name}" for name, count in passed_over.most_common(4))
        notes.append(f"left out, since they do not end for all at once: {names}; their time counts as work")
    inside: Counter[int] = Counter()
    for row in rows:
        inside[row.rank] += row.end_ns - row.start_ns
    wall_s = waited_s = unseen_s = 0.0
    for records in all_records:
        told = [step for step in records.steps if step.step in steps]
        waited = sum(step.waiting_s for step in told)
        wall_s += sum(step.wall_s for step in told)
        waited_s += waited
        unseen_s += max(0.0, waited - inside[records.identity.rank] * 1e-9)
    if waited_s and unseen_s > _MUCH * waited_s:
        notes.append(
            f"{unseen_s / wall_s:.0%} of the steps was waited for others in collectives that nobody recorded: it "
            "counts as work, and what a change would save is underrated"
        )
    return notes
