# SPDX-License-Identifier: Apache-2.0
"""The example with experts: it learns, survives a killed rank, and goes on with another number of ranks."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.processes.launch import SOON, Launch, free_port
from tests.processes.warmed import play_ranks, play_script

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parents[2] / "examples" / "train_moe_gpt.py"
SMALL = ("--batch-size=4", "--sequence-length=32", "--width=32", "--experts=4", "--log-every=1")


def losses(printed: str) -> dict[int, float]:
    """The loss of each step that was printed."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", printed)}


def trained(folder: Path, ranks: int, *options: str) -> str:
    """What rank 0 of so many prints; what torchrun starts, and how, is `test_launches'."""
    env = os.environ | {"MEGASCALE_CHECKPOINT_DIR": str(folder), "MEGASCALE_RECORDER": "0", "OMP_NUM_THREADS": "1"}
    if ranks == 1:
        all_done = [play_script(SCRIPT, [*SMALL, *options], env, 400)]
    else:
        all_done = play_ranks(SCRIPT, [*SMALL, *options], env, ranks, free_port(), 400)
    assert not any(done.returncode for done in all_done), [done.stderr for done in all_done]
    return all_done[0].stdout


@pytest.mark.matrix  # the recovery is test_recovery's, parts of tensors that come back test_checkpoint_ranks'
def test_a_killed_rank_costs_steps_and_not_the_training(launch: Launch) -> None:
    """Under `run`: the others stop, all restore the parts of whole tensors that are theirs, and the loss falls on."""
    launch.env["PYTHONPATH"] = str(SOON)
    run = launch.run(*SMALL, "--steps=30", "--checkpoint-every=5", "--step-sleep=0.05", script=SCRIPT)
    launch.until_step(12)
    os.kill(launch.pid(1), signal.SIGKILL)

    code = launch.finish(run)

    printed = launch.output()
    assert code == 0, printed
    assert re.search(r"resumed after step (10|15|20)\b", printed), printed
    found = losses(printed)
    assert found[30] < found[1] - 1.0, found
    verdict = launch.the_incident().verdict
    assert verdict is not None
    assert verdict.culprits == (1,)


def test_it_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Experts and features are cut anew; what was learnt is still there."""
    before = losses(trained(tmp_path / "checkpoints", 2, "--steps=12"))

    printed = trained(tmp_path / "checkpoints", 1, "--steps=14")

    after = losses(printed)
    assert "resumed after step 12" in printed
    assert sorted(after) == [13, 14]
    assert abs(after[13] - before[12]) < 0.5 * (before[1] - before[12]), (before, after)


def test_a_sequence_that_cannot_be_cut_is_told(tmp_path: Path) -> None:
    """One sentence, and no traceback."""
    env = os.environ | {"MEGASCALE_CHECKPOINT_DIR": str(tmp_path), "MEGASCALE_RECORDER": "0"}

    done = play_script(SCRIPT, ["--sequence-length=33"], env, 180)

    assert done.returncode == 1
    assert done.stderr.splitlines() == ["--sequence-length 33 can't be cut into 2 equal parts"]
