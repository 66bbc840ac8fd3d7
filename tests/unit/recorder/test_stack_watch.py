# SPDX-License-Identifier: Apache-2.0
"""Where a thread is from beat to beat: another function is another place, another line of the same one is not."""

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.recorder.recording.stack_watch import StackWatch, place_of

PATIENCE_S = 20.0


class Walker:
    """A thread that is led from place to place."""

    def __init__(self) -> None:
        # Queues of C: their methods are no frames, so the innermost one is `_stay` whenever it is looked at.
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._leave: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._walk)
        self._thread.start()
        self._arrived.get(timeout=PATIENCE_S)

    @property
    def ident(self) -> int:
        """The thread."""
        assert self._thread.ident is not None
        return self._thread.ident

    def go_on(self) -> None:
        """Lead it to its next place."""
        self._leave.put(None)
        self._arrived.get(timeout=PATIENCE_S)

    def end(self) -> None:
        """Let it run to its end."""
        for _ in range(10):
            self._leave.put(None)
        self._thread.join(PATIENCE_S)

    def _stay(self) -> None:
        self._arrived.put(None)
        self._leave.get(timeout=PATIENCE_S)

    def _walk(self) -> None:
        stay: Callable[[], None] = self._stay
        stay()
        self._in_one_line(stay)
        self._in_one_line(stay)  # the same function, called from another line
        self._elsewhere(stay)

    @staticmethod
    def _in_one_line(stay: Callable[[], None]) -> None:
        stay()

    @staticmethod
    def _elsewhere(stay: Callable[[], None]) -> None:
        stay()


@pytest.fixture
def walker() -> Iterator[Walker]:
    """A thread that has arrived at its first place."""
    made = Walker()
    yield made
    made.end()


@pytest.fixture
def box(tmp_path: Path) -> BoxWriter:
    """A box in which something moved at 100 s."""
    identity = BoxIdentity(job="j", node="n", rank=0, local_rank=0, world_size=1, pid=1, start_ticks=1, round=1)
    made = BoxWriter.create(tmp_path, identity)
    made.set_now(7, "other", now_mono_s=100.0)
    return made


def seen(folder: Path) -> tuple[int, float]:
    """Return what a reader sees: how often it wandered, and when last."""
    reader = BoxReader(folder / "0.box")
    progress = reader.progress()
    reader.close()
    return progress.wandered, progress.wandered_mono_s


def test_every_change_of_place_is_counted(walker: Walker, box: BoxWriter, tmp_path: Path) -> None:
    """Who stays is seen in the same place; who is called from another line is somewhere else."""
    wander = StackWatch(box)
    found = []

    for beat in range(8):
        wander.sample(walker.ident, 102.0 + beat)
        found.append(seen(tmp_path))
        if beat in {1, 3, 5}:
            walker.go_on()

    assert found == [
        (0, 0.0), (0, 0.0), (1, 104.0), (1, 104.0), (2, 106.0), (2, 106.0), (3, 108.0), (3, 108.0),
    ]  # fmt: skip


def test_a_run_that_moves_is_not_looked_at(walker: Walker, box: BoxWriter, tmp_path: Path) -> None:
    """A step begins it anew: what was counted before it says nothing of what comes."""
    wander = StackWatch(box)
    wander.sample(walker.ident, 102.0)
    walker.go_on()
    wander.sample(walker.ident, 103.0)
    before = seen(tmp_path)

    box.set_now(8, "other", now_mono_s=103.5)
    wander.sample(walker.ident, 104.0)
    after = seen(tmp_path)
    walker.go_on()
    wander.sample(walker.ident, 105.0)

    assert (before, after, seen(tmp_path)) == ((1, 103.0), (0, 0.0), (0, 0.0))


def test_a_loop_of_two_lines_is_one_place(box: BoxWriter, tmp_path: Path) -> None:
    """The innermost frame counts without its line: a loop without an end is stuck."""
    wander = StackWatch(box)
    ended: list[bool] = []

    def spin() -> None:
        number = 0
        while not ended:
            number += 1
            number -= 1

    thread = threading.Thread(target=spin)
    thread.start()
    assert thread.ident is not None
    for beat in range(200):
        wander.sample(thread.ident, 102.0 + beat)
    ended.append(True)
    thread.join(PATIENCE_S)

    assert seen(tmp_path) == (0, 0.0)


def test_a_thread_that_is_gone_is_nowhere(box: BoxWriter, tmp_path: Path) -> None:
    """Nothing is said of it."""
    wander = StackWatch(box)

    for beat in range(3):
        wander.sample(-1, 102.0 + beat)

    assert seen(tmp_path) == (0, 0.0)


def test_a_caller_that_is_no_frame_ends_the_walk() -> None:
    """The thread runs while it is looked at, and may leave the function whose caller is asked for."""
    code = test_a_caller_that_is_no_frame_ends_the_walk.__code__
    frame = SimpleNamespace(f_code=code, f_lasti=3, f_back={})

    assert place_of(frame) == (id(code),)  # type: ignore[arg-type]  # as far as a walk looks at a frame
