# SPDX-License-Identifier: Apache-2.0
"""A damaged journal: notice it before it is used, put it aside, and take over what can still be read.

A journal is damaged when SQLite reports a file as damaged that was plainly ours. It is renamed, never changed and never
deleted, so that a person may look at it. From a copy, whose header is set right, every table is read row by row around
the damage, and what its checksum vouches for is kept. Where only an index is damaged, it is made anew and nothing is
lost. Single rows whose checksums do not fit are no matter of SQLite's: ``journal.checking`` looks for them.

A file that was never ours is not touched: that is a user's mistake, reported when the journal is opened.
"""

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa

from megascale_ops.controller.journal.log_tail import lost_commits
from megascale_ops.controller.journal.parts import Part
from megascale_ops.controller.journal.plain_schema import describe_anew, has_our_schema
from megascale_ops.controller.journal.reading import Row, decoded, mended, taken
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.seal import DamagedRowError
from megascale_ops.controller.journal.tables import (
    CHECKS,
    EVENTS,
    HARDWARE,
    INCIDENTS,
    JOBS,
    KEYS,
    NODES,
    PARTS,
    TABLES,
)
from megascale_ops.schema.events import Event, Incident
from megascale_ops.schema.health import BadHardware, NodeMove, SelfCheckView

# What journals contain, in their schema and their rows; another file may contain one of these, not three.
_OURS = (
    b"CREATE TABLE meta",
    b"CREATE TABLE jobs",
    b"CREATE TABLE incidents",
    b"CREATE TABLE events",
    b"CREATE TABLE hardware",
    b"CREATE TABLE parts",
    b"ix_events_incident",
    b"megascale-ops",
    b',"crc32":"',
    b'{"wall_s":',
    b'","job":"',
)
_LEAST_OURS = 3
_SIDES = ("", "-wal", "-shm")
_MAGIC = b"SQLite format 3\x00"
_PAGE = 512  # the smallest that a database may have
# What the header of every journal holds, by its place: the magic word, WAL, fractions, schema format, UTF-8.
_HEADER = ((0, _MAGIC), (18, b"\x02\x02\x00\x40\x20\x20"), (44, b"\x00\x00\x00\x04"), (56, b"\x00\x00\x00\x01"))
_VERSIONS = (1, 2)  # without and with a write-ahead log
_PAGE_SIZE_AT, _PAGE_SIZE = 16, b"\x10\x00"  # 4,096 bytes, SQLite's default
# 10,000 looks at each table: a damaged place takes as many as its rows have binary digits.
_MOST_LOOKS = 10_000
_INDEX_WORDS = ("missing from index", "wrong # of entries in index", "non-unique entry in index", "NULL value in")
# What SQLite and Python raise on damage: names in a schema may be no text, row numbers no numbers.
_UNREADABLE = (sqlite3.DatabaseError, UnicodeDecodeError, OverflowError)


class Salvaged(NamedTuple):
    """What could be read, and the sentence on what was lost."""

    jobs: dict[str, bytes]
    parts: tuple[Part, ...]
    incidents: tuple[Incident, ...]
    events: tuple[Event, ...]
    hardware: tuple[BadHardware, ...]
    nodes: tuple[NodeMove, ...]
    checks: tuple[SelfCheckView, ...]
    loss: str

    def batches(self) -> Iterator[Batch]:
        """Return it as what is to be journaled."""
        for job, record in self.jobs.items():
            yield Batch(job=job, record=record)
        yield Batch(
            parts=self.parts, incidents=self.incidents, events=self.events, hardware=self.hardware, nodes=self.nodes,
            checks=self.checks,
        )  # fmt: skip


class Damage(NamedTuple):
    """What is wrong: with the file and its log ("": the file is whole), or with the log alone, as a sentence."""

    file: str
    log: str = ""
    raw_log: bytes = b""  # a log to put aside with the file: SQLite removes it when the file is closed


def find_damage(path: Path) -> Damage:
    """Return what is wrong with the journal at ``path``; nothing, when it was never ours.

    Reads all of it: 100 MB take a quarter of a second.
    """
    if not path.is_file() or not path.stat().st_size:
        return Damage("")
    log = _beside(path, "-wal")
    shared = _beside(path, "-shm")
    raw_log, raw_shared = (one.read_bytes() if one.is_file() else b"" for one in (log, shared))
    used = 0
    try:
        with closing(sqlite3.connect(path, timeout=5.0)) as connection:
            used = max(0, connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1])
            said = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(100)")]
            if said != ["ok"] and all(any(word in one for word in _INDEX_WORDS) for one in said):
                connection.execute("REINDEX")
                connection.commit()
                said = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(1)")]
            if said == ["ok"] and not _can_be_written(path):
                said = ["its header forbids writing"]
            if said == ["ok"] and not has_our_schema(connection, TABLES.sorted_tables):
                said = ["its schema is not what it was"]
    except _UNREADABLE as error:
        said = [str(error)]
        if isinstance(error, sqlite3.OperationalError) and "malformed" not in said[0]:
            return Damage("")  # locked, not readable, no room: no damage, and reported when it is opened next
    file = "" if said == ["ok"] or not _was_ours(path, raw_log) else said[0].strip().splitlines()[-1]
    lost = lost_commits(raw_log, raw_shared, used)
    if not lost:
        return Damage(file)
    what = f"the last {lost} commits" if lost > 1 else "what was committed last"
    if file:
        return Damage(f"{file}; its log has lost {what}", raw_log=raw_log)
    kept = _beside(_free(path), "-wal")
    kept.write_bytes(raw_log)
    told = f"the journal {path} has lost {what}: its log was damaged or cut off and is kept as {kept.name}"
    return Damage("", told)


