# SPDX-License-Identifier: Apache-2.0
"""Write a black box from Python: at most a microsecond an event, and never a system call after creation.

One writer per ring (see ``layout``): the training thread writes now and steps, the monitor thread writes the heartbeat,
collectives may come from any thread because each call takes a slot of its own. Errors are rare and take a lock.
"""

import contextlib
import errno
import itertools
import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from megascale_ops.blackbox import BoxError
from megascale_ops.blackbox.layout import (
    BEAT,
    COLLECTIVES,
    EFFORTS,
    ERROR,
    FILE_BYTES,
    FINDINGS,
    FLAG_ABSOLUTE,
    GPU_PHASES,
    GPU_STEPS,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MESH,
    NOW,
    PASSAGE_BITS,
    PASSAGE_STEP_BITS,
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
from megascale_ops.blackbox.private_folder import make_file, private_folder
from megascale_ops.blackbox.records import (
    MOST_GPU_PHASES,
    BoxIdentity,
    CollectiveRecord,
    GpuStepRecord,
    RestoresRecord,
    SavesRecord,
    StepRecord,
)
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.progress import RankError, RankFinding
from megascale_ops.schema.version import BOX_VERSION

_STATE_WORD = (PULSE.offset + PULSE.field("state").offset) // 8
_MOVED_WORD = (PULSE.offset + PULSE.field("moved_mono_s").offset) // 8
_WANDERED_AT_WORD = (PULSE.offset + PULSE.field("wandered_mono_s").offset) // 8
_WANDERED_WORD = (PULSE.offset + PULSE.field("wandered").offset) // 8
# A job has ten phases; a script that makes up a name at each step must not make the table grow without bound.
_MOST_PHASES = 256
_BODY = 8  # every slot begins with its sequence


# Plain names: an attribute of a ring costs 30 ns at every event. In the long rings a slot's place is computed each
# time: a table of 1,024 is 130 KB of small objects, and in a training loop those are not in the caches any more.
# Of "now" by the sequence of the record before, modulo twice the slots: its word, and where its body begins.
_NOW_SPAN = 2 * NOW.slots
_NOW_STARTS = tuple(NOW.offset + whole // 2 * NOW.stride for whole in range(_NOW_SPAN))
_NOW_AT = tuple((start >> 3, start + _BODY) for start in _NOW_STARTS)
_STEPS_OFFSET, _STEPS_SLOTS, _STEPS_STRIDE = STEPS.offset, STEPS.slots, STEPS.stride
_EFFORTS_OFFSET, _EFFORTS_STRIDE = EFFORTS.offset, EFFORTS.stride  # as many slots as steps have
_RING_WORD, _RING_SLOTS, _RING_WORDS = COLLECTIVES.offset >> 3, COLLECTIVES.slots, COLLECTIVES.stride >> 3
_ENDED_WORD = COLLECTIVES.field("ended_mono_ns").offset // 8
_PASSAGES_WORD, _PASSAGES_SLOTS = PASSAGES.offset // 8, PASSAGES.slots
_PASSAGE, _PASSAGE_STEP = (1 << PASSAGE_BITS) - 1, (1 << PASSAGE_STEP_BITS) - 1
_PHASE_SHIFT = PASSAGE_BITS + PASSAGE_STEP_BITS


class BoxWriter:
    """The one writer of a rank's box; made by :meth:`create`. After a fork only the parent may go on using it."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._map = mapping
        self._words = memoryview(mapping).cast("Q")
        self._reals = memoryview(mapping).cast("d")
        self._pack_now = NOW.body.pack_into
        self._pack_beat = BEAT.body.pack_into
        self._pack_step = STEPS.body.pack_into
        self._pack_effort = EFFORTS.body.pack_into
        self._pack_collective = COLLECTIVES.body.pack_into
        self._now_whole = 0  # the sequence of its newest record
        self._beat_count = 0
        self._steps_count = 0
        self._collective_numbers = itertools.count()
        self._rare = threading.Lock()
        self._error_count = 0
        self._server_count = 0
        self._mesh_count = 0
        self._saves_count = 0
        self._restores_count = 0
        self._findings_count = 0
        self._gpu_steps_count = 0
        self._gpu_phases_count = 0
        self.passages = 0  # the newest passage's number: phases and steps that were begun
        self._step = -1
        self._phase = "startup"
        self._phase_bytes = b"startup"
        self._phase_bits = 0  # as a passage holds them
        self._passage = _PASSAGE_STEP << PASSAGE_BITS  # the newest's word without its phase: one addition a passage
        self._phases: dict[str, tuple[bytes, int]] = {}  # as the box and as a passage hold them
        self._places: dict[str, int] = {}
        self._since_mono_s = time.monotonic()

    @classmethod
    def create(cls, folder: Path, identity: BoxIdentity) -> "BoxWriter":
        """Make ``<folder>/<rank>.box``, reserving all its memory; an old one becomes ``<rank>.box.old``.

        The folder is made with mode 0700 when missing. The file appears whole, by renaming.

        Raises:
            BoxError: the folder belongs to another user, is a link, or cannot be made; or the memory is not there.
        """
        if sys.byteorder != "little":
            raise BoxError("a black box is little-endian and this machine is not")
        name = f"{identity.rank}.box"
        try:
            with private_folder(folder) as handle:
                return cls._create_in(handle, name, identity)
        except OSError as error:
            room = ": there is no room left (is /dev/shm full?)" if error.errno == errno.ENOSPC else ""
            raise BoxError(f"no black box at {folder / name}{room} [{error}]") from error

    @classmethod
    def _create_in(cls, folder: int, name: str, identity: BoxIdentity) -> "BoxWriter":
        beside = f".{name}.{identity.pid}"
        mapping = _map_new_file(folder, beside)
        try:
            _write_header(mapping, identity)
            writer = cls(mapping)
            writer.set_now(-1, "startup")
            writer.set_worker_server(identity.worker_server_path)
            with contextlib.suppress(FileNotFoundError):
                os.replace(name, f"{name}.old", src_dir_fd=folder, dst_dir_fd=folder)
            os.replace(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside, dir_fd=folder)
            raise
        return writer

    def set_state(self, state: str) -> None:
        """Record the rank's state: starting, running or exited."""
        self._words[_STATE_WORD] = STATES.index(state)

    def moved(self, now_mono_s: float | None = None) -> None:
        """Record that the rank has made progress, now by default (CLOCK_MONOTONIC, s)."""
        self._reals[_MOVED_WORD] = time.monotonic() if now_mono_s is None else now_mono_s

    @property
    def moved_mono_s(self) -> float:
        """When it last said so."""
        return self._reals[_MOVED_WORD]

    def wandered(self, times: int, now_mono_s: float) -> None:
        """Record how often the training thread's stack has changed since the last progress, and when last (s)."""
        self._reals[_WANDERED_AT_WORD] = now_mono_s
        self._words[_WANDERED_WORD] = times

    def set_now(self, step: int, phase: str, absolute: bool = False, now_mono_s: float | None = None) -> None:
        """Record the last finished ``step`` and the current phase; this counts as progress.

        ``absolute`` means that ``step`` is the script's own number. A new step or another phase restarts the
        phase's clock.
        """
        now = time.monotonic() if now_mono_s is None else now_mono_s
        words = self._words
        if phase != self._phase or step != self._step:
            self.passages = passage = self.passages + 1
            if step != self._step:
                self._step = step
                self._passage = (step & _PASSAGE_STEP) << PASSAGE_BITS | passage & _PASSAGE
            else:
                self._passage += 1
            if phase != self._phase:
                self._phase = phase
                try:
                    self._phase_bytes, self._phase_bits = self._phases[phase]
                except KeyError:
                    self._phase_bytes, self._phase_bits = self._learn(phase)
            self._since_mono_s = now
            words[_PASSAGES_WORD + passage % _PASSAGES_SLOTS] = self._phase_bits + self._passage
        whole = self._now_whole
        word, at = _NOW_AT[whole % _NOW_SPAN]
        words[word] = whole + 1
        self._pack_now(
            self._map, at, step, self._steps_count, FLAG_ABSOLUTE if absolute else 0, self._since_mono_s,
            self._phase_bytes,
        )  # fmt: skip
        self._now_whole = words[word] = whole + 2
        self._reals[_MOVED_WORD] = now

    def _learn(self, phase: str) -> tuple[bytes, int]:
        """Return a phase's name as the box holds it and its place as a passage holds it, and remember them."""
        if len(self._phases) >= _MOST_PHASES:
            self._phases.clear()
        name, place = _text(phase, 31), self._places.get(phase, 0)
        if not place and len(self._places) < PHASES.slots:
            at = PHASES.offset + len(self._places) * PHASES.stride
            self._map[at : at + len(name)] = name
            place = self._places[phase] = len(self._places) + 1
        found = self._phases[phase] = name, place << _PHASE_SHIFT
        return found

    def beat(self, enqueued: int, completed: int, name: str) -> None:
        """Record a heartbeat of the monitor thread and the position of process group ``name`` (-1: not known)."""
        number = self._beat_count
        self._beat_count = number + 1
        at = BEAT.offset + number % BEAT.slots * BEAT.stride
        self._words[at >> 3] = 2 * number + 1
        self._pack_beat(self._map, at + _BODY, enqueued, completed, time.monotonic(), _text(name, 63))
        self._words[at >> 3] = 2 * number + 2

    def add_step(self, record: StepRecord) -> None:
        """Write a finished step into the ring; the next :meth:`set_now` carries the new count."""
        *times, gc_s, cpu_s, loss = msgspec.structs.astuple(record)
        self.end_step(times, gc_s, cpu_s, loss)

    def end_step(self, times: Sequence[float], gc_s: float, cpu_s: float, loss: float | None) -> None:
        """Do what :meth:`add_step` does, with the first nine fields of a record and the last three: none is made."""
        number = self._steps_count
        self._steps_count = number + 1
        slot = number % _STEPS_SLOTS
        writing, whole, words = 2 * number + 1, 2 * number + 2, self._words
        at = _EFFORTS_OFFSET + slot * _EFFORTS_STRIDE
        words[at >> 3] = writing
        if loss is None:
            self._pack_effort(self._map, at + _BODY, gc_s, cpu_s, 0.0, 0)
        else:
            self._pack_effort(self._map, at + _BODY, gc_s, cpu_s, loss, 1)
        words[at >> 3] = whole
        at = _STEPS_OFFSET + slot * _STEPS_STRIDE
        words[at >> 3] = writing
        step, ended_s, wall_s, data_s, forward_s, backward_s, optimizer_s, checkpoint_s, waiting_s = times
        self._pack_step(
            self._map, at + _BODY, step, ended_s, wall_s, data_s, forward_s, backward_s, optimizer_s, checkpoint_s,
            waiting_s,
        )  # fmt: skip
        words[at >> 3] = whole

    def add_collective(self, record: CollectiveRecord) -> int:
        """Write a collective into the ring as it is entered, and return its number. From any thread.

        A rank that dies or hangs inside leaves it without an end.
        """
        return self.begin_collective(
            collective_name(record.communicator), function_name(record.function), record.seq, record.bytes_moved,
            record.enqueued_mono_ns, record.started_mono_ns, record.ended_mono_ns, record.passage,
        )  # fmt: skip

    def begin_collective(
        self,
        communicator: bytes,
        function: bytes,
        seq: int,
        bytes_moved: int,
        enqueued_mono_ns: int,
        started_mono_ns: int,
        ended_mono_ns: int = 0,
        passage: int = 0,
    ) -> int:
        """Do what :meth:`add_collective` does, with names already as the box wants them; this counts as moving.

        Names are encoded once for a thousand calls, and one call does the work of two: 0.4 us of an event's two.
        """
        number = next(self._collective_numbers)
        word = _RING_WORD + number % _RING_SLOTS * _RING_WORDS
        whole, words = 2 * number + 2, self._words
        words[word] = whole - 1
        self._pack_collective(
            self._map, (word << 3) + _BODY, seq, bytes_moved, enqueued_mono_ns, started_mono_ns, ended_mono_ns,
            communicator, function, passage,
        )  # fmt: skip
        words[word] = whole
        self._reals[_MOVED_WORD] = enqueued_mono_ns * 1e-9
        return number

    def end_collective(self, number: int, ended_mono_ns: int) -> None:
        """Write the end of the collective ``number``: one word, never torn; this counts as moving."""
        word = _RING_WORD + number % _RING_SLOTS * _RING_WORDS
        words = self._words
        if words[word] == 2 * number + 2:  # else 1,024 others came between, and the slot holds another record
            words[word + _ENDED_WORD] = ended_mono_ns
        self._reals[_MOVED_WORD] = ended_mono_ns * 1e-9

    def set_error(self, error: RankError) -> None:
        """Record an uncaught exception; the newest two are kept."""
        with self._rare:
            fields = (
                error.step, _text(error.type, 95), _text(error.where, 383), _text(error.message, 711),
                TOLD_ERROR, error.raised_mono_s, _text(error.thread, 55),
            )  # fmt: skip
            self._write_rare(ERROR, self._error_count, fields)
            self._error_count += 1

    def add_finding(self, finding: RankFinding) -> None:
        """Record what a check of the rank's own has found, or without text that it is over; rare, from any thread."""
        with self._rare:
            fields = (finding.step, finding.told_mono_s, _text(finding.fault, 31), _text(finding.text, 455))
            self._write_rare(FINDINGS, self._findings_count, fields)
            self._findings_count += 1

    def set_worker_server(self, path: str) -> None:
        """Record the address of this rank's torch worker server (a unix socket; "" for none)."""
        with self._rare:
            self._write_rare(SERVER, self._server_count, (_text(path, 111),))
            self._server_count += 1

    def set_mesh(self, mesh: Mesh) -> None:
        """Record this rank's place in the device mesh."""
        with self._rare:
            self._write_rare(MESH, self._mesh_count, (mesh.tp, mesh.pp, mesh.dp, mesh.ep))
            self._mesh_count += 1

    def set_saves(self, record: SavesRecord) -> None:
        """Record what this rank knows of its checkpoints; from any thread."""
        with self._rare:
            self._write_rare(SAVES, self._saves_count, msgspec.structs.astuple(record))
            self._saves_count += 1

    def set_restores(self, record: RestoresRecord) -> None:
        """Record what this rank knows of its restores; from any thread."""
        with self._rare:
            self._write_rare(RESTORES, self._restores_count, msgspec.structs.astuple(record))
            self._restores_count += 1

    def add_gpu_step(self, record: GpuStepRecord) -> None:
        """Write what the GPU needed for a step that was finished a while ago; once a step, from the training thread.

        The phases are written first: a reader that sees the step sees them as well.
        """
        for phase, gpu_s in record.phases[:MOST_GPU_PHASES]:
            self._write_rare(GPU_PHASES, self._gpu_phases_count, (record.number, gpu_s, _text(phase, 31)))
            self._gpu_phases_count += 1
        fields = (
            record.number, record.step, record.wall_s, record.data_s, record.forward_s, record.backward_s,
            record.optimizer_s, record.checkpoint_s,
        )  # fmt: skip
        self._write_rare(GPU_STEPS, self._gpu_steps_count, fields)
        self._gpu_steps_count += 1

    def close(self) -> None:
        """Give the mapping back; the file stays. Nothing may be written afterwards."""
        self._words.release()
        self._reals.release()
        self._map.close()

    def _write_rare(self, ring: Ring, number: int, fields: tuple[int | float | bytes, ...]) -> None:
        """Write one record of a ring that is not in a hurry."""
        at = ring.offset + number % ring.slots * ring.stride
        self._words[at >> 3] = 2 * number + 1
        ring.body.pack_into(self._map, at + _BODY, *fields)
        self._words[at >> 3] = 2 * number + 2


def collective_name(communicator: str) -> bytes:
    """Return a communicator's name as the collectives ring holds it."""
    return _text(communicator, 23)


def function_name(function: str) -> bytes:
    """Return a collective function's name as the collectives ring holds it."""
    return _text(function, 27)


def _map_new_file(folder: int, name: str) -> mmap.mmap:
    """Create a file in an open folder, with all its bytes reserved, so that a full /dev/shm fails now, not later."""
    handle = make_file(folder, name)
    try:
        os.posix_fallocate(handle, 0, FILE_BYTES)
        return mmap.mmap(handle, FILE_BYTES)
    except BaseException:
        os.unlink(name, dir_fd=folder)
        raise
    finally:
        os.close(handle)


def _write_header(mapping: mmap.mmap, identity: BoxIdentity) -> None:
    """Write what never changes."""
    mesh = identity.mesh
    HEADER.codec.pack_into(
        mapping, 0, MAGIC, BOX_VERSION, HEADER_BYTES, FILE_BYTES, identity.round, identity.pid, identity.start_ticks,
        identity.started_mono_s, identity.started_wall_s, identity.rank, identity.local_rank, identity.world_size,
        mesh.tp, mesh.pp, mesh.dp, mesh.ep, 0, _text(identity.job, 103), _text(identity.node, 103),
        # Half a path names another file: rather none than a wrong one.
        _text(identity.stderr_path, 1023) if len(os.fsencode(identity.stderr_path)) < 1024 else b"",
    )  # fmt: skip


def _text(text: str, limit: int) -> bytes:
    """Return at most ``limit`` bytes; what cannot be encoded becomes a question mark. Readers drop a cut character."""
    return text.encode(errors="replace")[:limit]
