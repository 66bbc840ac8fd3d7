# SPDX-License-Identifier: Apache-2.0
"""Saves in the background, as the manager asks for them: copy, hand over, and hear how it went.

One save is in flight at a time. A second one waits for the first (back-pressure), together with all other ranks: each
tells the others how its own part stands, so that all go on with the same knowledge, and only the training thread ever
speaks over the process groups. Two threads of this process wait without Python's lock: one for the GPU's copy to end,
then it hands the job over; one for what the writer process reports.

A failure never ends the training: it is logged, counted, kept in ``failure``, and the next save tries again.
"""

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from megascale_ops.checkpoint.background.copying import Copier, written_by_steps
from megascale_ops.checkpoint.background.flight import Event, Flight
from megascale_ops.checkpoint.background.host_buffer import HostBuffer
from megascale_ops.checkpoint.background.local_part import LocalPart, OpenSet
from megascale_ops.checkpoint.background.messages import Alive, Job, LocalFailed, LocalWritten, Report, Sealed, Written
from megascale_ops.checkpoint.background.place_of_job import give_up
from megascale_ops.checkpoint.background.save_log import SaveLog
from megascale_ops.checkpoint.background.staging import Outline, Staged, Stager
from megascale_ops.checkpoint.background.writer_process import WriterProcess
from megascale_ops.checkpoint.manifest import Manifest
from megascale_ops.checkpoint.notify import tell
from megascale_ops.checkpoint.ranks import Ranks
from megascale_ops.checkpoint.retention import Rule
from megascale_ops.checkpoint.trust.file_digests import Algorithm
from megascale_ops.errors import CheckpointError

# 50 ms to 1 s: how long ranks wait before they tell each other again how their parts stand.
_FIRST_LOOK_S, _MOST_LOOK_S = 0.05, 1.0
# 5 s: for removing what a save that was cut off has left, where the storage answers.
_TIDIES_S = 5.0
# 0.1 s: a shorter wait for the save before is not worth a line.
_WORTH_A_LINE_S = 0.1

_BETWEEN = "%s between two saves; the next one starts another"

_log = logging.getLogger("megascale_ops.checkpoint")


class Save(NamedTuple):
    """A save as the ranks agreed on it. ``token`` is new for each, ``writer`` the number of the folder's lock."""

    token: str
    writer: int
    sealed: Manifest  # but for its files and its time
    found: bytes = b""  # of the leading rank: the file of what was found of the state; empty: none
    algorithm: Algorithm = "xxh3_128"


class _Part(NamedTuple):
    """How a rank's part of the save in flight stands; travels to all the others. ``failure``: why there is none."""

    is_over: bool
    failure: str
    is_echo: bool
    is_left: bool


class _Outcome(NamedTuple):
    """How the last save ended, as far as that is no good end."""

    failure: str = ""
    was_left: bool = False


class _Launched(NamedTuple):
    """The save in flight, and what the writer process was told of it."""

    flight: Flight
    job: Job
    local: LocalPart | None = None


