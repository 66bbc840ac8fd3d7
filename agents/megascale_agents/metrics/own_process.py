# SPDX-License-Identifier: Apache-2.0
"""The agent's own process as every Prometheus client shows it: ``process_*``, names that are not ours to choose.

https://prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics
"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from megascale_agents.collectors import process
from megascale_ops.exposition import Page
from megascale_ops.schema.metrics import Kind

_TICKS_A_S = os.sysconf("SC_CLK_TCK")


def add_to(page: Page) -> None:
    """Add what is known of this process."""
    for name, kind, text, value in _figures():
        page.foreign(f"process_{name}", kind, text, value)


def _figures() -> Iterator[tuple[str, Kind, str, float]]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    yield "cpu_seconds_total", Kind.COUNTER, "CPU time of this process in seconds.", used.ru_utime + used.ru_stime
    stat = process.read_once(os.getpid())
    yield "resident_memory_bytes", Kind.GAUGE, "Resident memory of this process in bytes.", float(stat.rss_bytes)
    booted_s = _booted_s()
    if booted_s:
        started_s = booted_s + stat.start_ticks / _TICKS_A_S
        yield "start_time_seconds", Kind.GAUGE, "When this process was started, Unix time in seconds.", started_s
    yield "open_fds", Kind.GAUGE, "Open files of this process.", float(len(os.listdir("/proc/self/fd")))  # noqa: PTH208  names alone
    yield (
        "max_fds",
        Kind.GAUGE,
        "Most files that this process may open.",
        float(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    )


def _booted_s() -> float:
    """Return when the machine was booted, Unix time; 0 where /proc does not have it."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) for line in lines if line.startswith("btime ")), 0.0)
