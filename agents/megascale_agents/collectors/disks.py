# SPDX-License-Identifier: Apache-2.0
"""Space and inodes left where a training run writes: the run folder, the root, shared memory.

``statvfs`` of a network file system whose server is gone never returns, so this runs in a thread of its own: that it
does not answer is itself what a person wants to know. Run folders with millions of small files run out of inodes
first, and the error message is the same as for bytes.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple


class Space(NamedTuple):
    """What is left of one file system, as shares of all; ``inodes`` is -1 where it has no fixed number of them."""

    kind: str  # run, root, shm
    path: str
    bytes_free: float
    inodes_free: float


def read(folders: Mapping[str, str]) -> dict[str, tuple[str, os.statvfs_result]]:
    """Return path and figures by kind; folders that are not there (yet) are left out.

    Raises:
        OSError: a file system answers with an error.
    """
    found = {}
    for kind, path in folders.items():
        try:
            found[kind] = (path, os.statvfs(path))
        except (FileNotFoundError, NotADirectoryError):
            continue
    return found


def parse(raw: Mapping[str, tuple[str, os.statvfs_result]]) -> tuple[Space, ...]:
    """Return shares; for an ordinary user, as who training runs."""
    return tuple(
        Space(
            kind,
            path,
            round(space.f_bavail / space.f_blocks, 4) if space.f_blocks else 0.0,
            round(space.f_favail / space.f_files, 4) if space.f_files else -1.0,
        )
        for kind, (path, space) in raw.items()
    )
