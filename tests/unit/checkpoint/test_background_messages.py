# SPDX-License-Identifier: Apache-2.0
"""Orders and reports cross a socket whole, and an end that closes is told from a message."""

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from megascale_ops.checkpoint.background import messages
from megascale_ops.checkpoint.background.messages import Abandon, Alive, Failed, FileImage, Job, Order, Report, Sealed
from megascale_ops.checkpoint.manifest import Manifest
from megascale_ops.checkpoint.retention import Rule

MANIFEST = Manifest(step=3, world_size=2, written_wall_s=0.0, files=(), metric=0.5)
JOB = Job("t", "/data", 7, 0, 8192, (FileImage("__0_0.tensors", 0, 5000),), b"plan", MANIFEST, Rule(5, 10), ("x",))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of one socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("order", [JOB, Abandon("t", "another rank failed")])
def test_orders_arrive_as_they_were_sent(ends: tuple[socket.socket, socket.socket], order: Order) -> None:
    """Manifest and rule included."""
    messages.send(ends[0], order)

    assert messages.receive_order(ends[1]) == order


@pytest.mark.parametrize("report", [Alive("t"), Sealed("t"), Failed("t", "No space left", is_echo=True)])
def test_reports_arrive_as_they_were_sent(ends: tuple[socket.socket, socket.socket], report: Report) -> None:
    """In the other direction."""
    messages.send(ends[1], report)

    assert messages.receive_report(ends[0]) == report


def test_a_plan_larger_than_the_socket_holds_arrives_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    """It is sent while it is taken."""
    job = msgspec.structs.replace(JOB, plan=bytes(range(256)) * 20_000)
    sender = threading.Thread(target=messages.send, args=(ends[0], job))
    sender.start()

    received = messages.receive_order(ends[1])
    sender.join(30)

    assert received == job


def test_what_is_sent_at_once_waits_for_no_process(ends: tuple[socket.socket, socket.socket]) -> None:
    """One that takes nothing is no reason to stand still; what was on its way arrives whole."""
    while messages.send_at_once(ends[0], Abandon("t", "x" * 1000)):
        pass

    assert messages.receive_order(ends[1]) == Abandon("t", "x" * 1000)


def test_an_end_that_closes_is_no_message(ends: tuple[socket.socket, socket.socket]) -> None:
    """Between two messages and inside one alike."""
    ends[0].sendall((100).to_bytes(8, "little") + b"half")
    ends[0].close()

    assert messages.receive_order(ends[1]) is None
    with pytest.raises(OSError, match="Broken pipe"):
        messages.send(ends[1], Sealed("t"))


def test_a_length_of_nonsense_ends_the_talk(ends: tuple[socket.socket, socket.socket]) -> None:
    """Instead of taking memory for it."""
    ends[0].sendall(b"\xff" * 8)

    assert messages.receive_report(ends[1]) is None
