# SPDX-License-Identifier: Apache-2.0
"""Finished steps: each is read once, and what they took teaches patience.

Pure, as ``slots``: given a function that copies bytes.
"""

import math
from collections import deque

from megascale_ops.blackbox.layout import EFFORTS, GPU_PHASES, GPU_STEPS, STEPS
from megascale_ops.blackbox.records import GpuStepRecord, StepRecord
from megascale_ops.blackbox.slots import Read, Slot, since, whole_slots
from megascale_ops.blackbox.values import MOST_S, finite, text
from megascale_ops.schema.progress import MOST_WORK


class Steps:
    """The steps of one rank, read on from where the last reading ended. One owner."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.next_step = 0  # how many the rank had finished when they were last read
        self._fresh: deque[StepRecord] = deque(maxlen=MOST_WORK)
        self._durations_s: deque[float] = deque(maxlen=STEPS.slots)
        self._first_s = 0.0  # what the process's first step took
        self._quantiles_s: tuple[float, float] | None = (0.0, 0.0)  # None: not of all the steps that were read

    def all(self, last: int) -> list[StepRecord]:
        """Return up to ``last`` finished steps that the ring still holds, oldest first."""
        found = whole_slots(STEPS, self._read)[-last:] if last > 0 else []
        return _records(found, whole_slots(EFFORTS, self._read) if found else [])

    def take_fresh(self) -> list[StepRecord]:
        """Return the steps read on since the last call, oldest first; of more than MOST_WORK the newest."""
        fresh = list(self._fresh)
        self._fresh.clear()
        return fresh

    def read_on(self) -> None:
        """Read the steps that are new since the last call, and only those: four copies, however many they are."""
        run = since(STEPS, self._read, self.next_step)
        if not run.slots:
            return
        self.next_step = run.next_number
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
        self._fresh.extend(_records(newest_slots, efforts))

    def quantiles_s(self) -> tuple[float, float]:
        """Return p50 and p99 of the steps in the ring, without checkpoints and without the process's first step.

        The first step compiles, allocates and connects: a minute of it among few steps would be taken for patience.
        """
        if self._quantiles_s is None:
            ordered = sorted(self._durations_s) or [self._first_s]
            last = len(ordered) - 1
            self._quantiles_s = (ordered[last // 2], ordered[min(last, math.ceil(0.99 * last))])
        return self._quantiles_s


def _records(steps: list[Slot], efforts: list[Slot]) -> list[StepRecord]:
    """Put finished steps and what else is known of them together; version 1 knew no more than the steps."""
    known = {slot.number: slot.fields for slot in efforts}
    found = []
    for number, (step, *parts) in steps:
        gc_s, cpu_s, loss, has_loss = known.get(number, (0.0, 0.0, 0.0, 0))
        times = (*parts, gc_s, cpu_s)
        # A sum without signs is small only where all of its parts are, and never where one is NaN: one question.
        if not sum(map(abs, times)) <= MOST_S:
            times = tuple(map(finite, times))
        found.append(StepRecord(*(step, *times, loss if has_loss else None)))
    return found


def gpu_steps(read: Read, last: int) -> list[GpuStepRecord]:
    """Return what the GPU needed for up to ``last`` steps, oldest first; none without a GPU."""
    found = whole_slots(GPU_STEPS, read)[-last:] if last > 0 else []
    phases: dict[int, list[tuple[str, float]]] = {}
    for slot in whole_slots(GPU_PHASES, read) if found else []:
        number, gpu_s, phase = slot.fields
        phases.setdefault(number, []).append((text(phase), finite(gpu_s)))
    records = []
    for slot in found:
        number, step, *times = slot.fields
        wall_s, data_s, forward_s, backward_s, optimizer_s, checkpoint_s = map(finite, times)
        named = tuple(phases.get(number, ()))
        records.append(
            GpuStepRecord(
                number, step, wall_s, data_s, forward_s, backward_s, optimizer_s, checkpoint_s, named
            )
        )  # fmt: skip
    return records


def _duration_s(slot: Slot) -> float:
    """Return a step's time without its checkpoints, which patience treats on their own."""
    return max(0.0, finite(slot.fields[2]) - finite(slot.fields[7]))
