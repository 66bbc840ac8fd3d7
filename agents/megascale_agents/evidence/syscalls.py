# SPDX-License-Identifier: Apache-2.0
"""Names of the system calls that a rank may sleep in, and which of them touch files.

Numbers from arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (aarch64).
"""

import platform
import re

_X86_64 = {
    0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 6: "lstat", 7: "poll", 8: "lseek", 16: "ioctl",
    17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev", 23: "select", 26: "msync", 34: "pause", 35: "nanosleep",
    40: "sendfile", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg",
    61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 76: "truncate", 77: "ftruncate", 82: "rename",
    83: "mkdir", 84: "rmdir", 87: "unlink", 162: "sync", 202: "futex", 217: "getdents64", 219: "restart_syscall",
    230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat", 262: "newfstatat", 263: "unlinkat",
    264: "renameat", 270: "pselect6", 271: "ppoll", 277: "sync_file_range", 281: "epoll_pwait", 285: "fallocate",
    288: "accept4", 295: "preadv", 296: "pwritev", 306: "syncfs", 316: "renameat2", 326: "copy_file_range",
    332: "statx", 426: "io_uring_enter",
}  # fmt: skip
_AARCH64 = {
    22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 34: "mkdirat", 35: "unlinkat", 38: "renameat",
    45: "truncate", 46: "ftruncate", 47: "fallocate", 56: "openat", 57: "close", 61: "getdents64", 62: "lseek",
    63: "read", 64: "write", 65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64", 69: "preadv", 70: "pwritev",
    71: "sendfile", 72: "pselect6", 73: "ppoll", 79: "newfstatat", 80: "fstat", 81: "sync", 82: "fsync",
    83: "fdatasync", 84: "sync_file_range", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep",
    128: "restart_syscall", 202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg",
    212: "recvmsg", 227: "msync", 242: "accept4", 260: "wait4", 267: "syncfs", 276: "renameat2",
    285: "copy_file_range", 291: "statx", 426: "io_uring_enter",
}  # fmt: skip
_NAMES = {"x86_64": _X86_64, "aarch64": _AARCH64}.get(platform.machine(), {})

# Their first argument is a handle, which may also be a socket's or a pipe's.
ON_HANDLES = frozenset(
    ("read", "write", "close", "fstat", "lseek", "pread64", "pwrite64", "readv", "writev", "preadv", "pwritev",
     "fsync", "fdatasync", "ftruncate", "fallocate", "getdents64", "sendfile", "sync_file_range", "copy_file_range",
     "syncfs", "ioctl", "fcntl", "flock", "recvfrom", "sendto", "recvmsg", "sendmsg", "connect", "accept")
)  # fmt: skip
# A lock on a file is waited for, not the file; an ioctl goes to a device.
_NO_STORAGE = frozenset(("ioctl", "fcntl", "flock", "recvfrom", "sendto", "recvmsg", "sendmsg"))
ON_FILES = frozenset(
    ("open", "openat", "stat", "lstat", "newfstatat", "statx", "rename", "renameat", "renameat2", "mkdir", "mkdirat",
     "rmdir", "unlink", "unlinkat", "truncate", "sync", "msync")
)  # fmt: skip


def name_of(number: int) -> str:
    """Return a system call's name, "" for one that no rank sleeps in."""
    return _NAMES.get(number, "")


def is_storage(name: str, target: str) -> bool:
    """Return whether a call reads or writes a file; ``target`` is what its handle is open on, "" when it has none.

    A handle on a socket or pipe reads "socket:[1]"; a file's reads as its path, and so does a FIFO's that has one.
    """
    if name in ON_FILES:
        return True
    is_file = target.startswith("/") and not re.match(r"/dev/(?!shm/)", target)
    return name in ON_HANDLES - _NO_STORAGE and is_file
