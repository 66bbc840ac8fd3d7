# SPDX-License-Identifier: Apache-2.0
"""Rows as they come out of the journal: read as bytes, held against their seals, and only then decoded.

SQLite gives back whatever a damaged page holds: text that is no UTF-8, a number where text was. So text is asked for as
bytes, and nothing is decoded before its checksum fits.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from megascale_ops.controller.journal.parts import Known, Longest
from megascale_ops.controller.journal.rows import check_row, event_row, hardware_row, incident_row, node_row
from megascale_ops.controller.journal.seal import DamagedRowError, is_sealed, unseal
from megascale_ops.controller.journal.tables import (
    CHECKS,
    EVENTS,
    HARDWARE,
    INCIDENTS,
    JOBS,
    KEYS,
    NODES,
    PARTS,
    key_of,
)
from megascale_ops.controller.policy.decision import Restart, Tab
from megascale_ops.foreign import UNREADABLE
from megascale_ops.schema.events import Event, Incident
from megascale_ops.schema.health import BadHardware, NodeMove, SelfCheckView

T = TypeVar("T")
_PARTS = {"restart": Restart, "habit": Longest, "tab": Tab, "runner": Known}
_ROW_OF: dict[str, tuple[type[msgspec.Struct], Any]] = {
    INCIDENTS.name: (Incident, incident_row),
    EVENTS.name: (Event, event_row),
    HARDWARE.name: (BadHardware, hardware_row),
    NODES.name: (NodeMove, node_row),
    CHECKS.name: (SelfCheckView, check_row),
}


class _Core(msgspec.Struct, frozen=True):
    """What ``parts.join`` needs of a job's record that an older program wrote: the fields that grow, of their kinds."""

    restarts: tuple[msgspec.Raw, ...] = ()
    habits: dict[str, object] = {}
    tabs: dict[str, object] = {}
    runners: tuple[msgspec.Raw, ...] = ()


class Row(msgspec.Struct, frozen=True):
    """One row that is what was written: its key, as text, and its body without the seal."""

    key: tuple[str, ...]
    body: bytes


def asked(table: sa.Table, dialect: str) -> list[sa.ColumnElement[Any]]:
    """Return the columns to select for ``taken``: the row's keys, and its body last."""
    columns = [*KEYS[table.name], table.c.body]
    if dialect != "sqlite":
        return list(columns)
    return [sa.cast(one, sa.LargeBinary) if isinstance(one.type, sa.String) else one for one in columns]


def taken(table: sa.Table, values: Sequence[Any]) -> Row:
    """Return a row that was selected by ``asked``.

    Raises:
        DamagedRowError: it is not what was written.
    """
    *keys, raw = values
    key = tuple(_text(one) for one in keys)
    body = unseal(key_of(table, key), raw)
    raw_bytes = raw.encode() if isinstance(raw, str) else raw
    if not is_sealed(raw_bytes):
        _check_unsealed(table, key, body)
    return Row(key, body)


def decoded(rows: Iterable[Row], kind: type[T]) -> Iterator[T]:
    """Yield what rows hold; what a newer program wrote, and can't be understood here, is left out."""
    for row in rows:
        with suppress(*UNREADABLE):
            yield msgspec.json.decode(row.body, type=kind)


def mended(table: sa.Table, values: Sequence[Any]) -> dict[str, Any] | None:
    """Return the row anew when its body is whole and only its columns are not; None when nothing vouches for it."""
    if table.name not in _ROW_OF:
        return None
    kind, row_of = _ROW_OF[table.name]
    try:
        row: dict[str, Any] = row_of(msgspec.json.decode(values[-1], type=kind))
    except (*UNREADABLE, TypeError):
        return None
    raw = values[-1].encode() if isinstance(values[-1], str) else values[-1]
    return row if is_sealed(raw) and row["body"].encode() == raw else None


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _check_unsealed(table: sa.Table, key: tuple[str, ...], body: bytes) -> None:
    """Hold a row of an older program, which has no checksum, against what such a row looks like."""
    kind: Any = _PARTS.get(key[1], object) if table is PARTS else _ROW_OF.get(table.name, (_Core, None))[0]
    try:
        body.decode()
        msgspec.json.decode(body)  # all of it: a type skips unknown members, whatever their content
        found = msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise DamagedRowError(f"it can't be read: {error}") from error
    if table is JOBS or table is PARTS:
        return
    row = _ROW_OF[table.name][1](found)
    columns = tuple(str(row[column.name]) for column in KEYS[table.name])
    if columns != key:
        raise DamagedRowError(f"it is filed as {', '.join(key)} and tells of {', '.join(columns)}")
