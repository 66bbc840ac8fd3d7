# SPDX-License-Identifier: Apache-2.0
"""A real NCCL whose profiler plugin asks for more and for less while collectives run: it goes on, results are right.

The CPU's stand-in for NCCL can't show this: whether NCCL's own counters bear it is a matter of NCCL's code. With sends
and receives NCCL 2.28 hangs (`nccl_toggling.py p2p`), which is why thinning's last change comes with the first.
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
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL wants one for each rank"),
]

SCRIPTS = Path(__file__).parents[1] / "fixtures" / "scripts"


def launched(folder: Path, script: str, *arguments: str, mask: str = "fixed") -> str:
    """Run a script on all GPUs with the plugin, to its good end; return what it said."""
    gpus = torch.cuda.device_count()
    run = [sys.executable, "-m", "megascale_ops.cli.main", "run", f"--nproc-per-node={gpus}", "--nccl-profiler=on"]
    done = subprocess.run(
        [*run, f"--run-dir={folder / 'run'}", "--", str(SCRIPTS / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"MEGASCALE_PROFILER_MASK": mask, "MEGASCALE_PROFILER_THIN_AFTER": "0"},
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert done.stdout.count("done") >= gpus
    return done.stdout


@pytest.mark.timeout(140)
def test_a_mask_that_changes_in_the_midst_harms_nothing(tmp_path: Path) -> None:
    """A change each 1.5 ms on average, also between an operation's start and end, on every rank by itself."""
    launched(tmp_path, "nccl_toggling.py", "6000")


@pytest.mark.timeout(140)
def test_thinned_few_of_many_collectives_have_channels(tmp_path: Path) -> None:
    """Thousands of small and large ones, alone and in groups, go on and are right while the mask turns."""
    said = launched(tmp_path, "nccl_thinning.py", "4000", mask="thin")

    assert "timed_one_in=" in said


@pytest.mark.timeout(140)
def test_sends_and_receives_after_thinning_has_begun_go_on(tmp_path: Path) -> None:
    """They end it for ever: thousands of groups of one of each in either order, and no more is left out."""
    said = launched(tmp_path, "nccl_thinning.py", "4000", "p2p", mask="thin")

    assert re.search(r"timed_one_in=1\b", said)
