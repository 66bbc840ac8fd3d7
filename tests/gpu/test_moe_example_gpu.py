# SPDX-License-Identifier: Apache-2.0
"""The example with experts on GPUs: it learns as on a CPU; a peer that dies or stands still in training is named."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from megascale_kernels.progress.view import read_board

from tests.processes.launch import Launch, free_port, until

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(200),
]

SCRIPT = Path(__file__).parents[2] / "examples" / "train_moe_gpt.py"
SIZES = ("--width=512", "--heads=8", "--kv-heads=4", "--layers=2", "--sequence-length=256", "--learning-rate=1e-3")
FUSED = ("moe_dispatch", "moe_combine")  # products that exchange tokens, forward and backward
STOPPED_S = 3.0  # a rank stands still for so long at most, far below the deadline of a kernel's wait
NEAR = 0.15  # bf16 sums in another order; a step that is left out or done twice moves the loss by more


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


def waited_for(folder: Path, victim: int) -> str:
    """In which fused MoE kernel another rank waits for this one, by the boards that ranks show; "" where none does."""
    for path in folder.glob("*.board"):
        with suppress(OSError, ValueError):  # it is being made, or no kernel has run yet
            view = read_board(path)
            if view.rank == victim or not view.operator.startswith(FUSED):
                continue
            for role in view.current:
                if role.state == "waiting" and role.wait is not None and role.wait.peer == victim:
                    return f"rank {view.rank}, {view.operator} launch {view.launch}, waits for rank {victim}"
    return ""


def kill_inside_a_fused_kernel(launch: Launch, victim: int) -> str:
    """Kill a rank while a fused MoE kernel of another one waits for it; what was seen of that.

    It is stopped somewhere in its step, and its peers come to the first launch that it has not queued. That may be any
    kernel: where it is another one, it goes on and is stopped again.
    """
    pid = launch.pid(victim)

    def caught() -> str:
        os.kill(pid, signal.SIGSTOP)
        since, seen = time.monotonic(), ""
        while time.monotonic() < since + STOPPED_S:
            time.sleep(0.6)  # boards are copied to the host twice a second
            before, seen = seen, waited_for(launch.box_root / "toy", victim)
            if seen and seen == before:  # not a moment of a launch that goes on
                os.kill(pid, signal.SIGKILL)
                return seen
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.137)
        return ""

    return until(caught, f"a fused kernel that waits for rank {victim}; output so far:\n{launch.output()}")


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_peer_killed_inside_a_fused_kernel_is_named_and_the_loss_goes_on(launch: Launch, ranks: int) -> None:
    """The verdict names it, the job goes on from a checkpoint, and steps that are done again have their loss again."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    run = launch.run(
        *SIZES, "--steps=300", "--log-every=10", "--checkpoint-every=50", "--deadline=20", nproc=ranks, script=SCRIPT
    )
    launch.until_step(120, deadline_s=150.0)
    seen = kill_inside_a_fused_kernel(launch, ranks - 1)
    try:
        code = launch.finish(run)
    finally:
        print(seen, launch.output()[-8000:], sep="\n")

    incident = launch.the_incident()
    print(incident)
    assert code == 0
    assert incident.verdict is not None
    assert incident.verdict.culprits == (ranks - 1,)
    curve = defaultdict(list)
    for step, loss in re.findall(r"step (\d+) loss (\S+)", launch.output()):
        curve[int(step)].append(float(loss))
    again = {step: both for step, both in curve.items() if len(both) > 1}
    # What is printed is a mean over ten steps; checkpoints are of every fiftieth, so the same ten before and after.
    assert again
    assert all(max(both) - min(both) < NEAR for both in again.values()), again
    assert sorted(curve) == list(range(10, 301, 10))
    assert curve[300][-1] < curve[10][0] - 1.0


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_ends_in_training_is_named_and_training_goes_on(launch: Launch, end: signal.Signals) -> None:
    """Killed: the runner sees it. Stopped: the other's kernel gives up, and says for which peer and tile it waited."""
    run = launch.run(*SIZES, "--steps=400", "--log-every=50", "--checkpoint-every=50", "--deadline=5", script=SCRIPT)
    launch.until_step(100)
    os.kill(launch.pid(1), end)
    try:
        code = launch.finish(run)
    finally:
        print(launch.output()[-6000:])

    incident = launch.the_incident()
    print(incident)
    assert code == 0
    assert "resumed after step" in launch.output()
    assert incident.verdict is not None
    assert incident.verdict.culprits == (1,)
