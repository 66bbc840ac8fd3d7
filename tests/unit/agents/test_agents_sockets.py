# SPDX-License-Identifier: Apache-2.0
"""Send queues of TCP connections, as the kernel lists them and as real sockets fill them."""

import os
import socket
from contextlib import suppress

import pytest
from megascale_agents.collectors import sockets
from megascale_agents.collectors.sockets import LOOKS, QUEUED_BYTES, Asking, Connection, SendQueues

LISTING = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 700 1 0 100 0 0 10 0
   1: 0100007F:9C40 0100007F:1F90 01 00020108:00000000 01:00000014 00000000     0        0 701 3 0 20 4 30 10 -1
   2: 0100007F:1F90 0100007F:9C40 01 00000000:00020000 00:00000000 00000000     0        0 702 1 0 20 4 1 10 -1
   3: broken
"""


def test_the_kernels_listing_is_read() -> None:
    """Addresses and queued bytes by inode; listening sockets and lines of another form are passed over."""
    found = sockets.parse(LISTING, socket.AF_INET)

    here = socket.inet_aton("127.0.0.1")
    assert found == {
        701: Connection(socket.AF_INET, here, 40000, here, 8080, 0x20108),
        702: Connection(socket.AF_INET, here, 8080, here, 40000, 0),
    }
    assert sockets.parse("", socket.AF_INET) == {}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_data_that_nobody_reads_is_seen_in_the_senders_queue(host: str) -> None:
    """Real sockets of both families: the sender's queue is full, the reader's is not; both belong to this process."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"this machine has no {host}: {error}")
    with server, socket.create_connection(server.getsockname()[:2]) as sender, server.accept()[0] as reader:
        sender.settimeout(0.0)
        with suppress(BlockingIOError):
            while True:
                sender.send(bytes(1 << 20))
        asking = Asking()

        listed = sockets.read(os.getpid())
        own = sockets.sockets_of(os.getpid())
        inodes = [os.fstat(one.fileno()).st_ino for one in (sender, reader)]
        asked = [asking.queued(listed[inode]) for inode in inodes]
        asking.close()

    assert set(inodes) <= own
    assert listed[inodes[0]].queued >= QUEUED_BYTES
    assert asked[0] >= QUEUED_BYTES
    assert asked[1] == listed[inodes[1]].queued == 0


def test_a_rank_whose_data_waits_is_told_from_one_whose_does_not() -> None:
    """From the first look at a process to its share; a connection made later is found as well."""
    queues = SendQueues()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0],
    ):
        for number in range(LOOKS // 2):
            queues.poll_sockets([os.getpid()], 100.0 * number)
        before = queues.share(os.getpid())
        sender.settimeout(0.0)
        with suppress(BlockingIOError):
            while True:
                sender.send(bytes(1 << 20))
        for number in range(LOOKS // 2):
            queues.poll_sockets([os.getpid()], 5000.0 + 100.0 * number)
        after = queues.share(os.getpid())
    queues.close()

    assert before == 0.0
    assert after == 0.5


def test_open_files_are_asked_every_five_seconds_and_those_of_a_new_rank_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank of torch has hundreds of them; one that joins is not waited for."""
    asked: list[int] = []
    monkeypatch.setattr(sockets, "sockets_of", lambda pid: asked.append(pid) or frozenset())
    queues = SendQueues()

    for now_s in (100.0, 101.0, 104.9, 105.0, 106.0):
        queues.poll_sockets([7], now_s)
    first = list(asked)
    queues.poll_sockets([7, 8], 107.0)
    queues.poll_sockets([8], 108.0)
    queues.close()

    assert first == [7, 7]
    assert sorted(asked[2:]) == [7, 8]


def test_a_share_is_told_once_half_of_the_looks_are_made() -> None:
    """Fewer say nothing."""
    queues = SendQueues()
    for number in range(LOOKS // 2 - 1):
        queues.ingest_socket(7, bool(number % 2))
    assert queues.share(7) == -1.0

    queues.ingest_socket(7, waits=True)

    assert queues.share(7) == 0.5
    assert queues.share(8) == -1.0


def test_it_is_told_for_whom_data_waited_most_often() -> None:
    """Looks in which none waited do not count, and what was never seen to wait waits for no peer."""
    queues = SendQueues()
    for to in ("10.0.0.3", "10.0.0.2", "10.0.0.2"):
        queues.ingest_socket(7, waits=True, to=to)
    for _ in range(5):
        queues.ingest_socket(7, waits=False)
        queues.ingest_socket(8, waits=False)

    assert queues.to(7) == "10.0.0.2"
    assert queues.to(8) == queues.to(9) == ""


def test_processes_that_are_gone_are_forgotten_and_one_that_cannot_be_read_is_no_error() -> None:
    """A rank may end between two looks."""
    queues = SendQueues()
    for _ in range(LOOKS):
        queues.ingest_socket(7, waits=False)

    queues.poll_sockets([1 << 30], 0.0)
    queues.close()

    assert queues.share(7) == -1.0
    assert sockets.read(1 << 30) == {}
    assert sockets.sockets_of(1 << 30) == frozenset()


def test_a_kernel_that_does_not_answer_is_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its late answer belongs to no later question: the next look begins with a connection of its own."""
    queues = SendQueues()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        queues.poll_sockets([os.getpid()], 0.0)
        asked = queues._asking
        with monkeypatch.context() as silent:
            silent.setattr(Asking, "queued", _no_answer)
            with pytest.raises(TimeoutError):
                queues.poll_sockets([os.getpid()], 100.0)

        queues.poll_sockets([os.getpid()], 200.0)

    assert queues._asking is not asked
    queues.close()


def _no_answer(_asking: Asking, _one: Connection) -> int:
    raise TimeoutError("no answer")
