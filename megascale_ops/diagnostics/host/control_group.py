# SPDX-License-Identifier: Apache-2.0
"""What limits this process's control group, of either version: the tightest of its own and of those above it.

Version 2 has one tree; version 1 a tree for each controller, in a folder named for it or for several. In a container
``/proc/self/cgroup`` may name a group as the host sees it: where that is not here, the root of the tree is its own.
What the kernel gives back when memory is short (pages of files) counts as free, as in the kubelet's working set.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
_SELF = Path("/proc/self/cgroup")
# Version 1 says "no limit" with the largest number of whole pages.
_NO_LIMIT = 1 << 60


class Group(NamedTuple):
    """The names that a version's files have.

    Attributes:
        quota, period: Files with the two numbers; period "": both are in the first.
        most, used: Files with bytes.
        files: Lines of ``memory.stat`` with bytes that are given back when memory is short.
    """

    quota: str
    period: str
    most: str
    used: str
    files: tuple[str, ...]


_V2 = Group("cpu.max", "", "memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = Group(
    "cpu.cfs_quota_us", "cpu.cfs_period_us", "memory.limit_in_bytes", "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)  # fmt: skip


class Limits(NamedTuple):
    """The tightest limits; None: there is none.

    Attributes:
        cpus: Processors.
        throttled: Share of the periods in which the group was held back, over its life.
        memory: Bytes that it may use.
        memory_free: Bytes of them that are left.
    """

    cpus: float | None = None
    throttled: float | None = None
    memory: float | None = None
    memory_free: float | None = None


def limits(root: Path | None = None, own: Path | None = None) -> Limits:
    """Return what limits this process.

    Args:
        root: Where the trees are.
        own: The file that names its groups.
    """
    root, own = root or ROOT, own or _SELF
    found: list[Limits] = []
    for controller, path in _named(own):
        if controller in ("", "cpu", "memory"):
            found += _of_tree(_top(root, controller), path, _V1 if controller else _V2)
    if not found:
        found = [*_of_tree(root, "/", _V2)]
    rooms = [(one.memory, one.memory_free) for one in found if one.memory is not None and one.memory_free is not None]
    throttled = [one.throttled for one in found if one.throttled is not None]
    return Limits(
        min((one.cpus for one in found if one.cpus is not None), default=None),
        max(throttled, default=None),
        min((most for most, _ in rooms), default=None),
        min((free for _, free in rooms), default=None),
    )


def _named(own: Path) -> Iterator[tuple[str, str]]:
    """Yield controller and path of each group that this process is in; version 2 has no controller's name."""
    for line in _text(own).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        yield from ((one, path) for one in controllers.split(","))


def _top(root: Path, controller: str) -> Path:
    """Return the root of a controller's tree: version 2's may be beside those of version 1."""
    if not controller:
        unified = root / "unified"
        return unified if unified.is_dir() and not (root / "cgroup.controllers").exists() else root
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            if controller in folder.name.split(","):
                return folder
    return root / controller


def _of_tree(top: Path, path: str, names: Group) -> Iterator[Limits]:
    """Yield the limits of a group and of those above it."""
    folder = top / path.lstrip("/")
    if not folder.is_dir() or ".." in folder.parts:
        folder = top
    while True:
        yield _of(folder, names)
        if folder == top:
            return
        folder = folder.parent


def _of(folder: Path, names: Group) -> Limits:
    quota, period = _text(folder / names.quota), _text(folder / names.period) if names.period else ""
    if not names.period:
        quota, _, period = quota.partition(" ")
    cpus = int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None
    cpu_stat = _table(folder / "cpu.stat")
    periods = cpu_stat.get("nr_periods", 0)
    throttled = cpu_stat.get("nr_throttled", 0) / periods if periods else None
    most, used = _text(folder / names.most), _text(folder / names.used)
    if not (most.isdigit() and used.isdigit() and int(most) < _NO_LIMIT):
        return Limits(cpus, throttled)
    stat = _table(folder / "memory.stat")
    held = int(used) - sum(stat.get(name, 0) for name in names.files)
    return Limits(cpus, throttled, float(most), float(int(most) - max(0, held)))


def _table(path: Path) -> dict[str, int]:
    """Return a file of names and numbers."""
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""
