# SPDX-License-Identifier: Apache-2.0
"""Read a black box, whichever program wrote it and whatever became of the writer.

The reader holds the file open, so the box stays readable after it was renamed or removed, and copies with ``pread``
instead of mapping it: a file that is truncated meanwhile gives a short copy, never a SIGBUS. After the constructor it
raises nothing: what is not there or not whole is None, an empty list, or the last whole record seen.
"""

import os
from pathlib import Path
from typing import Self

import msgspec

from megascale_ops.blackbox import BoxError, nccl_records
from megascale_ops.blackbox.header import read_identity
from megascale_ops.blackbox.layout import (
    BEAT,
    COLLECTIVES,
    ERROR,
    FILE_BYTES,
    FINDINGS,
    FLAG_ABSOLUTE,
    GPU_STEPS,
    HOT_BYTES,
    HOT_OFFSET,
    MESH,
    NCCL,
    NOW,
    PASSAGES,
    PHASES,
    PULSE,
    RESTORES,
    SAVES,
    SERVER,
    STATES,
    STEPS,
    TOLD_ERROR,
    Ring,
)
from megascale_ops.blackbox.records import (
    BoxIdentity,
    CollectiveRecord,
    CollectiveRun,
    CommunicatorRecord,
    GpuStepRecord,
    NcclRecord,
    ProfilerState,
    RestoresRecord,
    SavesRecord,
    StepRecord,
)
from megascale_ops.blackbox.slots import LOOKS, Slot, newest, since, whole_in, whole_slots
from megascale_ops.blackbox.steps import Steps, gpu_steps
from megascale_ops.blackbox.trails import trail_of
from megascale_ops.blackbox.values import finite, name_of, text
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.progress import CollectivePosition, Progress, RankError, RankFinding, Trail

# A pulse that something else has written over must still fit into a message.
_MOST_WANDERED = 1 << 31


