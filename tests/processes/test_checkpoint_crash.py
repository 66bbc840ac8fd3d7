# SPDX-License-Identifier: Apache-2.0
"""A crash during a save costs that save and nothing else; a folder without rights is refused before training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix import wide
from tests.processes.warmed import play_module

pytestmark = pytest.mark.processes

WITHOUT_RIGHTS = """
import os, sys
from megascale_ops.checkpoint import CheckpointManager
from megascale_ops.errors import UsageError
if os.getuid() == 0:
    os.setuid(65534)  # root may write anywhere: become nobody
try:
    CheckpointManager(sys.argv[1])
except UsageError as exc:
    print(exc)
    sys.exit(exc.exit_code)
"""


@pytest.mark.parametrize("trials", wide([8, 20], keep=[8]))
def test_kills_while_saving_leave_only_whole_checkpoints(tmp_path: Path, trials: int, drawn_seed: int) -> None:
    """After a SIGKILL at any moment every visible checkpoint verifies, and the newest step never goes back."""
    env = os.environ | {"MEGASCALE_RECORDER": "0", "OMP_NUM_THREADS": "1"}

    done = play_module(
        "tests.fixtures.checkpoint_killer", [str(tmp_path / "checkpoints"), str(trials), str(drawn_seed)], env, 400
    )

    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    told = f"seed {drawn_seed}: {found}"
    assert len(found) == trials
    assert all(trial["begun"] and not trial["mixed"] for trial in found), told
    assert all(all(trial["visible"]) and not trial["skipped"] for trial in found), told
    steps = [trial["newest"] for trial in found]
    assert steps == sorted(steps), told
    assert steps[-1] > 0, told
    assert any(trial["leftovers"] for trial in found), f"no kill fell into a save: {told}"
    assert all(trial["leftovers"] <= 1 for trial in found), told


def test_a_folder_without_rights_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """The mistake is told when the manager is made, before hours of training end in a save that cannot work."""
    tmp_path.chmod(0o755)
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)

    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RIGHTS, str(folder)], capture_output=True, text=True, timeout=180, check=False
    )

    assert done.returncode == 2, done.stderr
    assert done.stdout == f"cannot write checkpoints to {folder}: Permission denied\n"
