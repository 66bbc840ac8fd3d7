# SPDX-License-Identifier: Apache-2.0
"""A disk with a fault: a file system in memory, served over FUSE, that is slow, forgets what it was given, or hangs.

    python benchmarks/scripts/sick_disk.py FOLDER RATE DAMAGE HANG

Mounted on FOLDER until standard input ends: RATE bytes a second (0: as fast as it can), DAMAGE 1: a byte of the 2nd MiB
comes back wrong, HANG 1: a sync is never answered. Just enough of the protocol (<linux/fuse.h>, 7.31) for one file
that is written, synced and read; root mounts it.
"""

import ctypes
import errno
import os
import select
import struct
import sys
import time

_IN = struct.Struct("<IIQQIII4x")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_ROOT = 1
_MOST = 1 << 20
_SIZE = 4 << 30
# FORGET and BATCH_FORGET.
_UNANSWERED = (2, 42)


class Disk:
    """All files, by their number, and what is wrong."""

    def __init__(self, rate: float, *, damages: bool, hangs: bool) -> None:
        self.rate = rate
        self.damages = damages
        self.hangs = hangs
        self.names: dict[bytes, int] = {}
        self.files: dict[int, bytearray] = {}

    def answer(self, opcode: int, node: int, body: bytes) -> bytes | int | None:  # noqa: C901, PLR0911  a row each
        """Return the answer to one request, an error's number, or None: there is none."""
        match opcode:
            case 26:  # INIT
                return struct.pack("<IIIIHHIIHHI28x", 7, 31, 0, 1 << 5 | 1 << 22, 0, 0, _MOST, 1, 256, 0, 0)
            case 1:  # LOOKUP
                found = self.names.get(body.rstrip(b"\0"))
                return errno.ENOENT if found is None else self._entry(found)
            case 3 | 4:  # GETATTR, SETATTR
                return struct.pack("<QII", 0, 0, 0) + self._attributes(node)
            case 35:  # CREATE: flags, mode, umask, open_flags, name
                made = max(self.files, default=_ROOT) + 1
                self.names[body[16:].rstrip(b"\0")] = made
                self.files[made] = bytearray()
                return self._entry(made) + struct.pack("<QII", made, 1, 0)  # 1: FOPEN_DIRECT_IO
            case 10:  # UNLINK: who has it open keeps it
                self.names.pop(body.rstrip(b"\0"), None)
                return b""
            case 14 | 27:  # OPEN, OPENDIR
                return struct.pack("<QII", node, 1, 0)
            case 16:
                return self._write(node, body)
            case 15:
                return self._read(node, body)
            case 17:  # STATFS
                return struct.pack(
                    "<QQQQQIIII24x", _SIZE >> 12, _SIZE >> 12, _SIZE >> 12, 1000, 1000, 4096, 255, 4096, 0
                )
            case 20:  # FSYNC
                return None if self.hangs else b""
            case 18 | 25 | 28 | 29 | 34:  # RELEASE, FLUSH, READDIR, RELEASEDIR, ACCESS
                return b""
        return errno.ENOSYS

    def _write(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        held = self.files[node]
        held.extend(bytes(max(0, offset + size - len(held))))
        held[offset : offset + size] = body[40 : 40 + size]
        self._take_time(size)
        return struct.pack("<II", size, 0)

    def _read(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        part = bytearray(self.files[node][offset : offset + size])
        if self.damages and offset <= _MOST < offset + len(part):
            part[_MOST - offset] ^= 1
        self._take_time(size)
        return bytes(part)

    def _take_time(self, size: int) -> None:
        if self.rate:
            time.sleep(size / self.rate)

    def _entry(self, node: int) -> bytes:
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + self._attributes(node)

    def _attributes(self, node: int) -> bytes:
        is_root = node == _ROOT
        size, mode = (4096, 0o40777) if is_root else (len(self.files.get(node, b"")), 0o100600)
        return _ATTR.pack(node, size, size >> 9, 0, 0, 0, 0, 0, 0, mode, 2 if is_root else 1, 0, 0, 0, 4096, 0)


def main() -> None:
    """Mount, serve, and unmount when standard input ends."""
    folder, rate, damages, hangs = sys.argv[1:]
    disk = Disk(float(rate), damages=damages == "1", hangs=hangs == "1")
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    if libc.mount(b"sick", os.fsencode(folder), b"fuse.sick", 0, options.encode()):
        raise SystemExit(f"{folder} can't be mounted: {os.strerror(ctypes.get_errno())}")
    sys.stdout.write("mounted\n")
    sys.stdout.flush()
    try:
        while True:
            ready, _, _ = select.select([device, sys.stdin], [], [])
            if sys.stdin in ready and not sys.stdin.readline():
                return
            if device not in ready:
                continue
            request = os.read(device, _MOST + (1 << 16))
            _, opcode, unique, node, *_ = _IN.unpack_from(request)
            if opcode in _UNANSWERED:
                continue
            found = disk.answer(opcode, node, request[_IN.size :])
            if found is not None:
                data, error = (b"", -found) if isinstance(found, int) else (found, 0)
                os.write(device, _OUT.pack(_OUT.size + len(data), error, unique) + data)
    finally:
        libc.umount2(os.fsencode(folder), 2)  # MNT_DETACH


if __name__ == "__main__":
    main()
