# SPDX-License-Identifier: Apache-2.0
"""What a warm spare does while it waits, and what it leaves alone."""

import subprocess
import sys

from megascale_ops.runner import warm

# The start of CUDA is watched from the moment there is a torch: also without a GPU, where it would merely fail.
_WAIT = """
import os, runpy, sys

import torch

touched = []
vars(torch.cuda)["_lazy_init"] = lambda: touched.append("CUDA")
ready, told = os.pipe()
sys.argv = ["standby", str(told)]
runpy.run_path(PATH)["main"]()

assert os.read(ready, 1) == b"r"
assert {"torch", "torch._dynamo", "torch.distributed.checkpoint"} <= set(sys.modules)
assert not touched
assert not torch.cuda.is_initialized()
opened = [os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
assert not [one for one in opened if one.startswith("/dev/nvidia")], opened
"""


def test_a_spare_that_waits_has_not_touched_cuda() -> None:
    """All imports of a spare leave CUDA alone: no context, no device opened, nothing asked to begin."""
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
