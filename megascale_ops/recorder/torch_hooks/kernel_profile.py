# SPDX-License-Identifier: Apache-2.0
"""Which kernels a rank runs, and how long they take: torch's profiler around a few steps, on demand or one step in N.

The agent asks with a file; the recorder's own thread looks for it ten times a second (one ``stat``, 2 us), so training
itself pays nothing: at a step's end one attribute is looked at. Then the training thread switches the profiler on at
the end of a step and off at the end of the last that was asked for; adding up happens in a thread of its own, a little
at a time, since it would hold the interpreter's lock.

With a GPU only its kernels are recorded, which costs least; without one the operators of the training thread are.
torch waits for the GPU once when the profiler is switched off.

Never left on: an interpreter that ends with the profiler on dies of a segmentation fault (torch 2.13), and a forked
child (a data loader's worker) would record for the rest of its life. So before either it is switched off, and the
request is answered with that. Only the main thread is profiled, because only the thread that switched it on can switch
it off.

A script that uses the profiler itself is left alone: the request is answered with that. One that starts it while we
profile gets torch's error: do not ask for profiles of such a script.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from megascale_ops import foreign
from megascale_ops.recorder.hook_guard import guarded
from megascale_ops.recorder.recording.recording import Recording
from megascale_ops.recorder.torch_hooks.kernel_times import Span, summarise
from megascale_ops.schema.kernels import (
    MOST_STEPS,
    REQUEST_SUFFIX,
    RESULT_SUFFIX,
    SAMPLED_SUFFIX,
    ProfileRequest,
    RankKernels,
)
from megascale_ops.whole_file import PRIVATE, write_whole

NAME = "the kernel profile"
# 64 kB: a request has a few numbers and a path.
_MOST_BYTES = 1 << 16
# 200,000 events: a hundred steps of a large model's kernels; adding them up takes 3 s beside the training.
MOST_EVENTS = 200_000
# 100 events take 0.6 ms of the interpreter's lock; then the training thread has 1 ms for itself.
_EVENTS_AT_ONCE = 100
_PAUSE_S = 0.001
_USER_SCOPE = 7  # torch's RecordScope: what a script or an optimizer declares, no operator
_KINETO_LOGS = "KINETO_LOG_LEVEL"
_NO_LOGS = "6"  # above its highest level: else it prints two lines into the script's stderr at each start and stop


class Profiler(Protocol):
    """What is used of torch's profiler."""

    device: str

    def refusal(self) -> str:
        """Return why it cannot be switched on now, "" when it can."""

    def start(self) -> None:
        """Switch it on."""

    def stop(self) -> Iterator[Span]:
        """Switch it off; the events are read when they are asked for."""


class _Running:
    """A profile under way."""

    def __init__(self, request: ProfileRequest, path: Path, first_step: int, own_s: float) -> None:
        self.request = request
        self.path = path
        self.first_step = first_step
        self.left = request.steps
        self.own_s = own_s
        self.began_s = time.monotonic()


class KernelProfile:
    """Takes requests, samples, and answers.

    Args:
        recording: Gives the ends of steps.
        profiler: torch's.
        stem: ``<box dir>/<rank>``, to which the files' suffixes are added.
        every: Sample one step in so many; 0: none.
    """

    def __init__(self, recording: Recording, profiler: Profiler, stem: Path, every: int = 0) -> None:
        self._recording = recording
        self._profiler = profiler
        self._ask = Path(f"{stem}{REQUEST_SUFFIX}")
        self._answer = Path(f"{stem}{RESULT_SUFFIX}")
        self._sampled = Path(f"{stem}{SAMPLED_SUFFIX}")
        self._every = every
        self._seen: tuple[int, int] | None = None
        self._wanted: ProfileRequest | None = None
        self._running: _Running | None = None
        self._writer: threading.Thread | None = None
        self._step_ended = guarded(NAME, self._at_step_end)
        self._is_tidy = False
        if every:
            recording.at_step_end = self._step_ended

    def poll_request(self) -> None:
        """Look for a request; called by the recorder's own thread."""
        try:
            found = os.stat(self._ask)  # noqa: PTH116  ten times a second: half the cost of a Path
        except OSError:
            return
        stamp = (found.st_ino, found.st_mtime_ns)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            request = msgspec.json.decode(foreign.read(self._ask, _MOST_BYTES), type=ProfileRequest)
        except (OSError, *foreign.UNREADABLE):  # withdrawn since, or not a request
            return
        self._wanted = request
        self._go_on()

    def _go_on(self) -> None:
        """Have ``at_step_end`` called while a request is pending."""
        if self._wanted is not None:
            self._recording.at_step_end = self._step_ended

    def _at_step_end(self) -> None:
        """Switch on or off, as it is time to; in the training thread."""
        running = self._running
        if running is not None:
            running.left -= 1
            if running.left <= 0 or time.monotonic() > running.request.until_mono_s:
                self._running = None
                self._end(running)
            else:
                return
        request, self._wanted = self._wanted, None
        next_step = self._recording.step_number + 1
        if request is not None:
            self._begin(request, self._answer, next_step)
        elif self._every and not next_step % self._every:
            # A minute: a sample that takes longer means a hang, which the hang detector finds.
            sample = ProfileRequest(str(next_step), 1, time.monotonic() + 60.0)
            self._begin(sample, self._sampled, next_step)
        elif not self._every:
            self._recording.at_step_end = None
            self._go_on()  # a request may have come between the two lines above

    def _begin(self, request: ProfileRequest, path: Path, first_step: int) -> None:
        before_s = time.monotonic()
        if before_s > request.until_mono_s:
            return
        refusal = self._profiler.refusal()
        if threading.current_thread() is not threading.main_thread():
            refusal = "training does not run in the main thread"
        busy = self._writer is not None and self._writer.is_alive()
        if busy and path is self._sampled:
            return
        if busy:
            refusal = "the profile before is still being added up"
        if not 1 <= request.steps <= MOST_STEPS:
            refusal = f"{request.steps} steps can't be profiled: 1 to {MOST_STEPS}"
        if not refusal:
            try:
                self._profiler.start()
            except Exception as error:  # noqa: BLE001  torch refuses in many ways; the request is answered with it
                refusal = f"torch's profiler could not be started: {type(error).__name__}: {error}"
        if refusal:
            _answer(path, RankKernels(id=request.id, error=refusal))
            return
        if not self._is_tidy:
            self._is_tidy = True
            give_up = guarded(NAME, self._give_up)
            atexit.register(give_up, "the script ended")
            os.register_at_fork(before=lambda: give_up("the script forked meanwhile: ask again"))
        self._running = _Running(request, path, first_step, time.monotonic() - before_s)

    def _give_up(self, why: str) -> None:
        """Switch the profiler off in the midst of a step; in a fork's child there is nothing to switch off."""
        running = self._running
        if running is None or threading.current_thread() is not threading.main_thread() or not self._recording.live:
            return
        self._running = None
        self._profiler.stop()
        if running.path is self._answer:
            _answer(running.path, RankKernels(id=running.request.id, error=why))

    def _end(self, running: _Running) -> None:
        before_s = time.monotonic()
        request, path = running.request, running.path
        try:
            spans = self._profiler.stop()
        except Exception as error:  # noqa: BLE001  as above
            text = f"torch's profiler could not be stopped: {type(error).__name__}: {error}"
            _answer(path, RankKernels(id=request.id, error=text))
            return
        found = RankKernels(
            id=request.id,
            device=self._profiler.device,
            steps=request.steps - max(0, running.left),
            first_step=running.first_step,
            span_s=round(before_s - running.began_s, 6),
            own_s=round(running.own_s + time.monotonic() - before_s, 6),
        )
        # No daemon: one that is inside C++ when the interpreter ends would abort the process. It ends by itself.
        self._writer = threading.Thread(
            target=guarded(NAME, _add_up), args=(found, spans, path), name="megascale-ops-kernels"
        )
        self._writer.start()


