# SPDX-License-Identifier: Apache-2.0
"""A crash while a save is in the background costs that save and nothing else; a restart waits for what is finished."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megascale_ops.checkpoint import storage
from megascale_ops.checkpoint.background.unfinished import await_unfinished, in_folder
from tests.processes.warmed import play_module

pytestmark = pytest.mark.processes


# A writer process of a job whose training process is gone: it has the folder, and seals when it is told to.
ORPHAN = """
import sys
from pathlib import Path
from megascale_ops.checkpoint import processes, storage
from megascale_ops.checkpoint.background import shares
from megascale_ops.checkpoint.manifest import Manifest
root = Path(sys.argv[1])
folder = shares.begin(root, 5, 1, shares.Begun("t", processes.this_process()))
(folder / "__0_0.tensors").write_bytes(b"x" * 100)
print("begun", flush=True)
sys.stdin.readline()
shares.clear(folder, 1)
files = (storage.digest(folder / "__0_0.tensors"),)
storage.seal(root, Manifest(step=5, world_size=1, written_wall_s=1.0, files=files), 1)
"""


@pytest.mark.parametrize("trials", [8, pytest.param(500, marks=pytest.mark.matrix)])
def test_kills_at_drawn_moments_leave_only_whole_checkpoints(tmp_path: Path, trials: int, drawn_seed: int) -> None:
    """Of a writer process, of a rank and of everything: what is visible verifies, and no sealed step is lost."""
    env = os.environ | {"MEGASCALE_RECORDER": "0", "OMP_NUM_THREADS": "1"}

    done = play_module(
        "tests.fixtures.checkpoint_killer_behind",
        [str(tmp_path / "checkpoints"), str(trials), str(drawn_seed)],
        env,
        200 + 10 * trials,
    )

    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    told = f"seed {drawn_seed}: {found}\n{done.stderr[-4000:]}"
    assert len(found) == trials
    assert all(trial["begun"] and not trial["mixed"] for trial in found), told
    assert all(all(trial["visible"]) and not trial["skipped"] and not trial["strange"] for trial in found), told
    assert all(trial["survived"] for trial in found), f"no save after a writer process was killed: {told}"
    assert all(trial["ended"] for trial in found), f"a writer process outlived its rank: {told}"
    assert all(trial["newest"] >= trial["sealed"] > 0 for trial in found), f"a sealed checkpoint was lost: {told}"
    steps = [trial["newest"] for trial in found]
    assert steps == sorted(steps), told
    assert all(trial["leftovers"] <= 1 for trial in found), told


def orphan(root: Path) -> subprocess.Popen[str]:
    """Start one that has begun to write."""
    root.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def test_a_restart_waits_for_a_save_that_is_about_to_be_finished(tmp_path: Path) -> None:
    """Not longer than its writer process lives: then the checkpoint is there, or there will be none."""
    for is_killed in (False, True):
        root = tmp_path / f"killed {is_killed}"
        with orphan(root) as process:
            waiting = threading.Thread(target=await_unfinished, args=(in_folder(root),))
            waiting.start()
            waiting.join(0.5)
            assert waiting.is_alive()

            if is_killed:
                process.kill()
            else:
                process.communicate("\n", timeout=60)
            waiting.join(60)

        assert not waiting.is_alive()
        assert [storage.step_of(path) for path in storage.candidates(root)] == ([] if is_killed else [5])
