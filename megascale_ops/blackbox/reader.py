# SPDX-License-Identifier: Apache-2.0
"""Read a black box, whoever wrote it and whatever became of the writer.

The reader holds the file open, so the box stays readable after it was renamed or removed, and copies with ``pread``
instead of mapping it: a file that somebody truncates gives a short copy, never a SIGBUS. After the constructor it
raises nothing: what is not there or not whole is None, an empty list, or the last whole record seen.
"""

import math
import os
import stat
from collections import deque
from functools import lru_cache
from pathlib import Path
from typing import Self

import msgspec

from megascale_ops.blackbox import BoxError, nccl_records
from megascale_ops.blackbox.layout import (
    BEAT,
    COLLECTIVES,
    EFFORTS,
    ERROR,
    FILE_BYTES,
    FLAG_ABSOLUTE,
    GPU_PHASES,
    GPU_STEPS,
    HEADER,
    HEADER_BYTES,
    HOT_BYTES,
    HOT_OFFSET,
    MAGIC,
    MESH,
    NCCL,
    NOW,
    PULSE,
    SERVER,
    STATES,
    STEPS,
    TILES,
    Ring,
)
from megascale_ops.blackbox.records import (
    BoxIdentity,
    CollectiveRecord,
    CollectiveRun,
    CommunicatorRecord,
    GpuStepRecord,
    NcclRecord,
    NcclRun,
    ProfilerState,
    StepRecord,
    TileRecord,
)
from megascale_ops.blackbox.slots import LOOKS, Slot, newest, since, whole_in, whole_slots
from megascale_ops.errors import VersionError
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.progress import MOST_WORK, CollectivePosition, Progress, RankError
from megascale_ops.schema.version import BOX_VERSION, check_version


