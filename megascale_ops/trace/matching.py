# SPDX-License-Identifier: Apache-2.0
"""Find the same collective on all ranks, and separate waiting from moving data. Pure, without a synchronised clock.

A collective in which each rank waits for all others ends for all at once. So the rank that spent the least time in it
came last; what it spent is the time of moving the data, and what others spent above that they waited for it.

Point-to-point calls carry no number of their own, and of a broadcast, reduce, gather or scatter some ranks may leave
before others have come: none of these is split.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import TypeAlias

import msgspec

from megascale_ops.trace.rank_records import HOST, LAUNCH, CollectiveSpan, RankRecords

Key: TypeAlias = tuple[str, str, str, int]  # source, communicator, function, sequence number

_TOGETHER = ("allreduce", "allgather", "reducescatter", "alltoall", "barrier", "monitoredbarrier")


class Meeting(msgspec.Struct, gc=False):
    """One collective over all ranks that were seen in it; ``moving_ns`` and ``last_rank`` only of those that ended."""

    moving_ns: int = -1
    last_rank: int = -1
    ended: int = 0
    unfinished: int = 0


@cache
def ends_together(function: str) -> bool:
    """Return whether a collective of this name ends for all its ranks at once; NCCL's and torch's spellings."""
    return function.lower().replace("_", "").startswith(_TOGETHER)


def is_point_to_point(function: str) -> bool:
    """Return whether a function is a send, a receive, or both at once; NCCL and torch spell them differently."""
    return function.lower().removeprefix("i").startswith(("send", "recv"))


def is_shared(span: CollectiveSpan) -> bool:
    """Return whether a span can be compared with those of other ranks: it ends for all, and lasts until then."""
    return span.source != LAUNCH and ends_together(span.function)


def key_of(span: CollectiveSpan) -> Key:
    """Return what is the same on all ranks of one collective."""
    return (span.source, span.communicator, span.function, span.seq)


def newest_of(records: RankRecords) -> dict[Key, CollectiveSpan]:
    """Return a rank's spans by key. A group that was made anew begins to count again: the newest of a key stands."""
    return {key_of(span): span for span in records.spans if is_shared(span)}


def meet(meetings: dict[Key, Meeting], rank: int, spans: Iterable[tuple[Key, CollectiveSpan]]) -> None:
    """Add one rank's spans to what is known of each collective."""
    for key, span in spans:
        meeting = meetings.get(key)
        if meeting is None:
            meeting = meetings[key] = Meeting()
        if not span.ended_ns:
            meeting.unfinished += not span.is_over
            continue
        meeting.ended += 1
        took_ns = span.ended_ns - span.started_ns
        # Of equals the lowest rank, whatever the order in which they are added.
        if meeting.moving_ns < 0 or (took_ns, rank) < (meeting.moving_ns, meeting.last_rank):
            meeting.moving_ns, meeting.last_rank = took_ns, rank


def absentees(
    meetings: Mapping[Key, Meeting], newest: Mapping[int, Mapping[Key, CollectiveSpan]]
) -> dict[Key, tuple[int, ...]]:
    """Return, for each collective that some ranks are in and none has left, the ranks of its group that never came.

    A rank that is known to be in the communicator, and has not been seen
    beyond this number, is absent.
    """
    members: dict[tuple[str, str], set[int]] = {}
    furthest: dict[tuple[str, str, str, int], int] = {}
    for rank, spans in newest.items():
        for key in spans:
            members.setdefault(key[:2], set()).add(rank)
            counted = (*_counter_of(key), rank)
            furthest[counted] = max(key[3], furthest.get(counted, -1))
    found = {}
    seen = {key for spans in newest.values() for key in spans}
    for key, meeting in meetings.items():
        if meeting.unfinished and not meeting.ended and key in seen:
            counter = _counter_of(key)
            away = [rank for rank in members.get(key[:2], ()) if furthest.get((*counter, rank), -1) < key[3]]
            if away:
                found[key] = tuple(sorted(away))
    return found


def _counter_of(key: Key) -> tuple[str, str, str]:
    """Return what a sequence number counts: torch's all collectives of a group, NCCL's those of one function."""
    source, communicator, function, _ = key
    return (source, communicator, "" if source == HOST else function)


def communicators_of(records: RankRecords) -> Collection[tuple[str, str]]:
    """Return the communicators that a rank was seen in, with their source."""
    return frozenset((span.source, span.communicator) for span in records.spans)
