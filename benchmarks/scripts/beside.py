# SPDX-License-Identifier: Apache-2.0

"""What runs beside a node that is measured, for benchmarks/host_faults.py: ``beside.py memory | core | clock SECONDS``.

It says ``begun`` when it has begun, and goes on until it is killed. ``memory`` copies blocks that no cache holds,
``core`` computes four fifths of the time, ``clock`` answers NTP as a server that is so many seconds ahead.
"""

import ctypes
import mmap
import socket
import struct
import sys
import time

SIZE = 256 << 20
EPOCH_S = 2_208_988_800  # from 1900, where NTP begins, to 1970


def begun() -> None:
    """Say so."""
    print("begun", flush=True)


def memory() -> None:
    """Copy from one block to another."""
    one, other = mmap.mmap(-1, SIZE), mmap.mmap(-1, SIZE)
    a, b = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (one, other))
    ctypes.memset(a, 1, SIZE)
    ctypes.memset(b, 2, SIZE)
    begun()
    while True:
        ctypes.memmove(b, a, SIZE)


def core() -> None:
    """Compute for 80 ms, sleep for 20."""
    begun()
    while True:
        end_s = time.monotonic() + 0.08
        while time.monotonic() < end_s:
            pass
        time.sleep(0.02)


def clock(ahead_s: float) -> None:
    """Answer at the port of NTP, on loopback alone."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 123))
    begun()
    while True:
        asked, who = server.recvfrom(512)
        now_s = time.time() + ahead_s
        head = bytes([0x24, 1, asked[2], 0xEC]) + struct.pack("!II", 0, 0) + b"GPS\0"  # a server of stratum 1
        server.sendto(head + stamp(now_s - 1) + asked[40:48] + stamp(now_s) + stamp(now_s), who)


def stamp(wall_s: float) -> bytes:
    """Return a moment as NTP writes it: seconds since 1900 and their fraction."""
    return struct.pack("!II", int(wall_s + EPOCH_S), int(wall_s % 1 * 2**32))


if __name__ == "__main__":
    {"memory": memory, "core": core}[sys.argv[1]]() if sys.argv[1] != "clock" else clock(float(sys.argv[2]))
