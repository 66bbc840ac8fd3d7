# SPDX-License-Identifier: Apache-2.0
"""Connections in which data does not get on: the kernel's tables tell a cut network from a reader that is slow."""

import os
import socket
from contextlib import suppress

from megascale_agents.collectors.unsent import MOST_STUCK, describe, parse, read

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
# As listed by a kernel 1.5 s after the cable between 10.183.57.2 and 10.183.57.3 was taken out.
CUT = "   4: 0239B70A:8C21 0339B70A:D42E 01 00000060:00000000 01:000000A2 00000003     0   0 3753250 2 0 163 4 1 1 -1\n"
IDLE = (
    "   5: 0239B70A:1F90 0339B70A:D430 01 00000000:00000000 00:00000000 00000000     0   0 3753251 2 0 20 4 1 10 -1\n"
)
ASKED = (
    "   6: 0239B70A:8C22 0339B70A:01BB 02 00000001:00000000 01:000000A2 00000004     0   0 3753252 2 0 163 4 1 1 -1\n"
)
OTHERS = (
    "   7: 0239B70A:8C23 0339B70A:D431 01 00000060:00000000 01:000000A2 00000009     0   0 3753299 2 0 163 4 1 1 -1\n"
)
LISTENS = (
    "   8: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0   0 3753253 1 0 100 0 0 10 0\n"
)
OWN = frozenset({3753250, 3753251, 3753252, 3753253})


def test_data_that_is_sent_again_is_told_with_both_ends() -> None:
    """A connection that was asked for and never answered too; what other processes have open does not count."""
    stuck, addresses = parse([(HEAD + CUT + IDLE + ASKED + OTHERS + LISTENS + "nonsense\n", socket.AF_INET)], OWN)

    assert [(one.local, one.remote, one.queued_bytes, one.resent) for one in stuck] == [
        ("10.183.57.2:35874", "10.183.57.3:443", 1, 4),
        ("10.183.57.2:35873", "10.183.57.3:54318", 96, 3),
    ]
    assert addresses == ("10.183.57.2",)
    assert describe(stuck[1:]) == [
        "connection 10.183.57.2:35873: 96 bytes to 10.183.57.3:54318 not acknowledged, sent again 3 times"
    ]


def test_a_healthy_connection_is_no_evidence() -> None:
    """The negative control: nothing waits in either direction."""
    assert parse([(HEAD + IDLE, socket.AF_INET)], OWN) == ((), ("10.183.57.2",))


def test_of_many_connections_those_that_were_sent_again_most_are_told() -> None:
    """What travels is bounded."""
    lines = [CUT.replace("00000003 ", f"{number:08X} ").replace(":8C21", f":{number:04X}") for number in range(1, 40)]

    stuck, _ = parse([(HEAD + "".join(lines), socket.AF_INET)], OWN)

    assert [one.resent for one in stuck] == [39 - number for number in range(MOST_STUCK)]


def test_ipv4_within_ipv6_reads_as_the_other_end_does() -> None:
    """A store that listens on both gives its peers' addresses in IPv6; loopback identifies no node."""
    mapped = CUT.replace("0239B70A:8C21", "0000000000000000FFFF00000239B70A:8C21").replace(
        "0339B70A:D42E", "0000000000000000FFFF00000339B70A:D42E"
    )
    near = CUT.replace("0239B70A", "00000000000000000000000001000000").replace("0339B70A", "0" * 24 + "01000000")

    stuck, addresses = parse([(HEAD + mapped + near, socket.AF_INET6)], OWN)

    assert [one.remote for one in stuck] == ["10.183.57.3:54318", "[::1]:54318"]
    assert addresses == ("10.183.57.2",)


def test_a_reader_that_does_not_read_acknowledges_all_the_same() -> None:
    """Its kernel does that: data waits at both ends and is not sent again, which tells it from a cut network."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as sender,
        listening.accept()[0] as reader,
    ):
        sender.settimeout(0.0)
        with suppress(BlockingIOError):
            while True:
                sender.send(bytes(1 << 20))
        ports = sender.getsockname()[1], reader.getsockname()[1]

        stuck, _ = parse(*read(os.getpid()))

    by_port = {int(one.local.rpartition(":")[2]): one for one in stuck}
    assert by_port[ports[0]].queued_bytes > 0
    assert by_port[ports[0]].resent == 0
    assert by_port[ports[1]].unread_bytes > 0


def test_a_process_that_is_gone_tells_nothing() -> None:
    """No error: it may end between the order and the look."""
    assert parse(*read(1 << 30)) == ((), ())
