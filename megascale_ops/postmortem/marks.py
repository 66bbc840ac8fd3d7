# SPDX-License-Identifier: Apache-2.0
"""Whose a line is by a mark that says which process wrote it, where another line says which rank that process is.

Ray's actors print their process before each line, NCCL its host and process, and either prints a rank in a few of them
at most. A process of which two ranks are told, and a rank of which two processes are (places in groups), tells nothing.

Containers' composers and shippers put a name and a number before each line: names that differ by a number that counts
from 0 are taken for ranks, where each line has one.

Pure: lines in, ranks out.
"""

import re
from collections.abc import Sequence

from megascale_ops.diagnosis.exits.prefixes import COLOURS

# Ray's actor: "(RayTrainWorker pid=4121, ip=10.0.3.7) "; without an address it runs beside the driver.
RAYS = re.compile(
    r"^(?:\x1b\[[\d;]*m)?\(\w{1,60} pid=(?P<pid>\d{1,8})(?:, ip=(?P<ip>\S{1,60}?))?\)(?:\x1b\[[\d;]*m)? ?"
)
# NCCL: "host:process:thread [device] NCCL "; init.cc tells the rank.
_NCCLS = re.compile(r"^(?P<ip>\S{1,80}):(?P<pid>\d{1,8}):\d{1,8} \[\d{1,3}\] (?=.{0,80}\bNCCL )")
_OF_NCCL = re.compile(r"\bNCCL INFO .{0,200}?\brank (\d{1,6}) nranks \d{1,6}\b")
# "worker-2  | text"
_BARRED = re.compile(r"^(?P<name>[A-Za-z][\w.-]{0,60}?)[-_.]?(?P<number>\d{1,6}) {0,20}\| ?")
# What a launcher or a composer says itself, of no rank.
LAUNCHERS = re.compile(
    r"^\s*$|^(?:srun|slurmstepd|sbatch|salloc|mpirun|mpiexec|prterun|prun|pdsh)\b[^:\n]{0,80}: "
    r"|^\S{1,80} exited with code \d{1,3}$|^Attaching to "
)
# 0.9 of all lines: a name and a bar before a few are no composer's.
MOST_LINES = 0.9

_Tagged = list[tuple[int, str]]


def with_rays(lines: Sequence[str], tagged: Sequence[tuple[int, str]]) -> _Tagged:
    """Give lines of Ray's actors that have no tag to the rank that tags in other lines of the same actor tell."""
    homes: dict[tuple[str, str], set[int]] = {}
    found = [RAYS.match(line) for line in lines]
    for one, (rank, _) in zip(found, tagged, strict=True):
        if one is not None and rank >= 0:
            homes.setdefault((one["ip"] or "", one["pid"]), set()).add(rank)
    known = _only(homes)
    return [
        (known[key], line[one.end() :])
        if rank < 0 and one is not None and (key := (one["ip"] or "", one["pid"])) in known
        else (rank, bare)
        for line, one, (rank, bare) in zip(lines, found, tagged, strict=True)
    ]


def of_nccl(lines: Sequence[str], tagged: Sequence[tuple[int, str]]) -> _Tagged:
    """Give NCCL's lines that have no tag to the rank that NCCL says the process is."""
    homes: dict[tuple[str, str], set[int]] = {}
    found = [_NCCLS.match(line) if ":" in line[:90] else None for line in lines]
    for line, one in zip(lines, found, strict=True):
        if one is not None and (told := _OF_NCCL.search(line)) is not None:
            homes.setdefault((one["ip"], one["pid"]), set()).add(int(told[1]))
    known = _only(homes)
    return [
        (known[key], bare)
        if rank < 0 and one is not None and (key := (one["ip"], one["pid"])) in known
        else (rank, bare)
        for one, (rank, bare) in zip(found, tagged, strict=True)
    ]


def of_containers(lines: Sequence[str]) -> _Tagged:
    """Return lines by the numbers of containers of one name; nothing where a line has no bar, or no number is 0."""
    plain = [COLOURS.sub("", line) if "\x1b" in line else line for line in lines]
    found = [_BARRED.match(line) for line in plain]
    names = {one["name"] for one in found if one is not None}
    numbers = {int(one["number"]) for one in found if one is not None}
    own = sum(LAUNCHERS.match(line) is None for line in plain)
    is_all = sum(one is not None for one in found) >= MOST_LINES * own
    if len(names) != 1 or len(numbers) < 2 or 0 not in numbers or not is_all:
        return []
    return [
        (int(one["number"]), line[one.end() :]) if one is not None else (-1, line)
        for one, line in zip(found, plain, strict=True)
    ]


def _only(homes: dict[tuple[str, str], set[int]]) -> dict[tuple[str, str], int]:
    """Return the rank of each process of which one is told, where it is no other's."""
    single = {key: next(iter(ranks)) for key, ranks in homes.items() if len(ranks) == 1}
    owners: dict[int, int] = {}
    for rank in single.values():
        owners[rank] = owners.get(rank, 0) + 1
    return {key: rank for key, rank in single.items() if owners[rank] == 1}
