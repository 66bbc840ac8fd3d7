# SPDX-License-Identifier: Apache-2.0
"""A writer killed at any moment, thousands of times for real, never leaves a torn record behind."""

import os
import random
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest

from megascale_ops.blackbox.layout import BEAT, COLLECTIVES, NOW, STEPS
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity, CollectiveRecord, StepRecord
from megascale_ops.blackbox.writer import BoxWriter

pytestmark = pytest.mark.processes

LEAST = 300  # however slow the machine


def write_for_ever(folder: Path, ready: int) -> None:
    """Write records whose fields all follow from one number, as fast as it goes."""
    identity = BoxIdentity(
        job="kill", node="n", rank=0, local_rank=0, world_size=1, pid=os.getpid(), start_ticks=1, round=1
    )
    box = BoxWriter.create(folder, identity)
    os.write(ready, b"x")
    for n in count():
        number = box.add_collective(CollectiveRecord(f"g{n}", f"f{n}", n, n, n, n))
        box.add_step(StepRecord(n, *(float(n) for _ in range(8))))
        box.set_now(n, f"p{n}", now_mono_s=float(n))
        box.beat(n, n, f"b{n}")
        box.end_collective(number, n)


def check(reader: BoxReader) -> None:
    """Every record agrees with itself."""
    found = reader.progress()
    if found.step >= 0:
        assert (found.phase, found.phase_since_mono_s) == (f"p{found.step}", float(found.step)), found
    position = reader.collective()
    if position is not None:
        assert (position.completed, position.name) == (position.enqueued, f"b{position.enqueued}"), position
    for step in reader.steps():
        parts = (step.wall_s, step.data_s, step.forward_s, step.backward_s, step.optimizer_s, step.checkpoint_s)
        assert set(parts) | {step.ended_mono_s, step.waiting_s} == {float(step.step)}, step
    for record in reader.collectives():
        n = record.seq
        assert (record.communicator, record.function) == (f"g{n}", f"f{n}"), record
        assert {record.bytes_moved, record.enqueued_mono_ns, record.started_mono_ns} == {n}, record
        assert record.ended_mono_ns in (0, n), record


def half_written(raw: bytes) -> int:
    """Return how many records the writer was in the middle of."""
    return sum(
        byte & 1
        for ring in (NOW, BEAT, STEPS, COLLECTIVES)
        for byte in raw[ring.offset : ring.offset + ring.size : ring.stride]
    )


def kill_many(folder: Path, most: int, budget_s: float) -> tuple[int, int]:
    """Return how often a writer was killed, and how often in the middle of a record.

    Args:
        folder: of the box.
        most: kills; at least `LEAST`, and what is beyond those within the budget.
        budget_s: in seconds.
    """
    order = random.Random(7)  # noqa: S311  moments, not secrets
    deadline = time.monotonic() + budget_s
    kills = torn = 0
    while kills < LEAST or (kills < most and time.monotonic() < deadline):
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            write_for_ever(folder, theirs)
        os.close(theirs)
        try:
            assert os.read(ours, 1) == b"x"
            time.sleep(order.uniform(0, 400e-6))
            reader = BoxReader(folder / "0.box")
            if kills % 10 == 0:
                check(reader)  # while it writes
        finally:
            os.close(ours)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        before = reader.progress().step
        hit = half_written(reader.raw())
        torn += hit
        if hit or kills % 10 == 0:
            check(reader)
        assert reader.progress().step == before
        reader.close()
        kills += 1
    return kills, torn


@pytest.mark.parametrize(("most", "budget_s"), [(1000, 4.0), pytest.param(3000, 12.0, marks=pytest.mark.matrix)])
def test_a_killed_writer_leaves_whole_records(tmp_path: Path, most: int, budget_s: float) -> None:
    """A thousand SIGKILLs at random moments, many of them between two stores of one record: nothing is torn."""
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(most), str(budget_s)],
        check=False,
        timeout=200,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    kills, torn = map(int, done.stdout.split())
    assert kills >= LEAST
    assert torn >= kills // 100, "hardly any kill hit a record being written: the test proves nothing"


if __name__ == "__main__":
    # A small process of its own forks: the test runner has threads and plug-ins that must not be copied.
    print(*kill_many(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