class BoxReader:
    """One rank's box. :meth:`progress` and :meth:`collective` cost a few microseconds: made for ten a second.

    Raises:
        BoxError: the file cannot be opened, or is no black box that this version understands.
    """

    def __init__(self, path: Path) -> None:
        try:
            # NONBLOCK: a FIFO of that name must not hang us. NOFOLLOW: nor a link lead us elsewhere.
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise BoxError(f"no black box at {path} [{error}]") from error
        try:
            self._identity = _check(path, self._handle)
        except BaseException:
            os.close(self._handle)
            raise
        self._now: Slot | None = None
        self._beat: Slot | None = None
        self._kept: dict[str, tuple[bytes, Slot | None]] = {}
        self._next_step = 0
        self._fresh: deque[StepRecord] = deque(maxlen=MOST_WORK)
        self._durations_s: deque[float] = deque(maxlen=STEPS.slots)
        self._first_s = 0.0  # what the process's first step took
        self._quantiles_s: tuple[float, float] | None = (0.0, 0.0)  # None: not of all the steps that were read

    def identity(self) -> BoxIdentity:
        """Return whose box it is, with the worker server's path and the place in the mesh as they are now."""
        server, mesh = self._newest_of(SERVER), self._newest_of(MESH)
        known = self._identity
        path = _text(server.fields[0]) if server else known.worker_server_path
        place = Mesh(*mesh.fields) if mesh else known.mesh
        if path != known.worker_server_path or place != known.mesh:
            self._identity = msgspec.structs.replace(known, worker_server_path=path, mesh=place)
        return self._identity

    def progress(self) -> Progress:
        """Return what the rank is doing; before its first whole record, a rank that is starting."""
        state, moved_s = self._look()
        beat_s = _finite(self._beat.fields[2]) if self._beat else 0.0
        if self._now is None:
            return Progress(state=state, moved_mono_s=moved_s, beat_mono_s=beat_s)
        step, steps_seen, flags, since_s, phase = self._now.fields
        if steps_seen != self._next_step:  # the ring need not be copied to learn that it has nothing new
            self._read_new_steps()
        p50_s, p99_s = self._step_quantiles_s()
        return Progress(
            state=state,
            step=step,
            step_is_absolute=bool(flags & FLAG_ABSOLUTE),
            steps_seen=steps_seen,
            phase=_name(phase),
            phase_since_mono_s=_finite(since_s),
            moved_mono_s=moved_s,
            beat_mono_s=beat_s,
            step_p50_s=p50_s,
            step_p99_s=p99_s,
        )

    def collective(self, *, look: bool = True) -> CollectivePosition | None:
        """Return how far the rank's process groups are; None before there is one.

        Without ``look`` as of the last :meth:`progress`, which copied it along.
        """
        if look:
            self._look()
        if self._beat is None or self._beat.fields[0] < 0:
            return None
        enqueued, completed, _, name = self._beat.fields
        return CollectivePosition(enqueued, completed, _name(name))

    def error(self) -> RankError | None:
        """Return the exception that the rank died of, if it wrote one down."""
        slot = self._newest_of(ERROR)
        if slot is None:
            return None
        step, kind, where, message = slot.fields
        return RankError(type=_text(kind), message=_text(message), where=_text(where), step=step)

    def steps(self, last: int = STEPS.slots) -> list[StepRecord]:
        """Return up to ``last`` finished steps, oldest first."""
        found = whole_slots(STEPS, self._read)[-last:] if last > 0 else []
        return self._records(found, whole_slots(EFFORTS, self._read) if found else [])

    def take_fresh_steps(self, *, look: bool = True) -> list[StepRecord]:
        """Return the steps finished since the last call, oldest first; of more than MOST_WORK the newest.

        Without ``look`` as of the last :meth:`progress`, which copied them along.
        """
        if look:
            self._read_new_steps()
        fresh = list(self._fresh)
        self._fresh.clear()
        return fresh

    @property
    def steps_read(self) -> int:
        """How many steps the rank had finished when they were last read, by whatever method."""
        return self._next_step

    def gpu_steps(self, last: int = GPU_STEPS.slots) -> list[GpuStepRecord]:
        """Return what the GPU needed for up to ``last`` steps, oldest first; none without a GPU."""
        found = whole_slots(GPU_STEPS, self._read)[-last:] if last > 0 else []
        phases: dict[int, list[tuple[str, float]]] = {}
        for slot in whole_slots(GPU_PHASES, self._read) if found else []:
            number, gpu_s, phase = slot.fields
            phases.setdefault(number, []).append((_text(phase), _finite(gpu_s)))
        records = []
        for slot in found:
            number, step, *times = slot.fields
            wall_s, data_s, forward_s, backward_s, optimizer_s, checkpoint_s = map(_finite, times)
            named = tuple(phases.get(number, ()))
            records.append(
                GpuStepRecord(
                    number, step, wall_s, data_s, forward_s, backward_s, optimizer_s, checkpoint_s, named
                )
            )  # fmt: skip
        return records

    def collectives(self, last: int = COLLECTIVES.slots) -> list[CollectiveRecord]:
        """Return up to ``last`` collectives, oldest first."""
        return _collectives(whole_slots(COLLECTIVES, self._read)[-last:] if last > 0 else [])

    def collectives_since(self, number: int) -> CollectiveRun:
        """Return the collectives from the ``number``-th on (of those that Python wrote), ended or not."""
        found = since(COLLECTIVES, self._read, max(0, number))
        return CollectiveRun(_collectives(found.slots), found.next_number, found.lost)

    def nccl(self, last: int = NCCL.slots) -> list[NcclRecord]:
        """Return up to ``last`` of what NCCL was given to do, oldest first."""
        return nccl_records.records(whole_slots(NCCL, self._read)[-last:] if last > 0 else [])

    def nccl_since(self, number: int) -> NcclRun:
        """Return the records from the ``number``-th on, done or not; :meth:`nccl_tail` has each when it is done."""
        found = since(NCCL, self._read, max(0, number))
        return NcclRun(nccl_records.records(found.slots), found.next_number, found.lost)

    def nccl_tail(self) -> nccl_records.Tail:
        """Return who follows NCCL's records from now on, beginning with those that stand here."""
        return nccl_records.Tail(self._read)

    def communicators(self) -> list[CommunicatorRecord]:
        """Return the last 64 communicators that NCCL has made, oldest first."""
        return nccl_records.communicators(self._read)

    def profiler(self) -> ProfilerState | None:
        """Return what the NCCL profiler plugin says of itself; None where it has not come so far."""
        return nccl_records.state(self._read)

    def tiles(self) -> list[TileRecord]:
        """Return where the CTAs of fused kernels are, in the order of their slots."""
        once, again = self._read(TILES.offset, TILES.size), self._read(TILES.offset, TILES.size)
        unpack = TILES.codec.unpack_from
        found = []
        for at in range(0, min(len(once), len(again)) // TILES.stride * TILES.stride, TILES.stride):
            sequence, launch, operation, cta, tile, peer, state, _, since_ns = unpack(again, at)
            # A slot belongs to one CTA, so its records are numbered on their own: only evenness tells.
            if sequence and sequence % 2 == 0 and once[at : at + TILES.stride] == again[at : at + TILES.stride]:
                found.append(TileRecord(launch, operation, cta, tile, peer, state, since_ns))
        return found

    def raw(self) -> bytes:
        """Return the file as it is, to be kept as evidence; a box saved so can be read again."""
        return self._read(0, FILE_BYTES)

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
        """Copy bytes; fewer where the file ends, none where it cannot be read any more."""
        try:
            return os.pread(self._handle, length, offset)
        except OSError:
            return b""

    def _look(self) -> tuple[str, float]:
        """Read the hot page: keep the newest whole now and beat, return the state and when it last moved."""
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
            return STATES[0], 0.0
        state, moved_s = PULSE.codec.unpack_from(pulse)
        return STATES[state] if state < len(STATES) else STATES[0], _finite(moved_s)

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

    def _step_quantiles_s(self) -> tuple[float, float]:
        """Return p50 and p99 of the steps in the ring, without checkpoints and without the process's first step.

        The first step compiles, allocates and connects: a minute of it among few steps would be taken for patience.
        """
        if self._quantiles_s is None:
            ordered = sorted(self._durations_s) or [self._first_s]
            last = len(ordered) - 1
            self._quantiles_s = (ordered[last // 2], ordered[min(last, math.ceil(0.99 * last))])
        return self._quantiles_s

    def _read_new_steps(self) -> None:
        """Read the steps that are new since the last call, and only those: four copies, however many they are."""
        run = since(STEPS, self._read, self._next_step)
        if not run.slots:
            return
        self._next_step = run.next_number
        self._quantiles_s = None
        for slot in run.slots:
            if slot.number:
                self._durations_s.append(_duration_s(slot))
            else:
                self._first_s = _duration_s(slot)
        newest_slots = run.slots[-MOST_WORK:]
        first = newest_slots[0].number % STEPS.slots
        count = min(newest_slots[-1].number - newest_slots[0].number + 1, EFFORTS.slots)
        until_end = min(count, STEPS.slots - first)
        efforts = whole_slots(EFFORTS, self._read, first, until_end)
        efforts += whole_slots(EFFORTS, self._read, 0, count - until_end) if until_end < count else []
        self._fresh.extend(self._records(newest_slots, efforts))

    def _records(self, steps: list[Slot], efforts: list[Slot]) -> list[StepRecord]:
        """Put finished steps and what else is known of them together; version 1 knew no more than the steps."""
        known = {slot.number: slot.fields for slot in efforts}
        found = []
        for number, (step, *parts) in steps:
            gc_s, cpu_s, loss, has_loss = known.get(number, (0.0, 0.0, 0.0, 0))
            times = (*parts, gc_s, cpu_s)
            # A sum is finite only where all of its parts are: one question instead of ten.
            if not math.isfinite(sum(times)):
                times = tuple(map(_finite, times))
            found.append(StepRecord(*(step, *times, loss if has_loss else None)))
        return found


def _check(path: Path, handle: int) -> BoxIdentity:
    """Return the identity in the header, or refuse the file."""
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        raise BoxError(f"{path} is no black box: not a regular file")
    if found.st_size < HEADER_BYTES:
        raise BoxError(f"{path} is no black box: {found.st_size} bytes, shorter than a header ({HEADER_BYTES})")
    try:
        header = os.pread(handle, HEADER_BYTES, 0)
    except OSError as error:
        raise BoxError(f"{path} cannot be read [{error}]") from error
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        raise BoxError(f"{path} is no black box: it does not begin with {MAGIC.decode()}")
    (_, version, _, _, round_, pid, start_ticks, mono_s, wall_s, rank, local_rank, world_size,
     tp, pp, dp, ep, _, job, node, stderr_path) = HEADER.codec.unpack_from(header)  # fmt: skip
    try:
        check_version(f"the black box {path}", version, BOX_VERSION)
    except VersionError as error:
        raise BoxError(str(error)) from error
    if version == BOX_VERSION and found.st_size < FILE_BYTES:
        raise BoxError(f"{path} is a torn black box: {found.st_size} of {FILE_BYTES} bytes")
    return BoxIdentity(
        job=_text(job), node=_text(node), rank=rank, local_rank=local_rank, world_size=world_size, pid=pid,
        start_ticks=start_ticks, round=round_, mesh=Mesh(tp=tp, pp=pp, dp=dp, ep=ep), stderr_path=_text(stderr_path),
        started_mono_s=_finite(mono_s), started_wall_s=_finite(wall_s),
    )  # fmt: skip


def _collectives(slots: list[Slot]) -> list[CollectiveRecord]:
    """Return the collectives of Python's ring as structs."""
    return [
        CollectiveRecord(_name(communicator), _name(function), seq, bytes_moved, enqueued, started, ended)
        for seq, bytes_moved, enqueued, started, ended, communicator, function in (slot.fields for slot in slots)
    ]


def _part(ring: Ring, once: bytes, again: bytes) -> list[Slot]:
    """Return the whole slots of a ring inside two copies of the hot page."""
    start = ring.offset - HOT_OFFSET
    return whole_in(ring, once[start : start + ring.size], again[start : start + ring.size])


def _later(known: Slot | None, found: list[Slot]) -> Slot | None:
    """Return the newer of what was known and what was found: a file cut short does not turn time back."""
    return found[-1] if found and (known is None or found[-1].number >= known.number) else known


def _duration_s(slot: Slot) -> float:
    """Return a step's time without its checkpoints, which patience treats on their own."""
    return max(0.0, _finite(slot.fields[2]) - _finite(slot.fields[7]))


def _finite(number: float) -> float:
    """Return ``number``, or 0 for what is no number: JSON knows neither NaN nor infinity."""
    return number if math.isfinite(number) else 0.0


def _text(raw: bytes) -> str:
    """Return the characters before the first NUL; what is no UTF-8 is dropped."""
    return raw.partition(b"\0")[0].decode(errors="ignore")


# 1,024 names of communicators, functions and phases: a job has dozens, and each stands in thousands of records.
_name = lru_cache(maxsize=1024)(_text)
