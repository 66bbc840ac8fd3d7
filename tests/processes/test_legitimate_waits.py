# SPDX-License-Identifier: Apache-2.0
"""A rank that does something else while the others wait is not hanging: its job is left alone.

`benchmarks/legitimate_waits.py` holds all such waits for minutes; here are the most telling ones, in one job.
"""

import pytest

from tests.processes.launch import SCRIPTS, Launch, acted_upon

pytestmark = pytest.mark.processes

# 8 s each: the floor of patience is 5 s, and steps of 50 ms do not raise it.
WAITS = ("child_sleeps", "http_silent", "one_call", "sleeps", "flock_held")


def test_a_rank_that_is_busy_elsewhere_is_left_alone(launch: Launch) -> None:
    """A child, a server, a call of C, a sleep, a lock of the kernel: undeclared, and no rank is started anew."""
    run = launch.run("--seconds=8", *WAITS, script=SCRIPTS / "waits.py")

    code = launch.finish(run)

    output = launch.output()
    assert code == 0, output
    for name in WAITS:
        assert f"{name} is over in round 1" in output, output
    assert "in round 2" not in output
    assert acted_upon(launch.incidents()) == []
    launch.assert_nothing_left()
