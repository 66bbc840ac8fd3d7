# SPDX-License-Identifier: Apache-2.0
"""Write a file beside its place and rename it, so that under its name stands all of it, or what was there before.

A reader of the name never sees half a file: not while it is written, not after an exception, not after a kill. A kill
leaves the unfinished file behind, as ``.NAME.<random>.partial``; no later write and no other machine that shares the
folder takes that name again.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megascale_ops.errors import UsageError

SHARED = 0o666  # less the umask: as any other file that a user writes
PRIVATE = 0o600
# 1 MiB: one system call for some ten thousand events of a trace.
_BUFFER_BYTES = 1 << 20
# A file's name has 255 bytes at most, the name beside it 26 more; a character takes 4 at most.
_MOST_KEPT = 57


@contextlib.contextmanager
def open_beside(
    path: Path, *, mode: int = SHARED, follow: bool = False, durably: bool = False, anew: bool = False
) -> Iterator[BinaryIO]:
    """Open a file that takes its place when all has gone well, and is gone otherwise; what was there stays until then.

    Args:
        path: its place; the folder must be there.
        mode: its permissions, from its first byte on.
        follow: a person has named the place: a link is followed, and what is no regular file is refused. Renamed over,
            root's ``/dev/null`` would become one. Otherwise whatever stands under the name is replaced.
        durably: it is on the disk, and so is its name, before this returns; a power cut takes neither.
        anew: what stands there already stays.

    Raises:
        FileExistsError: with ``anew``, there is something in its place.
        UsageError: with ``follow``, there is a folder, a device or a pipe in its place.
        OSError: it can't be written there; it names the place.
    """
    place = Path(os.path.realpath(path)) if follow else path
    if follow and place.exists() and not place.is_file():
        what = "a folder" if place.is_dir() else "a device or a pipe"
        raise UsageError(f"{path} is {what}: give a file, which is written beside and renamed")
    if not place.name:  # "", "." and "/" have none, and it is a folder that they name
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    beside = place.with_name(f".{place.name[:_MOST_KEPT]}.{os.urandom(8).hex()}.partial")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb", buffering=_BUFFER_BYTES) as file:
            yield file
            if durably:
                file.flush()
                os.fsync(file.fileno())
        if anew:
            os.link(beside, place)  # unlike a rename it replaces no file
            beside.unlink()
        else:
            beside.replace(place)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first error is the one to raise
            beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # a write that fails, on a full disk, does not say of what
        raise
    if durably:
        sync_folder(place.parent)


def write_whole(
    path: Path, data: bytes, *, mode: int = SHARED, follow: bool = False, durably: bool = False, anew: bool = False
) -> None:
    """Write a file of these bytes; for all else see ``open_beside``."""
    with open_beside(path, mode=mode, follow=follow, durably=durably, anew=anew) as file:
        file.write(data)


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
