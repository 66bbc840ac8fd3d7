# SPDX-License-Identifier: Apache-2.0
"""Why a late rank is late, by what its host says of the same steps."""

import pytest

from megascale_ops.controller.skew_report import Culprit
from megascale_ops.controller.skew_verdicts import why
from megascale_ops.controller.stragglers import Watch
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.messages import JobPolicy
from megascale_ops.schema.progress import StepWork

STEP_S = 0.05


@pytest.mark.parametrize("host_timed", [False, True])
def test_a_rank_that_is_slow_since_a_few_steps_is_not_taken_for_well(*, host_timed: bool) -> None:
    """The host's steps before it became slow are not asked."""
    steps, policy = Watch(), JobPolicy()
    for number in range(40):
        for rank in range(4):
            own_s = STEP_S * (1.08 if rank == 2 and number >= 36 else 1.0)
            steps.take(rank, "a", Mesh(), [StepWork(number, 1.1 * STEP_S, 1.1 * STEP_S - own_s, cpu_s=own_s)])
        steps.advance(policy, 4)
    late = Culprit(2, 0.08, 0.08, 0.08, 0.0, 1.0, 0.01, blocks=4, since_s=4 * STEP_S)

    assert why(late, steps, STEP_S, {}, host_timed=host_timed) == "launch"
