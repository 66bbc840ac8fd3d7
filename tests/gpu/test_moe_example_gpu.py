# SPDX-License-Identifier: Apache-2.0
"""The example with experts on GPUs: it learns as on a CPU; a peer that dies or stands still in training is named."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.launch import Launch, free_port

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(200),
]

SCRIPT = Path(__file__).parents[2] / "examples" / "train_moe_gpt.py"
SIZES = ("--width=512", "--heads=8", "--kv-heads=4", "--sequence-length=256", "--learning-rate=1e-3", "--no-contest")
# One block, attention and experts: half the kernels to compile, each in one way, and most steps' time in the experts'.
MIXTURE_ALONE = ("--layers=1", "--mixture-every=1", "--experts=32", "--top-k=4", "--batch-size=32")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Real runs, stopped and cleaned whatever the test does."""
    launched = Launch(tmp_path)
    yield launched
    launched.close()


def losses(printed: str) -> dict[int, float]:
    """The loss of each step that was printed."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", printed)}


def trained(folder: Path, **env: str) -> dict[int, float]:
    """The losses of 20 steps on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    done = subprocess.run(
        [*command, str(SCRIPT), *SIZES, "--steps=20", "--log-every=1", "--checkpoint-every=0"],
        env=os.environ | {"MEGASCALE_CHECKPOINT_DIR": str(folder), "MEGASCALE_RECORDER": "0", **env},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


def test_the_losses_are_those_of_a_cpu(tmp_path: Path) -> None:
    """Kernels in bf16 beside the serial path in fp32, from the same weights: the same curve within noise."""
    ours, exact = trained(tmp_path / "gpu"), trained(tmp_path / "cpu", CUDA_VISIBLE_DEVICES="")

    print(ours, exact)
    assert sorted(ours) == sorted(exact) == list(range(1, 21))
    assert max(abs(ours[step] - exact[step]) for step in ours) < 0.25
    assert ours[20] < ours[1] - 1.0


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_ends_in_training_is_named_and_training_goes_on(launch: Launch, end: signal.Signals) -> None:
    """Killed: the runner sees it. Stopped: the other's kernel gives up, and says for which peer and tile it waited."""
    options = ("--steps=120", "--log-every=20", "--checkpoint-every=20", "--deadline=5")
    run = launch.run(*SIZES, *MIXTURE_ALONE, *options, script=SCRIPT)
    try:
        launch.until_step(50)
        os.kill(launch.pid(1), end)
        code = launch.finish(run)
    finally:
        print(launch.output()[-6000:])

    incident = launch.the_incident()
    print(incident)
    assert code == 0
    assert "resumed after step" in launch.output()
    assert incident.verdict is not None
    assert incident.verdict.culprits == (1,)
