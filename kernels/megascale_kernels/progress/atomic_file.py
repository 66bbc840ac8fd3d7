# SPDX-License-Identifier: Apache-2.0
"""Write a file where a user asked for it: whole or not at all, and never in the place of a device.

A file that is written beside its name and renamed is never seen half. But a rename takes the place of whatever has the
name: as root, as in most containers, `-o /dev/null` would leave a plain file where every program of the machine expects
the device. So what is there and is no plain file is written into, and a link is followed first.
"""

import os
from pathlib import Path


def is_plain(path: Path) -> bool:
    """Whether a path is, or would become, a plain file."""
    return not path.exists() or path.is_file()


def put(path: Path, data: bytes, *, durably: bool = False) -> None:
    """Write a file beside its name, then in its place; a pipe or a device gets the bytes as they are.

    Args:
        path: where a user wants it.
        data: all of it.
        durably: its bytes are on the disk before it takes its place, so that no power cut leaves it empty.

    Raises:
        ValueError: the path names no file.
        OSError: it cannot be written.
    """
    if not path.name:
        raise ValueError(f"{str(path)!r} names no file to write")
    if not is_plain(path):
        path.write_bytes(data)
        return
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(data)
            if durably:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
