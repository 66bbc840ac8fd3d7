# SPDX-License-Identifier: Apache-2.0
"""The journal on real engines: SQLite files, and a PostgreSQL server that the test starts for itself."""

import json
import sqlite3
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from megascale_ops.cli.main import main
from megascale_ops.controller.journal import tables
from megascale_ops.controller.journal.engine import engine_of
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import Store, open_store
from megascale_ops.errors import UsageError, VersionError
from megascale_ops.schema.events import Event, Incident, Marks
from megascale_ops.schema.messages import EvidenceItem

if TYPE_CHECKING:
    from tests.fakes.postgres import PostgresServer


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ops.db"
    postgres: PostgresServer = request.getfixturevalue("postgres")
    return postgres.url


def _incident(number: int, job: str = "job", **more: object) -> Incident:
    marks = Marks(detected=float(number))
    return Incident(id=f"{job}-{number}", job=job, round=number, marks=marks, **more)  # type: ignore[arg-type]  # fields


def _write(store: Store, *batches: Batch) -> None:
    done = threading.Event()
    for batch in batches:
        store.submit(batch)
    store.submit(Batch(), done.set)
    assert done.wait(10)


def test_what_is_written_is_read_back(url: str) -> None:
    """Jobs, incidents and events, after the store was closed and opened again."""
    evidence = (EvidenceItem(kind="stacks", ok=True, text="long"),)
    store = open_store(url)
    _write(
        store,
        Batch(job="job", record=b'{"a":1}', incidents=(_incident(1),)),
        Batch(job="job", record=b'{"a":2}', incidents=(_incident(2), _incident(1, evidence=evidence))),
        Batch(events=(Event(1.0, "job", "lost", "why", incident="job-1"), Event(2.0, "job", "formed"))),
        Batch(job="b", record=b"{}", incidents=(_incident(1, "b"),)),
    )
    store.close()

    store = open_store(url)
    jobs, everything, one = store.jobs(), store.incidents(), store.incident("job-1")
    listed, newest, events = store.incidents("job"), store.newest_incidents(2), store.events("job")
    store.close()

    assert jobs == {"job": b'{"a":2}', "b": b"{}"}
    assert {incident.id for incident in everything} == {"job-1", "job-2", "b-1"}
    assert [incident.id for incident in listed] == ["job-1", "job-2"]
    assert listed[0].evidence[0].text == ""
    assert one is not None
    assert one.evidence[0].text == "long"
    assert [event.kind for event in one.events] == ["lost"]
    assert len(newest) == 2
    assert [event.kind for event in events] == ["lost", "formed"]


def test_a_journal_that_is_not_made_whole_is_not_made(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut off behind the last table: nothing is left that is no journal, and the next one makes it."""

    def cut_off(_: sa.Connection) -> None:
        raise sa.exc.OperationalError("stamp", None, OSError("cut off"))

    with monkeypatch.context() as patched:
        patched.setattr(tables, "_stamp", cut_off)
        with pytest.raises(UsageError, match="cut off"):
            open_store(url)
    engine = engine_of(url, readonly=False)
    left = sa.inspect(engine).get_table_names()
    engine.dispose()
    store = open_store(url)
    _write(store, Batch(job="job", record=b"{}"))
    jobs = store.jobs()
    store.close()

    assert left == []
    assert list(jobs) == ["job"]


def test_done_is_called_in_order_and_after_the_commit(url: str) -> None:
    """The barrier: when done is called, another connection sees the batch."""
    store = open_store(url)
    seen: list[bytes] = []
    finished = threading.Event()

    for number in range(20):
        store.submit(
            Batch(job="job", record=b'{"a":%d}' % number), lambda: seen.append(store.jobs().get("job", b"none"))
        )
    store.submit(Batch(), finished.set)
    assert finished.wait(20)
    store.close()

    told = [json.loads(one)["a"] for one in seen]
    assert told == sorted(told)
    assert all(one >= number for number, one in enumerate(told))


def test_a_newer_version_is_refused(url: str) -> None:
    """One version apart is understood, two are refused with both named."""
    open_store(url).close()
    engine = sa.create_engine(url)
    for version, refused in (("3", False), ("4", True)):
        with engine.begin() as connection:
            connection.execute(sa.text(f"UPDATE meta SET value = '{version}' WHERE key = 'version'"))  # noqa: S608  the test's own number

        if refused:
            with pytest.raises(VersionError, match=r"version 4.*version 2"):
                open_store(url)
        else:
            open_store(url).close()
    engine.dispose()


def test_a_database_of_something_else_is_refused(url: str) -> None:
    """Nothing is written into what is not ours."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE meta (id INTEGER, who VARCHAR(20))"))
    engine.dispose()

    with pytest.raises(UsageError, match="database of something else"):
        open_store(url)


