# SPDX-License-Identifier: Apache-2.0
"""Bandwidth of the host's memory, for each NUMA node: all its cores copy between buffers of their own at once.

NUMA nodes of one host are equals, and so are those of all hosts of a fleet: a memory module that is gone, or trained
to a lower rate, takes its share of channels and is seen as a node that is slower than the others. Bytes read and bytes
written are both counted; ``memmove`` of large blocks writes past the caches, so nothing else is moved. A node is
credited with the best of several bursts.
"""

import contextlib
import ctypes
import mmap
import os
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

from megascale_ops.diagnostics.check import Check, Reading, Task, UnmeasuredError
from megascale_ops.diagnostics.host.control_group import limits
from megascale_ops.diagnostics.host.numa import cpus_of, numa_nodes
from megascale_ops.diagnostics.report import CheckFinding, Figure

CHECK = Check("memory", "bandwidth of host memory", quick_s=10.0, full_s=60.0, alone=True, severity="warn")

# 64 MiB: more than a core's share of any last-level cache (32 MiB a complex, 768 MiB of 96 cores with V-Cache).
_BUFFER_BYTES = 64 << 20
_LEAST_BUFFER_BYTES = 16 << 20
# 64: two threads a channel fill all channels of today's sockets; more only wait.
_MOST_THREADS = 64
# An eighth of what is free: a job that runs beside must not be killed for memory.
_SHARE_OF_FREE = 8
_QUICK, _FULL = 7, 40
# 4 bursts of a tenth of a second or more, a quarter apart: what other programs of the host do to its memory for a
# moment is over in one of them, what holds a node back is there in all. In one burst healthy nodes differed by a fifth.
_BURSTS, _APART_S, _BURST_S = 4, 0.25, 0.1
_BARRIER_S = 30.0
# 80 %: as in the check of cores.
ENOUGH_SHARE = 0.8


def measure(task: Task) -> Reading:
    """Copy within each NUMA node."""
    allowed = os.sched_getaffinity(0)
    nodes = {node: sorted(allowed & cpus) for node, cpus in numa_nodes().items()} or {0: sorted(allowed)}
    figures = []
    for node, cpus in nodes.items():
        chosen = _spread_over(cpus, _MOST_THREADS)
        if not chosen:
            continue
        size = min(_BUFFER_BYTES, _free_bytes() // _SHARE_OF_FREE // (2 * len(chosen))) // mmap.PAGESIZE * mmap.PAGESIZE
        if size < _LEAST_BUFFER_BYTES:
            raise UnmeasuredError(f"too little free memory to measure its bandwidth ({_free_bytes() >> 20} MiB)")
        samples, share = _best_of(chosen, size, thorough=task.thorough)
        # Where other work took part of the cores the rate is theirs as well: it is told, and compared with none.
        peers = f"{len(chosen)} threads" if share >= ENOUGH_SHARE else ""
        figures.append(Figure("memory_copy", f"NUMA node {node}", median(samples), tuple(samples), peers))
        figures.append(Figure("cpu_share", f"NUMA node {node}", share))
    return Reading(tuple(figures))


def _spread_over(cpus: list[int], most: int) -> list[int]:
    """Return at most so many of these processors, one hardware thread of each core before the second of any."""
    first = [cpu for cpu in cpus if cpu == min(cpus_of(_siblings(cpu)) & set(cpus) or {cpu})]
    ranked = first[:most]
    return ranked[:: max(1, -(-len(ranked) // most))]


def _siblings(cpu: int) -> str:
    with contextlib.suppress(OSError):
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        return path.read_text(encoding="ascii").strip()
    return str(cpu)


def _free_bytes() -> int:
    """Return what is free on the host, or in the control group where that is less."""
    try:
        free = int(psutil.virtual_memory().available)
    except (KeyError, ValueError) as error:  # a container whose /proc/meminfo is empty or another one's
        raise UnmeasuredError("the kernel does not tell here how much memory is free") from error
    left = limits().memory_free
    return free if left is None else min(free, int(left))


def _best_of(cpus: list[int], size: int, *, thorough: bool) -> tuple[list[float], float]:
    """Return what ``_copy`` returns, of the best of several bursts: those that got their cores before all others."""
    found = []
    for burst in range(_BURSTS):
        if burst:
            time.sleep(_APART_S)
        found.append(_copy(cpus, size, _FULL if thorough else _QUICK))
    return max(found, key=lambda one: (one[1] >= ENOUGH_SHARE, median(one[0])))


def _copy(cpus: list[int], size: int, rounds: int) -> tuple[list[float], float]:
    """Copy on these processors at once, ``rounds`` times and for ``_BURST_S``.

    Returns:
        Bytes moved per second in each round, and the least share of a core that a thread got.
    """
    marks: list[float] = []
    shares: list[float] = []
    failed: list[Exception] = []

    over = threading.Event()

    def note() -> None:  # by one thread, while all others wait: all see the same end
        marks.append(time.perf_counter())
        if len(marks) > rounds and marks[-1] - marks[0] >= _BURST_S:
            over.set()

    barrier = threading.Barrier(len(cpus), action=note, timeout=_BARRIER_S)

    def work(cpu: int) -> None:
        try:
            os.sched_setaffinity(0, {cpu})
            with mmap.mmap(-1, size) as source, mmap.mmap(-1, size) as target:
                a, b = (ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (source, target))
                ctypes.memset(a, 1, size)  # the pages are put where this processor is
                ctypes.memset(b, 2, size)
                shares.append(_copy_until(over, barrier, (b, a, size)))
        except threading.BrokenBarrierError:
            return  # another one has failed, and says why
        except Exception as error:  # noqa: BLE001  raised in the thread that waits
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(cpu,), daemon=True) for cpu in cpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    moved = 2 * size * len(cpus)
    # The first round finds clocks asleep.
    return [moved / (end_s - begin_s) for begin_s, end_s in pairwise(marks)][1:], min(shares)


def _copy_until(over: threading.Event, barrier: threading.Barrier, blocks: tuple[int, int, int]) -> float:
    """Copy again and again, in step with the other threads; return the share of its core that this one got."""
    used_s = wall_s = 0.0
    while True:
        barrier.wait()
        if over.is_set():
            return used_s / wall_s
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        ctypes.memmove(*blocks)
        used_s += time.thread_time() - began_cpu_s
        wall_s += time.perf_counter() - began_s


def judge(reading: Reading) -> list[CheckFinding]:
    """Say where other work took part; the rest its equals say: no bar holds for laptops and servers alike."""
    return [
        CheckFinding("note", of, f"{of}: other work took {1 - share:.0%} of a core, so its bandwidth is not compared")
        for of, share in reading.values("cpu_share").items()
        if share < ENOUGH_SHARE
    ]
