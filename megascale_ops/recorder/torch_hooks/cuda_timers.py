# SPDX-License-Identifier: Apache-2.0
"""GPU times of forward, backward, optimizer and each declared phase: CUDA events, read late.

The host's times of a step are those of launching. Where a phase begins, an event is recorded on the stream that the
training thread launches into; the GPU writes its clock there when it reaches it. Events are only *queried*
(``query``), at the end of a later step: nothing here ever waits for the GPU. A step whose events are not all complete
after ``MOST_PENDING`` more steps is given up and counted in ``dropped``.

The time between two events includes GPU idle time: a step that launches too slowly shows long GPU times as well, and a
phase that waits for a batch is as long on the GPU as on the host.

Not timed: a step in which a CUDA graph was being captured (an event would become part of the graph, and a query of
another stream's event would break the capture), one with more than ``MOST_MARKS`` phases, one that ends on another
device than it began. CUDA is never initialised from here: until the script has done so nothing is recorded.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from megascale_ops.blackbox.records import MOST_GPU_PHASES, GpuStepRecord

# 4: a host is one or two steps ahead of its GPU, since the loss or the optimizer's state is read now and then.
MOST_PENDING = 4
# 256: 64 micro-batches with four phases each; above it the events alone would cost a millisecond a step.
MOST_MARKS = 256
_PARTS = ("data", "forward", "backward", "optimizer", "checkpoint")
_UNNAMED = frozenset({*_PARTS, "other", "startup"})


class Event(Protocol):
    """What is used of ``torch.cuda.Event``."""

    def record(self) -> None:
        """Put it into the current stream."""

    def query(self) -> bool:
        """Return whether the GPU has reached the event."""

    def elapsed_time(self, end_event: "Event") -> float:
        """Return milliseconds to a later event; both must have been passed."""


class Cuda(Protocol):
    """What is used of ``torch.cuda``."""

    def is_initialized(self) -> bool:
        """Return whether the script uses CUDA in this process."""

    def is_current_stream_capturing(self) -> bool:
        """Return whether a CUDA graph is being captured now."""

    def Event(self, *, enable_timing: bool) -> Event:  # noqa: N802  torch's name
        """Make an event."""


Mark = tuple[str, Event]


class _Pending:
    """A finished step whose events may still be ahead of the GPU."""

    __slots__ = ("end", "marks", "number", "step")

    def __init__(self, number: int, step: int, marks: list[Mark], end: Event) -> None:
        self.number = number
        self.step = step
        self.marks = marks
        self.end = end  # also the next step's first mark, which owns it

    def is_done(self) -> bool:
        """Return whether the GPU has passed all events; phases may have used several streams, so each is asked."""
        return self.end.query() and all(event.query() for _, event in self.marks)

    def read(self) -> GpuStepRecord | None:
        """Return the times of a step that is done; None when its events do not follow each other."""
        spent_s: dict[str, float] = {}
        begins = [event for _, event in self.marks]
        for (phase, begin), end in zip(self.marks, [*begins[1:], self.end], strict=True):
            spent_s[phase] = spent_s.get(phase, 0.0) + begin.elapsed_time(end) * 1e-3
        if min(spent_s.values()) < 0:  # of two streams that nothing orders
            return None
        declared = [(phase, gpu_s) for phase, gpu_s in spent_s.items() if phase not in _UNNAMED]
        data_s, forward_s, backward_s, optimizer_s, checkpoint_s = (spent_s.get(part, 0.0) for part in _PARTS)
        return GpuStepRecord(
            self.number, self.step, sum(spent_s.values()), data_s, forward_s, backward_s, optimizer_s, checkpoint_s,
            tuple(declared[:MOST_GPU_PHASES]),
        )  # fmt: skip


class CudaTimers:
    """The events of one training thread.

    Args:
        cuda: ``torch.cuda``.
        write: Takes the times of a step, some steps after it.
    """

    def __init__(self, cuda: Cuda, write: Callable[[GpuStepRecord], None]) -> None:
        self._cuda = cuda
        self._write = write
        self._marks: list[Mark] = []
        self._is_whole = True  # the step under way can be timed
        self._pending: deque[_Pending] = deque()
        self._free: list[Event] = []
        self.dropped = 0

    def mark(self, phase: str) -> None:
        """Note that ``phase`` begins."""
        if self._marks and self._marks[-1][0] == phase:
            return
        event = self._record()
        if event is not None:
            self._marks.append((phase, event))

    def finish(self, number: int, step: int, phase: str) -> None:
        """Note that a step ends and that the next begins with ``phase``; write those before that are done now."""
        end = self._record()
        marks, self._marks = self._marks, []
        if end is not None:
            if marks and self._is_whole:
                self._pending.append(_Pending(number, step, marks, end))
            self._marks.append((phase, end))
        self._is_whole = end is not None
        if end is not None:  # else CUDA is not in use, or a graph is being captured: no event may be queried either
            self._read_late()

    def _record(self) -> Event | None:
        """Put an event into the stream, unless that would not do; then the step is not timed."""
        if not self._cuda.is_initialized() or self._cuda.is_current_stream_capturing() or len(self._marks) > MOST_MARKS:
            self._is_whole = False
            return None
        event = self._free.pop() if self._free else self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def _read_late(self) -> None:
        pending = self._pending
        while pending and pending[0].is_done():
            done = pending.popleft()
            try:
                record = done.read()
            except RuntimeError:  # events of two devices: the script has changed its device within the step
                record = None
            if record is None:
                self.dropped += 1
            else:
                self._write(record)
            self._free += [event for _, event in done.marks]
        while len(pending) > MOST_PENDING:
            # Its events go to the garbage: one that the GPU has still to pass would be recorded twice.
            pending.popleft()
            self.dropped += 1
