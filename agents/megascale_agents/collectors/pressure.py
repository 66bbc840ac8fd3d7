# SPDX-License-Identifier: Apache-2.0
"""How much the host's processes wait for memory, storage and processors, and whom the kernel killed for memory.

``/proc/pressure/*``: the share of the last 10 s in which a process waited (kernel documentation, psi).
``/proc/vmstat``: ``oom_kill`` counts kills of the whole host, those within one control group included.
"""

import re
from pathlib import Path
from typing import NamedTuple

_RESOURCES = ("memory", "io", "cpu")
_AVG10 = re.compile(r"^some avg10=([0-9.]+)", re.MULTILINE)
_OOM_KILL = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class Pressure(NamedTuple):
    """Shares in 0..1, without those that this kernel does not tell; ``oom_kills`` is -1 where it does not count."""

    waiting: dict[str, float]  # memory, io, cpu
    oom_kills: int


def read(proc_root: str) -> dict[str, str]:
    """Return the texts of the files, by name; kernels without PSI have no such folder."""
    names = [f"pressure/{name}" for name in _RESOURCES] + ["vmstat"]
    return {name: text for name in names if (text := _text(Path(proc_root) / name))}


def parse(texts: dict[str, str]) -> Pressure:
    """Return shares and counts."""
    found = {name: _AVG10.search(texts.get(f"pressure/{name}", "")) for name in _RESOURCES}
    kills = _OOM_KILL.search(texts.get("vmstat", ""))
    return Pressure(
        {name: round(float(match[1]) / 100, 4) for name, match in found.items() if match is not None},
        int(kills[1]) if kills is not None else -1,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""  # the kernel was built or started without it (psi=0)
