# SPDX-License-Identifier: Apache-2.0
"""What must cause nothing: slow, but not broken."""

import pytest

from tests.processes.launch import Launch

# Alone: patience is cut to seconds here, so a machine that is busy with other tests would look like silence.
pytestmark = [pytest.mark.processes, pytest.mark.alone]

# Patience cut to a fraction of the pause, so that a verdict would come if the pause were not excused.
IMPATIENT = ("--policy", "silence_floor_s=3", "--policy", "silence_factor=2")


@pytest.mark.parametrize(
    ("toy", "options"),
    [
        (("--fault=slow_step", "--at=0", "--seconds=12", "--steps=20"), IMPATIENT),
        (("--fault=slow_checkpoint", "--at=29", "--seconds=8"), IMPATIENT),
        # To the judge as the first one: nobody has made a step yet.
        pytest.param(("--fault=idle", "--seconds=10", "--steps=20"), IMPATIENT, marks=pytest.mark.matrix),
        (("--fault=end_apart", "--seconds=8", "--steps=30"), IMPATIENT),
    ],
    ids=["first step of many seconds", "slow checkpoint", "idle before stepping", "ends seconds apart"],
)
def test_slow_is_not_broken(launch: Launch, toy: tuple[str, ...], options: tuple[str, ...]) -> None:
    """No restart and no incident that was acted upon."""
    run = launch.run(*toy, options=options)

    code = launch.finish(run)

    assert code == 0, launch.output()
    assert "in round 2" not in launch.output()
    assert [incident for incident in launch.incidents() if incident.state != "harmless"] == []
    launch.assert_nothing_left()