class BackgroundSaver:
    """The saves of one manager.

    Args:
        root: the checkpoint folder, or its URL.
        rule: what stays.
        overlapped: return from a save before everything is copied; see ``copying``.
        deadline_s: how long nothing may be written before a later save, or the end, gives a save up.
        log: what is told of the saves.
    """

    def __init__(self, root: str, rule: Rule, *, overlapped: bool, deadline_s: float, log: SaveLog) -> None:
        self._outcome = _Outcome()
        self._root, self._rule, self._deadline_s, self._save_log = root, rule, deadline_s, log
        self._copier = Copier(overlapped=overlapped)
        self._buffer = HostBuffer()
        self._stager = Stager(self._buffer, self._copier)
        self._launched: _Launched | None = None
        self._overwritten_by_steps: frozenset[int] = frozenset()  # of the save that is staged
        self._writer: WriterProcess | None = None
        self._courier: SimpleQueue[tuple[Flight, Job] | None] | None = None  # of a thread that waits for a job
        self._changed = threading.Condition()
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    @property
    def failure(self) -> str:
        """Why the last save failed; empty: it went well, or still goes."""
        return self._outcome.failure

    @property
    def was_left(self) -> bool:
        """Whether the last one was for the nodes alone, and was left out there."""
        return self._outcome.was_left

    @property
    def _flight(self) -> Flight | None:
        return self._launched.flight if self._launched is not None else None

    @property
    def is_in_flight(self) -> bool:
        """Whether a save is not over yet."""
        return not self._is_sealed_or_failed()

    def settle(self, ranks: Ranks) -> None:
        """End the save in flight, on all ranks; collective. How it ended is logged, never raised."""
        flight, began_s, pause_s = self._flight, time.monotonic(), _FIRST_LOOK_S
        if flight is None:  # on all ranks: a copy is made by all of them or by none
            return
        is_enough = self._is_sealed_or_failed if ranks.leads else self._share_is_over
        while True:
            parts = ranks.gather(self._part(flight, ranks))
            failed = [rank for rank, part in enumerate(parts) if part.failure]
            if failed or all(part.is_over for part in parts):
                break
            self._await(is_enough, pause_s)
            pause_s = min(pause_s * 2, _MOST_LOOK_S)
        waited_s = time.monotonic() - began_s
        if ranks.leads and waited_s > _WORTH_A_LINE_S:
            _log.warning("waited %.1f s for the save of step %d, which was still in flight", waited_s, flight.step)
        was_left = any(part.is_left for part in parts)
        if failed:
            cause = next((rank for rank in failed if not parts[rank].is_echo), failed[0])
            where = f" on rank {cause}" if ranks.world_size > 1 else ""
            self._give_up(flight, parts[cause].failure)
            self._outcome = _Outcome(f"the save of step {flight.step} failed{where}: {parts[cause].failure}")
        elif was_left:
            self._outcome = _Outcome(was_left=True)
        else:
            self._move(flight, "sealed")
        self._await(self._local_is_over, self._deadline_s)  # the set on the nodes hears of a failure at once
        self._launched = None

    def drop(self) -> None:
        """A save that was started will not be."""
        self._stager.drop()

    def start(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Start what can be copied before the ranks have agreed; the save before has been settled."""
        if self._courier is None:  # here, while the GPU works: until a thread has begun a busy host takes milliseconds
            courier: SimpleQueue[tuple[Flight, Job] | None] = SimpleQueue()
            threading.Thread(target=self._carry, args=(courier,), name="checkpoint", daemon=True).start()
            self._courier = courier
        self._overwritten_by_steps = written_by_steps(state)
        self._stager.start(tensors, self._overwritten_by_steps)

    def outline(self, flat: Mapping[str, torch.Tensor], ranks: Ranks) -> Outline | None:
        """What the others need to know of this rank; see ``staging``."""
        return self._stager.outline(flat, ranks)

    def stage(self, flat: Mapping[str, torch.Tensor], ranks: Ranks, outlines: list[Outline | None]) -> Staged:
        """Copy this rank's share; collective. Nothing is written yet.

        Args:
            flat: the state, taken apart by ``contents``.
            ranks: who takes part.
            outlines: of all ranks.

        Raises:
            CheckpointError: this rank, or another one, could not copy.
        """
        known = [each for each in outlines if each is not None]
        if len(known) == ranks.world_size:
            return self._stager.stage_again(known, self._overwritten_by_steps)
        return self._stager.stage(flat, ranks, self._overwritten_by_steps)

    def launch(
        self,
        save: Save,
        staged: Staged,
        ranks: Ranks,
        damaged: frozenset[str],
        *,
        to_shared: bool = True,
        opened: OpenSet | None = None,
    ) -> None:
        """Hand the share over; all ranks have copied theirs.

        Args:
            save: what the ranks agreed on.
            staged: what ``stage`` returned.
            ranks: who takes part.
            damaged: paths of checkpoints that are known not to verify.
            to_shared: whether it goes to the shared folder or store.
            opened: the set on the nodes, where it goes there.
        """
        flight = Flight(save.token, save.sealed.step, time.monotonic())
        local = LocalPart(opened, partial(self._end_local, flight, is_alone=not to_shared)) if opened else None
        job = Job(
            token=save.token,
            root=self._root if to_shared else "",
            writer=save.writer,
            rank=ranks.rank,
            buffer_bytes=staged.size_bytes,
            files=staged.images,
            plan=staged.plan,
            found=save.found,
            algorithm=save.algorithm,
            sealed=save.sealed,
            rule=self._rule,
            damaged=tuple(sorted(damaged)),
            local=local.folder if local is not None else "",
        )
        self._launched, self._outcome = _Launched(flight, job, local), _Outcome()
        courier, self._courier = self._courier, None
        assert courier is not None, "a save is launched that was not started"
        courier.put((flight, job))

    def wait_copied(self) -> None:
        """Make the GPU streams of this thread wait until everything is copied."""
        self._copier.wait_copied()

    def wait(self, deadline_s: float) -> None:
        """Wait for the save in flight; of this rank alone, not collective.

        Raises:
            CheckpointError: it failed, or is not over by then; then it goes on.
        """
        if not self._await(self._is_sealed_or_failed, deadline_s) and self._flight is not None:
            where = ", and is not sealed on the nodes" if self._flight.has_ended else ""
            raise CheckpointError(self._flight.sentence(time.monotonic()) + where)
        if self.failure:
            raise CheckpointError(self.failure)

    def close(self, deadline_s: float | None) -> None:
        """Wait for the save in flight, and end the writer process.

        Args:
            deadline_s: after so long the save is given up; None: when it goes on no more.

        Raises:
            CheckpointError: the last save failed, or was given up because it took longer.
        """
        if os.getpid() != self._pid:
            return  # a forked child: all of it is its parent's
        atexit.unregister(self._at_exit)
        self._await_end(deadline_s)
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.dismiss()
        courier, self._courier = self._courier, None
        if courier is not None:
            courier.put(None)
        self._stager.drop()
        self._copier.close()
        self._buffer.close()
        if self.failure:
            raise CheckpointError(self.failure)

    # -- threads of this room ---------------------------------------------------------------------------------------

    def _carry(self, courier: "SimpleQueue[tuple[Flight, Job] | None]") -> None:
        """Wait for the job of one save, and hand it over; None: there will be none."""
        carried = courier.get()
        if carried is not None:
            self._hand_over(*carried)

    def _hand_over(self, flight: Flight, job: Job) -> None:
        """Wait for the GPU, then give the job to the writer process, which is started where none runs."""
        try:
            for end in self._copier.pending.values():
                end.synchronize()
            self._move(flight, "copied")
            if self._is_over(flight):
                return  # its writer process died meanwhile: another one must not begin what the ranks have given up
            writer = self._running_writer(flight)
            with suppress(ConnectionError):  # it has ended: its listener says how, of this save
                writer.send(job)
            if self._is_over(flight):
                writer.abandon(flight.token, flight.reason)
        except (OSError, RuntimeError) as exc:
            self._move(flight, "failed", f"the writer process could not be told: {exc}")

    def _is_over(self, flight: Flight) -> bool:
        with self._changed:
            return flight.has_ended

    def _running_writer(self, flight: Flight) -> WriterProcess:
        """The process that carries a save from now on: its end is the save's, that of one before it is not."""
        with self._changed:
            if self._writer is not None and self._writer.has_ended:  # not noticed by its thread yet
                _log.warning(_BETWEEN, self._writer.end_in_words())
                self._writer = None
            if self._writer is None:
                writer = self._writer = WriterProcess(self._buffer.descriptor)
                name = f"checkpoint-writer-{writer.pid}"
                threading.Thread(target=self._listen, args=(writer,), name=name, daemon=True).start()
            self._writer.token = flight.token
            return self._writer

    def _listen(self, writer: WriterProcess) -> None:
        """Take reports until the writer process ends."""
        while (report := writer.receive()) is not None:
            self._take(report)
        with self._changed:
            is_ours = self._writer is writer
            self._writer = None if is_ours else self._writer
        writer.dismiss()
        if is_ours:  # else it was dismissed
            reason, launched = writer.end_in_words(), self._launched
            if launched is not None and not launched.flight.has_ended and launched.flight.token == writer.token:
                self._move(launched.flight, "failed", reason)
                if launched.job.root:
                    give_up(launched.job, reason)
            else:
                _log.warning(_BETWEEN, reason)

    def _take(self, report: Report) -> None:
        flight = self._flight
        if flight is None or flight.token != report.token or flight.has_ended:
            return  # of a save that has been settled
        launched = self._launched
        if isinstance(report, Alive):
            flight.touch(time.monotonic())
        elif isinstance(report, LocalWritten | LocalFailed):
            self._take_local(launched, report)
        elif isinstance(report, Written):
            self._move(flight, "written")
        elif isinstance(report, Sealed):
            self._move(flight, "sealed")
        else:
            self._move(flight, "failed", report.reason, is_echo=report.is_echo)

    def _take_local(self, launched: _Launched | None, report: LocalWritten | LocalFailed) -> None:
        if launched is None or launched.local is None:
            return
        launched.flight.touch(time.monotonic())
        if isinstance(report, LocalFailed):
            launched.local.tell(failure=report.reason)
            return
        if not launched.job.root:
            self._move(launched.flight, "written")
        launched.local.tell(report.files)

    def _end_local(self, flight: Flight, is_sealed: bool, *, is_alone: bool) -> None:
        """The set on the nodes is sealed or left out: the end of a save that was for them alone."""
        if is_alone:
            self._move(flight, "sealed" if is_sealed else "left")
        with self._changed:
            self._changed.notify_all()

    # -- the flight ------------------------------------------------------------------------------------------------

    def _move(self, flight: Flight, event: Event, reason: str = "", *, is_echo: bool = False) -> None:
        """Go on, tell those who wait, and log a failure; what comes after the end of a flight is dropped."""
        now_s, launched = time.monotonic(), self._launched
        local = launched.local if launched is not None and launched.flight is flight else None
        if event == "failed" and local is not None:
            local.tell(failure=reason)  # nothing where its files are there already
            if launched is not None and not launched.job.root:
                event = "left"
        with self._changed:
            if flight.has_ended:
                return
            flight.move(event, now_s, reason, is_echo=is_echo)
            if flight.state == "failed":
                self._outcome = _Outcome(flight.sentence(now_s))
            self._changed.notify_all()
        if flight.state == "left":
            self._save_log.leave()
        elif flight.state == "sealed":
            self._save_log.seal(flight.step, flight.background_s(now_s))
            tell("sealed", flight.step)
        elif flight.state == "failed":
            self._save_log.fail()
            _log.error("%s; the training goes on, and the next save tries again", self.failure)
            tell("save_failed", flight.step)

    def _part(self, flight: Flight, ranks: Ranks) -> _Part:
        """How this rank's part stands; one that takes too long has failed."""
        self._cut_off_if_quiet()
        is_over = (flight.has_ended or (flight.share_is_over and not ranks.leads)) and self._local_is_over()
        has_failed, is_left = flight.state == "failed", flight.state == "left"
        return _Part(is_over, flight.reason if has_failed else "", flight.is_echo, is_left)

    def _cut_off_if_quiet(self) -> None:
        flight = self._flight
        if flight is not None and flight.quiet_s(time.monotonic()) > self._deadline_s:
            self._cut_off(f"nothing was written for {self._deadline_s:.0f} s")

    def _cut_off(self, reason: str) -> None:
        """End the save in flight, and its writer process with it: that may hang in a read or write."""
        launched, writer, self._writer = self._launched, self._writer, None
        if launched is not None:
            self._move(launched.flight, "failed", reason)
        if writer is not None:
            writer.kill()
        if launched is not None and launched.job.root:  # in a thread: the storage may hang this process, too
            tidy = threading.Thread(target=give_up, args=(launched.job, reason), daemon=True)
            with suppress(RuntimeError):  # no thread begins while the interpreter ends: the next save tidies up
                tidy.start()
                tidy.join(_TIDIES_S)

    def _give_up(self, flight: Flight, reason: str) -> None:
        """Have the writer process drop the save because another rank's part failed."""
        if not flight.has_ended:
            self._move(flight, "failed", reason)
            writer = self._writer
            if writer is not None:
                writer.abandon(flight.token, reason)

    def _await_end(self, deadline_s: float | None) -> None:
        """Wait until the save in flight has ended, or end it."""
        began_s = time.monotonic()
        while not self._await(self._is_sealed_or_failed, _MOST_LOOK_S):
            self._cut_off_if_quiet()
            if deadline_s is not None and time.monotonic() - began_s > deadline_s:
                self._cut_off(f"it was not sealed within {deadline_s:.0f} s")

    def _local_is_over(self) -> bool:
        launched = self._launched
        return launched is None or launched.local is None or launched.local.is_over

    def _share_is_over(self) -> bool:
        return self._flight is None or (self._flight.share_is_over and self._local_is_over())

    def _is_sealed_or_failed(self) -> bool:
        return self._flight is None or (self._flight.has_ended and self._local_is_over())

    def _await(self, is_so: Callable[[], bool], deadline_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(is_so, deadline_s)

    def _at_exit(self) -> None:
        """The interpreter ends: wait for the save in flight, and say what became of it."""
        try:
            self.close(None)
        except CheckpointError as exc:
            _log.error("at the end of the process: %s", exc)
