# SPDX-License-Identifier: Apache-2.0
"""Measure the way between two nodes over TCP: how long a byte takes there and back, how fast bytes go each way.

One side listens at a port of the system's choice for as long as the measurement takes, and serves none that does not
begin with the secret of this round; the other connects. Four streams at once: one alone is bound by a core. Every wait
has a deadline, and what does not answer by then is the result: a way that is cut.
"""

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

SECRET_BYTES = 32
_STREAMS = 4
_BLOCK = bytes(1 << 20)
_PINGS = 50
_ECHO, _TAKE, _GIVE = b"e", b"t", b"g"


class Way(NamedTuple):
    """What was measured from this side: bytes a second there and back, and the median of a byte's round trip."""

    there_bytes_s: float
    back_bytes_s: float
    round_trip_s: float


class Listener:
    """The side that is connected to. ``port`` is where; ``close`` ends it with all that it serves."""

    def __init__(self, secret: bytes, deadline_s: float) -> None:
        self._secret = secret
        self._deadline_s = deadline_s
        self._server = socket.create_server(("", 0), backlog=2 * _STREAMS)
        self._server.settimeout(deadline_s)
        self._open: list[socket.socket] = []
        self.port = int(self._server.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="pair", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve no more."""
        for one in (self._server, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._thread.join(1.0)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed, or its deadline has passed
            while True:
                peer, _ = self._server.accept()
                self._open.append(peer)
                threading.Thread(target=self._serve, args=(peer,), name="pair", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), peer:
            peer.settimeout(self._deadline_s)
            if not hmac.compare_digest(_exactly(peer, SECRET_BYTES), self._secret):
                return
            wish = _exactly(peer, 1)
            if wish == _ECHO:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while byte := peer.recv(1):
                    peer.sendall(byte)
            elif wish == _TAKE:
                peer.sendall(str(_take(peer)).encode())
            elif wish == _GIVE:
                while True:
                    peer.sendall(_BLOCK)


def measure(address: tuple[str, int], secret: bytes, seconds: float, deadline_s: float) -> Way:
    """Measure the way to a listener.

    Args:
        address: Where it listens.
        secret: What it was given.
        seconds: For how long bytes go each way.
        deadline_s: How long any single wait may take.

    Raises:
        OSError: it can't be reached, or does not answer.
        ValueError: it answers nonsense.
    """
    return Way(
        _together(lambda: _push(address, secret, seconds, deadline_s)),
        _together(lambda: _pull(address, secret, seconds, deadline_s)),
        _ping(address, secret, deadline_s),
    )


def _together(one: Callable[[], float]) -> float:
    """Run all streams at once; return the sum of their rates.

    Raises:
        OSError: one of them failed.
    """
    rates: list[float] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            rates.append(one())
        except (OSError, ValueError) as error:
            failed.append(error)

    threads = [threading.Thread(target=run, name="pair", daemon=True) for _ in range(_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return sum(rates)


def _connected(address: tuple[str, int], secret: bytes, wish: bytes, deadline_s: float) -> socket.socket:
    peer = socket.create_connection(address, timeout=deadline_s)
    peer.sendall(secret + wish)
    return peer


def _push(address: tuple[str, int], secret: bytes, seconds: float, deadline_s: float) -> float:
    """Send for so long; return the rate at which the other side has received."""
    with _connected(address, secret, _TAKE, deadline_s) as peer:
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < seconds:
            peer.sendall(_BLOCK)
        peer.shutdown(socket.SHUT_WR)
        taken = int(peer.recv(32) or b"")
        return taken / (time.perf_counter() - began_s)


def _pull(address: tuple[str, int], secret: bytes, seconds: float, deadline_s: float) -> float:
    """Receive for so long; return the rate."""
    room = bytearray(len(_BLOCK))
    with _connected(address, secret, _GIVE, deadline_s) as peer:
        began_s, count = time.perf_counter(), 0
        while time.perf_counter() - began_s < seconds:
            got = peer.recv_into(room)
            if not got:
                raise ConnectionResetError("the other side stopped")
            count += got
        return count / (time.perf_counter() - began_s)


def _ping(address: tuple[str, int], secret: bytes, deadline_s: float) -> float:
    times = []
    with _connected(address, secret, _ECHO, deadline_s) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            began_s = time.perf_counter()
            peer.sendall(b"p")
            _exactly(peer, 1)
            times.append(time.perf_counter() - began_s)
    return median(times)


def _take(peer: socket.socket) -> int:
    """Receive until the other side has no more; return how many bytes."""
    room, count = bytearray(len(_BLOCK)), 0
    while got := peer.recv_into(room):
        count += got
    return count


def _exactly(peer: socket.socket, count: int) -> bytes:
    """Receive so many bytes.

    Raises:
        ConnectionResetError: the other side ended before.
    """
    found = b""
    while len(found) < count:
        part = peer.recv(count - len(found))
        if not part:
            raise ConnectionResetError("the other side ended")
        found += part
    return found
