# SPDX-License-Identifier: Apache-2.0
"""What the hooks and the explicit API report to: it knows the step, asks the anatomy, and writes the black box.

Phases and steps are those of one thread, the *training thread*: the one that opened the box, or the first other one
that takes an optimizer step while that one has taken none. Events of other threads (an asynchronous save, a second
model served beside) are not the rank's progress and are ignored.

**What ends a step.** The first optimizer object seen; when it has been collected, the next one seen. So with several
optimizers (a GAN) a step is the first one's period, and gradient accumulation is part of its step. Once the script
calls ``recorder.step()`` only that ends steps; the first call merges with the step that the optimizer has just ended.

**Its number.** The script's own where something knows it: ``recorder.step(number)``; our checkpoints; the framework's
count of steps; or, when the first step begins, what the optimizer has made in its life by the state that was loaded
into it. An optimizer's steps count from 0, as those of a script of which nothing is known: the two fit together when
only one of them could be seen before a restart. A framework's or an optimizer's number never takes a step back in one
process: five folds of a cross validation are five times as many steps.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from time import monotonic, process_time
from typing import Protocol

import msgspec

from megascale_ops.blackbox.records import RestoresRecord, SavesRecord
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.recorder.hook_guard import guarded, step_aside
from megascale_ops.recorder.recording.anatomy import Anatomy
from megascale_ops.recorder.recording.gc_times import CollectorClock
from megascale_ops.recorder.recording.loss import LossKeeper
from megascale_ops.recorder.recording.optimizer_steps import steps_made
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.progress import RankFinding


class Alarm(Protocol):
    """What a checkpoint has found: a class of fault, the ranks that it blames (none: the whole job), a sentence."""

    @property
    def fault(self) -> str:
        """A class of ``schema.fault_classes``."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers in the whole job."""

    @property
    def text(self) -> str:
        """What was found."""


# Of a checkpoint's events; how a save in the background ends is nothing that the training does.
_OF_THE_TRAINING = frozenset({"save_begin", "save_end", "restored"})


class GpuTimers(Protocol):
    """Times the GPU's part of each phase."""

    def mark(self, phase: str) -> None:
        """Note that ``phase`` begins."""

    def finish(self, number: int, step: int, phase: str) -> None:
        """Note that a step ends and that the next begins with ``phase``."""


