# SPDX-License-Identifier: Apache-2.0
"""A wire between two network interfaces that can be made slow: a relay of frames in user space.

A bad link between nodes where the kernel offers none (``tc`` and its ``netem`` are missing on many machines): each end
is a TAP device, and whatever comes out of one goes into the other, as fast as the wire allows. Unlike a relay of single
connections it carries whatever the nodes say to each other, at whatever ports. Source: Linux, networking/tuntap.rst.
"""

import fcntl
import os
import select
import struct
import threading
import time

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
# 64 KiB: larger than any frame.
_MOST_BYTES = 65536
# 0.2 s: how long an end that is closed is not noticed at most.
_LOOK_S = 0.2


class Wire:
    """One wire, carried by two threads. ``bytes_per_s`` may be set at any time and holds from then on, each way.

    Args:
        near: name of the one device to make.
        far: name of the other.

    Raises:
        OSError: this machine has no right or no kernel for TAP devices.
    """

    def __init__(self, near: str, far: str) -> None:
        self.bytes_per_s = 0  # 0: as much as comes
        self._is_over = threading.Event()
        self._ends: list[int] = []
        try:
            self._ends += [_tap(near)]
            self._ends += [_tap(far)]
        except OSError:
            self.close()
            raise
        ways = (self._ends, self._ends[::-1])
        self._threads = [threading.Thread(target=self._carry, args=way, name="wire", daemon=True) for way in ways]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Take it away; its devices go with it."""
        self._is_over.set()
        for thread in getattr(self, "_threads", ()):
            thread.join(10.0)
        for end in self._ends:
            os.close(end)
        self._ends = []

    def _carry(self, source: int, sink: int) -> None:
        free_at_s = 0.0  # when what was put on the wire has left it
        while not self._is_over.is_set():
            if not select.select([source], [], [], _LOOK_S)[0]:
                continue
            try:
                frame = os.read(source, _MOST_BYTES)
                if self.bytes_per_s:
                    now_s = time.monotonic()
                    free_at_s = max(free_at_s, now_s) + len(frame) / self.bytes_per_s
                    # Below a few milliseconds sleeping is not exact; the delay adds up until it is.
                    if free_at_s - now_s > 0.005:
                        time.sleep(free_at_s - now_s)
                os.write(sink, frame)
            except OSError:
                continue  # an end is down: frames are lost, as on a wire that is not plugged in


def _tap(name: str) -> int:
    handle = os.open("/dev/net/tun", os.O_RDWR)
    try:
        fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    except OSError:
        os.close(handle)
        raise
    return handle
