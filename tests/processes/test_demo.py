# SPDX-License-Identifier: Apache-2.0
"""The demo is the first thing a newcomer sees: it must come true, and say so."""

import subprocess
from pathlib import Path

import pytest

from megascale_ops.cards import card
from megascale_ops.cli.demo.report import Report
from megascale_ops.cli.demo.stage import Loss
from megascale_ops.schema.events import Incident
from megascale_ops.schema.health import Verdict
from tests.processes.launch import Launch

pytestmark = pytest.mark.processes

# `make demo` is this command in the environment that `make setup` has made.
README_COMMANDS = ("make demo",)


@pytest.mark.alone  # four faults, each named within seconds, before four ranks that need both cores
def test_the_demo_comes_true(launch: Launch) -> None:
    """All four faults are named with the right rank, the loss falls, and nothing is left behind."""
    done = launch.command("demo", deadline_s=360.0)  # a minute where nothing else runs

    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed: the rank was killed by a signal from outside" in done.stdout
    assert "frozen: the process is stopped (state T)" in done.stdout
    assert "straggler: " in done.stdout
    assert "a bug wakes up: rank 3 leaves one all_reduce out" in done.stdout
    assert "every verdict named the right rank, and the loss went on falling" in done.stdout
    assert not list(Path("/dev/shm").glob("megascale-demo-*"))
    assert not subprocess.run(
        ["pgrep", "-f", "train_gpt.py --steps=100000"], capture_output=True, check=False
    ).stdout, "ranks of the demo still run"


def test_a_wrong_rank_fails_the_demo(tmp_path: Path) -> None:
    """A verdict that names another rank than the one that was hurt ends the demo with a non-zero exit."""
    report = Report(tmp_path)
    verdict = Verdict(fault="killed", reason="made up", confidence=0.9, culprits=(0,))
    incident = Incident(id="demo-1", job="demo", round=1, verdict=verdict)

    report.show(("killed",), 2, 0.0, incident)
    report.finish([Loss(1, step, 4.0 - step / 10) for step in range(10)], 0.5)

    assert card(incident)
    assert report.close() == 1


def test_a_loss_that_does_not_fall_fails_the_demo(tmp_path: Path) -> None:
    """Recovering the process but not the training is no recovery."""
    report = Report(tmp_path)

    report.finish([Loss(1, step, 3.0) for step in range(10)], 0.5)

    assert report.close() == 1
