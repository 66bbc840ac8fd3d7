# SPDX-License-Identifier: Apache-2.0
"""What grows in a job's record, in rows of its own: so an event writes what it changes, and not all that ever was.

A record of a job that failed 4,000 times had 1.2 MB, nearly all of it restarts, and every event wrote it anew. Now a
restart is a row, written once; so is each habit, each warning's tab and each runner that was known. In memory the
record is whole: it is taken apart on its way into the journal (``split``), by comparison with what the journal has, and
put together on its way out (``join``).

A journal of the version before has all of it inside the record: ``join`` takes that as well.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from megascale_ops.controller.record.job_record import JobRecord

_encode = msgspec.json.encode


class Part(NamedTuple):
    """One row: a piece of a job's record; ``body`` None: it is no more."""

    job: str
    kind: str
    key: str
    body: bytes | None


class Longest(msgspec.Struct, frozen=True):
    """A habit as a row: the longest silence at a place (its key) that ended by itself."""

    longest_s: float


class Known(msgspec.Struct, frozen=True):
    """A runner of this life, as a row."""

    runner: str


# The field of the record, by the kind of its rows.
FIELDS = {"restart": "restarts", "habit": "habits", "tab": "tabs", "runner": "runners"}
_EMPTY: dict[str, object] = {"restarts": (), "habits": {}, "tabs": {}, "runners": ()}


def split(record: "JobRecord", saved: "JobRecord | None") -> tuple[bytes, tuple[Part, ...]]:
    """Return the record without what grows, encoded, and the rows that have changed since ``saved`` was journaled."""
    core = msgspec.structs.replace(record, **_EMPTY)
    changed: list[Part] = []
    for kind, field in FIELDS.items():
        now = getattr(record, field)
        before = getattr(saved, field) if saved is not None else _EMPTY[field]
        if now is before:
            continue
        rows, old = _rows(kind, now), _rows(kind, before)
        changed += [Part(record.job, kind, key, None) for key in old if key not in rows]
        changed += [Part(record.job, kind, key, _encode(one)) for key, one in rows.items() if old.get(key) != one]
    return _encode(core), tuple(changed)


def _rows(kind: str, value: object) -> dict[str, object]:
    """Return one field's pieces by key; keys sort as their pieces follow each other."""
    if isinstance(value, Mapping):
        return {key: Longest(one) if kind == "habit" else one for key, one in value.items()}
    assert isinstance(value, tuple)
    if kind == "runner":
        return {one: Known(one) for one in value}
    return {f"{one.wall_s:017.6f}": one for one in value}


def join(core: bytes, rows: Iterable[tuple[str, str, bytes]]) -> bytes:
    """Return a whole record, encoded, from its core and its rows (kind, key, body)."""
    by_kind: dict[str, dict[str, bytes]] = {}
    for kind, key, body in sorted(rows):
        by_kind.setdefault(kind, {})[key] = body
    if not by_kind:
        return core
    whole = msgspec.json.decode(core, type=dict[str, msgspec.Raw])
    for kind, pieces in by_kind.items():
        if kind in FIELDS:
            whole[FIELDS[kind]] = msgspec.Raw(_field(kind, pieces, whole.get(FIELDS[kind])))
    return _encode(whole)


def _field(kind: str, pieces: Mapping[str, bytes], inline: msgspec.Raw | None) -> bytes:
    """Return one field; ``inline`` is what a program of the version before has written since, and counts on top."""
    if kind in {"habit", "tab"}:
        found: dict[str, object] = {
            key: msgspec.json.decode(body, type=Longest).longest_s if kind == "habit" else msgspec.Raw(body)
            for key, body in pieces.items()
        }
        return _encode(found | (msgspec.json.decode(inline, type=dict[str, object]) if inline is not None else {}))
    later = msgspec.json.decode(inline, type=list[msgspec.Raw]) if inline is not None else []
    if kind == "runner":
        return _encode([*(msgspec.json.decode(body, type=Known).runner for body in pieces.values()), *later])
    return _encode([*(msgspec.Raw(body) for body in pieces.values()), *later])
