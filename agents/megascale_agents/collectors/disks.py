# SPDX-License-Identifier: Apache-2.0
"""Space and inodes left where a training run writes: the run folder, the root, shared memory.

``statvfs`` of a network file system whose server is gone never returns, so this runs in a thread of its own: that it
does not answer is itself what a person wants to know. Run folders with millions of small files run out of inodes
first, and the error message is the same as for bytes.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from megascale_agents.collectors.collector import Pace, Place, Sample
from megascale_agents.ownership.rights import myself, taken
from megascale_ops.schema.health import HardwareFinding

# Every 10 s: a disk that fills at 1 GB/s is seen before its last 5 % are gone.
PACE = Pace(10.0, 10.0, 0.001)
# 5 %: a checkpoint of a large model takes more; 1 %: the next write fails.
LITTLE_LEFT = 0.05
NOTHING_LEFT = 0.01


class Space(NamedTuple):
    """What is left of one file system, as shares of all; ``inodes`` is -1 where it has no fixed number of them."""

    kind: str  # run, root, shm
    path: str
    bytes_free: float
    inodes_free: float


def read(place: Place) -> dict[str, tuple[str, os.statvfs_result]]:
    """Return path and figures by kind; folders that are not there (yet) are left out.

    Raises:
        OSError: a file system answers with an error.
    """
    folders = {"root": "/", "shm": place.box_root} | ({"run": place.run_dir} if place.run_dir else {})
    found = {}
    with taken(place.owner or myself()):
        for kind, path in folders.items():
            try:
                found[kind] = (path, os.statvfs(path))
            except (FileNotFoundError, NotADirectoryError):
                continue
    return found


def parse(
    raw: Mapping[str, tuple[str, os.statvfs_result]], before: tuple[Space, ...] | None = None
) -> tuple[Space, ...]:
    """Return the free shares of space and inodes for an ordinary user, as training runs."""
    del before
    return tuple(
        Space(
            kind,
            path,
            round(space.f_bavail / space.f_blocks, 4) if space.f_blocks else 0.0,
            round(space.f_favail / space.f_files, 4) if space.f_files else -1.0,
        )
        for kind, (path, space) in raw.items()
    )


def judge(spaces: Iterable[Space], passed_s: float) -> list[HardwareFinding]:
    """Return where there is little left to write to."""
    del passed_s
    found = []
    for space in spaces:
        for what, left in (("bytes", space.bytes_free), ("inodes", space.inodes_free)):
            if 0.0 <= left < LITTLE_LEFT:
                text = f"{left:.1%} of the {what} of {space.path} are free"
                severity = "fail" if left < NOTHING_LEFT else "warn"
                found.append(HardwareFinding(f"disk_full_{space.kind}_{what}", text, "disks", severity))
    return found


def samples(spaces: Iterable[Space]) -> Iterator[Sample]:
    """Yield shares of bytes and inodes."""
    for space in spaces:
        yield "megascale_host_disk_free_ratio", (space.kind,), space.bytes_free
        if space.inodes_free >= 0:
            yield "megascale_host_inodes_free_ratio", (space.kind,), space.inodes_free
