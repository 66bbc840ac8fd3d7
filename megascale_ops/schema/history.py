# SPDX-License-Identifier: Apache-2.0
"""The history of a job's steps as bytes: each rank's speed over time. Written by the controller, read by the report.

Time is cut into *buckets*; a bucket has for each rank how many steps it ended in it, what they took in all, and the
longest of them. The layout, little-endian:

    magic 8 | version u16 | length of the head u32 | CRC-32 of the head u32 | CRC-32 of the body u32 | head | body

The head is JSON (``Facts``; of each bucket its losses and where its cells begin), the body is one run of float32 for
each field of each bucket. A damaged body leaves the head readable: states, places and policy are known even then.
"""

import struct
import sys
import zlib
from array import array
from pathlib import Path
from typing import NamedTuple

import msgspec

from megascale_ops.errors import MegascaleError
from megascale_ops.foreign import UNREADABLE
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.version import check_version

MAGIC = b"MSOsteps"
HISTORY_VERSION = 1
# By rank. ``own``: a step without what was waited for others and without checkpoints.
FIELDS = ("steps", "wall_s", "waiting_s", "checkpoint_s", "longest_s", "longest_own_s")
_PREFIX = struct.Struct("<8sHIII")
_CELL_BYTES = 4


class DamagedHistoryError(MegascaleError):
    """Bytes that are no history, or one of which nothing can be read any more."""


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """A job came into a state."""

    wall_s: float
    state: str
    round: int


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a rank is, in its newest round."""

    rank: int
    node: str
    mesh: Mesh = Mesh()


class Losses(NamedTuple):
    """What ranks told of the loss: the sum over the steps of all of them that had one, and how many had.

    ``astray`` counts those whose loss was no finite number; they are no part of the sum.
    """

    total: float = 0.0
    steps: float = 0.0
    astray: int = 0

    @property
    def mean(self) -> float | None:
        """The mean, None where there was no loss."""
        return self.total / self.steps if self.steps else None


class Bucket(NamedTuple):
    """What happened between ``start_s`` and ``start_s + length_s``, wall clock seconds.

    ``cells`` holds one array of float32 for each of FIELDS, by rank: sums over the steps that ended here, and the
    longest; ``step`` is the furthest step of any rank.
    """

    start_s: float
    length_s: float
    step: int
    cells: tuple["array[float]", ...]
    losses: Losses = Losses()


class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a history knows of its job besides the steps."""

    job: str
    life: int = 1
    round: int = 0
    world_size: int = 0
    nodes: tuple[int, int] = (1, 1)  # the least and the most that the job runs on
    began_wall_s: float = 0.0
    until_wall_s: float = 0.0  # of the moment that this was written
    turns: tuple[Turn, ...] = ()
    forgotten_turns: int = 0
    places: tuple[Place, ...] = ()
    policy: JobPolicy = JobPolicy()
    changed: dict[str, str] = {}  # settings that a person changed while the job lived
    # The ledger's own account of the steps: start, end, seconds covered, waited for the slowest, in checkpoints.
    costs: tuple[tuple[float, float, float, float, float], ...] = ()
    known_wall_s: float = 0.0  # since when that account is kept; 0: it is not
    step_s: float = 0.0  # a step of late, as the account has it; 0: not known


class History(NamedTuple):
    """All that is kept of a job's steps, oldest first. ``damage`` is one sentence on what could not be read."""

    facts: Facts
    buckets: tuple[Bucket, ...] = ()
    damage: str = ""


class HistoryReply(msgspec.Struct, frozen=True):
    """Answer to ``GET /v1/jobs/JOB/history``: what ``encode`` made."""

    data: bytes


class _Shape(msgspec.Struct, frozen=True, array_like=True):
    """One bucket in the head: where its cells begin follows from those before. ``losses`` came later than the rest."""

    start_s: float
    length_s: float
    step: int
    ranks: int
    losses: Losses = Losses()


class _Head(msgspec.Struct, frozen=True):
    facts: Facts
    shapes: tuple[_Shape, ...]


_heads = msgspec.json.Decoder(_Head)


def history_file(folder: Path, job: str) -> Path:
    """Return where the history of a job is kept: beside the journal."""
    return folder / f"history-{job}.bin"


def encode(history: History) -> bytes:
    """Return a history as bytes."""
    shapes = tuple(
        _Shape(one.start_s, one.length_s, one.step, min(len(cells) for cells in one.cells), one.losses)
        for one in history.buckets
    )
    head = msgspec.json.encode(_Head(history.facts, shapes))
    # Of arrays that grow during the copy only the length in the head is taken.
    body = b"".join(
        _little(cells[: shape.ranks])
        for bucket, shape in zip(history.buckets, shapes, strict=True)
        for cells in bucket.cells
    )
    return _PREFIX.pack(MAGIC, HISTORY_VERSION, len(head), zlib.crc32(head), zlib.crc32(body)) + head + body


def decode(raw: bytes, what: str = "the history of steps") -> History:
    """Return the history that ``raw`` holds; when only its head can be read, ``damage`` is set.

    Raises:
        DamagedHistoryError: nothing of it can be read.
        VersionError: it was written by a program that is too new or too old.
    """
    if len(raw) < _PREFIX.size or not raw.startswith(MAGIC):
        raise DamagedHistoryError(f"{what} is damaged: it is no history of steps")
    _magic, version, length, head_sum, body_sum = _PREFIX.unpack_from(raw)
    check_version(what, version, HISTORY_VERSION)
    head_bytes, body = raw[_PREFIX.size : _PREFIX.size + length], raw[_PREFIX.size + length :]
    if zlib.crc32(head_bytes) != head_sum:
        raise DamagedHistoryError(f"{what} is damaged: its head can't be read")
    try:
        head = _heads.decode(head_bytes)
    except UNREADABLE as error:
        raise DamagedHistoryError(f"{what} is damaged: its head can't be read ({error})") from error
    wanted = sum(shape.ranks for shape in head.shapes) * len(FIELDS) * _CELL_BYTES
    if len(body) != wanted or zlib.crc32(body) != body_sum:
        lost = f"{what} is damaged: the times of steps can't be read ({len(body):,} of {wanted:,} bytes are there)"
        return History(head.facts, damage=lost)
    return History(head.facts, tuple(_buckets(head.shapes, body)))


def _buckets(shapes: tuple[_Shape, ...], body: bytes) -> list[Bucket]:
    found = []
    at = 0
    for shape in shapes:
        cells = []
        for _ in FIELDS:
            until = at + shape.ranks * _CELL_BYTES
            one = array("f")
            one.frombytes(body[at:until])
            if sys.byteorder == "big":
                one.byteswap()
            cells.append(one)
            at = until
        found.append(Bucket(shape.start_s, shape.length_s, shape.step, tuple(cells), shape.losses))
    return found


def _little(cells: "array[float]") -> bytes:
    if sys.byteorder == "big":
        cells.byteswap()  # a slice: a copy of its own
    return cells.tobytes()
