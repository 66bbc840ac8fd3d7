# SPDX-License-Identifier: Apache-2.0
"""When a rank's profiler is on, for how long, and what is answered."""

import threading
import time
from pathlib import Path

import msgspec
import pytest

from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.recorder.recording.config import read_settings
from megascale_ops.recorder.recording.recording import Recording
from megascale_ops.recorder.torch_hooks.kernel_profile import KernelProfile
from megascale_ops.recorder.torch_hooks.kernel_times import Span
from megascale_ops.schema.kernels import ProfileRequest, RankKernels
from tests.fakes.profilers import FakeProfiler

SPANS = [Span("aten::mm", 1, 0, 4_000), Span("aten::mm", 1, 5_000, 2_000)]


class Rank:
    """A rank's recording, its profile and the files between it and the agent."""

    def __init__(self, folder: Path, every: int = 0) -> None:
        identity = BoxIdentity(job="j", node="n", rank=3, local_rank=0, world_size=4, pid=1, start_ticks=1, round=1)
        self.recording = Recording(BoxWriter.create(folder, identity))
        self.profiler = FakeProfiler(SPANS)
        self.folder = folder
        self.profile = KernelProfile(self.recording, self.profiler, folder / "3", every)

    def ask(self, name: str, steps: int, patience_s: float = 60.0) -> None:
        """Do what an agent does, and what the beat does after it."""
        request = ProfileRequest(name, steps, time.monotonic() + patience_s)
        beside = self.folder / "new"
        beside.write_bytes(msgspec.json.encode(request))
        beside.replace(self.folder / "3.profile.json")
        self.profile.poll_request()

    def answer(self, name: str = "3.kernels.json") -> RankKernels | None:
        """Return the answer, once it is added up."""
        writer = self.profile._writer
        if writer is not None:
            writer.join(10)
        path = self.folder / name
        return msgspec.json.decode(path.read_bytes(), type=RankKernels) if path.exists() else None

    def step(self) -> None:
        """Finish a step."""
        self.recording.step()


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    """A rank that has made two steps."""
    made = Rank(tmp_path)
    made.step()
    made.step()
    return made


def test_whole_steps_are_profiled_from_the_next_on(rank: Rank) -> None:
    """On at the end of the step under way, off two steps later; then nothing is left that costs a step time."""
    rank.profile.poll_request()
    assert rank.recording.at_step_end is None

    rank.ask("a", 2)
    assert not rank.profiler.on
    rank.step()
    assert rank.profiler.on
    rank.step()
    assert rank.profiler.on
    rank.step()

    assert rank.profiler.log == ["on", "off"]
    found = rank.answer()
    assert found is not None
    assert (found.id, found.device, found.steps, found.first_step) == ("a", "cpu", 2, 3)
    assert [(row.name, row.calls, row.total_us, row.median_us) for row in found.kernels] == [("aten::mm", 2, 6.0, 3.0)]
    assert rank.recording.at_step_end is None
    assert [path.name for path in rank.folder.iterdir() if path.name.startswith(".")] == []


def test_the_same_request_is_obeyed_once(rank: Rank) -> None:
    """Its file may lie there until the agent has read the answer; another one is obeyed anew."""
    rank.ask("a", 1)
    for _ in range(3):
        rank.profile.poll_request()
        rank.step()
        rank.answer()
    rank.ask("b", 1)
    rank.step()
    rank.step()

    assert rank.profiler.log == ["on", "off"] * 2
    found = rank.answer()
    assert found is not None
    assert found.id == "b"


def test_a_request_whose_time_is_over_is_not_obeyed(rank: Rank) -> None:
    """No order waits for it any more."""
    rank.ask("a", 2, patience_s=-1.0)
    rank.step()
    rank.step()

    assert rank.profiler.log == []
    assert rank.answer() is None
    assert rank.recording.at_step_end is None


