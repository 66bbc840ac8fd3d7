# SPDX-License-Identifier: Apache-2.0
"""A rank that sleeps inside its backward pass is not waited for as one that sleeps between its steps is."""

import pytest

from tests.processes.launch import SCRIPTS, Launch, acted_upon
from tests.processes.warmed import Ahead

pytestmark = pytest.mark.processes

SCRIPT = SCRIPTS / "asleep_in_backward.py"


def test_asleep_in_a_backward_pass_is_a_hang_and_between_steps_is_not(launch: Launch) -> None:
    """Inside it is restarted; between steps 16 s are left alone, although 6 are granted to what no wait looks like."""
    patience = ("--policy=stuck_patience_s=6", "--policy=restart_price_s=1", "--policy=absent_patience_s=540")
    launch.ahead = Ahead(("torch._dynamo",), (str(SCRIPT),))  # which an optimizer's first step imports
    run = launch.run(options=patience, script=SCRIPT)

    code = launch.finish(run)

    output = launch.output()
    acted = acted_upon(launch.incidents())
    assert code == 0, output
    assert "awake in round 2" in output, output
    assert "done in round 2" in output, output
    assert [one.verdict.culprits for one in acted if one.verdict is not None] == [(1,)]
    assert [one.verdict.fault for one in acted if one.verdict is not None] == ["sleeping"]
    assert "inside its backward pass" in acted[0].verdict.reason if acted[0].verdict is not None else False
    launch.assert_nothing_left()
