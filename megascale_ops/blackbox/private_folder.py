# SPDX-License-Identifier: Apache-2.0
"""A folder that is this user's alone, and files in it that no other user can put in the way.

Black boxes lie below folders in which every user of a node may make names (/dev/shm). So a folder is opened once, by a
path whose last part must not be a link; the owner of the open folder is checked; and what is made in it is made
relative to the open folder. Swapping folder and link in between changes a name, and no longer what we write into.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from megascale_ops.blackbox import BoxError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotOursError(BoxError):
    """A folder that is not this user's alone; the message names its owner."""


@contextlib.contextmanager
def private_folder(path: Path, *, strict: bool = False) -> Iterator[int]:
    """Open a folder of ours, made when missing (with its parents, mode 0700); the value is its descriptor.

    Args:
        path: The folder.
        strict: Refuse one that others could write into so far, too: what is in it may be theirs. Otherwise it is
            closed to them from now on.

    Raises:
        NotOursError: it is a link, no folder, or another user's.
        OSError: it can't be made.
    """
    handle = open_private(path, strict=strict)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def public_folder(path: Path) -> Iterator[int]:
    """Open a folder of ours that every user may read (mode 0755), made when missing; the value is its descriptor.

    Raises:
        NotOursError: it is a link, no folder, or another user's.
        OSError: it can't be made.
    """
    handle = open_private(path, strict=True, mode=0o755)
    try:
        yield handle
    finally:
        os.close(handle)


def open_private(path: Path, *, strict: bool = False, mode: int = 0o700) -> int:
    """Open a folder as :func:`private_folder` does; the caller closes it. ``mode`` is the most that others may do."""
    for parent in reversed([parent for parent in path.parents if not parent.exists()]):
        parent.mkdir(mode=0o700, exist_ok=True)
    above = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path.name, 0o700, dir_fd=above)
        handle = _open(path, above)
    finally:
        os.close(above)
    try:
        _close_to_others(path, handle, mode, strict=strict)
    except BaseException:
        os.close(handle)
        raise
    return handle


def who_may_move(path: Path) -> str:
    """Return a sentence on other users that may replace ``path`` by another folder, "" if none may.

    Folders that a group may write into are let pass: a group of one's own is usual.
    """
    above = path.parent.stat()
    if above.st_uid not in (0, os.geteuid(), _hidden_root()):
        return f"user {above.st_uid}, to whom {path.parent} belongs, may move it"
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        return f"everybody may move it, since {path.parent} has no sticky bit"
    return ""


def _hidden_root() -> int:
    """Return the uid as which root's files appear, -1 if as root's: containers without root (Apptainer) map it."""
    try:
        inside = Path("/proc/self/uid_map").read_text(encoding="ascii").split()[:3]
        shown = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1
    return shown if inside != ["0", "0", "4294967295"] else -1


def _open(path: Path, above: int) -> int:
    try:
        return os.open(path.name, _FOLDER, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise NotOursError(f"{path} is a link or no folder") from error
        if error.errno == errno.EACCES:
            raise NotOursError(f"{path} is not ours to enter") from error
        raise


def _close_to_others(path: Path, handle: int, mode: int, *, strict: bool) -> None:
    """Refuse a folder of another user; give ours the rights that it shall have."""
    found = os.fstat(handle)
    if found.st_uid != os.geteuid():
        raise NotOursError(f"{path} belongs to user {found.st_uid}, not to us (user {os.geteuid()})")
    if strict and found.st_mode & _OTHERS_WRITE:
        raise NotOursError(f"others could write into {path} (mode {stat.S_IMODE(found.st_mode):04o})")
    if stat.S_IMODE(found.st_mode) != mode:
        os.fchmod(handle, mode)


def make_file(folder: int, name: str) -> int:
    """Make a file of mode 0600 in an open folder, in place of what has this name; return its descriptor.

    Raises:
        OSError: it can't be made.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o600, dir_fd=folder)


def write_file(folder: int, name: str, data: bytes, mode: int = 0o600) -> None:
    """Write a file in an open folder so that it is whole or not there.

    Raises:
        OSError: it can't be written.
    """
    beside = f"{name}.new"
    with os.fdopen(make_file(folder, beside), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)
    os.replace(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
