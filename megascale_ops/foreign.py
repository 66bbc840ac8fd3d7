# SPDX-License-Identifier: Apache-2.0
"""Read what others may have written, and never hang, drown or stumble over it.

A user that may write a folder may put anything where a file is expected: a link to ``/dev/zero`` that never ends, a
FIFO without a writer, a file of a terabyte. So a file is opened without following a link and without waiting, must be a
regular one, and is read up to a bound that the caller names. And what then stands in it may be no text at all.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What ``msgspec.json.decode`` raises at foreign bytes: its own errors, for text that is not UTF-8, and for depth."""

# 1 MB: below it the calls cost, above it nothing is gained.
_CHUNK_BYTES = 1 << 20

_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotRegularError(OSError):
    """What stands under the name is no regular file, or a larger one than may be read."""


@contextmanager
def opened(path: Path, *, follow: bool = False) -> Iterator[int]:
    """A handle to read a regular file by; closed at the end.

    Args:
        path: where it is.
        follow: take a link to one, too: where a person or a cluster has put the file, links are usual.

    Raises:
        NotRegularError: it is a link, a folder, a device, a FIFO or a socket; the message names which.
        OSError: it is not there or can't be read.
    """
    _require_regular(path.stat(follow_symlinks=follow).st_mode)  # before: opening alone makes some devices act
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        _require_regular(os.fstat(handle).st_mode)
        yield handle
    finally:
        os.close(handle)


def _require_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise NotRegularError(f"it is {kind}, not a regular file")


def read(path: Path, most_bytes: int, *, follow: bool = False, owner: int | None = None) -> bytes:
    """All of a regular file; see ``opened``.

    Args:
        path: where it is.
        most_bytes: what it may have.
        follow: as in ``opened``.
        owner: the user it must belong to; None: any.

    Raises:
        PermissionError: it belongs to another user.
        NotRegularError: it is no regular file, or has more than ``most_bytes``.
        OSError: it is not there or can't be read.
    """
    with opened(path, follow=follow) as handle:
        found = os.fstat(handle)
        if owner is not None and found.st_uid != owner:
            raise PermissionError(errno.EPERM, f"it belongs to user {found.st_uid}", str(path))
        size_bytes = found.st_size
        if size_bytes > most_bytes:
            raise NotRegularError(f"it has {size_bytes} bytes, more than the {most_bytes} that it may have")
        # One byte more than allowed: what grows while it is read is seen, and not followed.
        data = b"".join(_chunks(handle, most_bytes + 1))
    if len(data) > most_bytes:
        raise NotRegularError(f"it grew beyond the {most_bytes} bytes that it may have")
    return data


def _chunks(handle: int, most_bytes: int) -> Iterator[bytes]:
    left_bytes = most_bytes
    while left_bytes > 0 and (chunk := os.read(handle, min(_CHUNK_BYTES, left_bytes))):
        left_bytes -= len(chunk)
        yield chunk
