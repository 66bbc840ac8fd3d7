# SPDX-License-Identifier: Apache-2.0
"""Finished collectives on their way from agents to the controller, and what the controller makes of them for people.

A rank may finish thousands of collectives a second; a few dozen show the same. But all ranks must keep the *same* ones,
or nothing can be compared: so what is kept follows from the sequence number alone (``is_sampled``). One of two is kept
at 1 bit, one of four at 2 bits, and a rank that keeps fewer keeps a subset of what the others keep; so ranks that for a
moment disagree about the bits still have collectives in common. Which one of two is kept looks random, because a step
has the same number of collectives each time and every fourth would always be the same layer's.

A row takes 13 bytes, little-endian, and travels packed: place of its line (u8), sequence number (u32, its lower bits),
duration and own work (u32 each, in units of 0.1 us, at most 429 s). *Own work* is the time from the end of the rank's
collective before (of any communicator, sampled or not) to the start of this one, on the rank's own clock.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from megascale_ops.schema.ranges import MOST_RANKS, Bits, Count, Line, Packed, Rank, Seconds, Word

ROW = struct.Struct("<BIII")
# Units of time a second, and the mark of a time that is not known (own work before the first collective).
TICKS_PER_S = 10_000_000
NOT_KNOWN = 0xFFFF_FFFF
MOST_LINES = 255
# In large jobs each rank reports every 5 s instead of every heartbeat: a fifth of the messages to take apart.
LARGE_WORLD, LARGE_EVERY_S = 512, 5.0
# 1 in a million: beyond it nothing is left to compare.
MOST_BITS = 20


class SampledLine(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stream of collectives of a rank: those of one function of one communicator, of about one size."""

    communicator: Line
    function: Word
    size_bits: Bits = 0  # bytes moved, rounded up to 2**size_bits; 0 where the ranks' sizes may differ
    bits: Bits = 0  # one in 2**bits is kept


class CollectiveSample(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Collectives that one rank has finished since the sample before, oldest first."""

    rank: Rank
    lines: Annotated[tuple[SampledLine, ...], Meta(max_length=MOST_LINES)] = ()
    rows: Packed = b""
    span_s: Seconds = 0.0  # how long this covers, on the rank's clock
    finished: Count = 0  # how many were finished, kept or not
    point_to_point: Count = 0  # of these; they are not in the rows, since only a pair takes part
    lost: Count = 0  # overwritten or left out for lack of room
    # Times are the host's, of what went through Python alone: what waited in a collective below it looks like own work.
    host_timed: bool = False


class SkewRank(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank in the collectives of the last minute; shares are of the time, 0..1."""

    rank: int
    node: str = ""
    waiting: float = 0.0  # spent waiting for others inside collectives
    excess: float = 0.0  # of own work, more than the median of its equals
    late_p50_s: float = 0.0  # behind the first to arrive
    late_p99_s: float = 0.0
    last: float = 0.0  # share of its collectives in which it came last
    cost: float = 0.0  # of every step, what all ranks lose by it; 0 unless it is named
    verdict: str = ""  # "", or why it is named: a cause, "slow now and then", "slow link"
    above: float = 0.0  # own work above its equals', as a share of theirs, as its verdict has it; 0: not named for that


class SkewLink(msgspec.Struct, frozen=True, omit_defaults=True):
    """Communicators that move data more slowly than their equals, and what they have in common."""

    ranks: tuple[int, ...]
    communicators: tuple[str, ...]
    ratio: float  # of the transfer to that of its equals
    cost: float
    text: str = ""


class SkewView(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to ``GET /v1/jobs/JOB/skew``; ranks that cost or wait for least first."""

    job: str
    state: str  # watching, waiting (no collectives have been reported), off (and why)
    span_s: float = 0.0  # how long was watched in all
    matched: int = 0  # rows of collectives that all their ranks have reported
    unmatched: int = 0
    noise: float = 0.0  # of own work, share of a step
    calm: str = ""  # the threshold's false-alarm rate, a sentence
    ranks: tuple[SkewRank, ...] = ()
    links: tuple[SkewLink, ...] = ()
    silent: tuple[int, ...] = ()  # ranks that have reported no collective
    unseen: str = ""  # what can't be seen of this job's collectives, a sentence


def is_sampled(seq: int, bits: int) -> bool:
    """Return whether all ranks keep this collective when one in ``2**bits`` is kept."""
    for level in range(1, bits + 1):
        mixed = ((seq >> level) * 0x9E3779B1 + level * 0x85EBCA6B) & 0xFFFF_FFFF
        mixed = ((mixed ^ mixed >> 15) * 0x2C1B3C6D) & 0xFFFF_FFFF
        if (seq >> (level - 1) ^ mixed >> 13) & 1:
            return False
    return True


def pack_rows(rows: Iterable[tuple[int, int, int, int]]) -> bytes:
    """Return rows (line, sequence number, duration in ns, own work in ns or -1) as they travel."""
    pack = ROW.pack
    return b"".join(
        [pack(line, seq & 0xFFFF_FFFF, _ticks(took_ns), _ticks(own_ns)) for line, seq, took_ns, own_ns in rows]
    )


def _ticks(time_ns: int) -> int:
    return min(time_ns // 100, NOT_KNOWN) if time_ns >= 0 else NOT_KNOWN


# ---- who belongs to a process group ----

# 64 runs of three numbers: 1 KB. Groups of a mesh are one run; what is more uneven is left out.
MOST_RUNS = 64
# 8: the groups in which a rank waits, whose members matter.
MOST_GROUPS = 8


class RankRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Ranks at equal distances: ``first``, ``first + stride``, ... , ``count`` of them."""

    first: Rank
    count: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    stride: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1


class GroupMembers(msgspec.Struct, frozen=True, gc=False):
    """All members of one process group, as a rank in it knows them."""

    group: Line
    runs: Annotated[tuple[RankRun, ...], Meta(max_length=MOST_RUNS)]

    def ranks(self) -> Iterator[int]:
        """Yield the members, lowest first."""
        for run in self.runs:
            yield from range(run.first, run.first + run.count * run.stride, run.stride)


def members_of(group: str, ranks: Sequence[int]) -> GroupMembers | None:
    """Return a group of these ranks; None where they are too uneven to be told in short, or are none."""
    left = sorted(set(ranks))
    runs: list[RankRun] = []
    at = 0
    while at < len(left) and len(runs) <= MOST_RUNS:
        stride = left[at + 1] - left[at] if at + 1 < len(left) else 1
        end = at + 1
        while end < len(left) and left[end] - left[end - 1] == stride:
            end += 1
        runs.append(RankRun(left[at], end - at, stride))
        at = end
    return GroupMembers(group, tuple(runs)) if 0 < len(runs) <= MOST_RUNS else None
