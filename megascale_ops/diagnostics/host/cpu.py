# SPDX-License-Identifier: Apache-2.0
"""How fast each core is: SHA-256 on it, judged against the median of the other cores.

A core that is held back (heat, a stuck clock, a neighbour on its sibling thread) slows every rank whose threads come
to run there. SHA-256 of a buffer that fits the second-level cache is bound by the core alone, needs no library and
is the same work each time. Rates are of CPU time, so that another program on the core does not make it look slow; the
share of the time that the measurement got is reported beside it.

Cores are measured in turn, several rounds of all of them, and each is credited with its best: what disturbs for a
moment disturbs no core in all rounds. Those that seem slow all the same are measured again, for longer: on a virtual
machine the host takes a core away for milliseconds and counts that as the program's time.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from megascale_ops.diagnostics.check import Check, Reading, Task
from megascale_ops.diagnostics.report import CheckFinding, Figure

CHECK = Check("cpu", "processor cores", quick_s=12.0, full_s=60.0, alone=True, severity="warn")

_BLOCK = bytes(range(256)) * 1024  # 256 KiB
_ROUNDS = 5
# 2 s for all cores in all rounds: 192 cores get 2 ms each time, some ten blocks.
_QUICK_S, _FULL_S = 2.0, 20.0
_LONGEST_SAMPLE_S = 0.02
# 3 ms: a core that sleeps takes one to two to come to its clock.
_WARM_S = 0.003
# 4 %: half of what a core is named for. 32 cores, 10 times 20 ms: 7 s at most, and nearly always none.
_SEEMS_SLOW = 0.04
_MORE_ROUNDS = 10
_MOST_AGAIN = 32
# 80 %: less than that, and something else computes here.
_ENOUGH_SHARE = 0.8


def measure(task: Task) -> Reading:
    """Hash on each core that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    sample_s = min(_LONGEST_SAMPLE_S, (_FULL_S if task.thorough else _QUICK_S) / (len(cores) * _ROUNDS))
    rates: dict[int, list[float]] = {core: [] for core in cores}
    shares: dict[int, list[float]] = {core: [] for core in cores}

    def look(core: int, seconds: float) -> None:
        with contextlib.suppress(OSError):  # taken away meanwhile
            os.sched_setaffinity(0, {core})
            _hash_for(_WARM_S)
            rate, share = _hash_for(seconds)
            rates[core].append(rate)
            shares[core].append(share)

    for _ in range(_ROUNDS):
        for core in cores:
            look(core, sample_s)
    for _ in range(_MORE_ROUNDS):
        for core in seems_slow(rates):
            look(core, _LONGEST_SAMPLE_S)
    model = _model()
    return Reading(tuple(_figures(rates, shares, {core: f"{model}, {_top_clock(core)}" for core in cores})))


def seems_slow(rates: dict[int, list[float]]) -> list[int]:
    """Return the cores whose best is below that of most others, the slowest first."""
    best = {core: max(samples) for core, samples in rates.items() if samples}
    bar = (1 - _SEEMS_SLOW) * median(best.values()) if best else 0.0
    return sorted((core for core in best if best[core] < bar), key=lambda core: best[core])[:_MOST_AGAIN]


def _figures(rates: dict[int, list[float]], shares: dict[int, list[float]], peers: dict[int, str]) -> Iterator[Figure]:
    for core, samples in rates.items():
        if samples:
            yield Figure("cpu_hash", f"CPU {core}", max(samples), tuple(samples), peers[core])
            yield Figure("cpu_share", f"CPU {core}", median(shares[core]))


def _hash_for(seconds: float) -> tuple[float, float]:
    """Hash for so long; return bytes for each second of CPU time, and the share of the time that it was."""
    digest, blocks = hashlib.sha256(), 0
    wall_s, cpu_s = time.perf_counter(), time.thread_time()
    while time.perf_counter() - wall_s < seconds:
        digest.update(_BLOCK)
        blocks += 1
    cpu_s = max(1e-9, time.thread_time() - cpu_s)
    return blocks * len(_BLOCK) / cpu_s, min(1.0, cpu_s / (time.perf_counter() - wall_s))


def _model() -> str:
    """Return the processor's name; where the kernel tells none, the architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine


def _top_clock(core: int) -> str:
    """Return a core's highest clock: cores for speed and cores for economy are no equals."""
    with contextlib.suppress(OSError, ValueError):
        path = Path(f"/sys/devices/system/cpu/cpu{core}/cpufreq/cpuinfo_max_freq")
        return f"{int(path.read_text(encoding='ascii')) / 1e6:.1f} GHz"
    return "clock not told"


def judge(reading: Reading) -> list[CheckFinding]:
    """Say where something else computes: the figures are still good, training there would share its cores."""
    shares = reading.values("cpu_share")
    busy = sorted((one for one, share in shares.items() if share < _ENOUGH_SHARE), key=lambda one: shares[one])
    if not busy:
        return []
    text = (
        f"{len(busy)} of {len(shares)} cores are shared with other work: {busy[0]} gave the check "
        f"{shares[busy[0]]:.0%} of its time"
    )
    return [CheckFinding("note", busy[0], text, "see what runs there: top, or ps -eLo psr,pcpu,comm")]