def _add_up(found: RankKernels, spans: Iterator[Span], path: Path) -> None:
    """Add the events up, a little at a time, and write the answer."""
    kept: list[Span] = []
    for span in spans:
        kept.append(span)
        if not len(kept) % _EVENTS_AT_ONCE:
            time.sleep(_PAUSE_S)
        if len(kept) >= MOST_EVENTS:
            break
    kernels, left_out, left_out_us = summarise(kept)
    _answer(path, msgspec.structs.replace(found, kernels=kernels, left_out=left_out, left_out_us=left_out_us))


def _answer(path: Path, found: RankKernels) -> None:
    """Write an answer, readable by its owner alone, as the box is."""
    write_whole(path, msgspec.json.encode(found), mode=PRIVATE)


class TorchProfiler:
    """torch's profiler: the GPU's kernels where the script uses CUDA, else the operators of the CPU.

    The one in ``torch.autograd``. ``torch.profiler``, made of it, imports the compiler when it starts (torch 2.13: 892
    modules, one to three seconds, in which the rank would look slow).
    """

    def __init__(self) -> None:
        self.device = ""
        self._profile: Any = None

    def refusal(self) -> str:
        """Return the refusal if the script profiles itself, else ""."""
        from torch._C._autograd import _profiler_enabled

        return "the script uses torch's profiler itself" if _profiler_enabled() else ""

    def start(self) -> None:
        """Switch it on: 1 ms on a CPU."""
        from torch import cuda
        from torch.autograd.profiler import profile

        on_gpu = bool(cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch has no types there
        self.device = "gpu" if on_gpu else "cpu"
        before = os.environ.get(_KINETO_LOGS)
        os.environ[_KINETO_LOGS] = before or _NO_LOGS
        try:
            ours = profile(use_cpu=not on_gpu, use_device="cuda" if on_gpu else None, use_kineto=True)
            self._profile = ours.__enter__()  # type: ignore[no-untyped-call]  # as above
        finally:
            if before is None:
                del os.environ[_KINETO_LOGS]

    def stop(self) -> Iterator[Span]:
        """Switch it off."""
        ended, self._profile = self._profile, None
        ended.__exit__(None, None, None)
        return _spans(ended.kineto_results.events(), on_gpu=self.device == "gpu")


def _spans(events: Any, *, on_gpu: bool) -> Iterator[Span]:  # noqa: ANN401  torch's C++ types
    """Yield what counts: a GPU's kernels and copies, or the operators of CPU threads."""
    from torch._C._autograd import DeviceType

    for event in events:
        if (event.device_type() == DeviceType.CPU) is on_gpu:
            continue
        if event.is_user_annotation() or event.scope() == _USER_SCOPE:
            continue
        yield Span(event.name(), 0 if on_gpu else event.start_thread_id(), event.start_ns(), event.duration_ns())


def watch(recording: Recording, stem: Path, every: int, also: Callable[[Callable[[], None]], None]) -> None:
    """Let requests be looked for; ``also`` takes a function for the monitor thread to call at each heartbeat."""
    also(guarded(NAME, KernelProfile(recording, TorchProfiler(), stem, every).poll_request))
