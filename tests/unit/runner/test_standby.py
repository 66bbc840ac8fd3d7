# SPDX-License-Identifier: Apache-2.0
"""What a warm spare does while it waits, and what it leaves alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

from megascale_ops.runner.ranks import warm

# The start of CUDA is watched from the moment there is a torch: also without a GPU, where it would merely fail.
_WAIT = """
import gc, os, runpy, sys

import torch

touched = []
vars(torch.cuda)["_lazy_init"] = lambda: touched.append("CUDA")
ready, told = os.pipe()
sys.argv = ["standby", str(told)]
runpy.run_path(PATH)["main"]()

assert os.read(ready, 1) == b"r"
assert {"torch", "torch._dynamo", "torch.distributed.checkpoint"} <= set(sys.modules)
assert gc.isenabled() and gc.get_freeze_count() > 100_000, gc.get_freeze_count()
assert not touched
assert not torch.cuda.is_initialized()
opened = [os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
assert not [one for one in opened if one.startswith("/dev/nvidia")], opened
"""


def test_a_spare_that_waits_has_not_touched_cuda() -> None:
    """All imports of a spare leave CUDA alone: no context, no device opened, nothing asked to begin.

    What they brought is no garbage, and is not looked through in the script's steps.
    """
    program = _WAIT.replace("PATH", repr(str(vars(warm)["_STANDBY"])))

    done = subprocess.run(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr


def test_a_spare_that_became_a_rank_reads_what_the_runner_reads(tmp_path: Path) -> None:
    """A question that a warm rank asks is answered from the terminal, not by the line that told it who it is."""
    (tmp_path / "torch.py").write_text("raise ImportError('none here: this is about something else')\n")
    (tmp_path / "asks.py").write_text("print('hello', input())\n")
    ready, told = os.pipe()
    terminal, keys = os.pipe()
    spare = subprocess.Popen(
        [sys.executable, str(vars(warm)["_STANDBY"]), str(told), str(terminal)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        pass_fds=(told, terminal),
    )
    order = {
        "argv": ["-u", str(tmp_path / "asks.py")], "env": dict(os.environ), "cwd": str(tmp_path), "stdout": "",
        "stderr": "", "bootstrap": "",
    }  # fmt: skip

    os.write(keys, b"ada\n")
    out, _ = spare.communicate(json.dumps(order).encode() + b"\n", timeout=60)

    for end in (ready, told, terminal, keys):
        os.close(end)
    assert out == b"hello ada\n"
