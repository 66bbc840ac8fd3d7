# SPDX-License-Identifier: Apache-2.0
"""How much the host's processes wait for memory, storage and processors, and what the kernel killed for memory.

``/proc/pressure/*``: the share of the last 10 s in which a process waited (kernel documentation, psi).
``/proc/vmstat``: ``oom_kill`` counts kills of the whole host, those within one control group included.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megascale_agents.collectors.collector import NotHereError, Pace, Place, Sample
from megascale_ops.schema.health import HardwareFinding

_RESOURCES = ("memory", "io", "cpu")
_AVG10 = re.compile(r"^some avg10=([0-9.]+)", re.MULTILINE)
_OOM_KILL = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


# Every 5 s: the kernel averages over 10 s.
PACE = Pace(5.0, 5.0)
# A fifth of the time waiting for memory: reclaim has begun to take part in every step.
MEMORY_PRESSURE = 0.2


class Pressure(NamedTuple):
    """Shares in 0..1, without those that this kernel lacks; ``oom_kills`` is -1 where it does not count."""

    waiting: dict[str, float]  # memory, io, cpu
    oom_kills: int


def read(place: Place) -> dict[str, str]:
    """Return the texts of the files, by name; kernels without PSI have no such folder.

    Raises:
        NotHereError: there is none of them.
    """
    names = [f"pressure/{name}" for name in _RESOURCES] + ["vmstat"]
    found = {name: text for name in names if (text := _text(Path(place.proc_root) / name))}
    if not found:
        raise NotHereError("this kernel tells nothing of pressure")
    return found


def parse(texts: dict[str, str], before: Pressure | None = None) -> Pressure:
    """Return shares and counts; the kernel has averaged already."""
    del before
    found = {name: _AVG10.search(texts.get(f"pressure/{name}", "")) for name in _RESOURCES}
    kills = _OOM_KILL.search(texts.get("vmstat", ""))
    return Pressure(
        {name: round(float(match[1]) / 100, 4) for name, match in found.items() if match is not None},
        int(kills[1]) if kills is not None else -1,
    )


def judge(pressure: Pressure, passed_s: float) -> list[HardwareFinding]:
    """Return whether the host runs out of memory."""
    del passed_s
    share = pressure.waiting.get("memory", 0.0)
    if share < MEMORY_PRESSURE:
        return []
    text = f"processes of this host waited for memory in {share:.0%} of the last 10 s"
    return [HardwareFinding("memory_pressure", text, "pressure")]


def samples(pressure: Pressure) -> Iterator[Sample]:
    """Yield shares and kills."""
    for resource, share in pressure.waiting.items():
        yield f"megascale_host_{resource}_pressure_ratio", (), share
    if pressure.oom_kills >= 0:
        yield "megascale_host_oom_kills_total", (), float(pressure.oom_kills)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""  # the kernel was built or started without it (psi=0)
