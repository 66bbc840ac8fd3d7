# SPDX-License-Identifier: Apache-2.0
"""From the records of NCCL's profiler plugin to the operations queued on the GPU (``schema.gpu_queue``).

An operation that was not timed has no known end. If it was enqueued before those that have not begun, on another
communicator, their stream may wait for it, unseen: then the queue is partial. On the same communicator
it is before them anyway, and has ended where the next one has begun on any rank.

Pure: records in, a queue out.
"""

import zlib
from collections.abc import Mapping, Sequence

from megascale_ops.blackbox.nccl_codes import FLAG_COPY_ENGINE, FLAG_UNTIMED
from megascale_ops.blackbox.nccl_words import behind_last_end, has_ended
from megascale_ops.blackbox.records import NcclRecord
from megascale_ops.schema.gpu_queue import MOST_OPERATIONS, GpuOperation, GpuQueue

# 64: whatever began or ended between two looks of two seconds is among the newest, or there is none.
_NEWEST = 64


def queue_of(
    records: Sequence[NcclRecord], now_ns: int, names: Mapping[int, str], moments: Sequence[int] = ()
) -> GpuQueue | None:
    """Return what the GPU has before it; None where no end of any operation was ever seen.

    Args:
        records: all that a box holds, in the order of their enqueueing.
        now_ns: the moment to count from, on the rank's CLOCK_MONOTONIC.
        names: of communicators, by id.
        moments: numbers that grow with whatever else the GPU is seen to pass (the newest step that it has ended).
    """
    if not any(one.started_channels or has_ended(one) for one in records):
        return None  # NCCL up to 2.25 reports no times, and another plugin's box has no records
    waiting = _waiting(records)
    operations = tuple(
        GpuOperation(
            communicator=f"{one.communicator:016x}",
            function=one.function,
            seq=min(one.seq, 2**53),
            name=names.get(one.communicator, ""),
            peer=one.peer,
            waited_s=min(1e9, max(0, now_ns - one.enqueued_mono_ns) * 1e-9),
            begun=bool(one.started_channels),
        )
        for one in waiting[:MOST_OPERATIONS]
    )
    # Not what was only enqueued: a host that runs ahead is no evidence about its GPU.
    moved = [one for one in records if one.started_channels or has_ended(one)]
    seen = [(one.number, one.started_channels, one.ended_channels) for one in moved[-_NEWEST:]]
    state = zlib.crc32(repr((seen, list(moments))).encode())
    return GpuQueue(operations, state, is_partial=_is_partial(records, waiting))


def _waiting(records: Sequence[NcclRecord]) -> list[NcclRecord]:
    """Return what was given to the GPU and timed there after the last that ended on its communicator, oldest first."""
    return behind_last_end(record for record in records if not record.flags & (FLAG_UNTIMED | FLAG_COPY_ENGINE))


def _is_partial(records: Sequence[NcclRecord], waiting: Sequence[NcclRecord]) -> bool:
    """Return whether what has not begun may wait for what was not timed: since the last end on that communicator."""
    late = [one for one in waiting if not one.started_channels]
    if not late:
        return False
    untimed: dict[int, NcclRecord] = {}
    for record in records:
        if has_ended(record):
            untimed.pop(record.communicator, None)
        elif record.flags & (FLAG_UNTIMED | FLAG_COPY_ENGINE):
            untimed[record.communicator] = record
    return any(
        one.communicator != late[0].communicator and one.enqueued_mono_ns < late[-1].enqueued_mono_ns
        for one in untimed.values()
    )
