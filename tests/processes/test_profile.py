# SPDX-License-Identifier: Apache-2.0
"""Kernel timings of real ranks: the one that is slower in one operator is named, and of equal ranks none is named."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.processes.launch import SCRIPTS, Launch

pytestmark = pytest.mark.processes
PATIENT = ("--policy=frozen_grace_s=600", "--policy=silence_floor_s=600")


class Profiled:
    """A run that can be profiled until it is told to end."""

    def __init__(self, launch: Launch, *options: str) -> None:
        self.launch = launch
        self._stop = launch.tmp_path / "stop"
        self._stop.unlink(missing_ok=True)
        script = (str(SCRIPTS / "kernels.py"), f"--stop-file={self._stop}")
        self._proc = launch.spawn("run", "--nproc-per-node=3", "--job=toy", *PATIENT, "--", *script, *options)
        launch.until_step(3)

    def profile(self, *arguments: str, is_cold: bool = False) -> subprocess.CompletedProcess[str]:
        """Ask for a profile."""
        return self.launch.command("profile", *arguments, is_cold=is_cold)

    def view(self, *arguments: str) -> dict[str, Any]:
        """Ask for a profile that succeeds; what was found."""
        done = self.profile("toy", "--json", *arguments)
        assert done.returncode == 0, done.stderr + self.launch.output()
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def end(self) -> None:
        """Let the ranks end, and look whether the script noticed anything."""
        self._stop.touch()
        assert self.launch.finish(self._proc) == 0, self.launch.output()
        assert "steps aside" not in self.launch.output()
        assert "profiler" not in self.launch.output()


def test_the_rank_that_is_slower_in_one_operator_is_named(launch: Launch) -> None:
    """Rank 1 multiplies larger matrices under the same name: that operator of that rank, and nothing else."""
    job = Profiled(launch, "--slow-rank=1")

    found = job.view("--steps=5")
    said = job.profile("--ranks=0,2", "--steps=2")
    wrong = [job.profile("toy", "--ranks=7"), job.profile("tyo"), job.profile("toy", "--ranks=x")]
    job.end()
    after = job.profile("toy", is_cold=True)

    slow = {(row["rank"], row["kernel"]) for row in found["rows"] if row["is_slow"]}
    assert slow == {(1, "aten::mm")}, found
    assert found["verdict"].startswith("rank 1 runs aten::mm ")
    (row,) = (row for row in found["rows"] if row["is_slow"])
    assert row["calls"] % 5 == 0
    assert row["ratio"] > 2
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2]
    kept = json.loads(Path(found["ranks"][1]["path"]).read_text())
    assert kept["steps"] == 5
    assert "aten::mm" in {kernel["name"] for kernel in kept["kernels"]}  # first, unless the machine is busy
    assert Path(found["ranks"][1]["path"]).parent == launch.run_dir() / "profiles" / found["id"]

    assert said.returncode == 0, said.stderr
    assert "2 steps of ranks 0,2" in said.stdout
    assert "none can be named" in said.stdout
    assert [done.returncode for done in wrong] == [2, 2, 2]
    assert "there is no rank 7: job toy has ranks 0-2" in wrong[0].stderr
    assert "did you mean 'toy'?" in wrong[1].stderr
    assert "can't be read" in wrong[2].stderr
    assert after.returncode == 1
    assert "no controller runs" in after.stderr
    launch.assert_nothing_left()


def test_equal_ranks_name_nobody_and_a_stopped_one_is_told(launch: Launch) -> None:
    """The negative control; then one rank is frozen and the others, which wait for it, finish no step."""
    job = Profiled(launch)

    found = job.view("--steps=5")
    os.kill(launch.pid(2), signal.SIGSTOP)
    frozen = job.profile("toy", "--timeout=2")
    os.kill(launch.pid(2), signal.SIGCONT)
    job.end()

    assert [row for row in found["rows"] if row["is_slow"]] == []
    assert found["verdict"] == "no rank stands out in any operator"
    assert all(not rank["text"] for rank in found["ranks"])
    assert frozen.returncode == 1
    assert "rank 2: no answer: its process is stopped" in frozen.stdout
    assert "rank 0: no answer in 2 s: it is in phase" in frozen.stdout
