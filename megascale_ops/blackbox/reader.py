# SPDX-License-Identifier: Apache-2.0
"""Read a black box, whoever wrote it and whatever became of the writer.

The reader holds the file open, so the box stays readable after it was renamed or removed, and copies with ``pread``
instead of mapping it: a file that somebody truncates gives a short copy, never a SIGBUS. After the constructor it
raises nothing: what is not there or not whole is None, an empty list, or the last whole record seen.
"""

import math
import os
import stat
from pathlib import Path
from typing import Self

from megascale_ops.blackbox import BoxError
from megascale_ops.blackbox.layout import (
    BEAT,
    COLLECTIVES,
    ERROR,
    FILE_BYTES,
    FLAG_ABSOLUTE,
    HEADER,
    HEADER_BYTES,
    HOT_BYTES,
    HOT_OFFSET,
    MAGIC,
    NOW,
    PULSE,
    SERVER,
    STATES,
    STEPS,
    TILES,
    Ring,
)
from megascale_ops.blackbox.records import BoxIdentity, CollectiveRecord, StepRecord, TileRecord
from megascale_ops.blackbox.slots import LOOKS, Slot, newest, whole_in, whole_slots
from megascale_ops.errors import VersionError
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.progress import CollectivePosition, Progress, RankError
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
        self._next_step = 0
        self._durations_s: dict[int, float] = {}
        self._quantiles_s = (0.0, 0.0)

    def identity(self) -> BoxIdentity:
        """Return whose box it is, with the worker server's path as it is now."""
        slot = newest(SERVER, self._read)
        path = _text(slot.fields[0]) if slot else self._identity.worker_server_path
        return _replace_server(self._identity, path)

    def progress(self) -> Progress:
        """Return what the rank is doing; before its first whole record, a rank that is starting."""
        state, moved_s = self._look()
        beat_s = _finite(self._beat.fields[2]) if self._beat else 0.0
        if self._now is None:
            return Progress(state=state, moved_mono_s=moved_s, beat_mono_s=beat_s)
        step, steps_seen, flags, since_s, phase = self._now.fields
        p50_s, p99_s = self._step_quantiles_s()
        return Progress(
            state=state,
            step=step,
            step_is_absolute=bool(flags & FLAG_ABSOLUTE),
            steps_seen=steps_seen,
            phase=_text(phase),
            phase_since_mono_s=_finite(since_s),
            moved_mono_s=moved_s,
            beat_mono_s=beat_s,
            step_p50_s=p50_s,
            step_p99_s=p99_s,
        )

    def collective(self) -> CollectivePosition | None:
        """Return how far the rank's process groups are; None before there is one."""
        self._look()
        if self._beat is None or self._beat.fields[0] < 0:
            return None
        enqueued, completed, _, name = self._beat.fields
        return CollectivePosition(enqueued, completed, _text(name))

    def error(self) -> RankError | None:
        """Return the exception that the rank died of, if it wrote one down."""
        slot = newest(ERROR, self._read)
        if slot is None:
            return None
        step, kind, where, message = slot.fields
        return RankError(type=_text(kind), message=_text(message), where=_text(where), step=step)

    def steps(self, last: int = STEPS.slots) -> list[StepRecord]:
        """Return up to ``last`` finished steps, oldest first."""
        found = whole_slots(STEPS, self._read)[-last:] if last > 0 else []
        return [StepRecord(slot.fields[0], *map(_finite, slot.fields[1:])) for slot in found]

    def collectives(self, last: int = COLLECTIVES.slots) -> list[CollectiveRecord]:
        """Return up to ``last`` collectives, oldest first."""
        found = whole_slots(COLLECTIVES, self._read)[-last:] if last > 0 else []
        return [
            CollectiveRecord(_text(communicator), _text(function), seq, bytes_moved, enqueued, started, ended)
            for seq, bytes_moved, enqueued, started, ended, communicator, function in (slot.fields for slot in found)
        ]

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

    def _step_quantiles_s(self) -> tuple[float, float]:
        """Return p50 and p99 of the steps in the ring, without checkpoints and without the process's first step.

        The first step compiles, allocates and connects: a minute of it among few steps would be taken for patience.
        Only slots that are new since the last call are read.
        """
        seen = len(self._durations_s), self._next_step
        for _ in range(STEPS.slots):
            slots = whole_slots(STEPS, self._read, self._next_step % STEPS.slots, 1)
            if not slots or slots[0].number < self._next_step:
                break
            if slots[0].number > self._next_step:  # lapped: begin again with all that is there
                self._durations_s = {slot.number: _duration_s(slot) for slot in whole_slots(STEPS, self._read)}
                self._next_step = max(self._durations_s, default=slots[0].number) + 1
                break
            self._durations_s[self._next_step] = _duration_s(slots[0])
            self._durations_s.pop(self._next_step - STEPS.slots, None)
            self._next_step += 1
        if seen != (len(self._durations_s), self._next_step):
            ordered = sorted(duration_s for number, duration_s in self._durations_s.items() if number > 0)
            ordered = ordered or sorted(self._durations_s.values())
            last = len(ordered) - 1
            self._quantiles_s = (ordered[last // 2], ordered[min(last, math.ceil(0.99 * last))])
        return self._quantiles_s


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


def _replace_server(identity: BoxIdentity, path: str) -> BoxIdentity:
    """Return ``identity`` with the worker server at ``path``."""
    fields = {name: getattr(identity, name) for name in identity.__struct_fields__}
    return BoxIdentity(**{**fields, "worker_server_path": path})


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
