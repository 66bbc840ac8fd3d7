# SPDX-License-Identifier: Apache-2.0
"""The campaign of kills and damages finds nothing, and can find something.

``benchmarks/results/checkpoint_kills.txt`` is a long one; here a short one of every kind, drawn anew in each run.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.matrix import wide
from tests.processes.warmed import play_script

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "checkpoint_kills.py"


def play(kills: int, damages: int, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    """Run it in a folder of its own, to which others may go: part of it becomes another user."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{SCRIPT.parent}"}
    return play_script(script, [f"--kills={kills}", f"--damages={damages}"], env, 590)


@pytest.mark.parametrize(("kills", "damages"), wide([(1, 12), (100, 600)], keep=[(1, 12)]))
def test_whatever_is_killed_or_damaged_the_newest_whole_one_comes_back(kills: int, damages: int) -> None:
    """Bit for bit, or a sentence; never a mixture, never an older one, never a wait without an end."""
    done = play(kills, damages)

    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 not as they must be" in done.stdout
    told = [line for line in done.stdout.splitlines() if line.startswith("kill ")]
    assert sum(int(line.split()[-3]) for line in told) == 3 * kills, done.stdout


def test_a_reader_that_verifies_nothing_is_found(tmp_path: Path) -> None:
    """The negative control: with digests taken for granted the same campaign fails."""
    blind = tmp_path / "blind.py"
    blind.write_text(f"""
import runpy
from megascale_ops.checkpoint import manifest
manifest.judge_file = lambda entry, seen: None
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
""")

    done = play(0, 24, blind)

    assert done.returncode == 1, done.stdout + done.stderr
    assert "flipped bytes: " in done.stdout
