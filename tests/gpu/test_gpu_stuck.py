# SPDX-License-Identifier: Apache-2.0
"""A GPU that does not come to its collective is named as such, over a real NCCL; one that is late is left alone.

On one GPU the ranks share it and NCCL goes through sockets; the GPU runs them by turns, also beside a kernel that
does not end.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.launch import Launch

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RANKS = 4
SCRIPT = Path(__file__).parents[1] / "fixtures" / "scripts" / "gpu_late.py"


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Real runs, stopped and cleaned whatever the test does."""
    launched = Launch(tmp_path)
    yield launched
    launched.close()


@pytest.mark.timeout(280)
def test_a_kernel_without_an_end_is_found_on_its_gpu() -> None:
    """Four ranks, one with a kernel that spins before its all_reduce: gpu_stuck, that rank, surer than 60 %."""
    command = [sys.executable, "-m", "megascale_ops.cli.main", "chaos", "run", "kernel_endless", "--backend=nccl"]

    done = subprocess.run(
        [*command, f"--nproc={RANKS}", "--rank=2", "--json"],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=270,
        check=False,
    )

    assert done.stdout, done.stderr
    (grade,) = json.loads(done.stdout)
    print(json.dumps(grade, indent=1))
    assert grade["faults"] == [], grade
    assert done.returncode == 0


@pytest.mark.timeout(280)
def test_a_gpu_that_is_late_is_left_alone(launch: Launch) -> None:
    """Fifteen seconds of work before one all_reduce: whatever is named meanwhile, nothing is stopped."""
    run = launch.spawn(
        *("run", "--job=toy", f"--nproc-per-node={RANKS}", "--nccl-profiler=on", "--", str(SCRIPT), "120", "15"),
    )

    assert launch.finish(run) == 0
    incidents = launch.incidents()
    print([(one.state, one.verdict and (one.verdict.fault, one.verdict.confidence)) for one in incidents])
    assert not [one for one in incidents if one.marks.ordered]
