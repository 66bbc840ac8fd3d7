# SPDX-License-Identifier: Apache-2.0
"""What is left of a kill: the kernel's log, the limits of the control group, and what can't be known.

A process that SIGKILL ends says nothing, so its stderr is empty and its stacks are gone. What can be told: whether the
kernel's log names it (a kill for memory does), how much memory its control group may have and has had, and how many
processes were killed there for memory. Who sent a signal the kernel writes down nowhere.

Source: Documentation/admin-guide/cgroup-v2.rst (memory.max, memory.peak, memory.events), cgroup-v1/memory.rst
(memory.limit_in_bytes, memory.max_usage_in_bytes, memory.oom_control).
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from megascale_ops.schema.wording import escaped

KIND = "kernel"
CGROUP_ROOT = "/sys/fs/cgroup"
# 8 KiB a record; 8,192 records are more than any kernel's ring holds with its usual 256 KiB to 1 MiB.
_RECORD_BYTES, _MOST_RECORDS = 8192, 8192
_MOST_LINES = 4
_MOST_LINE = 300
_FILE_BYTES = 4096
# A limit that is none: 2^63 less a page in version 1.
_NO_LIMIT = 1 << 60
_OOM_KILL = re.compile(r"^oom_kill (\d{1,18})$", re.MULTILINE)
# The runner records which ranks it has ended itself; those are no kills from outside.
_SENDER = (
    "who sent the signal: Linux keeps no record of it, and the runner did not; logs of the batch system or of the "
    "container may tell"
)


class _Version(NamedTuple):
    """The files of one version of control groups."""

    root: str
    limit: str
    peak: str
    now: str
    kills: str


_VERSIONS = {
    "": _Version("", "memory.max", "memory.peak", "memory.current", "memory.events"),
    "memory": _Version(
        "memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.usage_in_bytes", "memory.oom_control"
    ),
}


def of_kill(pids: tuple[int, ...], cgroups: Mapping[str, str], kernel_log: str, cgroup_root: str = CGROUP_ROOT) -> str:
    """Return what is to be said of the end of a rank whose process was one of ``pids``, a sentence a line.

    Args:
        pids: of what the runner started and of what trained.
        cgroups: path by hierarchy, as /proc/PID/cgroup has it ("": version 2).
        kernel_log: the device; "": it is not to be read.
        cgroup_root: where control groups are mounted.
    """
    return "\n".join((_log_says(pids, kernel_log), _memory_says(cgroups, Path(cgroup_root)), _SENDER))


def _log_says(pids: tuple[int, ...], kernel_log: str) -> str:
    """Return what the kernel's log has of these processes."""
    if not kernel_log:
        return "kernel log: it is not read by this agent"
    try:
        lines = _lines_about(pids, kernel_log)
    except OSError as error:
        why = os.strerror(error.errno or 0).lower()
        return f"kernel log: {kernel_log} can't be read ({why}), so a kill for memory would not be seen there"
    if not lines:
        named = " or ".join(map(str, pids))
        return f"kernel log: no line names process {named}, so the kernel did not kill it for memory"
    return "\n".join(f"kernel log: {line}" for line in lines)


def _lines_about(pids: tuple[int, ...], kernel_log: str) -> list[str]:
    """Return the newest lines of the log that name one of the processes."""
    number = "|".join(str(pid) for pid in pids)
    names = re.compile(rf"(?:\b[Pp]rocess (?:{number})\b|\bpid[=: ](?:{number})\b|\[(?:{number})\])")
    found = []
    handle = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for _ in range(_MOST_RECORDS):
            try:
                part = os.read(handle, _RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # overwritten before it was read
            if not part:
                break
            for line in part.decode("utf-8", "replace").splitlines():
                text = line.partition(";")[2] or line
                if not line.startswith(" ") and names.search(text):
                    found.append(escaped(text)[:_MOST_LINE])
    finally:
        os.close(handle)
    return found[-_MOST_LINES:]


def _memory_says(cgroups: Mapping[str, str], root: Path) -> str:
    """Return the limit that binds first, how much was used, and how many were killed for it."""
    for hierarchy, version in _VERSIONS.items():
        path = cgroups.get(hierarchy)
        if path is None or not (group := _group(root / version.root, path, version)):
            continue
        limit, place = group
        peak = _number(place / version.peak)
        used = peak if peak is not None else _number(place / version.now)
        kills = _OOM_KILL.search(_text(place / version.kills))
        parts = ["no limit of memory" if limit is None else f"may have {_size(limit)} of memory"]
        if used is not None:
            parts.append(f"has had {_size(used)} at most" if peak is not None else f"has {_size(used)} now")
        if kills is not None:
            parts.append(f"{kills[1]} of its processes were killed for memory since it was made")
        return f"control group {path}: {', '.join(parts)}"
    return "control group: none that tells of memory is known of this rank"


def _group(mount: Path, path: str, version: _Version) -> tuple[int | None, Path] | None:
    """Return the least limit on the way up and the group that has it; the group itself where none is limited.

    Inside a container a path may lead out of what is mounted: then the mount itself is the container's group.
    """
    own = mount / path.lstrip("/") if ".." not in Path(path).parts else mount
    while not (own / version.limit).exists():
        if own == mount:
            return None
        own = own.parent
    limits = []
    for place in (own, *own.parents):
        value = _number(place / version.limit)
        if value is not None and value < _NO_LIMIT:
            limits.append((value, place))
        if place == mount:
            break
    return min(limits, key=lambda one: one[0]) if limits else (None, own)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _text(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(_FILE_BYTES)
    except OSError:
        return ""


def _size(count: int) -> str:
    for unit, size in (("TiB", 40), ("GiB", 30), ("MiB", 20)):
        if count >= 1 << size:
            return f"{count / (1 << size):.1f} {unit}"
    return f"{count} B"
