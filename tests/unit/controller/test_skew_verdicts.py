# SPDX-License-Identifier: Apache-2.0
"""Why a late rank is late, by what its host says of the same steps."""

import pytest

from megascale_ops.diagnosis.skew.detector import Skew
from megascale_ops.diagnosis.skew.report import Culprit
from megascale_ops.diagnosis.skew.verdicts import standing, why
from megascale_ops.diagnosis.stragglers.detector import Watch
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import StepWork

STEP_S = 0.05


def hosts(slow_since: int) -> Watch:
    """Return forty steps of four ranks, of which rank 2 needs 8 % longer from one on."""
    steps = Watch()
    for number in range(40):
        for rank in range(4):
            own_s = STEP_S * (1.08 if rank == 2 and number >= slow_since else 1.0)
            steps.ingest_steps(rank, "a", Mesh(), [StepWork(number, 1.1 * STEP_S, 1.1 * STEP_S - own_s, cpu_s=own_s)])
        steps.advance(JobPolicy(), 4)
    return steps


def late(rank: int, blocks: int, *together: int) -> Culprit:
    """Return a rank that came 8 % of a step late for so many steps."""
    return Culprit(rank, 0.08, 0.08, 0.08, 0.0, 1.0, 0.01, blocks, blocks * STEP_S, together=together)


@pytest.mark.parametrize("host_timed", [False, True])
def test_a_rank_that_is_slow_since_a_few_steps_is_not_taken_for_well(*, host_timed: bool) -> None:
    """The host's steps before it became slow are not asked."""
    assert why(late(2, 4), hosts(36), STEP_S, {}, host_timed=host_timed) == "launch"


def test_who_is_let_go_is_not_told_as_one_to_fix_either() -> None:
    """Ranks 1 and 2 come late, and only the host of rank 2 works longer."""
    skew = Skew([])
    report = skew.report(4)._replace(culprits=(late(1, 16, 2), late(2, 16, 1)))

    by_host = standing(report, hosts(20), STEP_S, {1, 2})
    by_gpu = standing(report, hosts(20), STEP_S, ())

    assert [(one.rank, one.together, cause) for one, cause in by_host] == [(2, (), "launch")]
    assert [(one.rank, one.together, cause) for one, cause in by_gpu] == [(1, (2,), "gpu"), (2, (1,), "launch")]
