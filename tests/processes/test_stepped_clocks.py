# SPDX-License-Identifier: Apache-2.0
"""Somebody sets a clock by an hour, forth and back, while ranks train: nothing may come of it.

The wall clock of real processes is stepped by a library that stands before libc (``fixtures/stepped_clock.c``); the
monotonic clock goes on as ever, as it does when an administrator or NTP sets a real clock.
"""

import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes.launch import ENDLESS, PLAIN, Launch, until
from tests.processes.nodes import Clusters

pytestmark = pytest.mark.processes

SOURCE = Path(__file__).parents[1] / "fixtures" / "stepped_clock.c"
HOUR_S = 3600


class SteppedClock:
    """A wall clock for whoever is started with its environment."""

    def __init__(self, folder: Path) -> None:
        library, self._file = folder / "stepped_clock.so", folder / "clock"
        compile_c = [
            "cc",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-shared",
            "-fPIC",
            "-o",
            str(library),
            str(SOURCE),
            "-ldl",
        ]
        subprocess.run(compile_c, check=True, timeout=180)
        self._file.write_bytes(bytes(8))
        self.env = {"LD_PRELOAD": str(library), "STEPPED_CLOCK": str(self._file)}

    def step(self, seconds: int) -> None:
        """Let it be so far ahead of the true one from now on."""
        with self._file.open("r+b") as file:  # in place: it is mapped
            file.write(struct.pack("<q", seconds * 10**9))


@pytest.fixture
def clock(tmp_path: Path) -> SteppedClock:
    """A clock that is right so far."""
    return SteppedClock(tmp_path)


def test_the_clock_of_these_tests_is_stepped(clock: SteppedClock) -> None:
    """The control: a program sees the hour, and its monotonic clock does not."""
    clock.step(HOUR_S)

    look = [sys.executable, "-c", "import time; print(time.time(), time.monotonic())"]
    told = subprocess.run(look, env=os.environ | clock.env, capture_output=True, text=True, timeout=180, check=True)
    wall_s, mono_s = map(float, told.stdout.split())

    assert wall_s - time.time() == pytest.approx(HOUR_S, abs=60)
    assert mono_s - time.monotonic() == pytest.approx(0, abs=60)


@pytest.mark.matrix
def test_all_clocks_of_a_run_are_stepped_forth_and_back(clock: SteppedClock, launch: Launch) -> None:
    """Controller, agent, runner and ranks alike; a rank that is killed in between comes back, with true durations."""
    launch.env |= clock.env
    run = launch.run(*ENDLESS, script=PLAIN)
    launch.until_step(20)

    clock.step(HOUR_S)
    launch.until_more_steps(100)
    os.kill(launch.pid(1), signal.SIGKILL)
    until(lambda: any(one.marks.stepped for one in launch.incidents()), "the recovery")
    clock.step(-HOUR_S)
    launch.until_more_steps(100)
    launch.enough()

    assert launch.finish(run) == 0, launch.output()
    incident = launch.the_incident()
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == ("killed", (1,))
    assert 0 <= incident.marks.stepped - incident.marks.began < 60
    assert "in round 3" not in launch.output()


@pytest.mark.parametrize("seconds", [HOUR_S, pytest.param(-HOUR_S, marks=pytest.mark.matrix)])
def test_the_clock_of_one_node_is_stepped(clock: SteppedClock, clusters: Clusters, seconds: int) -> None:
    """Its agent, runner and rank live an hour off the controller and the other node: nobody is accused of it."""
    cluster = clusters("a", "b", nnodes="1:2", script=PLAIN)
    cluster["b"].env |= clock.env
    cluster.start()
    cluster.until_status("running", step=20)

    clock.step(seconds)
    cluster.until_status("running", step=400)
    cluster.finish()

    assert [fault for fault in cluster.faults(warnings=True) if fault != "straggler"] == []
    assert "in round 2" not in cluster["a"].output()
