# SPDX-License-Identifier: Apache-2.0
"""A damaged journal: notice it before it is used, put it aside, and take over what can still be read.

A journal is damaged when SQLite says so of a file that was plainly ours. It is renamed, never changed and never
deleted, so that a person may look at it. From a copy every table is read from its beginning and from its end, up to the
damage; what decodes is kept. A flipped byte costs the rows of one page then, and mostly not the state of any job.

A file that was never ours is not touched: that is a user's mistake, told as such by whoever opens it.
"""

import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from megascale_ops.schema.events import Event, Incident
from megascale_ops.schema.health import BadHardware

# What no file but ours holds together: our tables' names on the first page, or the one that carries our name with it.
_OURS = (
    (b"CREATE TABLE meta", b"CREATE TABLE jobs", b"CREATE TABLE incidents", b"CREATE TABLE events"),
    (b"CREATE TABLE meta", b"megascale-ops"),
)
_SIDES = ("", "-wal", "-shm")
T = TypeVar("T")


class Salvaged(NamedTuple):
    """What could be read, and the sentence that tells the loss."""

    jobs: dict[str, bytes]
    incidents: tuple[Incident, ...]
    events: tuple[Event, ...]
    loss: str
    hardware: tuple[BadHardware, ...] = ()


def find_damage(path: Path) -> str:
    """Return what is wrong with the journal at ``path``; "" for nothing, or when it was never ours.

    Reads all of it: 100 MB take a quarter of a second.
    """
    if not path.is_file() or not path.stat().st_size:
        return ""
    try:
        with closing(sqlite3.connect(path, timeout=5.0)) as connection:
            (said,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        said = str(error)
        if isinstance(error, sqlite3.OperationalError) and "malformed" not in said:
            return ""  # locked, not readable, no room: no damage, and told by whoever opens it next
    if said == "ok" or not _was_ours(path):
        return ""
    return str(said).strip().splitlines()[-1]


def _was_ours(path: Path) -> bool:
    raw = b"".join(side.read_bytes() for suffix in _SIDES[:2] if (side := _beside(path, suffix)).is_file())
    return any(all(mark in raw for mark in marks) for marks in _OURS)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def put_aside(path: Path, damage: str) -> Salvaged:
    """Rename a damaged journal and read from it what can be read."""
    number = 1
    while _beside(path, f".damaged-{number}").exists():
        number += 1
    aside = _beside(path, f".damaged-{number}")
    for suffix in _SIDES:
        with suppress(FileNotFoundError):
            _beside(path, suffix).rename(_beside(aside, suffix))
    jobs, incidents, events, hardware = _read(aside)
    loss = (
        f"the journal {path} was damaged ({damage}) and is kept as {aside.name}; {len(jobs)} jobs, {len(incidents)} "
        f"incidents and {len(events)} events could be read from it, what else it held is lost"
    )
    return Salvaged(jobs, incidents, events, loss, hardware)


def _read(
    aside: Path,
) -> tuple[dict[str, bytes], tuple[Incident, ...], tuple[Event, ...], tuple[BadHardware, ...]]:
    """Read what decodes from a copy: SQLite itself would write into a journal with a write-ahead log."""
    with tempfile.TemporaryDirectory(prefix="megascale-salvage-") as folder:
        copy = Path(folder, "journal.db")
        for suffix in _SIDES[:2]:
            with suppress(FileNotFoundError):
                shutil.copyfile(_beside(aside, suffix), _beside(copy, suffix))
        with closing(sqlite3.connect(copy)) as connection:
            jobs = {job: body.encode() for job, body in _rows(connection, "jobs", "job, body") if _decodes(body, dict)}
            incidents = tuple(_decoded((body for (body,) in _rows(connection, "incidents", "body")), Incident))
            events = tuple(_decoded((body for (body,) in _rows(connection, "events", "body")), Event))
            hardware = tuple(_decoded((body for (body,) in _rows(connection, "hardware", "body")), BadHardware))
    return jobs, incidents, events, hardware


def _rows(connection: sqlite3.Connection, table: str, columns: str) -> list[tuple[str, ...]]:
    """Return the rows of a table up to the damage, from both ends, oldest first."""
    found: dict[int, tuple[str, ...]] = {}
    for order in ("", "DESC"):
        with suppress(sqlite3.DatabaseError, UnicodeDecodeError):
            query = f"SELECT rowid, {columns} FROM {table} ORDER BY rowid {order}"  # noqa: S608  names of our own
            for number, *row in connection.execute(query):
                if number in found:
                    break
                if all(isinstance(value, str) for value in row):
                    found[number] = tuple(row)
    return [found[number] for number in sorted(found)]


def _decodes(body: str, kind: type[object]) -> bool:
    try:
        msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError:
        return False
    return True


def _decoded(bodies: Iterable[str], kind: type[T]) -> Iterator[T]:
    for body in bodies:
        with suppress(msgspec.MsgspecError):
            yield msgspec.json.decode(body, type=kind)
