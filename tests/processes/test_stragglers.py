# SPDX-License-Identifier: Apache-2.0
"""Real runs of four ranks, one of them slow: it is named with its cause, and a victim never is.

Work is sleeping, so that four ranks on two cores do not slow each other down. DDP waits in C++ inside the backward
pass; the script has no line of ours.
"""

from pathlib import Path

import pytest

from megascale_ops.schema.events import Incident
from tests.processes.launch import Launch

# Alone: what one rank does 20 % slower than its equals must not drown in what others do on these cores.
pytestmark = [pytest.mark.processes, pytest.mark.alone]

PACED = Path(__file__).parents[1] / "fixtures" / "scripts" / "paced.py"
SLOW_FROM = 60


def run(launch: Launch, *options: str) -> list[Incident]:
    """Run the paced script to its end, and return the warnings about stragglers."""
    started = launch.spawn("run", "--nproc-per-node=4", "--job=toy", "--", str(PACED), *options)
    assert launch.finish(started) == 0, launch.output()
    return [
        incident
        for incident in launch.incidents()
        if incident.verdict is not None and incident.verdict.fault in ("straggler", "loss_nan", "loss_spike")
    ]


@pytest.mark.parametrize(
    ("part", "cause"),
    [
        ("forward", "host"),
        pytest.param("backward", "host", marks=pytest.mark.matrix),
        pytest.param("data", "input", marks=pytest.mark.matrix),
        pytest.param("other", "launch", marks=pytest.mark.matrix),
        pytest.param("gc", "gc", marks=pytest.mark.matrix),
        pytest.param("spin", "compute", marks=pytest.mark.matrix),
    ],
)
def test_a_rank_that_is_20_percent_slower_is_named(launch: Launch, part: str, cause: str) -> None:
    """In whatever part: rank 2 and no other, within 20 steps, with the cause and a cost near to a sixth of a step."""
    found = run(launch, f"--slow={part}", f"--at={SLOW_FROM}", "--steps=160")

    assert found, launch.output()
    assert {incident.verdict.culprits for incident in found if incident.verdict} == {(2,)}
    first = found[0]
    assert first.verdict is not None
    assert first.verdict.cause == cause, first.verdict
    assert first.step_before - SLOW_FROM <= 20, first
    # A collection of the garbage of torch takes longer than the 20 % that were asked for.
    assert 0.05 < first.verdict.cost < (0.9 if part == "gc" else 0.35)
    assert first.state == "over"  # the job's end ends it


def test_a_clean_run_names_nobody(launch: Launch) -> None:
    """400 steps of four equal ranks."""
    assert run(launch, "--steps=400") == []


@pytest.mark.matrix
def test_a_loss_that_is_no_number_is_told_and_stops_nothing(launch: Launch) -> None:
    """Without a line of ours in the script; the run goes on to its end."""
    (found,) = run(launch, "--steps=120", "--nan-at=60")

    assert found.verdict is not None
    assert (found.verdict.fault, found.verdict.since_step) == ("loss_nan", 60)
