# SPDX-License-Identifier: Apache-2.0
"""Sums of the collectives that the ranks of this node have finished: durations, bytes, bus bandwidth.

Pure. Per node and job, never per rank or communicator: a job of 1,536 nodes pays for each series 1,536 times. With five
classes of operation and size in use there are some 50, and 80 at most.

Bus bandwidth is NCCL's own measure (the document PERFORMANCE.md of nccl-tests): the *size* of a collective, over its
duration, times how much of it crosses the slowest link: 2(n-1)/n of an all-reduce, (n-1)/n of an all-gather, a
reduce-scatter and an all-to-all, all of a broadcast. So it can be held against what the hardware can do, whatever the
number of ranks. A duration includes the wait for ranks that come late; the median over the node's ranks leaves out
single waits, and a job whose ranks wait for each other all the time shows less than the wires could.

The size is that of the whole: of an all-gather what every rank has in the end. The black box holds what the call was
given: of NCCL one rank's share (its own Inspector counts as we do), of Python the first tensor. A group's size is known
where NCCL's profiler plugin reports it, and of the job's default group; elsewhere there is no bandwidth, and shares
stay shares.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from megascale_agents.collectives.source import Ended
from megascale_ops.blackbox.calls import function_of
from megascale_ops.schema.metrics import METRICS, MOST_DETAILED

DURATION = "megascale_collective_duration_seconds"
BYTES = "megascale_collective_bytes_total"
BANDWIDTH = "megascale_collective_bus_bandwidth_bytes_per_second"

# Upper bounds of the classes of size: where NCCL usually goes from LL over LL128 to Simple, and what fills a link.
SIZE_CLASSES = ((1 << 16, "le64k"), (1 << 20, "le1m"), (1 << 24, "le16m"), (1 << 28, "le256m"))
LARGEST = "more"
# 8 classes of operation and size, nine series each: 3D parallelism has seven. Start-up (broadcasts, barriers) is not
# what a dashboard shows: whatever has come 20 times first is shown.
MOST_SHOWN, LEAST_OFTEN = 8, 20
# Of a job of more than ``MOST_DETAILED`` ranks: what 1,536 nodes can send within its budget.
MOST_SHOWN_LARGE = 5
# Some 0.5 s to 3 s of a node's collectives: recent, and a median that single waits don't move.
RECENT = 63
# 4,096 sizes of 200 bytes; a model has some hundred.
MOST_KINDS = 4096

# What the words of NCCL and of torch mean, and whether the bytes in the box are one rank's share of the whole.
_OPS: dict[str, tuple[str, bool]] = {
    "AllReduce": ("all_reduce", False),
    "AllGather": ("all_gather", True),
    "ReduceScatter": ("reduce_scatter", True),
    "AlltoAll": ("all_to_all", True),
    "Broadcast": ("broadcast", False),
    "Reduce": ("reduce", False),
    "Send": ("send", False),
    "Recv": ("recv", False),
    "all_reduce": ("all_reduce", False),
    "all_gather": ("all_gather", False),
    "reduce_scatter": ("reduce_scatter", True),
    "all_to_all": ("all_to_all", False),
    "broadcast": ("broadcast", False),
    "reduce": ("reduce", False),
    "send": ("send", False),
    "recv": ("recv", False),
}
OTHER = ("other", False)
# Parts of n in the factor: (a, b) is (a * n - b) / n.
_FACTORS = {
    "all_reduce": (2, 2),
    "all_gather": (1, 1),
    "reduce_scatter": (1, 1),
    "all_to_all": (1, 1),
    "broadcast": (1, 0),
    "reduce": (1, 0),
    "send": (1, 0),
    "recv": (1, 0),
}
# Whole nanoseconds: 300,000 ns are within 0.0003 s, and as a float they are not.
_BOUNDS_NS = tuple(round(bound_s * 1e9) for bound_s in METRICS[DURATION].buckets)


class Durations(NamedTuple):
    """One histogram: how many ended within each bound and above the last (not cumulative), and their sum."""

    counts: list[int]
    sum_s: float


class _Class:
    """Collectives of one operation and class of size."""

    __slots__ = ("bandwidths", "counts", "key", "number", "sum_ns")

    def __init__(self, key: tuple[str, str]) -> None:
        self.key = key
        self.counts = [0] * (len(_BOUNDS_NS) + 1)
        self.number = self.sum_ns = 0
        self.bandwidths: deque[float] = deque(maxlen=RECENT)


class _Kind(NamedTuple):
    """What is the same of all collectives of one function, size and number of ranks."""

    op: str
    size: int
    sums: _Class
    moved: float  # over the slowest link, bytes times 1e9: over nanoseconds it is the bus bandwidth; 0: unknown


class JobSums:
    """The sums of one job's ranks on this node."""

    def __init__(self, most_shown: int = MOST_SHOWN) -> None:
        self._most_shown = most_shown
        self._bytes: dict[str, int] = {}
        self._classes: dict[tuple[str, str], _Class] = {}
        self._shown: dict[tuple[str, str], _Class] = {}
        self._kinds: dict[tuple[str, int, int], _Kind] = {}

    def add(self, finished: Iterable[Ended]) -> None:
        """Count what has ended; some 1 us each."""
        for one in finished:
            name = one.function, one.bytes_moved, one.ranks
            # A training loop repeats itself: what a collective counts for is determined once.
            op, size, sums, moved = self._kinds.get(name) or self._learn(name)
            self._bytes[op] += size
            took_ns = one.ended_ns - one.started_ns
            sums.counts[bisect_left(_BOUNDS_NS, took_ns)] += 1
            sums.sum_ns += took_ns
            sums.number += 1
            if sums.number == LEAST_OFTEN and len(self._shown) < self._most_shown:
                self._shown[sums.key] = sums
            if moved and took_ns > 0:
                sums.bandwidths.append(moved / took_ns)

    def bytes_moved(self) -> dict[str, int]:
        """Return the bytes of all collectives so far, by operation."""
        return dict(self._bytes)

    def durations(self) -> dict[tuple[str, str], Durations]:
        """Return the histograms of the classes that are shown, by operation and class of size."""
        return {key: Durations(list(sums.counts), sums.sum_ns * 1e-9) for key, sums in self._shown.items()}

    def bandwidths(self) -> dict[tuple[str, str], float]:
        """Return the median bus bandwidth of the newest of each class that is shown, bytes a second."""
        return {key: _median(sums.bandwidths) for key, sums in self._shown.items() if sums.bandwidths}

    def _learn(self, name: tuple[str, int, int]) -> _Kind:
        function, moved, ranks = name
        # Object collectives move pickles of unknown size, and first of all their sizes.
        op, is_share = OTHER if "object" in function else _OPS.get(function) or _OPS.get(function_of(function), OTHER)
        size = moved * ranks if is_share and ranks else moved
        key = op, size_class(size)
        sums = self._classes.get(key)
        if sums is None:
            sums = self._classes[key] = _Class(key)
        self._bytes.setdefault(op, 0)
        if len(self._kinds) >= MOST_KINDS:  # sizes that never come again
            self._kinds.clear()
        known = _Kind(op, size, sums, size * 1e9 * factor(op, ranks) if ranks > 1 and op in _FACTORS else 0.0)
        self._kinds[name] = known
        return known


class CollectiveSums:
    """The sums of all jobs on this node."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobSums] = {}

    def of_job(self, job: str, world_size: int = 0) -> JobSums:
        """Return the sums of a job, new ones for a job that is new."""
        if job not in self._jobs:
            self._jobs[job] = JobSums(MOST_SHOWN_LARGE if world_size > MOST_DETAILED else MOST_SHOWN)
        return self._jobs[job]

    def forget(self, jobs: Collection[str]) -> None:
        """Drop the sums of all jobs but these."""
        self._jobs = {job: sums for job, sums in self._jobs.items() if job in jobs}

    def __iter__(self) -> Iterator[tuple[str, JobSums]]:
        """Go through the jobs."""
        return iter(self._jobs.items())


def _median(values: Collection[float]) -> float:
    """Return the upper median; the module ``statistics`` would cost the agent's start 10 ms."""
    return sorted(values)[len(values) // 2]


def size_class(size: int) -> str:
    """Return the name of the class of a size in bytes."""
    for most, name in SIZE_CLASSES:
        if size <= most:
            return name
    return LARGEST


def factor(op: str, ranks: int) -> float:
    """Return which part of a collective's size crosses the slowest link."""
    times, less = _FACTORS[op]
    return (times * ranks - less) / ranks
