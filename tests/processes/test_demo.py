# SPDX-License-Identifier: Apache-2.0
"""The demo is the first thing a newcomer sees: it must come true, and say so."""

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
    launch.is_cold = True
    demo = launch.spawn("demo", log="demo.log")
    code = launch.finish(demo, deadline_s=360.0)  # three quarters of a minute where nothing else runs
    said = launch.output("demo.log")

    assert code == 0, said
    assert "killed: the rank was killed by a signal from outside" in said
    assert "frozen: the process is stopped (state T)" in said
    assert "straggler: " in said
    assert "a bug wakes up: rank 3 leaves one all_reduce out" in said
    assert "every verdict named the right rank, and the loss went on falling" in said
    assert not list(Path("/dev/shm").glob(f"megascale-demo-{demo.pid}-*"))
    launch.assert_nothing_left()


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
