# SPDX-License-Identifier: Apache-2.0
"""Patience with a stuck GPU by the default policy: one that never comes is acted upon, one that is late is not.

Two ranks with a GPU each; what was seen on H200 is in ``benchmarks/results/patience_h200.txt``. The two differ in the
length of one kernel alone, so each is the other's control.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale_ops.schema.policy import JobPolicy
from tests.processes.launch import Launch

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: a shared one runs its ranks by turns"),
]

SCRIPT = Path(__file__).parents[1] / "fixtures" / "scripts" / "gpu_late.py"
STEPS, STUCK_RANK = "140", 1
# Well below `stuck_patience_s`, and well beyond the seconds after which a silence is named.
LATE_S, ENDLESS_S = "45", "100000"


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Real runs, stopped and cleaned whatever the test does."""
    launched = Launch(tmp_path)
    yield launched
    launched.close()


@pytest.mark.timeout(280)
def test_a_kernel_that_ends_within_the_patience_is_left_alone(launch: Launch) -> None:
    """Forty-five seconds late: the GPU is named, nothing is stopped, and the job ends in its first round."""
    run = launch.spawn("run", "--job=toy", "--nproc-per-node=2", "--", str(SCRIPT), STEPS, LATE_S)

    assert launch.finish(run, 240) == 0, launch.output()
    incidents = launch.incidents()
    told = [(one.state, one.verdict and (one.verdict.fault, one.verdict.culprits)) for one in incidents]
    print(told)
    assert ("harmless", ("gpu_stuck", (STUCK_RANK,))) in told
    assert not [one for one in incidents if one.marks.ordered]
    assert "no restarts" in launch.output()


@pytest.mark.timeout(280)
def test_a_kernel_without_an_end_is_acted_upon_after_the_patience(launch: Launch) -> None:
    """No option says how long to wait: the rank is restarted once, not before the patience is over."""
    run = launch.spawn("run", "--job=toy", "--nproc-per-node=2", "--", str(SCRIPT), STEPS, ENDLESS_S)

    assert launch.finish(run, 240) == 0, launch.output()
    incident = launch.the_incident()
    print(incident.verdict, incident.marks)
    assert incident.verdict is not None
    assert (incident.verdict.fault, incident.verdict.culprits) == ("gpu_stuck", (STUCK_RANK,))
    assert incident.marks.stepped > incident.marks.ordered
    # Not how fast, but that it is not hasty; ranks are heard of at least every two seconds.
    assert incident.marks.ordered - incident.marks.began >= JobPolicy().stuck_patience_s - 2.0
