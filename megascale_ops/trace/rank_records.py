# SPDX-License-Identifier: Apache-2.0
"""What one rank's black box holds, as the timeline wants it: finished steps, and *spans* of collectives of any source.

Each source of spans is a function: an open box in, spans on the rank's CLOCK_MONOTONIC out. There are
two: Python's calls on the host, and what the NCCL profiler plugin saw on the GPU. Where the second is there, a call of
the first only launches a kernel and returns at once: its time does not include waiting, and it is called a *launch*.

A corrupted box may hold any number as a time or as a step: what cannot be is left out and counted.
"""

from collections.abc import Iterable

import msgspec

from megascale_ops.blackbox.nccl_codes import FLAG_DOUBTFUL, FLAG_UNTIMED
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity, NcclRecord, StepRecord

NS = 1_000_000_000
# 60 s before the box was opened, an hour after its last heartbeat: nothing of this process can lie outside.
_EARLY_NS = 60 * NS
_LATE_NS = 3600 * NS
# No step of training lasts four months; above it a float's bits were damaged.
_LONGEST_STEP_S = 1e7
# A step every microsecond for twelve days; one damaged number beyond it would leave no other rank a step to show.
_MOST_STEPS = 1 << 40


HOST, LAUNCH, NCCL = "host", "launch", "NCCL"


class CollectiveSpan(msgspec.Struct, frozen=True, gc=False):
    """One collective on one rank. Times: the rank's CLOCK_MONOTONIC.

    ``ended_ns`` is 0 when its end was not seen; ``is_over`` is true if it has ended all the same, or was not timed
    (``is_timed`` is false then: it is no evidence about what came before it).
    """

    communicator: str
    function: str
    seq: int
    bytes_moved: int
    started_ns: int
    ended_ns: int
    source: str = HOST
    is_over: bool = False
    is_timed: bool = True


class RankRecords(msgspec.Struct, frozen=True):
    """All that is drawn of one rank, oldest first; times as in ``CollectiveSpan``."""

    identity: BoxIdentity
    steps: tuple[StepRecord, ...] = ()
    spans: tuple[CollectiveSpan, ...] = ()
    phase: str = ""
    phase_since_ns: int = 0
    last_ns: int = 0  # the newest time stamp in the box
    impossible: int = 0  # records left out because their times or numbers cannot be
    names: dict[str, str] = {}  # of communicators that have one beside their number


def host_calls(box: BoxReader, source: str = HOST) -> list[CollectiveSpan]:
    """Return the collectives that the recorder saw from Python: entry and return of the call on the host."""
    return [
        CollectiveSpan(
            record.communicator,
            record.function,
            record.seq,
            record.bytes_moved,
            record.started_mono_ns or record.enqueued_mono_ns,
            record.ended_mono_ns,
            source,
        )
        for record in box.collectives()
    ]


def nccl_kernels(box: BoxReader) -> list[CollectiveSpan]:
    """Return what the NCCL profiler plugin saw: start and end on the GPU, or the enqueueing where they are not known.

    The end that stands in a record before it is done is that of one channel of many.
    """
    return [
        CollectiveSpan(
            f"{record.communicator:016x}",
            record.function,
            record.seq,
            record.bytes_moved,
            record.gpu_started_mono_ns or record.enqueued_mono_ns,
            record.gpu_ended_mono_ns if record.is_done and record.gpu_started_mono_ns and not _doubtful(record) else 0,
            NCCL,
            is_over=record.is_done,
            is_timed=not record.flags & FLAG_UNTIMED,
        )
        for record in box.nccl()
    ]


def _doubtful(record: NcclRecord) -> bool:
    return bool(record.flags & FLAG_DOUBTFUL)


def read_rank_records(box: BoxReader) -> RankRecords:
    """Return what an open box holds."""
    identity, progress = box.identity(), box.progress()
    pulse_ns = round(max(progress.moved_mono_s, progress.beat_mono_s) * NS)
    kernels = nccl_kernels(box)
    spans = [*host_calls(box, LAUNCH if kernels else HOST), *kernels]
    names = {f"{one.id:016x}": one.name for one in box.communicators() if one.name}
    return make_rank_records(
        identity, box.steps(), spans, pulse_ns=pulse_ns, phase=progress.phase,
        phase_since_ns=round(progress.phase_since_mono_s * NS), names=names,
    )  # fmt: skip


def make_rank_records(
    identity: BoxIdentity,
    steps: Iterable[StepRecord],
    spans: Iterable[CollectiveSpan],
    *,
    pulse_ns: int = 0,
    phase: str = "",
    phase_since_ns: int = 0,
    names: dict[str, str] | None = None,
) -> RankRecords:
    """Put records of any number together: a box holds 256 steps, these as many as one has.

    Args:
        identity: Whose they are.
        steps: Finished steps, oldest first.
        spans: Collectives of all sources, in any order.
        pulse_ns: The rank's last heartbeat or progress; 0 when not known, and then no time is too late.
        phase: What the rank does now.
        phase_since_ns: Since when.
        names: Names of communicators, by what spans call them.
    """
    all_steps, all_spans = list(steps), list(spans)
    first_ns = round(identity.started_mono_s * NS) - _EARLY_NS
    latest_ns = pulse_ns + _LATE_NS if pulse_ns else 1 << 62
    good_steps = [
        step
        for step in all_steps
        if first_ns <= step.ended_mono_s * NS <= latest_ns
        and 0.0 <= step.wall_s < _LONGEST_STEP_S
        and 0 <= step.step < _MOST_STEPS
    ]
    good_spans = [
        span
        for span in all_spans
        if max(first_ns, 1) <= span.started_ns <= latest_ns
        and (span.ended_ns == 0 or span.started_ns <= span.ended_ns <= latest_ns)
    ]
    good_spans.sort(key=_start)
    stamps = [pulse_ns, *(round(step.ended_mono_s * NS) for step in good_steps[-1:])]
    stamps += [max(span.started_ns, span.ended_ns) for span in good_spans]
    return RankRecords(
        identity=identity,
        steps=tuple(good_steps),
        spans=tuple(good_spans),
        phase=phase,
        phase_since_ns=phase_since_ns if first_ns <= phase_since_ns <= latest_ns else 0,
        last_ns=max(stamps),
        names=names or {},
        impossible=len(all_steps) + len(all_spans) - len(good_steps) - len(good_spans),
    )


def _start(span: CollectiveSpan) -> int:
    """Return what spans are ordered by."""
    return span.started_ns
