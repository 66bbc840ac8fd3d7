# SPDX-License-Identifier: Apache-2.0
"""The kernel that digests tensors on GPUs, run by Triton's interpreter; which that is, its import decides."""

import os
import subprocess
import sys

import pytest

from tests.needed import needs

needs("triton")
pytestmark = pytest.mark.processes

SCRIPT = """
import torch
from megascale_ops.checkpoint.trust import digests
from megascale_ops.checkpoint.trust.gpu_sums import Memory, Sums

BLOCK = digests.BLOCK_BYTES
raw = torch.randint(0, 256, (6 * BLOCK + 64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
spans = [(0, size) for size in (0, 1, 7, 8, 9, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 3, 5 * BLOCK + 17)]
spans += [(8, BLOCK + 16), (64, 3 * BLOCK + 64)]
tensors = [raw[start:stop] for start, stop in spans]
weights = digests._weights(torch.device("cpu"), digests.WORDS)

def sums():
    return Sums([Memory(each.data_ptr(), each.numel()) for each in tensors], *weights).fetch()

wanted = [digests.block_sums(each).numpy().tobytes() for each in tensors]
assert sums() == wanted
assert Sums([Memory(0, 0)], *weights).fetch() == [b""]
raw[2 * BLOCK + 5] ^= 1  # the control: a bit that flips is seen where it is, and nowhere else
changed = [number for number, (one, other) in enumerate(zip(sums(), wanted)) if one != other]
assert changed == [number for number, (start, stop) in enumerate(spans) if start <= 2 * BLOCK + 5 < stop], changed
print("the same sums")
"""


def test_the_kernel_gives_the_sums_of_torchs_functions() -> None:
    """Of memories of all kinds of lengths, in one launch."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "the same sums\n"), done.stderr
