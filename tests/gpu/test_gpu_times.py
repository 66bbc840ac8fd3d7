# SPDX-License-Identifier: Apache-2.0
"""GPU timers and kernel timings on a real GPU: one rank under the recorder, looked at from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.schema.kernels import ProfileRequest, RankKernels
from tests.fakes.node import BOOTSTRAP

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Each part burns a known number of the GPU's clock cycles; the host is far ahead of it.
SCRIPT = """
import sys, time
import torch
from megascale_ops.recorder import recorder

class Burn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        torch.cuda._sleep(20_000_000)
        return x * 1
    @staticmethod
    def backward(ctx, gradient):
        torch.cuda._sleep(60_000_000)
        return gradient

layer = torch.nn.Linear(256, 256, device="cuda")
optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
x = torch.randn(256, 256, device="cuda")
for step in range(int(sys.argv[1])):
    loss = Burn.apply(layer(x)).square().mean()
    loss.backward()
    with recorder.phase("sample"):
        torch.cuda._sleep(40_000_000)
    optimizer.step()
    optimizer.zero_grad()
    if step % 3 == 0:
        torch.cuda.synchronize()
print("done", flush=True)
"""


class Rank:
    """One rank in a process of its own."""

    def __init__(self, folder: Path, steps: int, **environ: str) -> None:
        self.folder = folder
        env = {name: value for name, value in os.environ.items() if not name.startswith("MEGASCALE")}
        env |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MEGASCALE_BOX_DIR": str(folder), **environ}
        paths = (str(BOOTSTRAP), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(steps)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until(self, path: Path) -> Path:
        """Wait until a file is there."""
        end_s = time.monotonic() + 60.0
        while not path.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end_s, f"no {path} in 60 s"
            time.sleep(0.02)
        return path

    def finish(self) -> str:
        """Wait for its end; what it wrote to stderr."""
        out, err = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, err
        assert out == "done\n"
        return err

    def close(self) -> None:
        """Leave nothing running."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)


def test_parts_and_phases_are_timed_on_the_gpu(tmp_path: Path) -> None:
    """Backward burns three times what forward does, the declared phase twice; the script's stderr stays empty."""
    rank = Rank(tmp_path, 60)
    try:
        assert rank.finish() == ""
    finally:
        rank.close()
    steps = BoxReader(tmp_path / "0.box").gpu_steps()

    assert len(steps) == 32
    for step in steps[:-4]:
        phases = dict(step.phases) or {"sample": 2 * step.forward_s}  # of older steps the phases are driven out
        assert step.backward_s / step.forward_s == pytest.approx(3.0, rel=0.15)
        assert phases["sample"] / step.forward_s == pytest.approx(2.0, rel=0.15)
        assert step.optimizer_s < 0.2 * step.forward_s


def test_kernels_are_timed_and_nothing_is_printed(tmp_path: Path) -> None:
    """On demand: the spinning kernel and the matrix product, by name, on the GPU's own clock."""
    rank = Rank(tmp_path, 400)
    try:
        rank.until(tmp_path / "0.box")
        request = ProfileRequest("a", 3, time.monotonic() + 60.0)
        (tmp_path / "new").write_bytes(msgspec.json.encode(request))
        (tmp_path / "new").replace(tmp_path / "0.profile.json")
        answer = rank.until(tmp_path / "0.kernels.json").read_bytes()
        assert rank.finish() == ""
    finally:
        rank.close()
    found = msgspec.json.decode(answer, type=RankKernels)

    assert (found.error, found.device, found.steps) == ("", "gpu", 3), json.loads(answer)
    assert found.kernels[0].total_us > 1000
    assert "spin" in found.kernels[0].name
    assert abs(found.kernels[0].calls - 9) <= 3  # the GPU is some kernels behind the host at both ends
    assert any("gemm" in row.name.lower() or "cutlass" in row.name.lower() for row in found.kernels)


def test_a_script_that_ends_while_it_is_sampled_ends_in_order(tmp_path: Path) -> None:
    """Its last step begins a sample: exit status 0, and nothing on stderr."""
    rank = Rank(tmp_path, 40, MEGASCALE_PROFILE_EVERY="20")
    try:
        assert rank.finish() == ""
    finally:
        rank.close()

    assert (tmp_path / "0.sampled.json").exists()
