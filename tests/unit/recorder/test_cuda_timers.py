# SPDX-License-Identifier: Apache-2.0
"""GPU times of a step: right, late, and never at the cost of a wait."""

from pathlib import Path

import pytest

from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity, GpuStepRecord
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.recorder.recording.recording import Recording
from megascale_ops.recorder.torch_hooks.cuda_timers import MOST_MARKS, MOST_PENDING, CudaTimers
from tests.fakes.cuda_events import FakeCuda


class Timed:
    """Timers over a fake GPU, and what they wrote."""

    def __init__(self) -> None:
        self.cuda = FakeCuda()
        self.written: list[GpuStepRecord] = []
        self.timers = CudaTimers(self.cuda, self.written.append)

    def step(self, number: int, forward_s: float = 0.1, backward_s: float = 0.2, optimizer_s: float = 0.01) -> None:
        """Launch one step; the host needs 1 ms for each part."""
        for phase, work_s in (("forward", forward_s), ("backward", backward_s), ("optimizer", optimizer_s)):
            self.timers.mark(phase)
            self.cuda.launch(work_s)
        self.timers.finish(number, number + 100, "forward")


@pytest.fixture
def timed() -> Timed:
    """Timers of their own."""
    return Timed()


def test_the_gpus_own_times_are_told_not_the_launching(timed: Timed) -> None:
    """The host needs 3 ms for the step, the GPU 310 ms; told at the end of a later step."""
    timed.step(0)
    timed.cuda.catch_up()
    assert timed.written == []

    timed.step(1)

    (found,) = timed.written
    assert (found.number, found.step) == (0, 100)
    assert found.forward_s == pytest.approx(0.1)
    assert found.backward_s == pytest.approx(0.2)
    assert found.optimizer_s == pytest.approx(0.01)
    assert found.wall_s == pytest.approx(0.31)


def test_a_gpu_that_is_behind_is_never_waited_for(timed: Timed) -> None:
    """Nothing is told while it is; a step that is too old is dropped and counted, the later ones are told."""
    for number in range(MOST_PENDING + 3):
        timed.step(number)
    assert timed.written == []
    assert timed.timers.dropped == 3

    timed.cuda.catch_up()
    timed.step(MOST_PENDING + 3)

    assert [record.number for record in timed.written] == [3, 4, 5, 6]


def test_events_are_used_again(timed: Timed) -> None:
    """A hundred steps need the events of a few."""
    for number in range(100):
        timed.step(number)
        timed.cuda.catch_up()

    assert len(timed.written) == 99
    assert timed.cuda.made <= 3 * 3
    assert timed.timers.dropped == 0


def test_accumulation_adds_up_and_a_declared_phase_has_its_name(timed: Timed) -> None:
    """Four micro-batches, and a phase of the script's."""
    for _ in range(4):
        timed.timers.mark("forward")
        timed.cuda.launch(0.1)
        timed.timers.mark("backward")
        timed.cuda.launch(0.2)
    timed.timers.mark("sample")
    timed.cuda.launch(0.5)
    timed.timers.finish(0, 0, "forward")
    timed.cuda.catch_up()
    timed.timers.finish(1, 1, "forward")

    (found,) = timed.written[:1]
    assert found.forward_s == pytest.approx(0.4)
    assert found.backward_s == pytest.approx(0.8)
    assert found.phases == (("sample", pytest.approx(0.5)),)


def test_cuda_is_not_initialised_for_the_timers(timed: Timed) -> None:
    """A script on the CPU has no event, and no times."""
    timed.cuda.initialized = False

    for number in range(3):
        timed.step(number)

    assert timed.cuda.made == 0
    assert timed.written == []


def test_a_graph_that_is_captured_is_left_alone(timed: Timed) -> None:
    """Neither an event nor a question while it is; the steps around it are timed."""
    timed.step(0)
    timed.cuda.catch_up()
    timed.timers.mark("forward")
    timed.cuda.capturing = True
    timed.timers.mark("backward")
    timed.timers.finish(1, 1, "other")
    timed.cuda.capturing = False
    for number in (2, 3, 4):
        timed.step(number)
        timed.cuda.catch_up()

    assert [record.number for record in timed.written] == [0, 3]


def test_a_step_of_endless_phases_is_given_up(timed: Timed) -> None:
    """Its events stay bounded, and the next step is timed again."""
    for _ in range(MOST_MARKS):
        timed.timers.mark("forward")
        timed.timers.mark("backward")
    timed.timers.finish(0, 0, "forward")
    assert timed.cuda.made <= MOST_MARKS + 2
    for number in (1, 2, 3):
        timed.step(number)
        timed.cuda.catch_up()

    assert [record.number for record in timed.written][:1] == [2]


def test_a_step_over_two_devices_is_dropped(timed: Timed) -> None:
    """Their clocks have nothing in common."""
    timed.timers.mark("forward")
    timed.cuda.device = 1
    timed.timers.mark("backward")
    timed.timers.finish(0, 0, "forward")
    timed.cuda.catch_up()
    timed.timers.finish(1, 1, "forward")

    assert [record.number for record in timed.written] == [1]
    assert timed.timers.dropped == 1


def test_the_recording_marks_its_phases_and_the_box_has_the_times(tmp_path: Path) -> None:
    """From the hooks' events to what a reader finds, with the number that tells the step."""
    identity = BoxIdentity(job="j", node="n", rank=0, local_rank=0, world_size=1, pid=1, start_ticks=1, round=1)
    recording = Recording(BoxWriter.create(tmp_path, identity))
    cuda = FakeCuda()
    recording.time_gpu(CudaTimers(cuda, recording.box.add_gpu_step))
    optimizer = FakeCuda()  # anything that can be referred to weakly

    for _ in range(40):
        recording.data_begin()
        recording.data_end()
        cuda.launch(0.1)
        recording.backward_begin()
        cuda.launch(0.2)
        recording.backward_end()
        recording.phase_begin("sample")
        cuda.launch(0.05)
        recording.phase_end()
        recording.optimizer_begin(optimizer)
        cuda.launch(0.01)
        recording.optimizer_end(optimizer)
        cuda.catch_up()

    reader = BoxReader(tmp_path / "0.box")
    found = reader.gpu_steps()
    assert [record.number for record in found] == list(range(7, 39))
    last = found[-1]
    assert (last.step, last.phases) == (38, (("sample", pytest.approx(0.05)),))
    times_s = (last.forward_s, last.backward_s, last.optimizer_s)
    assert times_s == (pytest.approx(0.1), pytest.approx(0.2), pytest.approx(0.01))
    assert [record.step for record in reader.gpu_steps(2)] == [37, 38]
    assert found[0].phases == ()  # 28 slots: of older steps only the parts are left
