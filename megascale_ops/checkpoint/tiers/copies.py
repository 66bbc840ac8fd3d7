# SPDX-License-Identifier: Apache-2.0
"""Send files of a set to the buddy node, and receive those of another: over TCP, in threads, beside the training.

Each rank listens for one partner and sends to one. A connection carries files one after the other: a request that names
the set and the file, its bytes, an answer. The receiver takes nothing that its own manifest of that set does not
promise, and nothing whose size or digest differs; a file stands under its name when it is whole, never before.

All ranks of a job share a token that the process group has carried; a connection without it is closed. Neither token
nor bytes are encrypted: they travel where those of the process group do. Every wait has a deadline, and a partner that
stands still for ``_STALLED_S`` is given up, with one sentence.
"""

import hmac
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from megascale_ops import foreign
from megascale_ops.checkpoint import latest, storage
from megascale_ops.checkpoint.manifest import Fault, FileEntry
from megascale_ops.checkpoint.tiers import node_folder
from megascale_ops.checkpoint.trust.file_digests import FileDigest
from megascale_ops.whole_file import open_beside

# 30 s: a node that takes no byte for so long is gone, or as good as gone.
_STALLED_S = 30.0
# 5 MB/s: below it the network is broken; and a minute for whatever is small.
_LEAST_BYTES_S = 5e6
_LEAST_S = 60.0
_BLOCK_BYTES = 8 << 20
_MOST_REQUEST_BYTES = 1 << 16
_LENGTH = struct.Struct("!I")
_OK = b"ok"
_GONE = b"it keeps no such set any more"

_log = logging.getLogger("megascale_ops.checkpoint")


class _RefusedError(Exception):
    """A file that the receiver does not take; the text says why."""


class _Request(msgspec.Struct, frozen=True, array_like=True):
    token: bytes
    step: int
    set_id: str
    name: str


def send_message(connection: socket.socket, raw: bytes) -> None:
    """Send one message.

    Raises:
        OSError: the other side takes it no more.
    """
    connection.sendall(_LENGTH.pack(len(raw)) + raw)


def receive_message(connection: socket.socket, most_bytes: int = _MOST_REQUEST_BYTES) -> bytes:
    """One message; empty where the other side has closed the connection.

    Raises:
        OSError: it is too long or cut short, or does not come in time.
    """
    head = _receive(connection, _LENGTH.size)
    if not head:
        return b""
    (length,) = _LENGTH.unpack(head)
    if not 0 < length <= most_bytes:
        raise OSError("a message of a length that none has")
    return _receive(connection, length)


def _receive(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        piece = connection.recv(min(count - len(found), _BLOCK_BYTES))
        if not piece:
            if found:
                raise OSError("the connection was closed within a message")
            return b""
        found += piece
    return bytes(found)


class Receiver:
    """Listens for a partner's files; one thread for connections, one for each of them.

    Args:
        root: this node's folder.
        host: the address that the partner is told.
        token: what a connection must show.
    """

    def __init__(self, root: Path, host: str, token: bytes) -> None:
        self._root, self._token = root, token
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=8)
        self.address: tuple[str, int] = (host, self._listening.getsockname()[1])
        self._connections: set[socket.socket] = set()
        self._serving: list[threading.Thread] = []
        self._beginning = threading.Lock()  # a thread that is listed has started
        self._stopped = False
        threading.Thread(target=self._accept, name="checkpoint-copies", daemon=True).start()

    def close(self, most_s: float) -> None:
        """Stop listening; what is being received has so long to come to its end."""
        until_s = time.monotonic() + most_s
        with self._beginning:
            serving = tuple(self._serving)
        for serve in serving:
            serve.join(max(until_s - time.monotonic(), 0.0))
        self._stopped = True
        for each in (self._listening, *self._connections):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits on it
            with suppress(OSError):
                each.close()

    def _accept(self) -> None:
        while not self._stopped:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            connection.settimeout(_STALLED_S)
            self._connections.add(connection)
            serve = threading.Thread(target=self._serve, args=(connection,), name="checkpoint-copy-in", daemon=True)
            with self._beginning:
                self._serving = [each for each in self._serving if each.is_alive()] + [serve]
                serve.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                while raw := receive_message(connection):
                    request = msgspec.msgpack.decode(raw, type=_Request)
                    if not hmac.compare_digest(request.token, self._token):
                        return
                    send_message(connection, self._take(connection, request))
        except (OSError, *foreign.UNREADABLE) as exc:
            if not self._stopped:
                _log.debug("a copy from another node broke off: %s", exc)
        finally:
            self._connections.discard(connection)

    def _take(self, connection: socket.socket, request: _Request) -> bytes:
        """Receive one file; what the partner is told."""
        folder = node_folder.find(self._root, request.step, request.set_id)
        entry = _entry_of(folder, request.name) if folder is not None else None
        send_message(connection, _OK if entry is not None else _GONE)
        if folder is None or entry is None:
            return _GONE
        try:
            with open_beside(folder / entry.name, durably=True) as file:
                _write(connection, file, entry)
        except _RefusedError as exc:
            return str(exc).encode()
        except FileNotFoundError:
            return _GONE  # deleted while it came
        return _OK


