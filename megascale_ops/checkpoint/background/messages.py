# SPDX-License-Identifier: Apache-2.0
"""What a training process and its writer process say to each other, over one socket, and how it is framed.

The training process sends a ``Job`` when its copy of the state is complete, and may take it back by ``Abandon``. The
writer process says now and then that a job goes on (``Alive``). Of a set on the nodes it answers with ``LocalWritten``
or ``LocalFailed``, what follows being the training process's work. Of the shared storage it answers with ``Written``
(this rank's files are on disk) and then with ``Sealed`` or ``Failed``, or with ``Failed`` alone. Either end of the
socket closes when its process ends, however that ends.
"""

import socket

import msgspec

from megascale_ops.checkpoint.manifest import FileEntry, Manifest
from megascale_ops.checkpoint.retention import Rule
from megascale_ops.checkpoint.trust.file_digests import Algorithm

# 8 bytes of length, then msgpack.
_HEAD_BYTES = 8
# 4 GB: a plan has some 100 bytes for each part of each tensor. What claims more is no message of ours.
_MOST_BYTES = 4 << 30


class FileImage(msgspec.Struct, frozen=True, array_like=True):
    """One file of this rank, as its bytes lie in the host buffer."""

    name: str
    start: int
    length: int


class Job(msgspec.Struct, frozen=True, tag="job"):
    """Make a checkpoint of what lies in the host buffer.

    Attributes:
        token: drawn anew for each save, the same on all ranks; files of other saves carry other ones.
        root: the checkpoint folder, or its URL; empty: the save goes to the nodes alone.
        writer: number of the lock by which the leading rank's training process holds the folder.
        rank: of the training process.
        buffer_bytes: how much of the host buffer to map.
        files: what to write.
        plan: ``plan.msgpack``; of the leading rank only.
        sealed: the manifest but for its files and its time.
        rule: what stays when this one is sealed.
        damaged: paths of checkpoints that are known not to verify.
        found: ``trust.json``; of the leading rank only, where the save has looked.
        local: folder of this node's set, which is written first; empty: the save does not go to the nodes.
        algorithm: by which files are digested.
    """

    token: str
    root: str
    writer: int
    rank: int
    buffer_bytes: int
    files: tuple[FileImage, ...]
    plan: bytes
    sealed: Manifest
    rule: Rule
    damaged: tuple[str, ...] = ()
    found: bytes = b""
    local: str = ""
    algorithm: Algorithm = "xxh3_128"

    @property
    def leads(self) -> bool:
        """Whether this rank's writer process seals."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """The step that is saved."""
        return self.sealed.step


class Abandon(msgspec.Struct, frozen=True, tag="abandon"):
    """Give the job up: another rank's part has failed, or the time is over."""

    token: str
    reason: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The save goes on: something was written since the last report."""

    token: str


class LocalWritten(msgspec.Struct, frozen=True, tag="local written"):
    """This rank's files are on its node, with their digests."""

    token: str
    files: tuple[FileEntry, ...]


class LocalFailed(msgspec.Struct, frozen=True, tag="local failed"):
    """They will not be; the shared storage is another matter."""

    token: str
    reason: str


class Written(msgspec.Struct, frozen=True, tag="written"):
    """This rank's files are on disk, with their digests."""

    token: str
    size_bytes: int


class Sealed(msgspec.Struct, frozen=True, tag="sealed"):
    """The checkpoint is whole and visible."""

    token: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """There will be no checkpoint of this job. ``is_echo``: this rank's part was well, another one's was not."""

    token: str
    reason: str
    is_echo: bool = False


Order = Job | Abandon
Report = Alive | LocalWritten | LocalFailed | Written | Sealed | Failed

_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Job | Abandon)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(
    Alive | LocalWritten | LocalFailed | Written | Sealed | Failed
)


def send(end: socket.socket, message: Order | Report) -> None:
    """Send one message; waits until the other process has taken it.

    Raises:
        OSError: the other process has ended.
    """
    end.sendall(_framed(message))


def send_at_once(end: socket.socket, message: Order | Report) -> bool:
    """Send one short message if the other process has taken what came before; whether it is on its way.

    Raises:
        OSError: the other process has ended.
    """
    raw = _framed(message)
    try:
        return end.send(raw, socket.MSG_DONTWAIT) == len(raw)
    except BlockingIOError:
        return False


def _framed(message: Order | Report) -> bytes:
    raw = msgspec.msgpack.encode(message)
    return len(raw).to_bytes(_HEAD_BYTES, "little") + raw


def receive_order(end: socket.socket) -> Order | None:
    """The next order; None when the training process has ended."""
    raw = _receive(end)
    return None if raw is None else _orders.decode(raw)


def receive_report(end: socket.socket) -> Report | None:
    """The next report; None when the writer process has ended."""
    raw = _receive(end)
    return None if raw is None else _reports.decode(raw)


def _receive(end: socket.socket) -> bytes | None:
    try:
        head = _exactly(end, _HEAD_BYTES)
        length = int.from_bytes(head, "little")
        return _exactly(end, length) if 0 < length <= _MOST_BYTES else None
    except OSError:  # ConnectionResetError: it ended with something unread
        return None


def _exactly(end: socket.socket, count: int) -> bytes:
    """So many bytes.

    Raises:
        OSError: the other process ended before.
    """
    got = bytearray(count)
    view = memoryview(got)
    while view:
        taken = end.recv_into(view)
        if not taken:
            raise ConnectionResetError("the other process has ended")
        view = view[taken:]
    return bytes(got)
