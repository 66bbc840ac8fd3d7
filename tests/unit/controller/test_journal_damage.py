# SPDX-License-Identifier: Apache-2.0
"""A journal with flipped bytes: kept aside, told in one sentence, and read as far as it can be."""

import random
from pathlib import Path

import pytest

from megascale_ops.controller.journal_rows import Batch
from megascale_ops.controller.salvage import find_damage
from megascale_ops.controller.store import open_store
from megascale_ops.errors import UsageError
from megascale_ops.schema.events import Event, Incident, Marks

JOBS = {f"job-{number}": b'{"job":"x"}' for number in range(50)}


def _journal(path: Path) -> bytes:
    store = open_store(f"sqlite:///{path}")
    for name, record in JOBS.items():
        store.submit(Batch(job=name, record=record))
    incidents = tuple(Incident(f"job-1-{n}", "job-1", n, marks=Marks(detected=float(n))) for n in range(1, 200))
    events = tuple(Event(float(n), "job-1", "lost", "x" * 200) for n in range(400))
    store.submit(Batch(incidents=incidents, events=events))
    store.close()
    return path.read_bytes()


def _flip(path: Path, first: int, last: int) -> None:
    raw = bytearray(path.read_bytes())
    for place in range(first, min(last, len(raw))):
        raw[place] ^= 0x5A
    path.write_bytes(raw)


def test_flipped_bytes_cost_what_they_hit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Damage among the events leaves jobs and incidents as they were; the loss is told once, with its numbers."""
    path = tmp_path / "ops.db"
    raw = _journal(path)
    hit = raw.rindex(b"x" * 200)
    _flip(path, hit // 4096 * 4096, hit // 4096 * 4096 + 4096)
    damaged = path.read_bytes()

    store = open_store(f"sqlite:///{path}")
    jobs, incidents, events = store.jobs(), store.incidents(), store.events("job-1")
    loss = store.loss
    store.close()
    again = open_store(f"sqlite:///{path}")
    again.close()

    assert jobs == JOBS
    assert len(incidents) == 199
    assert 0 < len(events) < 400
    assert (tmp_path / "ops.db.damaged-1").read_bytes() == damaged
    assert "50 jobs, 199 incidents" in loss
    assert caplog.text.count("was damaged") == 1
    assert again.loss == ""


def test_any_damage_leaves_a_journal_that_works(tmp_path: Path) -> None:
    """Wherever a page is flipped: what opens is a working journal, or what was there is called no database of ours."""
    path = tmp_path / "ops.db"
    raw = _journal(path)
    dice = random.Random(11)  # noqa: S311  the same damage in every run
    kept, refused = 0, []
    for _ in range(25):
        path.write_bytes(raw)
        first = dice.randrange(0, len(raw) - 64)
        _flip(path, first, first + dice.choice([1, 16, 4096]))

        try:
            store = open_store(f"sqlite:///{path}")
        except UsageError as error:
            refused.append(str(error))  # the page that carries our name: not to be told from somebody else's
            continue
        store.submit(Batch(job="new", record=b"{}"))
        store.close()

        reader = open_store(f"sqlite:///{path}", readonly=True)
        assert "new" in reader.jobs()
        reader.close()
        kept += 1
    assert kept >= 20
    assert all("database" in sentence for sentence in refused)
    assert path.exists()


@pytest.mark.parametrize("content", [b"", b"notes about megascale-ops, and no database at all" * 100])
def test_what_was_never_ours_is_not_touched(tmp_path: Path, content: bytes) -> None:
    """The negative control: an empty file and somebody's notes are no damaged journals, and neither is a whole one."""
    notes, whole = tmp_path / "notes.txt", tmp_path / "ops.db"
    notes.write_bytes(content)
    _journal(whole)

    assert find_damage(notes) == ""
    assert find_damage(whole) == ""
    assert find_damage(tmp_path / "missing") == ""
    assert notes.read_bytes() == content
