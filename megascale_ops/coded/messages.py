# SPDX-License-Identifier: Apache-2.0
"""What travels between a master and its workers: a header of numbers, and a vector of float64.

A header says how long its vector is, and no vector longer than agreed upon is taken: what connects and speaks something
else costs no memory. As between ranks of Gloo or NCCL there is no encryption; the job's name and round are asked for,
so that ranks of another job are refused.
"""

import hashlib
import os
import socket
import struct
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_ops.errors import MegascaleError, UsageError

Vector = npt.NDArray[np.float64]

# Four bytes that no other protocol begins with; kind, worker, step, message, numbers in the vector.
_HEADER = struct.Struct("<4sBiqiq")
_MAGIC = b"mcc1"
HELLO, TASK, ANSWER, END = range(4)
# Bytes of a name that are compared when ranks meet: a hash of job and round.
_TOKEN = 4  # float64 values


class CodedError(MegascaleError):
    """Ranks of a coded job did not meet, or one does not speak as agreed."""


class Frame(NamedTuple):
    """One message: ``kind``, who sent it or to whom it goes, its step, its number within the step, its numbers."""

    kind: int
    worker: int
    step: int
    message: int
    vector: Vector


def packed(frame: Frame) -> bytes:
    """Return a message as bytes."""
    vector = np.ascontiguousarray(frame.vector, dtype="<f8")
    return _HEADER.pack(_MAGIC, *frame[:4], vector.size) + vector.tobytes()


class Inbox:
    """Takes bytes as they come, and gives whole messages.

    Args:
        most: numbers that a vector may have.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = bytearray()

    def take(self, data: bytes) -> list[Frame]:
        """Return the messages that are whole now.

        Raises:
            CodedError: these bytes are no message, or one that is too long.
        """
        self._bytes += data
        found = []
        while len(self._bytes) >= _HEADER.size:
            magic, kind, worker, step, message, count = _HEADER.unpack_from(self._bytes)
            if magic != _MAGIC or kind > END or not 0 <= count <= self._most:
                raise CodedError(f"a peer sent what is no message of coded ranks with vectors of up to {self._most}")
            end = _HEADER.size + 8 * count
            if len(self._bytes) < end:
                break
            vector = np.frombuffer(bytes(self._bytes[_HEADER.size : end]), dtype="<f8").astype(np.float64)
            del self._bytes[:end]
            found.append(Frame(kind, worker, step, message, vector))
        return found


def token_of(name: str) -> Vector:
    """Return what a worker shows when it connects: numbers that follow from the name of what it belongs to."""
    digest = hashlib.sha256(name.encode()).digest()[: 4 * _TOKEN]
    return np.frombuffer(digest, dtype="<u4").astype(np.float64)


def meeting_name(environ: Mapping[str, str] = os.environ, part: str = "") -> str:
    """Return a name that all ranks of this round know and no other job has, from what every launcher sets.

    Args:
        environ: the environment of a rank.
        part: what tells several meetings of one job apart.
    """
    names = ("MASTER_ADDR", "MASTER_PORT", "MEGASCALE_JOB", "MEGASCALE_ROUND", "TORCHELASTIC_RESTART_COUNT")
    return "-".join(("megascale-coded", *(environ.get(name, "") for name in names), part))


def parse_address(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Return where an address is: ``tcp:HOST:PORT``, or ``local:NAME`` for ranks of one host.

    Raises:
        UsageError: it is neither.
    """
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if kind == "local" and rest and len(rest) < 100:  # 107 bytes are what Linux has room for
        return socket.AF_UNIX, f"\0{rest}"
    if kind == "tcp" and host and port.isdecimal() and int(port) < 65536:
        return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host.strip("[]"), int(port))
    raise UsageError(f"address {address!r} can't be used: give tcp:HOST:PORT, or local:NAME of less than 100 bytes")
