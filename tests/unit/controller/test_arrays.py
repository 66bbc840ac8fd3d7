# SPDX-License-Identifier: Apache-2.0
"""NumPy is loaded once, in a thread of its own, and only for many ranks."""

import subprocess
import sys

ASKS = """
import sys, threading, time
from megascale_ops.diagnosis.statistics import arrays

if len(sys.argv) > 1:
    sys.modules["numpy"] = None  # as if it were not installed
print(arrays.are_fast(1_023), threading.active_count(), end=" ")
print(arrays.are_fast(1_024), end=" ")
for thread in threading.enumerate():
    if thread.name == "numpy":
        thread.join(30)
print(arrays.are_fast(1_024), arrays.are_fast(8), threading.active_count())
"""


def ask(*argv: str) -> str:
    """Return what a fresh process prints, in which nobody has loaded NumPy."""
    done = subprocess.run([sys.executable, "-c", ASKS, *argv], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout


def test_many_ranks_get_numpy_once_it_is_loaded_and_nobody_waits_for_it() -> None:
    """Few ranks never start the thread."""
    assert ask() == "False 1 False True False 1\n"


def test_where_numpy_is_not_installed_plain_python_goes_on() -> None:
    """And nothing is printed or raised about it."""
    assert ask("without") == "False 1 False False False 1\n"
