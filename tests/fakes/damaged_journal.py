# SPDX-License-Identifier: Apache-2.0
"""A journal whose content is known, damage to it, and whether what is read from it was ever written."""

import random
import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec

from megascale_ops.controller.journal.parts import Part
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import Store, open_store
from megascale_ops.errors import UsageError
from megascale_ops.schema.events import Event, Incident, Marks
from megascale_ops.schema.health import BadHardware, Verdict

_SIDES = ("", "-wal", "-shm")


class Content(NamedTuple):
    """All that a journal tells."""

    jobs: dict[str, bytes]
    incidents: dict[str, Incident]
    events: dict[str, Event]
    hardware: dict[str, BadHardware]


def write_journal(path: Path) -> Content:
    """Write a journal of two jobs, left as a controller that was killed leaves it: half of it in the log."""
    url = f"sqlite:///{path}"
    records = {name: b'{"job":"%s","round":%d,"state":"running"}' % (name.encode(), 3) for name in ("demo", "other")}
    store = open_store(url)
    for half in (0, 1):
        for name, record in records.items():
            parts = tuple(
                Part(name, "restart", f"{n:017.6f}", b'{"wall_s":%d.5,"cause":"killed"}' % n)
                for n in range(half * 10, half * 10 + 10)
            )
            numbers = range(half * 20 + 1, half * 20 + 21)
            incidents = tuple(_incident(name, n) for n in numbers)
            events = tuple(Event(100.0 + n, name, f"lost-{name}-{n}", "x" * (n * 7), data={"n": n}) for n in numbers)
            store.submit(Batch(job=name, record=record, parts=parts, incidents=incidents, events=events))
        store.submit(Batch(hardware=(BadHardware(f"GPU-{half}", "xid 79", "a", "it fell off", 1.0, 2.0, 3),)))
        store.flush()
        if half == 0:
            store.close()
            store = open_store(url)
    left = [(side, path.with_name(path.name + side).read_bytes()) for side in _SIDES if _side(path, side).exists()]
    content = read_journal(store)
    store.close()
    for side, raw in left:
        _side(path, side).write_bytes(raw)
    return content


def read_journal(store: Store) -> Content:
    """Return all that an open store tells."""
    jobs = store.jobs()
    events = [event for job in ("demo", "other") for event in store.events(job)]
    return Content(
        jobs,
        {one.id: one for one in store.newest_incidents(1000)},
        {event.kind: event for event in events},
        {one.uuid: one for one in store.hardware()},
    )


def damage(path: Path, dice: random.Random) -> str:
    """Flip bits or bytes of a journal or its log, or cut one of them off; return in words what was done."""
    files = [side for side in _SIDES[:2] if _side(path, side).is_file() and _side(path, side).stat().st_size]
    side = dice.choice(files)
    raw = bytearray(_side(path, side).read_bytes())
    kind = dice.choice(["bit", "bit", "bits", "burst", "cut"])
    place = dice.randrange(len(raw))
    if kind == "cut":
        raw = raw[:place]
    elif kind == "burst":
        length = dice.choice([2, 16, 600, 4096])
        for at in range(place, min(place + length, len(raw))):
            raw[at] ^= dice.randrange(1, 256)
    else:
        for at in [place, *(dice.randrange(len(raw)) for _ in range(7 if kind == "bits" else 0))]:
            raw[at] ^= 1 << dice.randrange(8)
    _side(path, side).write_bytes(raw)
    return f"{kind} at {place} of ops.db{side}"


def judge(before: Content, path: Path) -> list[str]:
    """Open a damaged journal as a controller does; return what is wrong with how that went."""
    try:
        store = open_store(f"sqlite:///{path}")
    except UsageError as error:
        return [f"it was refused: {error}"]
    wrong = []
    try:
        now, loss = read_journal(store), store.loss
        store.submit(Batch(job="new", record=b'{"job":"new"}'))
        store.flush()
        wrong += [] if "new" in store.jobs() and not store.failing else [f"it can't be written to: {store.failing}"]
    finally:
        store.close()
    for what, known, found in zip(Content._fields, before, now, strict=True):
        wrong += [f"{what} {name} was invented" for name in found if name not in known]
        if what != "jobs":
            wrong += [f"{what} {name} is not what it was" for name in found if found[name] != known.get(name)]
        lost = [name for name in known if name not in found]
        if lost and not loss:
            wrong.append(f"{len(lost)} {what} were lost and nothing was said")
    return wrong + _wrong_jobs(before, now, loss)


def _wrong_jobs(before: Content, now: Content, loss: str) -> list[str]:
    """Hold records against what they were: fewer restarts than there were must be told, others are invented."""
    wrong = []
    for name, record in now.jobs.items():
        known = msgspec.json.decode(before.jobs.get(name, b"{}"))
        found = msgspec.json.decode(record)
        restarts, were = found.pop("restarts", []), known.pop("restarts", [])
        if found != known or any(one not in were for one in restarts):
            wrong.append(f"job {name} is not what it was: {found} {restarts}")
        if len(restarts) < len(were) and not loss:
            wrong.append(f"job {name} has lost restarts and nothing was said")
    return wrong


def copy_journal(path: Path, to: Path) -> None:
    """Copy a journal with its log."""
    for side in _SIDES:
        if _side(path, side).exists():
            shutil.copy(_side(path, side), _side(to, side))


def _incident(job: str, number: int) -> Incident:
    reason = f"rank {number} on node-{number} is stopped (state T) for {number}.5 s"
    verdict = Verdict(fault="frozen", reason=reason, confidence=0.99, culprits=(number,), nodes=(f"node-{number}",))
    marks = Marks(began=90.0 + number, detected=100.0 + number)
    return Incident(f"{job}-{number}", job, number, state="recovered", marks=marks, verdict=verdict)


def _side(path: Path, side: str) -> Path:
    return path.with_name(path.name + side)
