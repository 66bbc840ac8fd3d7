# SPDX-License-Identifier: Apache-2.0
"""What a rank hangs in, as the NCCL profiler plugin saw it: how far the GPU's kernel came, channel by channel.

An operation that was enqueued and of which no channel has begun was never started by the GPU: something before it on
its stream has not ended, and that is where to look. One of which channels have begun and not ended waits inside NCCL
for a peer. That is the difference between a stuck kernel and a stuck network.
"""

from collections.abc import Iterable, Mapping, Sequence

from megascale_ops.blackbox.nccl_codes import FLAG_UNTIMED
from megascale_ops.blackbox.records import CommunicatorRecord, NcclRecord, ProfilerState

# 4: the oldest is what the rank hangs in; the next ones are queued behind it.
MOST = 4
# 1 ms: NCCL reports all sends and receives of a group in a row, 0.2 us each; a thread may be held up in between.
GROUP_NS = 1_000_000


def has_ended(record: NcclRecord) -> bool:
    """Return whether the GPU is known to have ended an operation. One that was not timed may still run."""
    return record.is_done and not record.flags & FLAG_UNTIMED


def unfinished(records: Sequence[NcclRecord]) -> tuple[NcclRecord, ...]:
    """Return what was enqueued after the last operation that ended on its communicator, oldest first, at most MOST.

    An untimed record is no evidence that it waits or that those before it have ended. Sends and receives of a
    group share one kernel, so the end of one is no evidence about the others.
    """
    timed = (record for record in records if not (record.is_done and record.flags & FLAG_UNTIMED))
    return tuple(behind_last_end(timed)[:MOST])


def behind_last_end(records: Iterable[NcclRecord]) -> list[NcclRecord]:
    """Return what was enqueued after the last operation that ended on its communicator, oldest first."""
    waiting: dict[int, list[NcclRecord]] = {}
    for record in records:
        if record.is_done:
            before = waiting.get(record.communicator, [])
            waiting[record.communicator] = [one for one in before if may_share_a_kernel(one, record)]
        else:
            waiting.setdefault(record.communicator, []).append(record)
    found = [record for some in waiting.values() for record in some]
    return sorted(found, key=lambda record: record.enqueued_mono_ns)


def may_share_a_kernel(one: NcclRecord, other: NcclRecord) -> bool:
    """Return whether both may be of one group; two of the same direction between the same ranks run one by one."""
    if one.peer < 0 or other.peer < 0 or (one.function, one.peer) == (other.function, other.peer):
        return False
    return abs(other.enqueued_mono_ns - one.enqueued_mono_ns) <= GROUP_NS


def names_of(communicators: Sequence[CommunicatorRecord]) -> dict[int, str]:
    """Return what communicators are called, by their id; those without a name are left out."""
    return {one.id: one.name for one in communicators if one.name}


def sentence(record: NcclRecord, now_ns: int, names: Mapping[int, str]) -> str:
    """Return the sentence on one unfinished operation.

    Args:
        record: the operation.
        now_ns: the moment to count from, on the rank's CLOCK_MONOTONIC.
        names: of communicators, by id.
    """
    where = names.get(record.communicator) or f"communicator {record.communicator:016x}"
    peer = f" with rank {record.peer}" if record.peer >= 0 else ""
    how = "/".join(word for word in (record.algorithm, record.protocol) if word != "Unknown")
    what = f"NCCL {record.function} #{record.seq} of {where}{peer}, {record.bytes_moved:,} bytes{how and ', ' + how}"
    return f"{what}: enqueued {max(0, now_ns - record.enqueued_mono_ns) * 1e-9:.1f} s before, {_progress(record)}"


def told(
    records: Sequence[NcclRecord], now_ns: int, names: Mapping[int, str], state: ProfilerState | None = None
) -> list[str]:
    """Return one sentence for each unfinished operation, and one for each communicator whose last ones were not timed.

    Args:
        records: all that a box holds, in the order of their enqueueing.
        now_ns: the moment to count from, on the rank's CLOCK_MONOTONIC.
        names: of communicators, by id.
        state: of the plugin, with the share that is timed now.
    """
    now = f"; one in {state.timed_one_in} is now" if state is not None and state.timed_one_in > 1 else ""
    untimed = (f"{one}{now}" for one in untimed_sentences(records, names))
    return [*(sentence(one, now_ns, names) for one in unfinished(records)), *untimed]


def untimed_sentences(records: Sequence[NcclRecord], names: Mapping[int, str]) -> list[str]:
    """Return how far each communicator got beyond its last known end, where nothing since then was timed.

    Only of communicators of which an end is known: of the others (NCCL up to 2.25 times nothing) there is nothing to
    compare with. ``records`` come in the order of their enqueueing.
    """
    ends: dict[int, NcclRecord] = {}
    since: dict[int, list[NcclRecord]] = {}
    for record in records:
        if has_ended(record):
            ends[record.communicator] = record
            since[record.communicator] = []
        elif record.communicator in ends and record.flags & FLAG_UNTIMED:
            since[record.communicator].append(record)
    return [
        f"NCCL {some[-1].function} of {names.get(number) or f'communicator {number:016x}'}: "
        f"enqueued up to #{some[-1].seq}, the last known to have ended is {_end(ends[number], some[-1])}: "
        f"{len(some)} since then were not timed"
        for number, some in since.items()
        if some
    ]


def _end(ended: NcclRecord, last: NcclRecord) -> str:
    """Return an operation's number, with its function where another counts by itself."""
    return f"#{ended.seq}" if ended.function == last.function else f"{ended.function} #{ended.seq}"


def _progress(record: NcclRecord) -> str:
    begun, ended = record.started_channels.bit_count(), record.ended_channels.bit_count()
    if not begun and record.flags & FLAG_UNTIMED:
        return "and whether its kernel runs was not asked for"
    if not begun:
        return "its kernel has not begun: what comes before it on its stream has not ended"
    channels = f"{begun} of {max(record.channels, begun)} channels have begun and {ended} ended"
    return f"{channels}: it waits inside NCCL for a peer" if ended < begun else f"{channels}: it is about to end"
