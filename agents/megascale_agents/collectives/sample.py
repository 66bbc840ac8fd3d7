# SPDX-License-Identifier: Apache-2.0
"""Report finished collectives to the controller: a bounded sample of them, the same ones on every rank.

Each is read once, when it has ended: how long it took, and how long the rank worked by itself before it. All of
them are summed up (``sums``). What goes up is decided by the sequence number alone (``is_sampled``), at a
rate that each rank finds for itself: ranks of one communicator finish as many collectives a second, so they find the
same.

The time is an argument. Durations that are negative (a clock that was set back) are left out and counted as lost.
"""

import math
from bisect import bisect_right, insort
from collections.abc import Collection, Mapping
from operator import attrgetter

from megascale_agents.collectives.source import BoxSource, Ended, Source
from megascale_agents.collectives.sums import CollectiveSums, JobSums
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.schema.collectives import (
    LARGE_EVERY_S,
    LARGE_WORLD,
    MOST_BITS,
    MOST_LINES,
    CollectiveSample,
    SampledLine,
    is_sampled,
    pack_rows,
)

# Rows a second: 64 of each rank show a slow one within 20 steps; 512 of a node are 9 KB in a heartbeat.
RANK_ROWS_PER_S, NODE_ROWS_PER_S = 64.0, 512.0
# 50,000 a second of a whole job: a pass of ten seconds then stops the controller of 12,288 ranks for 0.15 s.
JOB_ROWS_PER_S = 50_000.0
LEAST_ROWS_PER_S = 4.0
# Twice the rate for 5 s of a large job; after a pause the newest are sent.
MOST_ROWS = 128
_ENDS_KEPT = 64
# 4,096 sizes of 200 bytes; a model has some hundred.
_MOST_NAMES = 4096
# Half a minute: what a rank does occasionally (a checkpoint) must not make its lines look slow or new.
_RATE_MEMORY = 0.8

_started = attrgetter("started_ns")
_POINT_TO_POINT = frozenset(
    {"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list"}
    | {"Send", "Recv", "SendRecv", "PutSignal", "Signal", "WaitSignal"}
)
# Each rank calls these with a size of its own.
_UNEVEN = frozenset(
    {"all_to_all", "all_to_all_single", "gather", "scatter", "AlltoAll", "AllGatherV", "Gather", "Scatter"}
)


class _Line:
    """How often one stream of collectives goes by, and which share of it is reported."""

    __slots__ = ("bits", "count", "place", "rate")

    def __init__(self, place: int) -> None:
        self.place = place
        self.bits = 0
        self.count = 0  # since the last sample
        self.rate = 0.0  # a second; 0 before the first sample


class _PassedBy:
    """How many collectives went by untold since the last sample."""

    __slots__ = ("lost", "point_to_point")

    def __init__(self) -> None:
        self.point_to_point = self.lost = 0


