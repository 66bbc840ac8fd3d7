# SPDX-License-Identifier: Apache-2.0
"""What a restore reads is not deleted under it, neither by a job that saves on nor by ``checkpoint prune``."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale_ops.checkpoint import CheckpointManager, storage
from tests.needed import late
from tests.processes.warmed import ask, env_of_programs

nn = late("torch.nn")
pytestmark = pytest.mark.processes

READER_SCRIPT = Path(__file__).parents[1] / "fixtures" / "checkpoint_slow_reader.py"
DEADLINE_S = 180.0


def save(manager: CheckpointManager, step: int) -> None:
    """Save a model whose every number is the step."""
    model = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model.weight, float(step))
    manager.save(step, {"model": model})


def steps(root: Path) -> list[int]:
    """What stands there, newest first."""
    return [storage.step_of(path) for path in storage.candidates(root)]


def prune(root: Path, *, is_cold: bool = False) -> str:
    """Keep the newest one only, as a person would; what was printed."""
    line = ("checkpoint", "prune", str(root), "--keep", "1")
    done = ask(line, env_of_programs(), deadline_s=DEADLINE_S, is_cold=is_cold)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def reader(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process in the middle of restoring step 1, while a job saves steps 2 and 3 and keeps one."""
    manager = CheckpointManager(tmp_path, keep=1)
    save(manager, 1)
    process = subprocess.Popen(
        [sys.executable, str(READER_SCRIPT), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"MEGASCALE_RECORDER": "0", "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"  # ends when the process does
        save(manager, 2)
        save(manager, 3)
        manager.close()
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


@pytest.mark.matrix
def test_what_a_restore_reads_stays_until_it_is_done(tmp_path: Path, reader: "subprocess.Popen[str]") -> None:
    """By the job's own rule and by prune; then it goes like any other."""
    assert steps(tmp_path) == [3, 1]
    told = prune(tmp_path)
    assert steps(tmp_path) == [3, 1]
    assert f"pid {reader.pid} on" in " ".join(told.split())

    out, _ = reader.communicate("\n", timeout=DEADLINE_S)

    assert json.loads(out) == {"step": 1, "same": True}
    prune(tmp_path)
    assert steps(tmp_path) == [3]
    assert list(tmp_path.glob(".reader-*")) == []


def test_a_reader_that_was_killed_keeps_nothing(tmp_path: Path, reader: "subprocess.Popen[str]") -> None:
    """Its mark stands there still, and ends by itself."""
    reader.kill()
    reader.wait(timeout=DEADLINE_S)
    assert len(list(tmp_path.glob(".reader-*"))) == 1

    prune(tmp_path, is_cold=True)

    assert steps(tmp_path) == [3]