class BoxReader:
    """One rank's box. :meth:`progress` and :meth:`collective` cost a few microseconds: made for ten a second.

    Args:
        path: Where it is.
        torn: Read one that ends too early, too. A ring that is not all there is empty then: its newest may be missing.
        handle: The file, where it is open already; it is taken over, also when it is refused.

    Raises:
        BoxError: the file cannot be opened, or is no black box that this version understands.
        TornBoxError: it ends too early.
    """

    def __init__(self, path: Path, *, torn: bool = False, handle: int = -1) -> None:
        try:
            # NONBLOCK: a FIFO of that name must not block the reader. NOFOLLOW: nor a link redirect it.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._handle = handle if handle >= 0 else os.open(path, flags)
        except OSError as error:
            raise BoxError(f"no black box at {path} [{error}]") from error
        try:
            self._identity = read_identity(path, self._handle, torn=torn)
        except BaseException:
            os.close(self._handle)
            raise
        self._torn = torn
        self._now: Slot | None = None
        self._beat: Slot | None = None
        self._kept: dict[str, tuple[bytes, Slot | None]] = {}
        self._steps = Steps(self._read)
        self._findings_raw = b""
        self._findings: tuple[RankFinding, ...] = ()

    def identity(self) -> BoxIdentity:
        """Return whose box it is, with the worker server's path and the place in the mesh as they are now."""
        server, mesh = self._newest_of(SERVER), self._newest_of(MESH)
        known = self._identity
        path = text(server.fields[0]) if server else known.worker_server_path
        place = Mesh(*mesh.fields) if mesh else known.mesh
        if path != known.worker_server_path or place != known.mesh:
            self._identity = msgspec.structs.replace(known, worker_server_path=path, mesh=place)
        return self._identity

    def progress(self) -> Progress:
        """Return what the rank is doing; before its first whole record, a rank that is starting."""
        state, moved_s, wandered_s, wandered = self._read_hot()
        beat_s = finite(self._beat.fields[2]) if self._beat else 0.0
        if self._now is None:
            return Progress(state=state, moved_mono_s=moved_s, beat_mono_s=beat_s)
        step, steps_seen, flags, since_s, phase = self._now.fields
        if steps_seen != self._steps.next_step:  # the ring need not be copied to find nothing new
            self._steps.read_on()
        p50_s, p99_s = self._steps.quantiles_s()
        return Progress(
            state=state,
            step=step,
            step_is_absolute=bool(flags & FLAG_ABSOLUTE),
            steps_seen=steps_seen,
            phase=name_of(phase),
            phase_since_mono_s=finite(since_s),
            moved_mono_s=moved_s,
            beat_mono_s=beat_s,
            step_p50_s=p50_s,
            step_p99_s=p99_s,
            wandered_mono_s=wandered_s,
            wandered=wandered,
        )

    def collective(self, *, look: bool = True) -> CollectivePosition | None:
        """Return how far the rank's process groups are; None before there is one.

        Without ``look`` as of the last :meth:`progress`, which copied it along.
        """
        if look:
            self._read_hot()
        if self._beat is None or self._beat.fields[0] < 0:
            return None
        enqueued, completed, _, name = self._beat.fields
        return CollectivePosition(enqueued, completed, name_of(name))

    def error(self) -> RankError | None:
        """Return the newest uncaught exception of the rank, None if it recorded none."""
        slot = self._newest_of(ERROR)
        if slot is None:
            return None
        step, kind, where, message, told, raised_s, thread = slot.fields
        if told != TOLD_ERROR:  # from an older writer, whose message may reach into this field
            return RankError(type=text(kind), message=text(message), where=text(where), step=step)
        return RankError(text(kind), text(message), text(where), step, text(thread), finite(raised_s))

    def findings(self) -> tuple[RankFinding, ...]:
        """Return what the rank's own checks have found and has not ended since, by class of fault."""
        raw = self._read(FINDINGS.offset, FINDINGS.size)
        if raw != self._findings_raw:
            newest = {slot.fields[2]: slot.fields for slot in whole_slots(FINDINGS, self._read)}
            self._findings_raw, self._findings = (
                raw,
                tuple(
                    RankFinding(name_of(fault), step, text(words), finite(told_s))
                    for fault, (step, told_s, _, words) in sorted(newest.items())
                    if text(words)
                ),
            )
        return self._findings

    def steps(self, last: int = STEPS.slots) -> list[StepRecord]:
        """Return up to ``last`` finished steps, oldest first."""
        return self._steps.all(last)

    def take_fresh_steps(self, *, look: bool = True) -> list[StepRecord]:
        """Return the steps finished since the last call, oldest first; of more than MOST_WORK the newest.

        Without ``look`` as of the last :meth:`progress`, which copied them along.
        """
        if look:
            self._steps.read_on()
        return self._steps.take_fresh()

    @property
    def steps_read(self) -> int:
        """How many steps the rank had finished when they were last read, by whatever method."""
        return self._steps.next_step

    def gpu_steps(self, last: int = GPU_STEPS.slots) -> list[GpuStepRecord]:
        """Return what the GPU needed for up to ``last`` steps, oldest first; none without a GPU."""
        return gpu_steps(self._read, last)

    def saves(self) -> SavesRecord | None:
        """Return what the rank knows of its checkpoints; None before the first one that it saves with us."""
        slot = self._newest_of(SAVES)
        if slot is None:
            return None
        step, stall_s, write_s, sealed_step, sealed_wall_s, in_flight, failed = slot.fields
        times = (finite(stall_s), finite(write_s), finite(sealed_wall_s))
        return SavesRecord(step, *times[:2], sealed_step, times[2], in_flight, failed)

    def restores(self) -> RestoresRecord | None:
        """Return what the rank knows of its restores; None before the first one."""
        slot = self._newest_of(RESTORES)
        if slot is None:
            return None
        step, restore_s, *counts = slot.fields
        return RestoresRecord(step, finite(restore_s), *counts)

    def collectives(self, last: int = COLLECTIVES.slots) -> list[CollectiveRecord]:
        """Return up to ``last`` collectives, oldest first."""
        return _collectives(whole_slots(COLLECTIVES, self._read)[-last:] if last > 0 else [])

    def collectives_since(self, number: int) -> CollectiveRun:
        """Return the collectives from the ``number``-th on (of those that Python wrote), ended or not."""
        found = since(COLLECTIVES, self._read, max(0, number))
        return CollectiveRun(_collectives(found.slots), found.next_number, found.lost)

    def trail(self) -> Trail:
        """Return through which phases and steps a process that has ended went last, and what it called there."""
        words, phases = self._read(PASSAGES.offset, PASSAGES.size), self._read(PHASES.offset, PHASES.size)
        slots = whole_slots(COLLECTIVES, self._read)
        return trail_of(words, phases, _collectives(slots), are_all=not slots or not slots[0].number)

    def nccl(self, last: int = NCCL.slots) -> list[NcclRecord]:
        """Return up to ``last`` of what NCCL was given to do, oldest first."""
        return nccl_records.records(whole_slots(NCCL, self._read)[-last:] if last > 0 else [])

    def nccl_tail(self) -> nccl_records.Tail:
        """Return a reader that follows NCCL's records from now on, beginning with those already present."""
        return nccl_records.Tail(self._read)

    def communicators(self) -> list[CommunicatorRecord]:
        """Return the last 64 communicators that NCCL has made, oldest first."""
        return nccl_records.communicators(self._read)

    def profiler(self) -> ProfilerState | None:
        """Return the NCCL profiler plugin's own state; None before it has written one."""
        return nccl_records.state(self._read)

    def raw(self) -> bytes:
        """Return the file as it is, to be kept as evidence; a box saved so can be read again."""
        return self._copy(0, FILE_BYTES)

    def close(self) -> None:
        """Let go of the file; safe to call again."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, offset: int, length: int) -> bytes:
        """Copy bytes; fewer where the file ends, of a torn one then none."""
        copy = self._copy(offset, length)
        return copy if not self._torn or len(copy) == length else b""

    def _copy(self, offset: int, length: int) -> bytes:
        """Copy bytes; fewer where the file ends, none where it cannot be read any more."""
        try:
            return os.pread(self._handle, length, offset)
        except OSError:
            return b""

    def _read_hot(self) -> tuple[str, float, float, int]:
        """Read the hot page: keep the newest whole records of now and heartbeat, return the pulse."""
        again = b""
        for _ in range(LOOKS):
            once, again = self._read(HOT_OFFSET, HOT_BYTES), self._read(HOT_OFFSET, HOT_BYTES)
            now, beat = _part(NOW, once, again), _part(BEAT, once, again)
            self._now = _later(self._now, now)
            self._beat = _later(self._beat, beat)
            if now or once == again:
                break
        pulse = again[PULSE.offset - HOT_OFFSET :]
        if len(pulse) < PULSE.stride:
            return STATES[0], 0.0, 0.0, 0
        state, moved_s, wandered_s, wandered = PULSE.codec.unpack_from(pulse)
        return (
            STATES[state] if state < len(STATES) else STATES[0],
            finite(moved_s),
            finite(wandered_s),
            min(wandered, _MOST_WANDERED),
        )

    def _newest_of(self, ring: Ring) -> Slot | None:
        """Return the newest whole record of a ring that seldom changes: one copy as long as it does not.

        Equal copies before and after a look mean that nothing was stored in between, since sequences only grow. So what
        the look found belongs to these bytes, and to every later copy that equals them.
        """
        once = self._read(ring.offset, ring.size)
        kept = self._kept.get(ring.name)
        if kept is not None and kept[0] == once:
            return kept[1]
        found = newest(ring, self._read)
        if self._read(ring.offset, ring.size) == once:
            self._kept[ring.name] = (once, found)
        return found


def _collectives(slots: list[Slot]) -> list[CollectiveRecord]:
    """Return the collectives of Python's ring as structs."""
    return [
        CollectiveRecord(name_of(communicator), name_of(function), seq, bytes_moved, enqueued, started, ended, passage)
        for seq, bytes_moved, enqueued, started, ended, communicator, function, passage in (
            slot.fields for slot in slots
        )
    ]


def _part(ring: Ring, once: bytes, again: bytes) -> list[Slot]:
    """Return the whole slots of a ring inside two copies of the hot page."""
    start = ring.offset - HOT_OFFSET
    return whole_in(ring, once[start : start + ring.size], again[start : start + ring.size])


def _later(known: Slot | None, found: list[Slot]) -> Slot | None:
    """Return the newer of what was known and what was found: a file cut short does not turn time back."""
    return found[-1] if found and (known is None or found[-1].number >= known.number) else known