def _can_be_written(path: Path) -> bool:
    """Return whether the header holds versions that SQLite writes; it only reads what seems to be of a later one."""
    with path.open("rb") as file:
        head = file.read(20)
    return head[18] in _VERSIONS and head[19] in _VERSIONS


def _was_ours(path: Path, raw_log: bytes) -> bool:
    raw = path.read_bytes()
    size = int.from_bytes(raw[_PAGE_SIZE_AT : _PAGE_SIZE_AT + 2])
    if raw.startswith(_MAGIC[: len(raw)]) and len(raw) < max(_PAGE, size):
        return True  # cut off within its first page, it holds nothing that could be missed
    return sum(mark in raw or mark in raw_log for mark in _OURS) >= _LEAST_OURS


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _free(path: Path) -> Path:
    """Return the first name for a damaged journal that is not taken."""
    number = 1
    while any(_beside(path, f".damaged-{number}{suffix}").exists() for suffix in _SIDES):
        number += 1
    return _beside(path, f".damaged-{number}")


def put_aside(path: Path, damage: Damage) -> Salvaged:
    """Rename a damaged journal and read from it what can be read."""
    aside = _free(path)
    for suffix in _SIDES:
        with suppress(FileNotFoundError):
            _beside(path, suffix).rename(_beside(aside, suffix))
    found = _read(aside)
    log = _beside(aside, "-wal")
    if damage.raw_log and not log.exists():
        log.write_bytes(damage.raw_log)
    loss = (
        f"the journal {path} was damaged ({damage.file}) and is kept as {aside.name}; {len(found.jobs)} jobs, "
        f"{len(found.incidents)} incidents and {len(found.events)} events could be read from it, what else it held is "
        "lost"
    )
    return found._replace(loss=loss)


def _read(aside: Path) -> Salvaged:
    """Read what can be vouched for, from a copy: SQLite itself would write into a journal with a write-ahead log."""
    with tempfile.TemporaryDirectory(prefix="megascale-salvage-") as folder:
        copy = Path(folder, "journal.db")
        for suffix in _SIDES[:2]:
            with suppress(FileNotFoundError):
                shutil.copyfile(_beside(aside, suffix), _beside(copy, suffix))
        _set_header_right(copy)
        with suppress(*_UNREADABLE), closing(sqlite3.connect(copy)) as connection:
            describe_anew(connection, TABLES.sorted_tables)
        with closing(sqlite3.connect(copy)) as connection:
            connection.text_factory = bytes
            jobs = {row.key[0]: row.body for row in _rows(connection, JOBS)}
            parts = tuple(Part(row.key[0], row.key[1], row.key[2], row.body) for row in _rows(connection, PARTS))
            incidents = tuple(decoded(_rows(connection, INCIDENTS), Incident))
            events = tuple(decoded(_rows(connection, EVENTS), Event))
            hardware = tuple(decoded(_rows(connection, HARDWARE), BadHardware))
            nodes = tuple(decoded(_rows(connection, NODES), NodeMove))
            checks = tuple(decoded(_rows(connection, CHECKS), SelfCheckView))
    return Salvaged(jobs, parts, incidents, events, hardware, nodes, checks, "")


def _set_header_right(copy: Path) -> None:
    """Give the first hundred bytes what they hold in every journal of ours; their length of the file is not used."""
    with copy.open("r+b") as file:
        head = bytearray(file.read(100))
        if len(head) < 100:
            return
        for place, known in _HEADER:
            head[place : place + len(known)] = known
        pages = int.from_bytes(head[_PAGE_SIZE_AT : _PAGE_SIZE_AT + 2])
        if pages != 1 and (pages < _PAGE or pages & (pages - 1)):
            head[_PAGE_SIZE_AT : _PAGE_SIZE_AT + 2] = _PAGE_SIZE
        head[92:96] = (int.from_bytes(head[24:28]) ^ 1).to_bytes(4)  # no longer vouches for the recorded length
        file.seek(0)
        file.write(head)


def _rows(connection: sqlite3.Connection, table: sa.Table) -> list[Row]:
    """Return the rows of a table that are what was written, oldest first, read around what is damaged."""
    columns = [*(column.name for column in KEYS[table.name]), "body"]
    found: dict[int, Row] = {}
    for number, *values in _readable(connection, table.name, columns):
        with suppress(DamagedRowError):
            try:
                found[number] = taken(table, values)
            except DamagedRowError:
                anew = mended(table, values)
                if anew is None:
                    raise
                found[number] = taken(table, [anew[name] for name in columns])
    return [found[number] for number in sorted(found)]


def _readable(connection: sqlite3.Connection, table: str, columns: list[str]) -> Iterator[tuple[Any, ...]]:
    """Yield rowid and columns of every row that can be read, over damaged places and from the end back."""
    wanted = ", ".join(f'"{column}"' for column in columns)
    query = f'SELECT rowid, {wanted} FROM "{table}" WHERE rowid > ? ORDER BY rowid'  # noqa: S608  names from the schema
    last, step = 0, 0
    for _ in range(_MOST_LOOKS):
        try:
            for row in connection.execute(query, (last + step,)):
                yield row
                last, step = int(row[0]), 0
        except _UNREADABLE:
            step = max(1, 2 * step)
            if last + step >= 1 << 62:
                break
            continue
        break
    with suppress(*_UNREADABLE):
        back = query.replace("rowid > ?", "rowid < 9223372036854775807").replace("BY rowid", "BY rowid DESC")
        for row in connection.execute(back):
            if row[0] <= last:
                break
            yield row
