# SPDX-License-Identifier: Apache-2.0
"""The agent's own process as every Prometheus client shows it: ``process_*``, names that are not ours to choose.

psutil tells it, 50 us a scrape; CPU time alone is the standard library's, which counts microseconds and not ticks of
10 ms. https://prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics
"""

import contextlib
import resource
from collections.abc import Iterator

import psutil

from megascale_ops.exposition import Page
from megascale_ops.schema.metrics import Kind, Metric


def add_to(page: Page) -> None:
    """Add what is known of this process."""
    for name, kind, text, value in _figures():
        page.add_family(Metric(f"process_{name}", "", kind, "", text), [((), value)])


def _figures() -> Iterator[tuple[str, Kind, str, float]]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    yield "cpu_seconds_total", Kind.COUNTER, "CPU time of this process in seconds.", used.ru_utime + used.ru_stime
    process = psutil.Process()
    yield (
        "resident_memory_bytes",
        Kind.GAUGE,
        "Resident memory of this process in bytes.",
        float(process.memory_info().rss),
    )
    with contextlib.suppress(OSError, RuntimeError):  # a container without the machine's boot time
        started_s = process.create_time()
        yield "start_time_seconds", Kind.GAUGE, "When this process was started, Unix time in seconds.", started_s
    yield "open_fds", Kind.GAUGE, "Open files of this process.", float(process.num_fds())
    most = float(process.rlimit(psutil.RLIMIT_NOFILE)[0])
    yield "max_fds", Kind.GAUGE, "Most files that this process may open.", most
