# SPDX-License-Identifier: Apache-2.0
"""What must cause nothing: slow, but not broken."""

import pytest

from tests.processes.launch import LOCKSTEP, TOY, Launch, acted_upon

pytestmark = pytest.mark.processes

# Patience at its floor of 5 s, a fraction of the pause: a verdict would come if the pause were not excused. Less would
# take a machine that is busy with other tests for silence.
# Nothing is granted to absentees: what is held here is that evidence excuses, not that patience is long.
IMPATIENT = ("--policy", "absent_patience_s=0", "--policy", "silence_factor=2")


@pytest.mark.parametrize(
    ("toy", "options"),
    [
        (("--fault=slow_step", "--at=0", "--seconds=12", "--steps=20"), IMPATIENT),
        (("--fault=slow_checkpoint", "--at=29", "--seconds=12"), IMPATIENT),
        (("--fault=idle", "--seconds=12", "--steps=20"), IMPATIENT),
        (("--fault=end_apart", "--seconds=12", "--steps=30"), IMPATIENT),
    ],
    ids=["first step of many seconds", "slow checkpoint", "idle before stepping", "ends seconds apart"],
)
def test_slow_is_not_broken(launch: Launch, toy: tuple[str, ...], options: tuple[str, ...]) -> None:
    """No restart and no incident that was acted upon."""
    # The slow checkpoint needs torch's own writer; the other waits need no torch.
    run = launch.run(*toy, options=options, script=TOY if "--fault=slow_checkpoint" in toy else LOCKSTEP)

    code = launch.finish(run)

    assert code == 0, launch.output()
    assert "in round 2" not in launch.output()
    assert acted_upon(launch.incidents()) == []
    launch.assert_nothing_left()


@pytest.mark.matrix  # a minute of waiting; the row above has a first step of twice the patience
def test_a_first_step_of_a_minute_is_not_broken(launch: Launch) -> None:
    """As long as compilation takes, with the policy that users have; one of two ranks waits for the other."""
    run = launch.run("--fault=slow_step", "--at=0", "--seconds=60", "--steps=20", script=LOCKSTEP)

    assert launch.finish(run) == 0, launch.output()
    assert "in round 2" not in launch.output()
    assert acted_upon(launch.incidents()) == []
