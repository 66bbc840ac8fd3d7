# SPDX-License-Identifier: Apache-2.0
"""Whether data that a rank sends waits in the kernel: the send queues of its TCP connections.

A collective is slow for all ranks alike, so its times do not show which link is slow. The kernel does: where a link (or
the reader at its other end) is slower than the rank that sends, data piles up in the sender's queue, and only there.

``/proc/PID/net/tcp`` and ``tcp6`` (proc(5)) list all connections of a network namespace; a process's own are those with
the inodes of its open sockets. Listing walks the kernel's whole table (12 ms for a quarter of a million buckets), so it
is done only when a rank has opened sockets, which is asked every 5 s. From then on each connection is asked for by its
addresses (sock_diag(7), 9 us). Nothing is seen of InfiniBand and other ways around TCP, nor of ranks in another network
namespace than ours.
"""

import os
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

# 16 KiB: acknowledgements and small messages are under way all the time and mean nothing.
QUEUED_BYTES = 16 * 1024
# 20 looks, a second apart: what is there in most of them is no single large message.
LOOKS = 20
# 32 connections of a rank: more are not read, since one slow link of a ring is one connection of a few.
MOST_CONNECTIONS = 32
# 5 s: a rank of torch has some hundred open files, and the type of each has to be read (2 us). A job makes its
# connections once, and each can be judged after ten looks at the earliest.
_OPEN_EVERY_S = 5.0
# A listing may cost 0.5 % of a core: after one that took 12 ms the next waits 2.4 s.
_LISTING_SHARE = 0.005
_ESTABLISHED = "01"

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_ANSWER_S = 0.1
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_REQUEST = struct.Struct("=BBBBI")  # struct inet_diag_req_v2 without its id
_PORTS = struct.Struct("!HH")
_TAIL = struct.Struct("=III")  # any interface, no cookie
_QUEUES = struct.Struct("=IIIII")  # expires, rqueue, wqueue, uid, inode of struct inet_diag_msg
_QUEUES_AT = _HEADER.size + 4 + 48
_ATTRIBUTES_AT = _HEADER.size + 72  # behind struct inet_diag_msg
_ATTRIBUTE = struct.Struct("=HH")  # struct nlattr: length with itself, kind
_INFO = 2  # INET_DIAG_INFO: struct tcp_info; requested with the bit 1 << (_INFO - 1)
_MOVED = struct.Struct("=QQ")  # tcpi_bytes_acked, tcpi_bytes_received
_MOVED_AT = 120


class Connection(NamedTuple):
    """One established connection: addresses as bytes in network order."""

    family: int
    local: bytes
    local_port: int
    remote: bytes
    remote_port: int
    queued: int  # bytes in the send queue when it was listed


def parse(text: str, family: int) -> dict[int, Connection]:
    """Return the established connections by the inodes of their sockets.

    Args:
        text: ``/proc/PID/net/tcp`` or ``tcp6``; lines that do not look as expected are passed over.
        family: AF_INET or AF_INET6, whichever file it is.
    """
    found = {}
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) <= 9 or words[3] != _ESTABLISHED:
            continue
        try:
            queued = int(words[4].partition(":")[0], 16)
            found[int(words[9])] = Connection(family, *address(words[1]), *address(words[2]), queued)
        except ValueError:
            continue
    return found


def address(text: str) -> tuple[bytes, int]:
    """Turn "0100007F:1F90" into bytes and port: words of 32 bits, each in this machine's byte order."""
    host, _, port = text.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    return struct.pack(f"={len(words)}I", *words), int(port, 16)


def host_of(one: Connection) -> str:
    """Return the other end's address as people write it; IPv4 within IPv6 as IPv4."""
    return socket.inet_ntop(one.family, one.remote).removeprefix("::ffff:")


def read(pid: int) -> dict[int, Connection]:
    """Return all established connections of the network namespace of a process; empty when it can't be read."""
    found: dict[int, Connection] = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            with open(f"/proc/{pid}/net/{name}", encoding="ascii") as file:  # noqa: PTH123  a third of a Path's cost
                found |= parse(file.read(), family)
        except OSError:
            continue
    return found


def sockets_of(pid: int) -> frozenset[int]:
    """Return the inodes of the sockets that a process has open; empty when it may not be asked."""
    found = set()
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                try:
                    target = os.readlink(entry.path)  # noqa: PTH115  as above
                except OSError:
                    continue  # closed since
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    except OSError:
        pass
    return frozenset(found)


