# SPDX-License-Identifier: Apache-2.0
"""A journal with flipped bytes: kept aside, told in one sentence, and read as far as it can be."""

import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.salvage import find_damage
from megascale_ops.controller.journal.store import open_store
from megascale_ops.schema.events import Event, Incident, Marks
from tests.fakes.controlled_job import World
from tests.fakes.damaged_journal import copy_journal, damage, judge, read_journal, write_journal
from tests.matrix import some

# 120 trials: 3 s.
TRIALS = some(120)

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


def test_any_damage_leaves_a_journal_that_works(tmp_path: Path, drawn_seed: int) -> None:
    """Flips, bursts and cuts anywhere in the journal or its log: it opens, invents nothing, and tells what it lost.

    The seed is drawn anew each time and told when a trial fails; 10,000 trials by hand took five minutes.
    """
    whole = tmp_path / "whole.db"
    content = write_journal(whole)

    wrong = []
    for number in range(TRIALS):
        path = tmp_path / str(number) / "ops.db"
        path.parent.mkdir()
        copy_journal(whole, path)
        done = damage(path, random.Random(drawn_seed + number))  # noqa: S311  no secret
        wrong += [f"seed {drawn_seed + number}, {done}: {one}" for one in judge(content, path)]
        shutil.rmtree(path.parent)

    assert wrong == []


def test_a_journal_left_by_a_kill_has_lost_nothing(tmp_path: Path) -> None:
    """The negative control: half of it in its log, undamaged, everything is there and no loss is told."""
    content = write_journal(tmp_path / "ops.db")

    store = open_store(f"sqlite:///{tmp_path}/ops.db")
    now, loss = read_journal(store), store.loss
    store.close()

    assert now == content
    assert loss == ""


@pytest.mark.parametrize("lives_on", ["ops.db", "ops.db.damaged-1"])
def test_the_judge_of_damage_can_say_no(tmp_path: Path, lives_on: str) -> None:
    """The negative control of the trials: a number that reads otherwise and a row that is gone are both noticed."""
    content = write_journal(tmp_path / "ops.db")
    other = content._replace(
        jobs={"demo": content.jobs["demo"].replace(b'"round":3', b'"round":7')},
        events={name: event for name, event in content.events.items() if lives_on == "ops.db" or event.wall_s > 110},
    )

    said = judge(other, tmp_path / "ops.db")

    assert any("job demo is not what it was" in one for one in said)
    assert any("was invented" in one for one in said)


