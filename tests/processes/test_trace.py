# SPDX-License-Identifier: Apache-2.0
"""Traces of real runs: while it runs, and of an incident after it has ended. The script has no line of ours."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.fakes.decoded_trace import Decoded, assert_arrows_whole, decode
from tests.processes.launch import Launch

pytestmark = pytest.mark.processes
GROUP = "group 0 (host calls)"


def traced(launch: Launch, *arguments: str) -> tuple[Decoded, str]:
    """Run ``trace`` and decode what it wrote."""
    path = launch.tmp_path / "out.pftrace"
    done = launch.command("trace", *arguments, "-o", str(path))
    assert done.returncode == 0, done.stderr + launch.output()
    return decode(path.read_bytes()), done.stdout


def test_a_running_job_is_drawn(launch: Launch) -> None:
    """Four ranks that meet in a barrier each step: their steps, their waiting, arrows; and again as Chrome's JSON."""
    patient = ("--policy=frozen_grace_s=600", "--policy=silence_floor_s=600")
    launch.run("--steps=100000", "--checkpoint-every=1", nproc=4, options=patient)
    launch.until_step(30)
    for rank in range(4):  # boxes are read one after the other: no rank goes on in between
        os.kill(launch.pid(rank), signal.SIGSTOP)

    trace, said = traced(launch, "toy", "--last=10", "--ranks=all")
    chrome = launch.command("trace", "toy", "--format=chrome", "-o", str(launch.tmp_path / "out.json"), "--json")
    mistyped = launch.command("trace", "tyo")

    assert "4 of 4 ranks, steps " in said
    for rank in range(4):
        steps = [one for one in trace.on(f"rank {rank} ", "steps") if one.name.removeprefix("step ").isdecimal()]
        assert 8 <= len(steps) <= 10  # a rank may have been stopped a step behind the newest
        assert all(one.end_ns > one.begin_ns for one in steps)
        barriers = [one for one in trace.on(f"rank {rank} ", GROUP) if not one.depth and one.name == "barrier"]
        assert len(barriers) >= 5
        assert any("last arrival" in one.args for one in barriers)
    assert assert_arrows_whole(trace) >= 5
    assert chrome.returncode == 0, chrome.stderr
    assert json.loads(chrome.stdout)["written"]["arrows"] > 0
    assert json.loads(Path(launch.tmp_path / "out.json").read_text())["traceEvents"]
    assert mistyped.returncode == 2
    assert "did you mean 'toy'?" in mistyped.stderr


def test_an_incident_is_drawn_after_the_run_has_ended(launch: Launch) -> None:
    """Rank 1 froze: it is marked as the culprit, rank 0 is in its backward pass, and what was done has its marks."""
    started = launch.run("--fault=sigstop", "--rank=1", "--at=25", "--steps=60", "--checkpoint-every=1")
    assert launch.finish(started) == 0, launch.output()
    (incident,) = [one for one in launch.incidents() if one.state == "recovered"]

    trace, said = traced(launch, "toy", f"--incident={incident.id}")
    over = launch.command("trace", "toy", is_cold=True)

    assert "rank 1 (culprit)" in said
    names = [one.name for one in trace.tracks.values() if one.pid]
    assert [name.endswith(", culprit") for name in names] == [False, False, True]
    assert "detected" in [one.name for one in trace.on("job toy", f"incident {incident.id}")]
    # DDP waits in C++, which Python's hooks do not see: the phase shows it.
    under_way = trace.on("rank 0", "steps")[-1]
    assert under_way.name.endswith("(under way)")
    assert under_way.args["phase"] == "backward"
    assert over.returncode == 1
    assert f"--incident {incident.id}" in over.stderr
