# SPDX-License-Identifier: Apache-2.0
"""Open, write and remove the files of a job as its owner would, and only what is what it should be.

Every file that a user can put in our way goes through here: round files, black boxes, logs, stacks, profiles, evidence.
What is opened is looked at before it is opened for reading (``O_PATH``): a pipe would wait for a writer, a device does
things when it is opened, a file of /proc depends on the reader and not on its owner. Two kinds are distinguished:

- **in the job's folder** everything is made by one user in one place: no link is followed, and the file is the owner's.
- **elsewhere** (logs, the run folder) users lay their paths as they like: links are followed as far as the owner may
  go, but for those of /proc that lead to what other processes have open ("magic" links).

The caller bounds how much is read. Source: openat2(2), symlink(7).
"""

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from megascale_agents.ownership.rights import Owner, libc, taken

_SYS_OPENAT2 = 437  # the same on every architecture
_NO_MAGIC_LINKS = 0x02  # RESOLVE_NO_MAGICLINKS
_AT_FDCWD = -100
# The errors of kernels before 5.6, and of system call filters without it.
_NO_OPENAT2 = (errno.ENOSYS, errno.EPERM)


class NotAFileError(OSError):
    """Something else lies there: a pipe, a device, a link, a file of /proc."""


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def opened(path: str | Path, owner: Owner, *, is_private: bool = True) -> int:
    """Open a file for reading and return its handle.

    Args:
        path: Where it is.
        owner: Whose rights are used.
        is_private: It lies in the job's folder: no link, and the owner's. Else links are followed.

    Raises:
        NotAFileError: there is no regular file.
        OSError: it is not there, not the owner's, or not readable for the owner.
    """
    with taken(owner):
        place = _spot(str(path), owner, follow=not is_private)
        try:
            found = os.fstat(place)
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            if not stat.S_ISREG(found.st_mode) or found.st_dev == os.stat("/proc").st_dev:  # noqa: PTH116  no Path for one number
                raise NotAFileError(errno.EINVAL, "is no regular file", str(path))
            if is_private and found.st_uid != owner.uid:
                raise PermissionError(errno.EPERM, f"belongs to user {found.st_uid}, not to {owner.uid}", str(path))
            try:
                return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError as error:  # with the path as given
                raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(place)


def read_small(path: str | Path, owner: Owner, most_bytes: int) -> bytes:
    """Return what a small file of the job's folder holds.

    Raises:
        OSError: as ``opened``, or it is larger than what was agreed upon.
    """
    handle = opened(path, owner)
    try:
        data = os.pread(handle, most_bytes + 1, 0)
    finally:
        os.close(handle)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"holds more than {most_bytes} bytes", str(path))
    return data


@contextlib.contextmanager
def folder(path: str | Path, owner: Owner) -> Iterator[int]:
    """Hold a folder open, and its owner's rights for what is read below it; links that lead there are followed.

    Raises:
        NotAFileError: it is one of /proc.
        OSError: it is not there, no folder, or not readable for the owner.
    """
    with taken(owner):
        place = _spot(str(path), owner, follow=True)
        try:
            if os.fstat(place).st_dev == os.stat("/proc").st_dev:  # noqa: PTH116  no Path for one number
                raise NotAFileError(errno.EINVAL, "is no folder of a user", str(path))
            try:
                handle = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)
            except OSError as error:  # with the path as given
                raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(place)
        try:
            yield handle
        finally:
            os.close(handle)


def inode_of(path: str, owner: Owner) -> int:
    """Return the number of the file that has this name now, links followed.

    Raises:
        OSError: it is not there, or he may not look.
    """
    with taken(owner):
        return os.stat(path).st_ino  # noqa: PTH116  half the cost of a Path, for 64 ranks a second


def listed(folder: str, owner: Owner, suffix: str) -> list[tuple[str, int]]:
    """Return names and numbers of what lies in the job's folder and ends so.

    Raises:
        OSError: it can't be listed.
    """
    with taken(owner), os.scandir(folder) as entries:
        return [(entry.name, entry.inode()) for entry in entries if entry.name.endswith(suffix)]


def remove(path: str | Path, owner: Owner) -> None:
    """Remove a file, if it is there and its owner may."""
    with contextlib.suppress(OSError), taken(owner):
        os.unlink(path)  # noqa: PTH108  takes either


def write_whole(base: str | Path, names: tuple[str, ...], name: str, data: bytes, owner: Owner) -> Path:
    """Write a file so that it is either whole or not there; return its path.

    Args:
        base: A folder; links are followed. Made where missing if there are names, for its owner only.
        names: Folders below it, one in the other; made where missing, for their owner only, never a link.
        name: The file's.
        data: Its bytes.
        owner: Whose it will be.

    Raises:
        OSError: a link stands in the way, the disk is full, no rights, and so on.
    """
    with taken(owner), _folder(base, names, owner) as folder:
        partial = f".{name}.{os.urandom(4).hex()}.partial"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(partial, flags, 0o600, dir_fd=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial, dir_fd=folder)
            raise
    return Path(base, *names, name)


@contextlib.contextmanager
def _folder(base: str | Path, names: tuple[str, ...], owner: Owner) -> Iterator[int]:
    """Hold a folder below ``base`` open, making what is missing; with the rights that the thread has taken."""
    if names:
        Path(base).mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        place = _spot(str(base), owner, follow=True)
        stack.callback(os.close, place)
        for name in names:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=place)
            flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            place = os.open(name, flags, dir_fd=place)
            stack.callback(os.close, place)
        yield place


def _spot(path: str, owner: Owner, *, follow: bool) -> int:
    """Return a handle on the place that a path names, without opening what is there.

    Raises:
        OSError: there is none, or the way there is not ours.
    """
    if not follow:
        return os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    if owner.uid == os.geteuid():  # paths of the agent's own user need no check
        return os.open(path, os.O_PATH | os.O_CLOEXEC)
    how = _How(os.O_PATH | os.O_CLOEXEC, 0, _NO_MAGIC_LINKS)
    size = ctypes.c_size_t(ctypes.sizeof(how))
    number, here = ctypes.c_long(_SYS_OPENAT2), ctypes.c_long(_AT_FDCWD)
    place = libc().syscall(number, here, os.fsencode(path), ctypes.byref(how), size)
    if place >= 0:
        return int(place)
    error = ctypes.get_errno()
    if error in _NO_OPENAT2:
        return _without_links(path)
    raise OSError(error, os.strerror(error), path)


def _without_links(path: str) -> int:
    """Return a handle on a path's place where the kernel can't refuse magic links: then no link is followed."""
    place = os.open("/" if path.startswith("/") else ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in Path(path).parts:
        if part in ("/", "."):
            continue
        try:
            after = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
        finally:
            os.close(place)
        place = after
        if stat.S_ISLNK(os.fstat(place).st_mode):
            os.close(place)
            raise OSError(errno.ELOOP, "a link is on the way, which a kernel without openat2 can't follow safely", path)
    return place