class Recording:
    """The one recording of this process. After :meth:`leave` (a fork's child) every event does nothing."""

    def __init__(self, box: BoxWriter, rank: int = 0) -> None:
        self.box = box
        self.rank = rank
        self._found: dict[str, RankFinding] = {}
        self.live = True
        self.step_number = -1
        self.loss = LossKeeper()
        self.collector = CollectorClock()
        self._gpu_begins: Callable[..., None] | None = None  # where there is a GPU
        self._gpu_ends: Callable[..., None] | None = None
        self.at_step_end: Callable[[], None] | None = None  # set while the next steps are to be profiled
        self._cpu_s = process_time()
        self._absolute = False
        self._counts_from_1 = False  # a framework counts its first step, still to come, as 1
        self._anatomy = Anatomy()
        self.thread = get_ident()  # the one that trains
        self._mesh = Mesh()
        self._running = False
        self._steps = 0
        self._explicit = False
        self._ender: weakref.ref[object] | None = None
        self.evaluated: weakref.ref[object] | None = None  # the model that was put into evaluation mode last
        self._optimizer_depth = 0
        self._backward_depth = 0
        self._work_ended_s = 0.0  # of the backward pass under way: this rank's own part of it
        # The collective that each thread is inside of: since when (ns), of which group, and whether the whole of it
        # is counted as a wait when it returns.
        self.calls: dict[int, tuple[int, bytes, bool]] = {}

    def leave(self) -> None:
        """Write nothing any more: this is a child that shares the parent's pages."""
        self.live = False

    def data_begin(self, quiet: bool = False) -> None:
        """A data loader is asked for a batch; ``quiet``: with gradients off."""
        if self.live and get_ident() == self.thread:
            if quiet or (self.evaluated is not None and self._anatomy.is_quiet):
                now_s = monotonic()
                self._phase_seen(self._anatomy.observe_quietly(now_s), now_s)
            else:
                self.evaluated = None
                self._observe("data")

    def data_end(self) -> None:
        """A data loader has answered with a batch."""
        if self.live and get_ident() == self.thread:
            self._observe("forward")

    def data_none(self) -> None:
        """A data loader has no batch left, or has failed."""
        if self.live and get_ident() == self.thread:
            self._observe("other")

    def model_evaluates(self, model: object) -> None:
        """A model in training mode is put into evaluation mode; before the first step that is no news."""
        if self.live and get_ident() == self.thread and self._steps:
            self.evaluated = weakref.ref(model)
            self._anatomy.quieten(monotonic())

    def model_trains(self, model: object) -> None:
        """A model is put into training mode."""
        if self.live and get_ident() == self.thread and self.evaluated is not None and self.evaluated() is model:
            self.evaluated = None
            now_s = monotonic()
            self._phase_seen(self._anatomy.learn_again(now_s), now_s)

    def backward_begin(self) -> None:
        """A backward pass begins; one inside another (recomputation) is part of it."""
        if self.live and get_ident() == self.thread:
            self._backward_depth += 1
            if self._backward_depth == 1:
                self._observe("backward")

    def backward_end(self) -> None:
        """A backward pass ends."""
        if self.live and get_ident() == self.thread and self._backward_depth:
            self._backward_depth -= 1
            if not self._backward_depth:
                if self._work_ended_s:
                    now_s = monotonic()
                    self._anatomy.waited(now_s - self._work_ended_s, now_s)
                    self._work_ended_s = 0.0
                self._observe("optimizer" if self._optimizer_depth else "other")

    def backward_worked(self) -> None:
        """All gradients of a backward pass are computed; until its end it only waits for those of other ranks."""
        if self.live and get_ident() == self.thread and self._backward_depth == 1:
            self._work_ended_s = monotonic()

    def optimizer_begin(self, optimizer: object) -> None:
        """An optimizer's step begins."""
        if not self.live or (get_ident() != self.thread and not self._takes_over()):
            return
        if (self._ender is None or self._ender() is None) and self._anatomy.may_step:
            self._ender = weakref.ref(optimizer)
            if not self._steps:
                self._go_on(optimizer)
        self._optimizer_depth += 1
        self._observe("optimizer")

    def optimizer_end(self, optimizer: object) -> None:
        """An optimizer's step ends, and maybe the training step with it."""
        if not self.live or get_ident() != self.thread:
            return
        self._optimizer_depth = max(0, self._optimizer_depth - 1)
        if self._explicit or self._ender is None or self._ender() is not optimizer or not self._anatomy.may_step:
            self._observe("optimizer" if self._optimizer_depth else "other")
            return
        self._optimizer_depth = 0
        self._finish(self._next())

    def step(self, step: int | None = None) -> None:
        """Take the script's own word that a step has ended."""
        if not self.live or (get_ident() != self.thread and not self._takes_over()):
            return
        merge = not self._explicit and self._steps > 0
        self._explicit = True
        if step is not None:
            self._absolute = True
        if merge:
            self.step_number = self.step_number if step is None else int(step)
            self._show(monotonic())
        else:
            self._finish(self._next() if step is None else int(step))

    def count_from(self, steps: int) -> None:
        """Take a framework's total of steps made, which is the number of the last one."""
        if not self.live or get_ident() != self.thread or self._explicit:
            return
        if steps > self.step_number:
            self._counts_from_1 = not steps
            self._absolute = True
            if steps:
                self.step_number = steps
                self._show(monotonic())

    def phase_begin(self, phase: str) -> None:
        """The script (or a save) declares a phase."""
        if self.live and get_ident() == self.thread:
            now_s = monotonic()
            self._anatomy.declare(phase, now_s)
            if self._gpu_begins is not None:
                self._gpu_begins(phase)
            self._show(now_s)

    def phase_end(self) -> None:
        """The innermost declared phase ends."""
        if self.live and get_ident() == self.thread:
            now_s = monotonic()
            self._anatomy.undeclare(now_s)
            if self._gpu_begins is not None:
                self._gpu_begins(self._anatomy.phase)
            self._show(now_s)

    def checkpoint(self, event: str, step: int) -> None:
        """Take what our checkpoints report; they also know the script's own step number."""
        if not self.live or get_ident() != self.thread or event not in _OF_THE_TRAINING:
            return
        if event != "save_end" and not (self._explicit and self._absolute):
            self.step_number = int(step)
            self._absolute = True
        if event == "save_begin":
            self.phase_begin("checkpoint")
        elif event == "save_end":
            self.phase_end()
        else:
            self._show(monotonic())

    def saves(self, known: SavesRecord) -> None:
        """Take what our checkpoints know of their saves; in any thread."""
        if self.live:
            self.box.set_saves(known)

    def restores(self, known: RestoresRecord) -> None:
        """Take what our checkpoints know of their restores."""
        if self.live:
            self.box.set_restores(known)

    def found(self, step: int, alarms: Sequence[Alarm]) -> None:
        """Take what our checkpoints have found of what they saved; from the thread that saves, whichever that is.

        What blames ranks is written by these, all else by rank 0. What is over is told as well.
        """
        if not self.live:
            return
        mine = {one.fault: one.text for one in alarms if self.rank in one.ranks or not (one.ranks or self.rank)}
        before, now_s = self._found, monotonic()
        found = {
            fault: before[fault]
            if fault in before and before[fault].text == text
            else RankFinding(fault, step, text, now_s)
            for fault, text in mine.items()
        }
        if found == before:
            return
        over = {fault: RankFinding(fault, step, "", now_s) for fault in before.keys() - found.keys()}
        for _, each in sorted((over | found).items()):  # all of it: what stood in the ring may be driven out
            self.box.add_finding(each)
        self._found = found

    def is_outer_backward(self) -> bool:
        """Whether a backward pass that begins now is the training thread's, and not inside another."""
        return self.live and not self._backward_depth and get_ident() == self.thread

    def waited(self, thread: int, seconds: float, now_s: float) -> None:
        """Add time that ``thread`` has spent inside a blocking collective, until now."""
        if thread == self.thread and self.live:
            self._anatomy.waited(seconds, now_s)

    def place(self, coordinates: Mapping[str, int]) -> None:
        """Learn where in the device mesh this rank is; what is known of an axis stays."""
        new = {axis: at for axis, at in coordinates.items() if getattr(self._mesh, axis) < 0}
        if new and self.live:
            self._mesh = msgspec.structs.replace(self._mesh, **new)
            self.box.set_mesh(self._mesh)

    def time_gpu(self, timers: GpuTimers) -> None:
        """Let ``timers`` see each phase begin and each step end; when they fail, they alone step aside."""
        self._gpu_begins = guarded("the GPU timers", timers.mark)
        self._gpu_ends = guarded("the GPU timers", timers.finish)

    def take_loss(self, value: object) -> None:
        """Take the script's loss of this step."""
        if self.live:
            self.loss.keep(value)

    def _go_on(self, optimizer: object) -> None:
        """Before the first step: go on from the one that ``optimizer`` was saved after, if nothing else knows it."""
        if self._absolute or self._explicit:
            return
        try:
            made = steps_made(optimizer)
        except Exception as error:  # noqa: BLE001  its state is the script's own matter; the hook on steps stays
            step_aside("the optimizer's own number of steps", error)
            return
        if made:
            self.step_number = made - 1
            self._absolute = True

    def _next(self) -> int:
        """Return the number of the step that ends now, unless the script gives another."""
        return self.step_number + (2 if self._counts_from_1 else 1)

    def _takes_over(self) -> bool:
        """Whether the caller, another thread, becomes the training thread because that one has never stepped."""
        if self._steps:
            return False
        self.thread = get_ident()
        self._backward_depth = self._optimizer_depth = 0
        return True

    def _observe(self, phase: str) -> None:
        """Take what a hook saw, and write it unless a declared phase hides it."""
        now_s = monotonic()
        if not self._anatomy.observe(phase, now_s):
            self.box.moved(now_s)
            return
        if self._gpu_begins is not None:
            self._gpu_begins(phase)
        if self._running:
            self.box.set_now(self.step_number, phase, self._absolute, now_s)
        else:
            self._show(now_s)

    def _phase_seen(self, changed: bool, now_s: float) -> None:
        """Write the phase that the anatomy has made of what was seen."""
        if not changed:
            self.box.moved(now_s)
            return
        if self._gpu_begins is not None:
            self._gpu_begins(self._anatomy.phase)
        self._show(now_s)

    def _finish(self, step: int) -> None:
        """End a step: first its record, then where the rank is."""
        now_s, cpu_s = monotonic(), process_time()
        self._steps += 1
        self._counts_from_1 = False
        self.step_number = step
        box, anatomy = self.box, self._anatomy
        box.end_step(anatomy.finish(step, now_s), self.collector.take_s(), cpu_s - self._cpu_s, self.loss.read())
        self._cpu_s = cpu_s
        if self._gpu_ends is not None:
            self._gpu_ends(self._steps - 1, step, anatomy.phase)
        if self._running:
            box.set_now(step, anatomy.phase, self._absolute, now_s)
        else:
            self._show(now_s)
        if self.at_step_end is not None:
            self.at_step_end()

    def _show(self, now_s: float) -> None:
        """Write where the rank is."""
        if not self._running:
            self._running = True
            self.box.set_state("running")
        self.box.set_now(self.step_number, self._anatomy.phase, self._absolute, now_s)
