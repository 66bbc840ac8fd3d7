# SPDX-License-Identifier: Apache-2.0
"""A real NCCL whose profiler plugin asks for more and for less while collectives run: it goes on, results are right.

The CPU's stand-in for NCCL can't show this: whether NCCL's own counters bear it is a matter of NCCL's code. With sends
and receives NCCL 2.28 hangs (`nccl_toggling.py p2p`), which is why thinning's last change comes with the first.

On one GPU two ranks share it: NCCL then goes through sockets, as between nodes, some milliseconds each time. That is a
network to it, with proxies that carry every byte.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RANKS = max(2, torch.cuda.device_count())
IS_SHARED = torch.cuda.device_count() < RANKS
# Fewer rounds where each takes longer; within this budget (per cent) they are thinned, however few a second there are.
SLOWER = 20 if IS_SHARED else 1
BUDGET = {"MEGASCALE_PROFILER_BUDGET": "0.001"} if IS_SHARED else {}

SCRIPTS = Path(__file__).parents[1] / "fixtures" / "scripts"


def launched(folder: Path, script: str, *arguments: str, mask: str = "fixed") -> str:
    """Run a script on all GPUs with the plugin, to its good end; return what it said."""
    run = [sys.executable, "-m", "megascale_ops.cli.main", "run", f"--nproc-per-node={RANKS}", "--nccl-profiler=on"]
    done = subprocess.run(
        [*run, f"--run-dir={folder / 'run'}", "--", str(SCRIPTS / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | BUDGET | {"MEGASCALE_PROFILER_MASK": mask, "MEGASCALE_PROFILER_THIN_AFTER": "0"},
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert done.stdout.count("done") >= RANKS
    return done.stdout


@pytest.mark.timeout(140)
def test_a_mask_that_changes_in_the_midst_harms_nothing(tmp_path: Path) -> None:
    """A change each 1.5 ms on average, also between an operation's start and end, on every rank by itself."""
    launched(tmp_path, "nccl_toggling.py", str(6000 // SLOWER))


@pytest.mark.timeout(140)
def test_thinned_few_of_many_collectives_have_channels(tmp_path: Path) -> None:
    """Thousands of small and large ones, alone and in groups, go on and are right while the mask turns."""
    said = launched(tmp_path, "nccl_thinning.py", str(4000 // SLOWER), mask="thin")

    assert "timed_one_in=" in said


@pytest.mark.timeout(140)
def test_sends_and_receives_after_thinning_has_begun_go_on(tmp_path: Path) -> None:
    """They end it for ever: thousands of groups of one of each in either order, and no more is left out."""
    said = launched(tmp_path, "nccl_thinning.py", str(4000 // SLOWER), "p2p", mask="thin")

    assert re.search(r"timed_one_in=1\b", said)
