# SPDX-License-Identifier: Apache-2.0
"""The examples learn, and a run that was stopped and resumed ends exactly like one that was not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megascale_ops.checkpoint import newest

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--batch-size", "4", "--sequence-length", "32", "--width", "32", "--log-every", "1", "--evaluate-every", "10"]


# A script as it is, sooner: half of its CPU time would go into torch's compiler, of which it uses nothing.
SOON = """
import runpy, sys
from megascale_ops.chaos import no_compiler
no_compiler.leave_out()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(script: str, folder: Path, steps: int, *, rendezvous_port: int = 0) -> dict[int, float]:
    """Train in one process, or on two ranks when a port is given; the loss of each step that was printed."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(rendezvous_port)]
    options = ["--steps", str(steps), "--checkpoint-every", "6", *SMALL]
    done = subprocess.run(
        [sys.executable, *(launcher if rendezvous_port else ["-c", SOON]), str(EXAMPLES / script), *options],
        env=os.environ | {"MEGASCALE_CHECKPOINT_DIR": str(folder), "MEGASCALE_RECORDER": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    words = [line.split() for line in done.stdout.splitlines()]
    return {int(line[1]): float(line[3]) for line in words if line[:1] == ["step"] and line[2] == "loss"}


@pytest.mark.parametrize("script", ["train_gpt.py", "train_gpt_plain.py"])
def test_a_resumed_run_ends_like_one_that_was_never_stopped(script: str, tmp_path: Path) -> None:
    """Weights, moments and the stream of text continue where they were: every loss is the same."""
    whole = run(script, tmp_path / "whole", 12)
    first = run(script, tmp_path / "halves", 6)

    second = run(script, tmp_path / "halves", 12)

    assert sorted(second) == list(range(7, 13))
    assert first | second == whole
    assert whole[12] < whole[1]


def test_two_ranks_share_the_stream_that_one_reads_alone(tmp_path: Path, unused_tcp_port: int) -> None:
    """A run resumed with more ranks goes on in the same text, so its mean loss goes on too."""
    alone = run("train_gpt.py", tmp_path / "alone", 12)
    run("train_gpt.py", tmp_path / "shared", 6)

    together = run("train_gpt.py", tmp_path / "shared", 12, rendezvous_port=unused_tcp_port)

    assert sorted(together) == list(range(7, 13))
    assert all(abs(together[step] - alone[step]) < 0.01 for step in together)
    choice = newest(tmp_path / "shared")
    assert choice.newest is not None
    assert choice.newest.manifest is not None
    assert choice.newest.manifest.world_size == 2
