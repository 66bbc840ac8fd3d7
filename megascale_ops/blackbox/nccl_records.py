# SPDX-License-Identifier: Apache-2.0
"""Read what the NCCL profiler plugin wrote into a black box.

Pure, as ``slots``: given a function that copies bytes. A box of version 2 ends before these rings; there every answer
is empty.
"""

from megascale_ops.blackbox import nccl_codes
from megascale_ops.blackbox.layout import COMMUNICATORS, NCCL, PROFILER
from megascale_ops.blackbox.records import CommunicatorRecord, NcclRecord, ProfilerState
from megascale_ops.blackbox.slots import Read, Slot, since, whole_slots
from megascale_ops.blackbox.values import text

# 1,024: half the ring. Whatever has not ended by then may be driven out before the next look; its channels' ends may
# have been lost on their way (NCCL keeps the last 64 of each channel), so no end need ever come.
MOST_PATIENCE = 1024


def records(slots: list[Slot]) -> list[NcclRecord]:
    """Return the records that stand in slots of the ring."""
    return [record(slot) for slot in slots]


def record(slot: Slot) -> NcclRecord:
    """Return the record that stands in a slot of the ring."""
    (seq, bytes_moved, enqueued, started, ended, gpu_clock, communicator, step, started_channels, ended_channels,
     function, datatype, algorithm, protocol, channels, peer, root, flags) = slot.fields  # fmt: skip
    return NcclRecord(
        slot.number, communicator, nccl_codes.word(nccl_codes.FUNCTIONS, function), seq, bytes_moved, enqueued, started,
        ended, gpu_clock, step, channels, started_channels, ended_channels,
        nccl_codes.word(nccl_codes.DATATYPES, datatype), nccl_codes.word(nccl_codes.ALGORITHMS, algorithm),
        nccl_codes.word(nccl_codes.PROTOCOLS, protocol), peer, root, flags,
    )  # fmt: skip


def communicators(read: Read) -> list[CommunicatorRecord]:
    """Return the communicators that are still in their ring, oldest first."""
    return [
        CommunicatorRecord(identifier, text(name), nranks, rank, nnodes, opened, closed)
        for identifier, opened, closed, nranks, rank, nnodes, _, name in (
            slot.fields for slot in whole_slots(COMMUNICATORS, read)
        )
    ]


def state(read: Read) -> ProfilerState | None:
    """Return the plugin's own page; None where no plugin has ever found this box. Each number is whole by itself."""
    page = read(PROFILER.offset, PROFILER.stride)
    if len(page) < PROFILER.stride:
        return None
    found = dict(zip((field.name for field in PROFILER.fields), PROFILER.codec.unpack_from(page), strict=True))
    if not found["opened_mono_ns"]:
        return None
    kept = {name: found[name] for name in ProfilerState.__struct_fields__ if name in found}
    return ProfilerState(
        **{
            **kept,
            "records": found["nccl_next"],
            "is_chained": bool(found["chained"]),
            "open_communicators": found["contexts_open"],
            "complaint": text(found["complaint"]) if found["has_complaint"] else "",
        }
    )


class Tail:
    """Hands out each record once, when nothing more is expected of it. One owner.

    What does not end is handed out as it is when 1,024 newer ones have come; until then :meth:`unfinished` shows it.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._next = 0
        self._pending: dict[int, Slot] = {}

    def drain_records(self) -> tuple[list[NcclRecord], int]:
        """Return the records that are done since the last call, oldest first, and how many were lost unread."""
        settled = self._look_again()
        run = since(NCCL, self._read, self._next)
        self._next = run.next_number
        for slot in run.slots:
            if _is_done(slot):
                settled.append(slot)
            else:
                self._pending[slot.number] = slot
        overdue = [number for number in self._pending if number < self._next - MOST_PATIENCE]
        settled += [self._pending.pop(number) for number in overdue]
        settled.sort(key=_number)
        return records(settled), run.lost

    def unfinished(self) -> list[NcclRecord]:
        """Return what was enqueued and had not ended at the last call of :meth:`take`, oldest first."""
        return records(sorted(self._pending.values(), key=_number))

    def _look_again(self) -> list[Slot]:
        """Read the slots again of those that had not ended."""
        if not self._pending:
            return []
        again = _between(self._read, min(self._pending), max(self._pending))
        settled = []
        for number in list(self._pending):
            slot = again.get(number % NCCL.slots)
            if slot is None:  # being written just now
                continue
            if slot.number != number:  # driven out: what was seen last is all there will ever be
                settled.append(self._pending.pop(number))
            elif _is_done(slot):
                settled.append(slot)
                del self._pending[number]
            else:
                self._pending[number] = slot
        return settled


def _is_done(slot: Slot) -> bool:
    """Return whether nothing more is expected of a record; its flags are the last field."""
    return bool(slot.fields[-1] & nccl_codes.FLAG_DONE)


def _between(read: Read, first: int, last: int) -> dict[int, Slot]:
    """Return the whole records in the slots of numbers ``first`` to ``last``, by slot."""
    count = min(last - first + 1, NCCL.slots)
    at = first % NCCL.slots
    found = whole_slots(NCCL, read, at, min(count, NCCL.slots - at))
    if at + count > NCCL.slots:
        found += whole_slots(NCCL, read, 0, at + count - NCCL.slots)
    return {slot.number % NCCL.slots: slot for slot in found}


def _number(slot: Slot) -> int:
    return slot.number
