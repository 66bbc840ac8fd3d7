# SPDX-License-Identifier: Apache-2.0
"""Processes in state D: they wait in the kernel for a device or a network file system, and no signal reaches them.

Each process's ``stat`` is read (11 us each: 10 ms for a thousand). ``procs_blocked`` of ``/proc/stat`` would be one
line, but counts only waits for block devices: a process that hangs in the GPU's driver or in NFS is not among them.
One sample proves nothing, since every write to a disk passes through D; a process that was in D in the sample before
as well, with the same start time, hangs.
"""

import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megascale_agents.collectors.collector import Pace, Place, Sample
from megascale_agents.collectors.short_files import beginning
from megascale_ops.schema.health import HardwareFinding

# 1 KiB: a stat line has some 300 bytes.
_STAT_BYTES = 1024
# Every 15 s, since all of /proc is walked through; at most 0.1 % of a core.
PACE = Pace(15.0, 15.0, 0.001)
_MOST_NAMED = 4


class Blocked(NamedTuple):
    """Processes in state D. Keys are (pid, start time), values names."""

    now: dict[tuple[int, int], str]
    still: dict[tuple[int, int], str]  # those that were so at the look before as well


def read(place: Place) -> dict[int, bytes]:
    """Return ``stat`` of every process that is in state D, by pid.

    Raises:
        OSError: there is no such folder.
    """
    found = {}
    for name in os.listdir(place.proc_root):  # noqa: PTH208  a thousand Path objects would cost as much as the reading
        if not name.isdigit():
            continue
        try:
            raw = beginning(f"{place.proc_root}/{name}/stat", _STAT_BYTES)
        except OSError:
            continue  # ended since
        if raw[raw.rfind(b")") + 2 : raw.rfind(b")") + 3] == b"D":
            found[int(name)] = raw
    return found


def parse(raw: Mapping[int, bytes], before: Blocked | None) -> Blocked:
    """Return the processes in state D, and those that were in the sample before, too."""
    now = {}
    for pid, stat in raw.items():
        name = stat[stat.find(b"(") + 1 : stat.rfind(b")")].decode("utf-8", "replace")
        fields = stat[stat.rfind(b")") + 2 :].split()
        now[pid, int(fields[19])] = name
    known = before.now if before is not None else {}
    return Blocked(now, {key: name for key, name in now.items() if key in known})


def judge(blocked: Blocked, passed_s: float) -> list[HardwareFinding]:
    """Return a finding on the processes that hang in the kernel."""
    if not blocked.still:
        return []
    named = [f"{name} ({pid})" for (pid, _), name in sorted(blocked.still.items())]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    text = f"{', '.join(named[:_MOST_NAMED])}{more} in state D at two looks {passed_s:.0f} s apart"
    return [HardwareFinding("blocked", text, "blocked", pids=tuple(pid for pid, _ in sorted(blocked.still))[:16])]


def samples(blocked: Blocked) -> Iterator[Sample]:
    """Yield how many there are."""
    yield "megascale_host_blocked_processes", (), float(len(blocked.now))
