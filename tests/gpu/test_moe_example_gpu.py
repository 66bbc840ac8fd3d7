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
SIZES = ("--width=512", "--heads=8", "--kv-heads=4", "--sequence-length=256", "--learning-rate=1e-3", "--no-contest")
# One block, attention and experts: half the kernels to compile, each in one way, and most steps' time in the experts'.
MIXTURE_ALONE = ("--layers=1", "--mixture-every=1", "--experts=32", "--top-k=4", "--batch-size=32")
FUSED = ("moe_dispatch", "moe_combine")  # products that exchange tokens, forward and backward
LOOK_S = 0.55  # boards are copied to the host twice a second
LOOKS = 2  # while a rank stands still: after the grace of a stopped process (1.5 s) the job would be restarted
NEAR = 0.25  # bf16 sums in another order; a step that is left out or done twice moves the loss by more


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


def waits_for(folder: Path, victim: int) -> dict[int, str]:
    """The operators in whose kernels other ranks wait for this one, by rank, as the ranks' boards show it."""
    found = {}
    for path in folder.glob("*.board"):
        with suppress(OSError, ValueError):  # it is being made, or no kernel has run yet
            view = read_board(path)
            waits = (role.wait for role in view.current if role.state == "waiting")
            if view.rank != victim and any(wait is not None and wait.peer == victim for wait in waits):
                found[view.rank] = f"{view.operator} {view.launch}"
    return found


def kill_inside_a_fused_kernel(launch: Launch, victim: int) -> dict[int, str]:
    """Kill a rank while fused MoE kernels of others wait for it; who waited, and where.

    It is stopped somewhere in its step, and its peers come to the first launch that it has not queued. That may be any
    kernel: where it is another one, it goes on and is stopped again.
    """
    pid, folder = launch.pid(victim), launch.box_root / "toy"
    tries: list[dict[int, str]] = []

    def caught() -> dict[int, str]:
        os.kill(pid, signal.SIGSTOP)
        before: dict[int, str] = {}
        seen: dict[int, str] = {}
        for _ in range(LOOKS):
            time.sleep(LOOK_S)
            before, seen = seen, waits_for(folder, victim)
            if seen and seen == before:  # not a moment of a launch that goes on
                break
        tries.append(seen)
        print(f"try {len(tries)}: {seen}", flush=True)
        if seen == before and any(operator.startswith(FUSED) for operator in seen.values()):
            os.kill(pid, signal.SIGKILL)
            return seen
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.037 * (1 + len(tries) % 7))  # at another place of a step
        return {}

    return until(caught, f"a fused kernel that waits for rank {victim}; where it was waited for is told above")


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_peer_killed_inside_a_fused_kernel_is_named_and_the_loss_goes_on(launch: Launch, ranks: int) -> None:
    """The verdict names it, the job goes on from a checkpoint, and steps that are done again have their loss again."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    run = launch.run(
        *SIZES,
        *MIXTURE_ALONE,
        "--steps=200",
        "--log-every=2",
        "--checkpoint-every=20",
        "--deadline=20",
        nproc=ranks,
        script=SCRIPT,
    )
    try:
        launch.until_step(30, deadline_s=150.0)
        print(kill_inside_a_fused_kernel(launch, ranks - 1), flush=True)
        code = launch.finish(run)
    finally:
        print(launch.output()[-12000:])

    incident = launch.the_incident()
    print(incident)
    assert code == 0
    assert incident.verdict is not None
    assert incident.verdict.culprits == (ranks - 1,)
    curve: defaultdict[int, list[float]] = defaultdict(list)
    for step, loss in re.findall(r"step (\d+) loss (\S+)", launch.output()):
        curve[int(step)].append(float(loss))
    again = {step: both for step, both in curve.items() if len(both) > 1}
    # What is printed is a mean over two steps; checkpoints are of every twentieth, so the same two before and after.
    print({step: both for step, both in curve.items() if len(both) > 1 or step % 20 == 0})
    assert again
    assert all(max(both) - min(both) < NEAR for both in again.values()), again
    assert sorted(curve) == list(range(2, 201, 2))
    assert curve[200][-1] < curve[2][0] - 1.0


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
