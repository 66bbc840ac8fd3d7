# SPDX-License-Identifier: Apache-2.0
"""Swap: how much is in use, and whether pages go in or out now; a rank that waits for a page holds up all others."""

import time
from pathlib import Path

import psutil

from megascale_ops.diagnostics.check import Check, Reading, Task
from megascale_ops.diagnostics.report import CheckFinding, Figure

CHECK = Check("swap", "swap", quick_s=5.0, full_s=10.0, severity="warn")

_APART_S = 1.0
_PAGE_BYTES = (
    4096  # the unit of pswpin and pswpout is a page; 4 KiB on all machines that have these GPUs but some arm64
)
# 1 MB/s: less is a page now and then, of a program that sleeps.
_BUSY_BYTES_S = 1e6


def measure(task: Task) -> Reading:
    """Read what is in use, and count pages for a second."""
    del task
    before, began_s = _pages(), time.monotonic()
    time.sleep(_APART_S)
    rate = (_pages() - before) * _PAGE_BYTES / (time.monotonic() - began_s)
    used = psutil.swap_memory().used
    return Reading((Figure("swap_used", "node", used), Figure("swap_rate", "node", rate)))


def _pages() -> int:
    lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("pswpin ", "pswpout ")))


def judge(reading: Reading) -> list[CheckFinding]:
    """Warn while pages move; what was swapped out once and sleeps costs nothing."""
    rate, used = (reading.values(name)["node"] for name in ("swap_rate", "swap_used"))
    if rate > _BUSY_BYTES_S:
        text = f"the node swaps {rate / 1e6:.0f} MB/s ({used / (1 << 30):.1f} GiB are in use)"
        return [CheckFinding("warn", "node", text, "free memory (ps --sort=-rss -eo rss,comm), or switch swap off")]
    if used:
        text = f"{used / (1 << 20):,.0f} MiB of swap are in use, and no page moves"
        return [CheckFinding("note", "node", text)]
    return []