@pytest.mark.parametrize("content", [b"this is no database at all, but long enough to look like a file", b"x"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    """A file that SQLite can't read gets one sentence and stays what it was."""
    path = tmp_path / "notes.txt"
    path.write_bytes(content * 40)

    with pytest.raises(UsageError, match="can't be used"):
        open_store(f"sqlite:///{path}")

    assert path.read_bytes() == content * 40


@pytest.mark.parametrize("url", ["nonsense", "sqlite://", "mysql://x/y", "sqlite:////no/such/folder/ops.db"])
def test_what_is_no_store_is_refused(url: str) -> None:
    """One sentence for each."""
    with pytest.raises(UsageError, match="can't be used"):
        open_store(url)


def test_a_server_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    """PostgreSQL away at the start: one sentence, and no password in it."""
    with pytest.raises(UsageError, match="can't be used") as refused:
        open_store(f"postgresql+psycopg://ops:hidden@/postgres?host={tmp_path}")

    assert "hidden" not in str(refused.value)


def test_reading_changes_nothing(tmp_path: Path) -> None:
    """A journal opened for reading is not written to, and one that is missing is not created."""
    path = tmp_path / "ops.db"
    with pytest.raises(UsageError, match="there is no journal"):
        open_store(f"sqlite:///{path}", readonly=True)
    store = open_store(f"sqlite:///{path}")
    _write(store, Batch(incidents=(_incident(1),)))

    reader = open_store(f"sqlite:///{path}", readonly=True)

    assert reader.incident("job-1") is not None
    assert reader.incident("job-9") is None
    reader.close()
    store.close()


def test_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    """While writing fails, done is still called, the trouble is told, and everything is written once it can be."""
    path = tmp_path / "ops.db"
    store = open_store(f"sqlite:///{path}")
    _write(store, Batch(job="job", record=b'{"a":1}'))
    blocker = sqlite3.connect(path)
    blocker.execute("CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
    blocker.commit()

    _write(store, Batch(job="job", record=b'{"a":2}', events=(Event(1.0, "job", "first"),)))
    _write(store, Batch(job="job", record=b'{"a":3}', events=(Event(2.0, "job", "second"),)))
    failing, kept = store.failing, store.kept
    blocker.execute("DROP TRIGGER full")
    blocker.commit()
    blocker.close()
    _write(store, Batch(events=(Event(3.0, "job", "third"),)))

    assert "disk is full" in failing
    assert kept > 0
    assert store.failing == ""
    assert store.jobs() == {"job": b'{"a":3}'}
    assert [event.kind for event in store.events("job")] == ["first", "second", "third"]
    store.close()


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that cannot be written for long loses its oldest events, and counts them."""
    monkeypatch.setattr("megascale_ops.controller.journal.writer.KEPT_EVENTS", 5)
    path = tmp_path / "ops.db"
    store = open_store(f"sqlite:///{path}")
    blocker = sqlite3.connect(path)
    blocker.execute("CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
    blocker.commit()

    for number in range(9):
        _write(store, Batch(events=(Event(float(number), "job", f"e{number}"),)))
    blocker.execute("DROP TRIGGER full")
    blocker.commit()
    blocker.close()
    _write(store, Batch())
    store.close()

    reader = open_store(f"sqlite:///{path}", readonly=True)
    assert [event.kind for event in reader.events("job")] == ["e4", "e5", "e6", "e7", "e8"]
    assert store.dropped_events == 4
    reader.close()


def test_what_is_bound_to_last_is_flushed_to_the_disk(tmp_path: Path) -> None:
    """FULL for the transaction that holds it, NORMAL for all others."""
    store = open_store(f"sqlite:///{tmp_path}/ops.db")
    said: list[str] = []

    def listen(_connection: object, _cursor: object, statement: str, *_more: object) -> None:
        said.extend([statement] if "synchronous" in statement else [])

    sa.event.listen(sa.Engine, "before_cursor_execute", listen)
    try:
        for binding in (False, True, False):
            _write(store, Batch(job="job", record=b"{}", binding=binding))
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", listen)
    store.close()

    kinds = [line.rpartition("=")[2] for line in said]
    assert kinds.count("FULL") == 1
    assert kinds[0] == kinds[-1] == "NORMAL"


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_commit_whose_answer_was_lost_is_not_made_twice(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has committed and the connection broke before it could say so: no event is told twice or lost."""
    store = open_store(url)
    commit, broken = sa.Connection.commit, []

    def breaking(connection: sa.Connection) -> None:
        commit(connection)
        if not broken:
            broken.append(True)
            raise sa.exc.OperationalError("COMMIT", {}, OSError("the connection broke"))

    monkeypatch.setattr(sa.Connection, "commit", breaking)
    _write(store, Batch(job="job", record=b'{"a":1}', events=(Event(1.0, "job", "first"),)))
    failing = store.failing
    _write(store, Batch(events=(Event(2.0, "job", "second"),)))
    events, now = store.events("job"), store.failing
    store.close()

    assert "the connection broke" in failing
    assert now == ""
    assert [event.kind for event in events] == ["first", "second"]


def test_a_commit_that_failed_is_made_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: it broke before anything was committed, and everything is written by the next."""
    store = open_store(url)
    commit, broken = sa.Connection.commit, []

    def breaking(connection: sa.Connection) -> None:
        if not broken:
            broken.append(True)
            raise sa.exc.OperationalError("COMMIT", {}, OSError("the connection broke"))
        commit(connection)

    monkeypatch.setattr(sa.Connection, "commit", breaking)
    _write(store, Batch(events=(Event(1.0, "job", "first"),)))
    _write(store, Batch(events=(Event(2.0, "job", "second"),)))
    events = store.events("job")
    store.close()

    assert [event.kind for event in events] == ["first", "second"]


def test_decisions_are_replayed_from_either(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``policy replay --store`` reads the journal of a controller at scale, too, and says which jobs it knows."""
    with_job = open_store(url)
    with_job.submit(Batch(job="llama", record=b"{}"))
    with_job.flush()
    with_job.close()

    codes = [main(["policy", "replay", *more, "--store", url]) for more in ([], ["llama"], ["lama"])]
    out, err = capsys.readouterr()

    assert codes == [0, 0, 2]
    assert out == "no decisions\nno decisions\n"
    assert "unknown job 'lama'" in err
    assert "llama" in err