class RankFeed:
    """Follows one rank's collectives and samples those not reported yet.

    Args:
        rank: its number.
        source: where its collectives are read.
        rows_per_s: most rows to report per second.
        every_s: least time between two samples, seconds.
        sums: where every collective is counted, reported or not.
    """

    def __init__(
        self, rank: int, source: Source, rows_per_s: float, every_s: float = 0.0, sums: JobSums | None = None
    ) -> None:
        self.source = source
        self._sums = sums
        self._rank = rank
        self._rows_per_s = rows_per_s
        self._every_s = every_s
        self._ends_ns: list[int] = []  # the newest, in order
        self._lines: dict[tuple[str, str, int], _Line] = {}
        self._known: dict[tuple[str, str, int], _Line | None] = {}  # by communicator, function and size
        self._told_s: float | None = None
        self._covered_ns = 0
        self._passed_by = _PassedBy()

    def drain_sample(self, now_s: float) -> CollectiveSample | None:
        """Return the next sample; None when nothing was finished, or when it is not time yet.

        Args:
            now_s: monotonic clock now.
        """
        if self._told_s is not None and now_s - self._told_s < self._every_s:
            return None
        fresh = self._fresh()
        if not fresh:
            return None
        if self._sums is not None:
            self._sums.add(fresh)
        elapsed_s = max(now_s - self._told_s, 0.1) if self._told_s is not None else _span_s(fresh)
        self._told_s = now_s
        lines = self._count(fresh)
        self._set_rates(elapsed_s)
        rows = []
        for record, line in zip(fresh, lines, strict=True):
            own_ns = self._own_ns(record)
            if line is not None and record.seq >= 0 and (not line.bits or is_sampled(record.seq, line.bits)):
                rows.append((line.place, record.seq, record.ended_ns - record.started_ns, own_ns))
        covered_ns = max([record.ended_ns for record in fresh])
        began_ns = self._covered_ns or fresh[0].started_ns
        self._covered_ns = max(covered_ns, self._covered_ns)
        sample = CollectiveSample(
            rank=self._rank,
            lines=tuple(SampledLine(*key, line.bits) for key, line in self._lines.items()),
            rows=pack_rows(rows[-MOST_ROWS:]),
            span_s=round(max(0, covered_ns - began_ns) * 1e-9, 6),
            finished=len(fresh),
            point_to_point=self._passed_by.point_to_point,
            lost=self._passed_by.lost + max(0, len(rows) - MOST_ROWS),
            host_timed=self.source.host_timed,
        )
        self._passed_by = _PassedBy()
        return sample

    def _fresh(self) -> list[Ended]:
        """Return what has ended since the last look, in the order of their starts."""
        found, lost = self.source.drain_ended()
        fresh = [record for record in found if record.ended_ns >= record.started_ns]
        self._passed_by.lost += lost + len(found) - len(fresh)
        fresh.sort(key=_started)
        return fresh

    def _count(self, fresh: list[Ended]) -> list[_Line | None]:
        """Count what went by; return the line of each. Lines beyond the 255th are not reported."""
        lines = []
        for record in fresh:
            name = (record.communicator, record.function, record.bytes_moved)
            # A training loop repeats itself: its line is determined once.
            line = self._known[name] if name in self._known else self._learn(name, record)
            if line is not None:
                line.count += 1
            elif record.function in _POINT_TO_POINT:
                self._passed_by.point_to_point += 1
            else:
                self._passed_by.lost += 1
            lines.append(line)
        return lines

    def _learn(self, name: tuple[str, str, int], record: Ended) -> _Line | None:
        """Return the line of a collective, a new one where there is room; None of those that are in none."""
        line = None
        if record.function not in _POINT_TO_POINT:
            key = _key(record)
            line = self._lines.get(key)
            if line is None and len(self._lines) < MOST_LINES:
                line = self._lines[key] = _Line(len(self._lines))
        if len(self._known) >= _MOST_NAMES:  # sizes that never come again
            self._known.clear()
        self._known[name] = line
        return line

    def _set_rates(self, elapsed_s: float) -> None:
        """Find the share of each line to report; every line gets an equal part of the rank's rows."""
        share = self._rows_per_s / max(1, len(self._lines))
        for line in self._lines.values():
            rate, line.count = line.count / elapsed_s, 0
            line.rate = _RATE_MEMORY * line.rate + (1 - _RATE_MEMORY) * rate if line.rate else rate
            wanted = math.ceil(math.log2(line.rate / share)) if line.rate > share else 0
            # Less is kept at once, more only when it is clear: ranks that waver at a power of two would disagree.
            if wanted > line.bits or line.rate < 0.7 * share * 2 ** (line.bits - 1):
                line.bits = min(wanted, MOST_BITS)

    def _own_ns(self, record: Ended) -> int:
        """Return how long the rank had been outside of collectives when it started this one; -1: not known."""
        ends_ns = self._ends_ns
        if ends_ns and record.started_ns >= ends_ns[-1]:  # the usual case: one after the other
            ends_ns.append(record.ended_ns)
            if len(ends_ns) > _ENDS_KEPT:
                del ends_ns[0]
            return record.started_ns - ends_ns[-2]
        before = bisect_right(ends_ns, record.started_ns)
        own_ns = record.started_ns - ends_ns[before - 1] if before else -1
        insort(ends_ns, record.ended_ns)
        if len(ends_ns) > _ENDS_KEPT:
            del ends_ns[0]
        return own_ns


class CollectiveFeed:
    """The feeds of all ranks of this node.

    Attributes:
        sums: what they have finished, for ``/metrics``.
    """

    def __init__(self) -> None:
        self.sums = CollectiveSums()
        self._feeds: dict[tuple[str, int], tuple[BoxReader, RankFeed]] = {}

    def drain_sample(self, job: str, boxes: Mapping[int, BoxReader], now_s: float) -> tuple[CollectiveSample, ...]:
        """Return the samples of the ranks of a job.

        Args:
            job: its name.
            boxes: of the round that runs, by rank.
            now_s: monotonic clock now.
        """
        samples = []
        for rank, box in boxes.items():
            known = self._feeds.get((job, rank))
            if known is None or known[0] is not box:
                known = self._feeds[job, rank] = (box, _feed(rank, box, len(boxes), self.sums, job))
            sample = known[1].drain_sample(now_s)
            if sample is not None:
                samples.append(sample)
        return tuple(samples)

    def forget(self, jobs: Collection[str]) -> None:
        """Drop the feeds of all jobs but these."""
        self._feeds = {key: kept for key, kept in self._feeds.items() if key[0] in jobs}
        self.sums.forget(jobs)


def _feed(rank: int, box: BoxReader, ranks_here: int, all_sums: CollectiveSums, job: str) -> RankFeed:
    """Return a feed at the rate that a job of this size allows."""
    world_size = box.identity().world_size
    sums = all_sums.of_job(job, world_size)
    rows_per_s = min(RANK_ROWS_PER_S, NODE_ROWS_PER_S / max(1, ranks_here), JOB_ROWS_PER_S / max(1, world_size))
    every_s = LARGE_EVERY_S if world_size > LARGE_WORLD else 0.0
    return RankFeed(rank, BoxSource(box), max(LEAST_ROWS_PER_S, rows_per_s), every_s, sums)


def _key(record: Ended) -> tuple[str, str, int]:
    """Return the line of a collective."""
    function = record.function
    even = record.bytes_moved > 0 and function not in _UNEVEN and "object" not in function
    return record.communicator, function, (record.bytes_moved - 1).bit_length() if even else 0


def _span_s(records: list[Ended]) -> float:
    """Return the time that the first records cover, at least a second: a burst at the start is no rate."""
    return max(1.0, (max(record.ended_ns for record in records) - records[0].started_ns) * 1e-9)
