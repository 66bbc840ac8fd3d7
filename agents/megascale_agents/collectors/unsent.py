# SPDX-License-Identifier: Apache-2.0
"""In which of a rank's TCP connections data does not get on: evidence of a network that is cut.

Where all ranks wait in one collective, none of their reports shows why it does not end. Their kernels do: data that the
other end's kernel does not acknowledge is sent again, after 0.2 s, 0.4, 0.8 ... for a quarter of an hour. A process
that is stopped, stuck or slow acknowledges all the same, since its kernel does that; only a machine that is gone or a
network that does not deliver leaves it undone. A connection that is asked for and never answered looks the same.

``/proc/PID/net/tcp`` and ``tcp6`` (proc(5)) list it for the process's own network namespace, whichever that is. They
are read only when a rank is asked for evidence. Nothing is seen of InfiniBand and other ways around TCP.
"""

import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path

from megascale_agents.collectors.sockets import address, sockets_of
from megascale_ops.schema.messages import StuckConnection

# 8 of a rank: with one cut node of two a rank of a ring has one or two, and the 8 with most retransmissions are enough.
MOST_STUCK = MOST_ADDRESSES = 8
_ESTABLISHED, _ASKED_FOR = "01", "02"  # TCP_ESTABLISHED, TCP_SYN_SENT of the kernel's tcp_states.h
_COUNT_DIGITS = 8  # the kernel writes counts as %08X
_FAMILIES = (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6))


def read(pid: int) -> tuple[list[tuple[str, int]], frozenset[int]]:
    """Return the kernel's tables with the family of each, and the sockets that the process has open."""
    tables: list[tuple[str, int]] = []
    for name, family in _FAMILIES:
        try:
            tables.append((Path(f"/proc/{pid}/net/{name}").read_text(encoding="ascii"), family))
        except OSError:
            continue
    return tables, sockets_of(pid)


def parse(
    tables: Iterable[tuple[str, int]], own: frozenset[int]
) -> tuple[tuple[StuckConnection, ...], tuple[str, ...]]:
    """Return the connections in which data does not get on, and the addresses by which others reach the process.

    Args:
        tables: texts of ``/proc/PID/net/tcp`` and ``tcp6``; lines that do not look as expected are passed over.
        own: inodes of the sockets that count.
    """
    stuck: list[StuckConnection] = []
    addresses: dict[str, None] = {}
    for text, family in tables:
        for line in text.splitlines()[1:]:
            words = line.split()
            if len(words) <= 9 or words[3] not in (_ESTABLISHED, _ASKED_FOR):
                continue
            try:
                if int(words[9]) not in own:
                    continue
                host, one = _read_line(words, family)
            except ValueError:
                continue
            if not ipaddress.ip_address(host).is_loopback:
                addresses[host] = None
            if one.queued_bytes or one.unread_bytes:
                stuck.append(one)
    stuck.sort(key=lambda one: (-one.resent, -one.queued_bytes, one.local))
    return tuple(stuck[:MOST_STUCK]), tuple(sorted(addresses))[:MOST_ADDRESSES]


def _read_line(words: list[str], family: int) -> tuple[str, StuckConnection]:
    queued, _, unread = words[4].partition(":")
    host, local = _name(*address(words[1]), family)
    _, remote = _name(*address(words[2]), family)
    return host, StuckConnection(local, remote, _count(queued), _count(unread), _count(words[6]))


def _count(word: str) -> int:
    if len(word) > _COUNT_DIGITS:
        raise ValueError(f"{word[:_COUNT_DIGITS]}... is no count")
    return int(word, 16)


def _name(packed: bytes, port: int, family: int) -> tuple[str, str]:
    """Return host, and host and port as people write them; IPv4 within IPv6 as IPv4, so that both ends read alike."""
    host = socket.inet_ntop(family, packed).removeprefix("::ffff:")
    return host, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def describe(stuck: Iterable[StuckConnection]) -> list[str]:
    """Return a line for people about each connection."""
    lines = []
    for one in stuck:
        parts = [f"{one.queued_bytes} bytes to {one.remote} not acknowledged"] if one.queued_bytes else []
        parts += [f"sent again {one.resent} times"] if one.resent else []
        parts += [f"{one.unread_bytes} bytes from {one.remote} not read"] if one.unread_bytes else []
        lines.append(f"connection {one.local}: {', '.join(parts)}")
    return lines