class Asking:
    """Asks the kernel for single connections. Raises OSError where it has no such interface."""

    def __init__(self) -> None:
        self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)
        self._netlink.settimeout(_ANSWER_S)

    def queued(self, one: Connection) -> int:
        """Return the bytes in a connection's send queue, 0 when it is gone.

        Raises:
            OSError: the kernel does not answer.
        """
        answer = self._ask(one)
        return int(_QUEUES.unpack_from(answer, _QUEUES_AT)[2]) if answer else 0

    def moved(self, one: Connection) -> int:
        """Return the bytes that the other end has acknowledged plus those received from it; 0 when it is gone.

        Raises:
            OSError: the kernel does not answer.
        """
        answer, at = self._ask(one, 1 << (_INFO - 1)), _ATTRIBUTES_AT
        while at + _ATTRIBUTE.size <= len(answer):
            length, kind = _ATTRIBUTE.unpack_from(answer, at)
            if kind == _INFO and length >= _ATTRIBUTE.size + _MOVED_AT + _MOVED.size:
                return sum(_MOVED.unpack_from(answer, at + _ATTRIBUTE.size + _MOVED_AT))
            if length < _ATTRIBUTE.size:
                break
            at += (length + 3) & ~3
        return 0

    def _ask(self, one: Connection, extra: int = 0) -> bytes:
        """Return the kernel's answer about a connection, b"" when it is gone; ``extra`` asks for attributes."""
        body = _REQUEST.pack(one.family, socket.IPPROTO_TCP, extra, 0, 0xFFF)
        body += _PORTS.pack(one.local_port, one.remote_port)
        body += one.local.ljust(16, b"\0") + one.remote.ljust(16, b"\0") + _TAIL.pack(0, 0xFFFFFFFF, 0xFFFFFFFF)
        self._netlink.send(_HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, 1, 1, 0) + body)
        answer = self._netlink.recv(4096)
        kind = _HEADER.unpack_from(answer)[1]
        return answer if kind == _SOCK_DIAG_BY_FAMILY and len(answer) >= _QUEUES_AT + _QUEUES.size else b""

    def close(self) -> None:
        """Let go of the socket."""
        self._netlink.close()


class SendQueues:
    """The last looks at the queues of a node's ranks."""

    def __init__(self) -> None:
        self._looks: dict[int, deque[tuple[bool, str]]] = {}  # by pid: whether data waited, and for which address
        self._open: dict[int, frozenset[int]] = {}  # by pid: the sockets that it had open when they were last listed
        self._open_at_s = 0.0  # when all are listed again
        self._sockets: dict[int, frozenset[int]] = {}  # by pid, as of the last listing
        self._connections: dict[int, list[Connection]] = {}  # by pid
        self._list_at_s = 0.0
        self._asking: Asking | None = None

    def poll_sockets(self, pids: Iterable[int], now_s: float) -> None:
        """Look at these processes, and forget all others.

        Args:
            pids: of ranks that live.
            now_s: Monotonic clock.

        Raises:
            OSError: the kernel can't be asked for connections.
        """
        living = set(pids)
        for known in (self._looks, self._open, self._sockets, self._connections):
            for pid in known.keys() - living:
                del known[pid]
        if not living:
            return
        if self._asking is None:
            self._asking = Asking()
        if now_s >= self._open_at_s or self._open.keys() != living:
            self._open = {pid: sockets_of(pid) for pid in living}
            self._open_at_s = now_s + _OPEN_EVERY_S
        if now_s >= self._list_at_s and self._open != self._sockets:
            self._list(self._open, now_s)
        try:
            for pid, connections in self._connections.items():
                full = next((one for one in connections if self._asking.queued(one) >= QUEUED_BYTES), None)
                self.ingest_socket(pid, full is not None, host_of(full) if full is not None else "")
        except OSError:
            self.close()  # a late reply must not be taken for that to the next request
            raise

    def _list(self, sockets: dict[int, frozenset[int]], now_s: float) -> None:
        """Find the connections behind the sockets of our own network namespace."""
        began_s = time.thread_time()
        listed = read(os.getpid())
        self._sockets = sockets
        for pid, own in sockets.items():
            connections = [listed[inode] for inode in sorted(own & listed.keys())][:MOST_CONNECTIONS]
            if connections:
                self._connections[pid] = connections
            else:
                self._connections.pop(pid, None)
        self._list_at_s = now_s + (time.thread_time() - began_s) / _LISTING_SHARE

    def ingest_socket(self, pid: int, waits: bool, to: str = "") -> None:
        """Note whether data of a process waited in this look, and on its way to which address."""
        self._looks.setdefault(pid, deque(maxlen=LOOKS)).append((waits, to))

    def share(self, pid: int) -> float:
        """Return the share of looks in which data of this process waited, -1.0 before half of them are made."""
        looks = self._looks.get(pid)
        if looks is None or len(looks) < LOOKS // 2:
            return -1.0
        return round(sum(waits for waits, _ in looks) / len(looks), 2)

    def to(self, pid: int) -> str:
        """Return the address for which data of this process waited most often, "" where none did."""
        waited = Counter(to for waits, to in self._looks.get(pid, ()) if waits)
        return min(waited, key=lambda to: (-waited[to], to)) if waited else ""

    def close(self) -> None:
        """Let go of the kernel."""
        if self._asking is not None:
            self._asking.close()
            self._asking = None
