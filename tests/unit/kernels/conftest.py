# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests of kernels that run on a CPU."""

import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Let torch reckon in one thread: its tiles are so small that handing them to others costs a sixth of the time.

    A worker of pytest already runs on every core, and on a machine of many cores torch would start a thread for each.
    """
    torch = sys.modules.get("torch")
    if torch is not None:  # whatever needs it has imported it while it was collected
        torch.set_num_threads(1)