def test_a_flip_inside_a_number_is_no_other_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Round 3 that reads 7 is valid JSON: the checksum tells. The row is put aside and told, the rest is used."""
    path = tmp_path / "ops.db"
    content = write_journal(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("""UPDATE jobs SET body = REPLACE(body, '"round":3', '"round":7') WHERE job = 'demo'""")
        connection.execute("UPDATE incidents SET began = 7.0 WHERE id = 'other-5'")
        connection.commit()

    store = open_store(f"sqlite:///{path}")
    now, loss, order = read_journal(store), store.loss, [one.id for one in store.incidents("other")]
    store.close()
    with closing(sqlite3.connect(path)) as connection:
        aside = connection.execute("SELECT source, why, body FROM damaged").fetchall()

    assert set(now.jobs) == {"other"}
    assert (now.incidents, now.events) == (content.incidents, content.events)
    assert order == [f"other-{n}" for n in range(1, 41)]  # its column was set right by its body
    assert "1 rows of the journal were damaged" in loss
    assert "the state of a job" in loss
    assert [one[0] for one in aside] == ["jobs"]
    assert b'"round":7' in aside[0][2]
    assert "demo" in aside[0][1]
    assert loss in caplog.text


@pytest.mark.parametrize(("where", "flipped"), [(0, b"TQLite"), (18, b"\x03"), (21, b"\x41")])
def test_a_damaged_header_costs_nothing(tmp_path: Path, where: int, flipped: bytes) -> None:
    """What the first hundred bytes of a journal say is known: rows are read as if nothing had been."""
    path = tmp_path / "ops.db"
    store = open_store(f"sqlite:///{path}")
    store.submit(Batch(job="demo", record=b'{"job":"demo"}', incidents=(Incident("demo-1", "demo", 1),)))
    store.close()
    raw = path.read_bytes()
    path.write_bytes(raw[:where] + flipped + raw[where + len(flipped) :])

    again = open_store(f"sqlite:///{path}")
    jobs, incidents, loss = again.jobs(), again.incidents(), again.loss
    again.close()

    assert (list(jobs), len(incidents)) == (["demo"], 1)
    assert "is kept as ops.db.damaged-1" in loss


@pytest.mark.parametrize("length", [7, 99, 600, 4000])
def test_a_journal_cut_off_in_its_first_page_is_put_aside(tmp_path: Path, length: int) -> None:
    """Nothing of it can be read; it is kept, told, and the controller begins anew."""
    path = tmp_path / "ops.db"
    write_journal(path)
    path.with_name("ops.db-wal").unlink()
    path.write_bytes(path.read_bytes()[:length])

    store = open_store(f"sqlite:///{path}")
    jobs, loss = store.jobs(), store.loss
    store.close()

    assert jobs == {}
    assert "0 jobs, 0 incidents" in loss
    assert (tmp_path / "ops.db.damaged-1").stat().st_size == length


def test_a_log_that_was_cut_off_is_told(tmp_path: Path) -> None:
    """What was committed last is gone, and nothing in the journal shows it: the file beside the log does."""
    path = tmp_path / "ops.db"
    write_journal(path)
    log = path.with_name("ops.db-wal")
    log.write_bytes(log.read_bytes()[:-5000])

    store = open_store(f"sqlite:///{path}")
    store.close()

    assert "has lost what was committed last" in store.loss
    assert (tmp_path / "ops.db.damaged-1-wal").exists()


@pytest.mark.parametrize("first_page", [bytes(4096), b"\xa5" * 4096])
def test_a_log_whose_beginning_is_gone_is_told(tmp_path: Path, first_page: bytes) -> None:
    """With header and first frame gone nothing says whose log it was: SQLite uses none of it, and the loss is told."""
    path = tmp_path / "ops.db"
    write_journal(path)
    log = path.with_name("ops.db-wal")
    log.write_bytes(first_page + log.read_bytes()[4096:])
    path.with_name("ops.db-shm").unlink(missing_ok=True)

    store = open_store(f"sqlite:///{path}")
    store.close()

    assert "has lost" in store.loss
    assert (tmp_path / "ops.db.damaged-1-wal").exists()


@pytest.mark.parametrize(("first", "last"), [(0, 99), (4096, 1 << 30)])
def test_a_journal_and_its_log_are_told_in_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int, last: int
) -> None:
    """Both are damaged, as by a disk: both are put aside, and the sentence on the file says what its log has lost."""
    path = tmp_path / "ops.db"
    write_journal(path)
    for side in ("", "-wal"):
        _flip(path.with_name(f"ops.db{side}"), first, last)
    log = (tmp_path / "ops.db-wal").read_bytes()

    store = open_store(f"sqlite:///{path}")
    store.close()

    assert [record.getMessage() for record in caplog.records] == [store.loss]
    assert store.loss.count("damaged") == 2  # what was, and the name by which it is kept
    assert "; its log has lost what was committed last)" in store.loss
    assert (tmp_path / "ops.db.damaged-1").exists()
    assert (tmp_path / "ops.db.damaged-1-wal").read_bytes() == log


@pytest.mark.parametrize("body", [b"null", b"7", b"[]", b'{"job":1e999}', b'{"restarts":3}', b'{"habits":[]}'])
def test_a_record_of_another_shape_is_put_aside(tmp_path: Path, body: bytes) -> None:
    """Rows without a checksum are valid JSON by chance: what is no record ends no controller at its start."""
    path = tmp_path / "ops.db"
    content = write_journal(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE jobs SET body = ? WHERE job = 'demo'", (body.decode(),))
        connection.commit()

    store = open_store(f"sqlite:///{path}")
    now, loss = read_journal(store), store.loss
    store.close()

    assert set(now.jobs) == {"other"}
    assert (now.incidents, now.events) == (content.incidents, content.events)
    assert "1 rows of the journal were damaged" in loss


@pytest.mark.parametrize(
    ("word", "flipped"),
    [(b"CREATE TABLE jobs", b"CREATE TABME jobs"), (b"jobs (", b"jobq ("), (b"VARCHAR(100)", b"VARCHAR(900)")],
)
def test_a_damaged_description_of_a_table_costs_no_row(tmp_path: Path, word: bytes, flipped: bytes) -> None:
    """Tables are told by what is left of their descriptions."""
    path = tmp_path / "ops.db"
    store = open_store(f"sqlite:///{path}")
    store.submit(Batch(job="demo", record=b'{"job":"demo"}', incidents=(Incident("demo-1", "demo", 1),)))
    store.close()
    raw = path.read_bytes()
    assert word in raw[:4096]
    path.write_bytes(raw[:4096].replace(word, flipped) + raw[4096:])

    again = open_store(f"sqlite:///{path}")
    jobs, incidents, loss = again.jobs(), again.incidents(), again.loss
    again.close()

    assert (list(jobs), len(incidents)) == (["demo"], 1)
    assert "damaged" in loss


def test_a_record_that_makes_no_sense_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A journal of an older program has no checksums: a state that there is none of begins its job anew, told."""
    world = World()
    world.memory.cores["job"] = b'{"job":"job","state":"runnimg","round":3}'
    world.memory.cores["other"] = b'{"job":"jbb","state":"running"}'

    world.restart_controller()
    world.loop.tick()

    assert world.loop.jobs == {}
    assert "there is no state 'runnimg'" in caplog.text
    assert "filed under other and tells of jbb" in caplog.text


@pytest.mark.parametrize("content", [b"", b"notes about megascale-ops, and no database at all" * 100])
def test_what_was_never_ours_is_not_touched(tmp_path: Path, content: bytes) -> None:
    """The negative control: an empty file and a text file are no damaged journals, and neither is a whole one."""
    notes, whole = tmp_path / "notes.txt", tmp_path / "ops.db"
    notes.write_bytes(content)
    _journal(whole)

    assert find_damage(notes).file == ""
    assert find_damage(whole).file == ""
    assert find_damage(tmp_path / "missing").file == ""
    assert notes.read_bytes() == content
