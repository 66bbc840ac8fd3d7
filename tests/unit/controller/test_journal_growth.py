# SPDX-License-Identifier: Apache-2.0
"""A journal grows with what happens and not with its square, keeps to its bound, and is read page by page."""

import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from megascale_ops.cli.main import main
from megascale_ops.controller.config import ControllerConfig, limit_of
from megascale_ops.controller.journal.parts import Part, join, split
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import Store, open_store
from megascale_ops.controller.record.job_record import read_record
from megascale_ops.errors import UsageError
from megascale_ops.link import BlockingLink
from megascale_ops.schema.events import Event, Incident, Incidents, Marks
from megascale_ops.schema.policy import JobPolicy
from tests.fakes.controlled_job import World
from tests.fakes.served_controller import serve_controller

if TYPE_CHECKING:
    from collections.abc import Callable

OLD = Path(__file__).parents[2] / "golden" / "journal" / "version-1.db"
ENDLESS = JobPolicy(restarts_per_hour=10**6, restarts_per_cause_per_hour=10**6, fruitless_restarts=10**6)


def _incidents(numbers: range, job: str = "job") -> tuple[Incident, ...]:
    return tuple(
        Incident(f"{job}-{n}", job, n, state="recovered", marks=Marks(detected=1000.0 + n // 2)) for n in numbers
    )


def _written(store: Store, *batches: Batch) -> Store:
    for batch in batches:
        store.submit(batch)
    store.flush()
    return store


class _Weighed:
    """Counts what a world's loop hands to its journal."""

    def __init__(self, world: World) -> None:
        self._memory = world.memory
        self.bytes = 0
        self.longest = 0

    def submit(self, batch: Batch, done: "Callable[[], None]") -> None:
        """Weigh it and pass it on."""
        rows = sum(len(part.body or b"") for part in batch.parts)
        events = sum(len(msgspec.json.encode(event)) for event in batch.events)
        self.bytes += len(batch.record) + rows + events
        self.longest = max(self.longest, len(batch.record) + rows)
        self._memory.submit(batch, done)


async def _fail(world: World, times: int) -> None:
    for _ in range(times):
        join_ = world.new_join(cause="failure", exits=(world.exit(1, -9),), previous_round=world.round)
        world.ranks.clear()
        reply = world.ask(join_)
        while not reply.done():
            await world.wait(0.1)
        assert reply.result().status == "go"
        await world.run_round(world.round * 5 + 20)


async def test_the_hundredth_incident_weighs_as_much_as_the_tenth() -> None:
    """What is journaled for an incident does not grow with the incidents before it, and neither does the record."""
    world = World(policy=ENDLESS)
    weighed = world.journal = _Weighed(world)
    world.loop = world.new_loop()
    await world.up("a")
    costs = []
    for _ in range(4):
        before = weighed.bytes
        await _fail(world, 30)
        costs.append(weighed.bytes - before)

    assert costs[3] < 1.05 * costs[1]
    assert weighed.longest < 4000
    assert world.loop.jobs["job"].record.restarts_in_all == 120


async def test_a_restarted_controller_knows_all_that_grows(tmp_path: Path) -> None:
    """Restarts, habits, tabs and runners are rows, and come back from a real journal as they were."""
    store = open_store(f"sqlite:///{tmp_path}/ops.db")
    world = World(policy=ENDLESS)
    saved = threading.Event()
    await world.up("a")
    await _fail(world, 3)
    job = world.loop.jobs["job"]
    job.change(habits={"upload (/x.py:1)": 61.5}, runners=(*job.record.runners, "runner-b"))
    record = job.record
    core, parts = split(record, None)

    store.submit(Batch(job="job", record=core, parts=parts), saved.set)
    assert saved.wait(10)
    store.close()
    again = open_store(f"sqlite:///{tmp_path}/ops.db")
    known = read_record("job", again.jobs()["job"])
    forgotten = msgspec.structs.replace(record, restarts=record.restarts[1:], habits={})
    core, parts = split(forgotten, record)
    _written(again, Batch(job="job", record=core, parts=parts))
    fewer = read_record("job", again.jobs()["job"])
    again.close()

    assert known == record
    assert {part.kind for part in parts} == {"restart", "habit"}  # what has not changed is not written again
    assert fewer == forgotten


def test_what_an_older_program_wrote_beside_rows_counts_on_top() -> None:
    """A program that knows of no rows keeps its restarts in the record: they follow those of the rows."""
    rows = [
        ("restart", "2", b'{"wall_s":2.0}'),
        ("restart", "1", b'{"wall_s":1.0}'),
        ("habit", "x", b'{"longest_s":5}'),
    ]

    whole = msgspec.json.decode(join(b'{"job":"job","restarts":[{"wall_s":3.0}],"habits":{"y":1}}', rows))

    assert [one["wall_s"] for one in whole["restarts"]] == [1.0, 2.0, 3.0]
    assert whole["habits"] == {"x": 5, "y": 1}


def test_a_journal_of_version_1_is_taken_over_whole(tmp_path: Path) -> None:
    """A file that the program before wrote: all that it held is there, sealed, and what grew is rows."""
    shutil.copy(OLD, tmp_path / "ops.db")
    with closing(sqlite3.connect(OLD)) as old:
        bodies = {name: [row[0] for row in old.execute(f"SELECT body FROM {name}")] for name in ("incidents", "events")}  # noqa: S608  names of the test's own
        (record,) = old.execute("SELECT body FROM jobs").fetchone()

    url = f"sqlite:///{tmp_path}/ops.db"
    store = open_store(url)
    job = read_record("job", store.jobs()["job"])
    incidents = [store.incident(one.id) for one in store.incidents()]
    events, hardware, loss = store.events("job"), store.hardware(), store.loss
    store.close()
    open_store(url).close()
    with closing(sqlite3.connect(tmp_path / "ops.db")) as new:
        rows = dict(new.execute("SELECT kind, COUNT(*) FROM parts GROUP BY kind"))
        (core,) = new.execute("SELECT body FROM jobs").fetchone()
        unsealed = new.execute("SELECT COUNT(*) FROM events WHERE body NOT LIKE '%,\"crc32\":%'").fetchone()[0]
        (version,) = new.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()

    wanted = read_record("job", record.encode())
    assert job == wanted
    assert (job.restarts_in_all, len(job.habits), job.round) == (3, 2, 4)
    assert [one and msgspec.structs.replace(one, events=()) for one in incidents] == [
        msgspec.json.decode(body, type=Incident) for body in bodies["incidents"]
    ]
    assert events == [msgspec.json.decode(body, type=Event) for body in bodies["events"]]
    assert [one.uuid for one in hardware] == ["GPU-1"]
    assert rows == {"restart": 3, "habit": 2, "tab": 1, "runner": 1}
    assert "restarts" not in msgspec.json.decode(core)
    assert (unsealed, version, loss) == (0, "2", "")


def test_a_finished_journal_of_version_1_is_read_as_it_is(tmp_path: Path) -> None:
    """Reading changes nothing, and needs no new tables."""
    shutil.copy(OLD, tmp_path / "ops.db")

    reader = open_store(f"sqlite:///{tmp_path}/ops.db", readonly=True)
    jobs, incidents = reader.jobs(), reader.incidents()
    reader.close()

    assert read_record("job", jobs["job"]).restarts_in_all == 3
    assert len(incidents) == 4
    assert (tmp_path / "ops.db").read_bytes() == OLD.read_bytes()


def test_pages_add_up_to_the_whole_list(tmp_path: Path) -> None:
    """Page by page, also among incidents of the same moment, each is seen once and the newest page comes first."""
    store = _written(
        open_store(f"sqlite:///{tmp_path}/ops.db"),
        Batch(incidents=(*_incidents(range(1, 51)), *_incidents(range(1, 31), "other"))),
    )

    seen: list[str] = []
    before = ""
    while page := store.incidents("job", 7, before):
        seen = [*(one.id for one in page), *seen]
        before = page[0].id
    newest = store.incidents(None, 3)
    store.close()

    assert seen == [f"job-{n}" for n in range(1, 51)]
    assert [one.id for one in newest] == ["job-48", "job-49", "job-50"]


async def test_the_api_turns_pages_beyond_what_is_at_hand(tmp_path: Path) -> None:
    """The newest page holds what the loop knows better than the journal; older ones come from the journal."""
    _written(open_store(f"sqlite:///{tmp_path}/ops.db"), Batch(incidents=_incidents(range(1, 31)))).close()
    async with serve_controller(tmp_path) as served:
        served.loop.incidents["job-30"] = msgspec.structs.replace(served.loop.incidents["job-30"], done="just now")

        def ask(limit: int, before: str = "") -> Incidents:
            with BlockingLink(served.url) as link:
                return link.incidents("job", limit, before)

        import asyncio

        first = await asyncio.to_thread(ask, 12)
        second = await asyncio.to_thread(ask, 12, first.incidents[0].id)
        third = await asyncio.to_thread(ask, 12, second.incidents[0].id)
        with pytest.raises(Exception, match="job-99"):
            await asyncio.to_thread(ask, 12, "job-99")

    pages = [[one.id for one in page.incidents] for page in (third, second, first)]
    assert sum(pages, []) == [f"job-{n}" for n in range(1, 31)]  # noqa: RUF017  three short lists
    assert [page.older for page in (first, second, third)] == [True, True, False]
    assert first.incidents[-1].done == "just now"


def test_the_command_line_turns_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``incidents`` shows the newest, and says how to see older ones."""
    _written(open_store(f"sqlite:///{tmp_path}/journal.db"), Batch(incidents=_incidents(range(1, 31)))).close()
    ask = ["incidents", "--run-dir", str(tmp_path), "--limit", "10"]

    codes = [main(ask), main([*ask, "--before", "job-21"]), main([*ask, "--before", "job-3"])]
    out, _ = capsys.readouterr()
    wrong = main([*ask, "--before", "job-77"])

    assert codes == [0, 0, 0]
    assert f"`megascale-ops incidents --before job-21 --run-dir {tmp_path}` shows older ones" in out
    assert f"`megascale-ops incidents --before job-11 --run-dir {tmp_path}` shows older ones" in out
    assert out.count("shows older ones") == 2
    assert wrong != 0


def test_a_full_journal_gives_up_its_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events before incidents, the oldest first, never the newest and never a job; and the file shrinks."""
    monkeypatch.setattr("megascale_ops.controller.journal.retention.LOOK_EACH_BYTES", 200_000)
    monkeypatch.setattr("megascale_ops.controller.journal.retention.KEPT_EVENTS", 500)
    limit = 2_000_000
    path = tmp_path / "ops.db"
    store = open_store(f"sqlite:///{path}", limit_bytes=limit)
    store.submit(Batch(job="job", record=b'{"job":"job"}', parts=(Part("job", "runner", "r", b'{"runner":"r"}'),)))
    for number in range(1, 101):
        events = tuple(
            Event(float(number), "job", "lost", f"{number} " + "x" * 1000, incident=f"job-{number}") for _ in range(100)
        )
        _written(store, Batch(events=events, incidents=_incidents(range(number, number + 1))))
    for _ in range(30):
        store.flush()
    incidents, events_left, jobs = store.incidents("job"), store.events("job"), store.jobs()
    store.close()

    assert path.stat().st_size < 1.3 * limit
    assert len(incidents) == 100
    assert 500 <= len(events_left) < 2500
    assert events_left[-1].wall_s == 100.0
    assert jobs["job"] == b'{"job":"job","runners":["r"]}'


def test_free_pages_go_back_to_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A journal that was filled by a storm is small again after it, and tidying says nothing where nothing is free."""
    monkeypatch.setattr("megascale_ops.controller.journal.retention.LOOK_EACH_BYTES", 100)
    monkeypatch.setattr("megascale_ops.controller.journal.retention.KEPT_EVENTS", 500)
    path = tmp_path / "ops.db"
    store = open_store(f"sqlite:///{path}")
    for _ in range(10):
        _written(store, Batch(events=tuple(Event(1.0, "job", "lost", "x" * 1000) for _ in range(1000))))
    filled = path.stat().st_size
    store.close()

    small = open_store(f"sqlite:///{path}", limit_bytes=1_000_000)
    for _ in range(40):
        _written(small, Batch(events=(Event(2.0, "job", "lost", "y" * 200),)))
    small.close()

    with closing(sqlite3.connect(path)) as opened:
        (free,) = opened.execute("PRAGMA freelist_count").fetchone()
    assert path.stat().st_size < 0.2 * filled
    assert free < 10
    assert "tidied" not in caplog.text


def test_incidents_go_when_events_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the oldest incidents that are over; one that is open stays, however old."""
    monkeypatch.setattr("megascale_ops.controller.journal.retention.LOOK_EACH_BYTES", 200_000)
    path = tmp_path / "ops.db"
    store = open_store(f"sqlite:///{path}", limit_bytes=1_000_000)
    heavy = tuple(msgspec.structs.replace(one, done="y" * 4000) for one in _incidents(range(2, 1001)))
    is_open = Incident("job-1", "job", 1, marks=Marks(detected=1.0), done="y" * 4000)
    for at in range(0, len(heavy), 50):
        _written(store, Batch(incidents=(is_open, *heavy[at : at + 50])))
    for _ in range(30):
        store.flush()
    left = [one.id for one in store.incidents("job")]
    store.close()

    assert path.stat().st_size < 1_500_000
    assert left[0] == "job-1"
    assert left[-1] == "job-1000"
    assert 50 < len(left) < 400


def test_a_bound_that_holds_nothing_is_refused() -> None:
    """One sentence, with the least that is needed."""
    with pytest.raises(UsageError, match=r"journal_mb = 3 is too little: at least 16"):
        limit_of(ControllerConfig(journal_mb=3))

    assert limit_of(ControllerConfig()) == 1024**3