def test_a_profile_that_takes_too_long_ends_with_what_there_is(rank: Rank) -> None:
    """One of three steps was finished when its time was over."""
    rank.ask("a", 3, patience_s=0.05)
    rank.step()
    assert rank.profiler.on
    while time.monotonic() < rank.profile._running.request.until_mono_s:  # type: ignore[union-attr]  it runs
        pass
    rank.step()

    assert not rank.profiler.on
    found = rank.answer()
    assert found is not None
    assert found.steps == 1


@pytest.mark.parametrize("steps", [0, -1, 101])
def test_an_impossible_number_of_steps_is_refused(rank: Rank, steps: int) -> None:
    """In the answer, not in the script."""
    rank.ask("a", steps)
    rank.step()

    found = rank.answer()
    assert found is not None
    assert "can't be profiled" in found.error
    assert rank.profiler.log == []


@pytest.mark.parametrize("content", [b"", b"[]", b'{"id": "a"}', b"\xff\xfe", b'{"id":1,"steps":"x","until_mono_s":0}'])
def test_a_file_that_is_no_request_changes_nothing(rank: Rank, content: bytes) -> None:
    """Whichever user wrote it."""
    (rank.folder / "3.profile.json").write_bytes(content)

    rank.profile.poll_request()
    rank.step()

    assert rank.profiler.log == []
    assert rank.recording.at_step_end is None


def test_a_script_that_profiles_itself_is_left_alone(rank: Rank) -> None:
    """The answer says so; so does torch's own refusal."""
    rank.profiler.refuses = "the script uses torch's profiler itself"
    rank.ask("a", 2)
    rank.step()
    first = rank.answer()
    rank.profiler.refuses, rank.profiler.fails = "", "CUPTI is in use"
    rank.ask("b", 2)
    rank.step()
    second = rank.answer()

    assert first is not None
    assert first.error == "the script uses torch's profiler itself"
    assert second is not None
    assert second.error == "torch's profiler could not be started: RuntimeError: CUPTI is in use"
    assert not rank.profiler.on


def test_it_is_never_left_on_when_the_script_ends_or_forks(rank: Rank) -> None:
    """An interpreter that ends with the profiler on crashes; the order gets a reply."""
    rank.ask("a", 2)
    rank.step()

    rank.profile._give_up("the script ended")
    rank.profile._give_up("the script ended")
    rank.step()

    assert rank.profiler.log == ["on", "off"]
    found = rank.answer()
    assert found is not None
    assert found.error == "the script ended"


def test_training_outside_of_the_main_thread_is_refused(tmp_path: Path) -> None:
    """Only the thread that switched the profiler on can switch it off, and at exit that must be the main one."""
    rank = Rank(tmp_path)

    def train() -> None:
        rank.step()
        rank.ask("a", 1)
        rank.step()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(10)

    found = rank.answer()
    assert found is not None
    assert found.error == "training does not run in the main thread"


def test_one_step_in_so_many_is_sampled(tmp_path: Path) -> None:
    """Steps 4 and 8 of ten, the same on every rank; the newest is kept in a file of its own."""
    rank = Rank(tmp_path, every=4)
    sampled = []

    for _ in range(10):
        rank.step()
        sampled.append(rank.profiler.on)
        rank.answer("3.sampled.json")

    assert [step + 1 for step, on in enumerate(sampled) if on] == [4, 8]
    found = rank.answer("3.sampled.json")
    assert found is not None
    assert (found.id, found.steps, found.first_step) == ("8", 1, 8)
    assert rank.answer() is None


@pytest.mark.parametrize(("said", "every"), [("", 0), ("0", 0), ("1000", 1000), ("-3", 0), ("often", 0), ("²", 0)])
def test_how_often_is_read_from_the_environment(said: str, every: int) -> None:
    """What is no number of steps switches sampling off and costs no rank its black box."""
    environ = {"RANK": "0", "MEGASCALE_BOX_DIR": "/b", "MEGASCALE_PROFILE_EVERY": said}

    settings = read_settings(environ, 1)

    assert settings is not None
    assert settings.profile_every == every