def _entry_of(folder: Path, name: str) -> FileEntry | None:
    sealed = latest.read_manifest(folder)
    if isinstance(sealed, Fault):
        return None
    return next((entry for entry in sealed.files if entry.name == name), None)


def _write(connection: socket.socket, file: BinaryIO, entry: FileEntry) -> None:
    """Receive a file. All of its bytes are received, whatever becomes of them: an answer follows.

    Raises:
        _RefusedError: it can't be written, or is not what was promised.
        OSError: of the connection.
    """
    failed, left, buffer = "", entry.size_bytes, bytearray(min(_BLOCK_BYTES, max(entry.size_bytes, 1)))
    digest = FileDigest(entry.digest)
    while left:
        count = connection.recv_into(buffer, min(left, len(buffer)))
        if not count:
            raise OSError("the connection was closed within a file")
        left -= count
        block = memoryview(buffer)[:count]
        digest.update(block)
        if not failed:
            try:
                file.write(block)
            except OSError as exc:
                failed = storage.describe(exc)
    if not failed and digest.text() != entry.digest:
        failed = "its digest differs from that of the manifest"
    if failed:
        raise _RefusedError(failed)


class Sender:
    """Sends the files of one set at a time."""

    def __init__(self, address: tuple[str, int], token: bytes, said: str) -> None:
        self._address, self._token, self._said = address, token, said
        self._thread: threading.Thread | None = None
        self._connection: socket.socket | None = None
        self.failure = ""
        """Why the last copy failed; empty: it did not."""

    @property
    def is_sending(self) -> bool:
        """Whether a copy is on its way."""
        return self._thread is not None and self._thread.is_alive()

    def send(self, folder: Path, step: int, set_id: str, files: Sequence[FileEntry]) -> None:
        """Begin to send files of a set that was sealed on all nodes."""
        assert not self.is_sending, "one set at a time"
        given = (folder, step, set_id, tuple(files))
        self._thread = threading.Thread(target=self._send, args=given, name="checkpoint-copy-out", daemon=True)
        self._thread.start()

    def wait(self, most_s: float) -> bool:
        """Until nothing is on its way; whether that is so."""
        if self._thread is not None:
            self._thread.join(most_s)
        return not self.is_sending

    def close(self) -> None:
        """End what is being sent."""
        connection = self._connection
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _send(self, folder: Path, step: int, set_id: str, files: Sequence[FileEntry]) -> None:
        size_bytes = sum(entry.size_bytes for entry in files)
        until_s = time.monotonic() + max(_LEAST_S, size_bytes / _LEAST_BYTES_S)
        failure = ""
        try:
            with socket.create_connection(self._address, timeout=_STALLED_S) as connection:
                self._connection = connection
                for entry in files:
                    failure = failure or self._send_file(connection, folder, step, set_id, entry, until_s)
        except OSError as exc:
            failure = storage.describe(exc)
        finally:
            self._connection = None
        if failure and failure != self.failure:
            _log.warning("no copy of step %d on %s: %s", step, self._said, failure)
        self.failure = failure

    def _send_file(
        self, connection: socket.socket, folder: Path, step: int, set_id: str, entry: FileEntry, until_s: float
    ) -> str:
        """Send one file; why it was not taken, or nothing."""
        send_message(connection, msgspec.msgpack.encode(_Request(self._token, step, set_id, entry.name)))
        if receive_message(connection) == _OK:
            with foreign.opened(folder / entry.name) as handle:
                at = 0
                while at < entry.size_bytes:
                    if time.monotonic() > until_s:
                        raise TimeoutError("the network is too slow for it")
                    with memoryview(os.pread(handle, _BLOCK_BYTES, at)) as block:
                        if not block:
                            raise OSError("a file ended too early")
                        connection.sendall(block[: entry.size_bytes - at])
                        at += len(block)
        answer = receive_message(connection)
        return "" if answer == _OK else answer.decode(errors="replace") or "it closed the connection"


def own_host() -> str:
    """The address of this machine that the ranks of a job can reach: the one that leads to where they met."""
    master, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    targets = [(master, int(port))] if master and port.isdigit() else []
    for host, number in (*targets, (socket.gethostname(), 9)):
        with suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(host, number, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind) as probe:
                    probe.connect(address)  # of UDP: asks for the way and sends nothing
                    return str(probe.getsockname()[0])
    return "127.0.0.1"
