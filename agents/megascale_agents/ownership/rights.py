# SPDX-License-Identifier: Apache-2.0
"""Act with the rights of a job's owner, for as long as one piece of work takes.

An agent that runs as root looks into folders that users own, and all that it finds there is a user's word: a link
where a log should be, a folder that leads elsewhere. So what is opened, made or renamed for a job is opened, made and
renamed by its owner. Linux keeps the rights to files (fsuid, fsgid, groups, capabilities) for each thread apart, as
file servers need it: ``taken`` changes those of the calling thread alone, and the kernel does the judging. Nothing that
was checked can be another thing a moment later, and no file ever has to be given away by chown.

The thread's real and effective user stay root's: a user may neither signal nor trace nor slow down the agent while it
acts for him. All capabilities are put down, not only those over files: CAP_SYS_PTRACE would still open /proc.

An agent that is not root is bound by its own rights already. It acts for its own user's jobs and for no others.

Source: credentials(7), setfsuid(2), capabilities(7), "Effect of user ID changes on capabilities".
"""

import contextlib
import ctypes
import errno
import os
import platform
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

# The group `nobody`, for a user without known groups.
NO_GROUP = 65534
# The C library's setgroups changes all threads; the system call itself only the one that makes it.
_SYS_SETGROUPS = {"x86_64": 116, "aarch64": 159, "riscv64": 159, "ppc64le": 81}
_ASK = 0xFFFFFFFF  # no such user: setfsuid then changes nothing and returns the current one
_CAPABILITIES_V3 = 0x20080522
_FUSE = 0x65735546  # statfs(2): FUSE_SUPER_MAGIC
_STATFS_BYTES = 512  # struct statfs has 120; its first word is the kind


class Owner(NamedTuple):
    """A user with the groups that his processes have."""

    uid: int
    gid: int = NO_GROUP
    groups: tuple[int, ...] = ()


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
        ("effective_high", ctypes.c_uint32),
        ("permitted_high", ctypes.c_uint32),
        ("inheritable_high", ctypes.c_uint32),
    )


@cache
def libc() -> ctypes.CDLL:
    """Return the C library, for what Python has no name for."""
    found = ctypes.CDLL(None, use_errno=True)
    for name in ("setfsuid", "setfsgid"):
        getattr(found, name).argtypes, getattr(found, name).restype = (ctypes.c_uint32,), ctypes.c_uint32
    return found


def myself() -> Owner:
    """Return this process's user, group and supplementary groups."""
    return Owner(os.geteuid(), os.getegid(), tuple(os.getgroups()))


def uid_of(folder: str) -> int:
    """Return the uid of a folder's owner: of the folder itself, not of what a link leads to.

    Raises:
        PermissionError: we may not act for the owner, or the owner can't be trusted.
        OSError: it is not there, or no folder.
    """
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        uid = os.fstat(handle).st_uid
        if os.geteuid() == 0 and _kind_of(handle) == _FUSE:  # the user who mounted it sets each file's owner
            raise PermissionError(errno.EPERM, "lies on a file system of a user's own (FUSE)", folder)
    finally:
        os.close(handle)
    if os.geteuid() not in (0, uid):
        raise PermissionError(errno.EPERM, f"belongs to user {uid}, and the agent runs as user {os.geteuid()}", folder)
    return uid


def _kind_of(handle: int) -> int:
    """Return the type of the file system of an open file (statfs f_type); 0 when it is not known."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if libc().fstatfs(handle, found) != 0:
        return 0
    return ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF


def owner_with(uid: int, pids: Iterable[int]) -> Owner:
    """Return a user with the groups of the first of these processes that is wholly the user's.

    Without one there are no groups: files that only a group may read stay closed, the user's own do not.
    """
    if uid == os.geteuid():
        return myself()
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, KeyError):
            found = _credentials(Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace"))
            # All four of one user: the groups of a process that has changed its user are not the user's.
            if set(found["Uid"]) == {uid}:
                return Owner(uid, found["Gid"][0], tuple(found["Groups"]))
    return Owner(uid)


def _credentials(status: str) -> dict[str, list[int]]:
    lines = (line.partition(":") for line in status.splitlines())
    return {name: [int(word) for word in rest.split()] for name, _, rest in lines if name in ("Uid", "Gid", "Groups")}


@contextlib.contextmanager
def taken(owner: Owner) -> Iterator[None]:
    """Let this thread use files with the owner's rights and no others. Never await inside: a thread has many tasks.

    Raises:
        PermissionError: we can't take his rights, so nothing may be done for him.
    """
    me = os.geteuid()
    if owner.uid == me:
        yield
        return
    if me != 0:
        raise PermissionError(errno.EPERM, f"user {me} can't act for user {owner.uid}")
    groups, held = os.getgroups(), _capabilities()
    try:
        _change(
            owner, _Capabilities(0, held.permitted, held.inheritable, 0, held.permitted_high, held.inheritable_high)
        )
        yield
    finally:
        _give_back(groups, held)


def _change(owner: Owner, without: _Capabilities) -> None:
    """Become the owner as far as files go.

    Raises:
        PermissionError: the kernel does not allow it (a container without CAP_SETUID and CAP_SETGID).
    """
    _set_groups(owner.groups)
    libc().setfsgid(owner.gid)
    libc().setfsuid(owner.uid)
    if (libc().setfsuid(_ASK), libc().setfsgid(_ASK)) != (owner.uid, owner.gid):
        raise PermissionError(errno.EPERM, f"the kernel does not let us act for user {owner.uid}")
    _set_capabilities(without)


def _give_back(groups: Iterable[int], held: _Capabilities) -> None:
    """Restore our own identity. A thread that keeps half of another's must not go on, and none has ever had to."""
    try:
        libc().setfsuid(os.geteuid())
        _set_capabilities(held)
        libc().setfsgid(os.getegid())
        if tuple(os.getgroups()) != tuple(groups):
            _set_groups(groups)
        is_back = (libc().setfsuid(_ASK), libc().setfsgid(_ASK)) == (os.geteuid(), os.getegid())
    except PermissionError:
        is_back = False
    if not is_back:
        os.abort()


def _set_groups(groups: Iterable[int]) -> None:
    wanted = list(groups)
    number = _SYS_SETGROUPS.get(platform.machine())
    if number is None:
        raise PermissionError(errno.ENOSYS, f"on {platform.machine()} no thread can act for another user")
    array = (ctypes.c_uint32 * max(1, len(wanted)))(*wanted)
    if libc().syscall(ctypes.c_long(number), ctypes.c_long(len(wanted)), array) != 0:
        raise PermissionError(ctypes.get_errno(), "this thread's groups can't be set (CAP_SETGID)")


def _capabilities() -> _Capabilities:
    found = _Capabilities()
    if libc().capget(ctypes.byref(_Header(_CAPABILITIES_V3, 0)), ctypes.byref(found)) != 0:
        raise PermissionError(ctypes.get_errno(), "this thread's capabilities can't be read")
    return found


def _set_capabilities(wanted: _Capabilities) -> None:
    if libc().capset(ctypes.byref(_Header(_CAPABILITIES_V3, 0)), ctypes.byref(wanted)) != 0:
        raise PermissionError(ctypes.get_errno(), "this thread's capabilities can't be set")
