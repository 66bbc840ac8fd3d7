# SPDX-License-Identifier: Apache-2.0
"""A real NCCL whose profiler plugin asks for more and for less while collectives run: it goes on, results are right.

The CPU's stand-in for NCCL can't show this: whether NCCL's own counters bear it is a matter of NCCL's code. With sends
and receives NCCL 2.28 hangs (the script's `p2p`), which is why the mask changes only where the user asks for it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL wants one for each rank"),
]

SCRIPT = Path(__file__).parents[1] / "fixtures" / "scripts" / "nccl_toggling.py"


@pytest.mark.timeout(180)
def test_a_mask_that_changes_in_the_midst_harms_nothing(tmp_path: Path) -> None:
    """A change each 1.5 ms on average, also between an operation's start and end, on every rank by itself."""
    gpus = torch.cuda.device_count()
    run = [sys.executable, "-m", "megascale_ops.cli.main", "run", f"--nproc-per-node={gpus}", "--nccl-profiler=on"]

    done = subprocess.run(
        [*run, f"--run-dir={tmp_path / 'run'}", "--", str(SCRIPT), "6000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-6000:]
    assert done.stdout.count("done") >= gpus
