# SPDX-License-Identifier: Apache-2.0
"""What was restored is bad itself: one checkpoint back, once, and never again and again from the same NaN."""

import pytest

from tests.processes.launch import SCRIPTS, Launch, acted_upon

pytestmark = pytest.mark.processes
BAD_STATE = SCRIPTS / "bad_state.py"


def _begun(launch: Launch) -> list[str]:
    """Return where each round began."""
    return [line.partition("begins at step ")[2] for line in launch.output().splitlines() if "begins at step" in line]


def test_a_poisoned_checkpoint_is_passed_over(launch: Launch) -> None:
    """NaN in what was saved at step 20: restored once, then the checkpoint before it, from which training ends well."""
    run = launch.run("--poison-at=18", nproc=1, script=BAD_STATE)

    code = launch.finish(run)

    assert code == 0, launch.output()
    first, second = acted_upon(launch.incidents())
    assert _begun(launch) == ["0 in round 1", "21 in round 2", "11 in round 3"]
    assert "one checkpoint back" not in first.done
    assert "within 10 steps of step 20, which was restored" in second.done
    assert "done with 160" in launch.output()
    assert "checkpoints of step 20 and later are passed over" in launch.output()


def test_a_checkpoint_further_back_is_a_persons_decision(launch: Launch) -> None:
    """Both checkpoints hold the NaN: one back, the same failure again, and the job stops and says so."""
    run = launch.run("--poison-at=5", "--unseen-until=21", nproc=1, script=BAD_STATE)

    code = launch.finish(run)

    assert code == 1, launch.output()
    assert _begun(launch) == ["0 in round 1", "21 in round 2", "11 in round 3"]
    last = acted_upon(launch.incidents())[-1]
    assert last.verdict is not None
    assert last.verdict.action == "stop"
    assert "going back further is a person's decision" in last.done


def test_a_nan_that_comes_once_costs_no_checkpoint(launch: Launch) -> None:
    """The loss was NaN once and the state is well: the newest checkpoint is restored, and training ends well."""
    run = launch.run("--once-at=21", nproc=1, script=BAD_STATE)

    code = launch.finish(run)

    assert code == 0, launch.output()
    assert _begun(launch) == ["0 in round 1", "21 in round 2"]
    assert "passed over" not in launch.output()
    assert len(acted_upon(launch.incidents())) == 1


def test_a_failure_late_in_the_run_is_the_scripts(launch: Launch) -> None:
    """The same exception 14 steps after the checkpoint: nothing goes back, and it is a bug as it ever was."""
    run = launch.run("--late-at=34", "--save-every=20", nproc=1, script=BAD_STATE)

    code = launch.finish(run)

    assert code == 1, launch.output()
    assert _begun(launch) == ["0 in round 1", "21 in round 2"]
    last = acted_upon(launch.incidents())[-1]
    assert last.verdict is not None
    assert (last.verdict.fault, last.verdict.action) == ("script_bug", "stop")
    assert "passed over" not in launch.output()
