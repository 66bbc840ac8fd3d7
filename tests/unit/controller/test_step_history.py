# SPDX-License-Identifier: Apache-2.0
"""What the controller keeps of all steps: bounded, true to its sums, and there after a controller was killed."""

import asyncio
import random
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.controller.history.files import HistoryFiles, folder_of
from megascale_ops.controller.history.histories import Histories
from megascale_ops.controller.history.step_history import LEAST_BUCKETS, MOST_CELLS, StepHistory
from megascale_ops.diagnosis.statistics.cooperative import run_through
from megascale_ops.schema.history import FIELDS, Bucket, decode, history_file
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.messages import Heartbeat, JobReport
from megascale_ops.schema.progress import MOST_WORK, StepWork
from tests.fakes.controlled_job import World

ORIGIN_S = 1_790_000_000.0


def filled(steps: int, *, ranks: int = 2, step_s: float = 1.0, most_buckets: int = 512) -> StepHistory:
    """Return the history of a job that made steps of one length, one report for each."""
    history = StepHistory(ORIGIN_S, most_buckets=most_buckets)
    for step in range(steps):
        for rank in range(ranks):
            work = StepWork(step, wall_s=step_s, waiting_s=0.25 * step_s, checkpoint_s=0.125 * step_s)
            history.ingest_steps(rank, "node", Mesh(), (work,), ORIGIN_S + (step + 1) * step_s - 0.001)
    return history


def total(buckets: tuple[Bucket, ...], field: str) -> float:
    """Return the sum of one field over all ranks and buckets."""
    return sum(sum(bucket.cells[FIELDS.index(field)]) for bucket in buckets)


def written(folder: Path) -> list[Path]:
    """Return what lies in a folder."""
    return list(folder.iterdir())


def test_a_bucket_tells_of_each_rank_what_its_steps_took() -> None:
    """Sums, the longest step and the longest own work, and how far the job was."""
    history = StepHistory(ORIGIN_S)

    works = (StepWork(7, wall_s=0.2, waiting_s=0.05), StepWork(8, wall_s=0.4, waiting_s=0.3, checkpoint_s=0.05))
    history.ingest_steps(1, "a", Mesh(tp=1), works, ORIGIN_S + 10.9)

    (bucket,) = history.buckets()
    assert (bucket.start_s, bucket.length_s, bucket.step) == (ORIGIN_S + 10, 1.0, 8)
    assert [round(cells[1], 6) for cells in bucket.cells] == [2.0, 0.6, 0.35, 0.05, 0.4, 0.15]
    assert [cells[0] for cells in bucket.cells] == [0.0] * len(FIELDS)
    assert [(place.rank, place.node, place.mesh.tp) for place in history.places()] == [(1, "a", 1)]


def test_steps_of_one_report_end_one_after_the_other() -> None:
    """The newest ended when the report was sent, those before it by their length earlier."""
    history = StepHistory(ORIGIN_S)

    history.ingest_steps(0, "a", Mesh(), tuple(StepWork(step, wall_s=2.0) for step in range(3)), ORIGIN_S + 10.5)

    assert [bucket.start_s - ORIGIN_S for bucket in history.buckets()] == [6.0, 8.0, 10.0]


@pytest.mark.parametrize("repeats", [False, True], ids=["goes on", "counts anew"])
def test_steps_handed_in_as_columns_are_those_that_were_reported(repeats: bool) -> None:
    """Two steps of each of five ranks, then one; the second way also where a script counts its steps anew."""
    reported, columns = StepHistory(ORIGIN_S), StepHistory(ORIGIN_S)
    ranks = np.array([4, 0, 2, 1, 3])
    fields = np.zeros((5, 12))
    fields[:, 1], fields[:, 2], fields[:, 10], fields[:, 11] = 3.0 + ranks, 0.5, np.nan, 1.0
    for history in (reported, columns):
        for rank in ranks.tolist():
            history.put_by(rank, "a", Mesh(), (StepWork(4, 2.0),), ORIGIN_S + 5.0)

    told = ((5, 6), ORIGIN_S + 20.0), ((0 if repeats else 7,), ORIGIN_S + 30.0)
    for steps, sent_s in told:
        each = [np.column_stack((np.full(5, step), fields[:, 1:])) for step in steps]
        columns.put_rows_by(ranks, each, np.full(5, sent_s) + ranks)
        for rank in ranks.tolist():
            works = tuple(StepWork(step, 3.0 + rank, 0.5) for step in steps)
            reported.put_by(rank, "a", Mesh(), works, sent_s + rank)

    assert columns.buckets() == reported.buckets()
    for history in (reported, columns):
        run_through(history.pieces(ORIGIN_S + 100.0))
    assert columns.costs.closed == reported.costs.closed
    assert len(columns.costs.closed) > 0


@given(
    ends=st.lists(st.floats(min_value=0.0, max_value=5e4), min_size=1, max_size=200),
    most=st.integers(min_value=LEAST_BUCKETS, max_value=40),
)
def test_no_step_is_lost_however_coarse(ends: list[float], most: int) -> None:
    """Late, early, in bursts, over a day: bounded, in order, without overlap, and every step is in one bucket."""
    history = StepHistory(ORIGIN_S, most_buckets=most)

    for step, end_s in enumerate(ends):
        history.ingest_steps(step % 3, "a", Mesh(), (StepWork(step, wall_s=0.5),), ORIGIN_S + end_s)

    buckets = history.buckets()
    assert len(buckets) <= most
    assert total(buckets, "steps") == len(ends)
    assert total(buckets, "wall_s") == pytest.approx(0.5 * len(ends))
    for before, after in pairwise(buckets):
        assert before.start_s + before.length_s <= after.start_s
    assert max(bucket.step for bucket in buckets) == len(ends) - 1


def test_a_full_history_doubles_its_buckets_one_at_a_time() -> None:
    """Lengths are one power of two and twice that, never more; at least half of the room stays in use."""
    for steps in (100, 512, 513, 700, 1024, 3000):
        buckets = filled(steps, ranks=1).buckets()

        lengths = {bucket.length_s for bucket in buckets}
        assert max(lengths) <= 2 * min(lengths)
        assert min(steps, 256) <= len(buckets) <= 512
        assert total(buckets, "steps") == steps


def test_the_room_is_bounded_in_cells() -> None:
    """12,288 ranks have 128 buckets of 24 bytes a rank: 38 MB, and 100,000 ranks have no more."""
    history = StepHistory(ORIGIN_S)
    for rank, capacity in ((3071, 512), (12_287, 128), (100_000, LEAST_BUCKETS)):
        history.ingest_steps(rank, "a", Mesh(), (StepWork(0, wall_s=1.0),), ORIGIN_S)

        assert history.capacity == capacity
    assert MOST_CELLS * 4 * len(FIELDS) < 38e6


def test_a_rank_that_cannot_be_takes_no_room() -> None:
    """A report of rank two billion is ignored."""
    history = StepHistory(ORIGIN_S)

    history.ingest_steps(2_000_000_000, "a", Mesh(), (StepWork(0, wall_s=1.0),), ORIGIN_S)
    history.ingest_steps(-1, "a", Mesh(), (StepWork(0, wall_s=1.0),), ORIGIN_S)

    assert history.buckets() == ()


def test_steps_that_a_report_has_no_room_for_are_counted() -> None:
    """A toy of 64 steps a second tells the newest 32: each stands for two. A gap in a short report is none of that."""
    history = StepHistory(ORIGIN_S)

    for second in range(1, 4):
        newest = tuple(StepWork(64 * second - MOST_WORK + k, wall_s=1 / 64) for k in range(MOST_WORK))
        history.ingest_steps(0, "a", Mesh(), newest, ORIGIN_S + second)
    history.ingest_steps(1, "a", Mesh(), (StepWork(0, wall_s=1.0),), ORIGIN_S + 1)
    history.ingest_steps(1, "a", Mesh(), (StepWork(9, wall_s=1.0),), ORIGIN_S + 2)

    steps = [sum(sum(bucket.cells[0][rank : rank + 1]) for bucket in history.buckets()) for rank in (0, 1)]
    assert steps == [32 + 64 + 64, 2]


Report = tuple[float, int, tuple[StepWork, ...]]  # time of sending, rank, steps


def reports_of(ranks: int, chance: random.Random) -> list[Report]:
    """Return reports of three steps each: some late, some with steps left out, epochs that count anew, checkpoints."""
    reports = []
    for beat in range(12):
        for rank in range(ranks):
            first = beat % 8 * 3
            works = tuple(
                StepWork(
                    step,
                    wall_s=chance.uniform(0.2, 0.4),
                    waiting_s=chance.uniform(0.0, 0.1),
                    checkpoint_s=0.05 if step % 5 == 0 else 0.0,
                )
                for step in range(first + (rank % 100 == 50), first + 3)
            )
            reports.append((ORIGIN_S + beat - (5.0 if chance.random() < 0.01 else 0.0), rank, works))
    return reports


def told(reports: list[Report], *, turn_at: int, put_by: bool) -> StepHistory:
    """Return a history that was told reports, one by one or put by, and of a new round among them."""
    history = StepHistory(ORIGIN_S, most_buckets=8)
    for number, (sent_s, rank, works) in enumerate(reports):
        if number % 500 == 0:
            run_through(history.pieces(ORIGIN_S + number / 1_100))
        if number == turn_at:
            history.turn(sent_s, "restarting", 2)
        (history.put_by if put_by else history.ingest_steps)(rank, "node", Mesh(pp=rank % 3), works, sent_s)
        if number % 300 == 0:
            history.reckon()
    history.reckon()
    run_through(history.pieces(ORIGIN_S + 30.0))
    return history


def test_steps_of_many_ranks_that_are_taken_at_once_say_the_same() -> None:
    """As one after the other: the same buckets, the same costs."""
    reports = reports_of(1_100, random.Random(7))  # noqa: S311  no secret

    plain = told(reports, turn_at=9_000, put_by=False)
    fast = told(reports, turn_at=9_000, put_by=True)

    assert len(plain.buckets()) > 4
    for mine, other in zip(plain.buckets(), fast.buckets(), strict=True):
        assert (mine.start_s, mine.length_s, mine.step) == (other.start_s, other.length_s, other.step)
        for cells, others in zip(mine.cells, other.cells, strict=True):
            assert others == pytest.approx(cells, rel=1e-5, abs=1e-6)
    assert len(plain.costs.closed) > 2
    assert fast.costs.closed == [pytest.approx(one, rel=1e-5) for one in plain.costs.closed]
    assert fast.costs.checkpoint_wall_s == plain.costs.checkpoint_wall_s
    assert fast.costs.waiting == pytest.approx(plain.costs.waiting, rel=1e-5)
    assert fast.costs.durations.counts == plain.costs.durations.counts


def test_a_stepped_wall_clock_moves_all_of_it() -> None:
    """Buckets and states keep their distances."""
    history = filled(10)
    history.turn(ORIGIN_S + 3, "running", 1)
    before = history.buckets()

    history.shift(-3600.25)

    assert [bucket.start_s for bucket in history.buckets()] == [bucket.start_s - 3600.25 for bucket in before]
    assert history.turns[0].wall_s == ORIGIN_S + 3 - 3600.25


def test_a_heartbeat_that_waited_comes_out_at_its_own_time() -> None:
    """Two minutes of heartbeats that are delivered at once are placed by their sender's clock."""
    histories = Histories()
    beat = Heartbeat(node="a", agent_id="x", seq=1, mono_s=50.0, wall_s=0.0)

    first = histories.sent_wall_s(beat, 1000.0)
    late = [histories.sent_wall_s(msgspec.structs.replace(beat, mono_s=51.0 + k), 1171.0) for k in range(120)]
    again = histories.sent_wall_s(msgspec.structs.replace(beat, agent_id="y", mono_s=3.0), 1300.0)

    assert first == 1000.0
    assert late == pytest.approx([1001.0 + k for k in range(120)], abs=0.2)
    assert again == 1300.0


def tell(world: World, steps: int) -> None:
    """Let the ranks of node a make steps of half a second, each in a heartbeat of its own."""
    for step in range(steps):
        world.now_s += 0.5
        world.train(step)
        world.seq["a"] = world.seq.get("a", 0) + 1
        reports = tuple(
            msgspec.structs.replace(rank.report(world.round), work=(StepWork(step, wall_s=0.5, waiting_s=0.1),))
            for rank in world.ranks["a"]
        )
        world.loop.heartbeat(
            Heartbeat(
                node="a", agent_id="agent-a", seq=world.seq["a"], mono_s=world.now_s, wall_s=world.now_s, full=True,
                jobs=(JobReport("job", world.round, "/run/job", reports),),
            )
        )  # fmt: skip
        world.loop.tick()


async def test_heartbeats_fill_it_and_states_are_told(tmp_path: Path) -> None:
    """What is written holds every step and every state, and no other file is left."""
    world = World()
    await world.up("a")
    tell(world, 40)

    await HistoryFiles(world.loop, tmp_path).close()

    kept = decode(history_file(tmp_path, "job").read_bytes())
    assert [path.name for path in written(tmp_path)] == ["history-job.bin"]
    assert total(kept.buckets, "steps") == 80
    assert total(kept.buckets, "waiting_s") == pytest.approx(8.0)
    assert [turn.state for turn in kept.facts.turns][-3:] == ["restarting", "catching_up", "running"]
    assert (kept.facts.job, kept.facts.world_size, len(kept.facts.places)) == ("job", 2, 2)


async def test_a_controller_that_was_killed_goes_on_with_it(tmp_path: Path) -> None:
    """The next one reads what was written, and adds to it."""
    world = World()
    await world.up("a")
    tell(world, 10)
    await HistoryFiles(world.loop, tmp_path).close()

    world.restart_controller()
    files = HistoryFiles(world.loop, tmp_path)
    files.restore()
    tell(world, 6)
    await files.close()

    kept = decode(history_file(tmp_path, "job").read_bytes())
    assert total(kept.buckets, "steps") == 32
    states = [turn.state for turn in kept.facts.turns]
    assert states.count("running") == 1


async def test_a_damaged_one_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is told in one sentence, the controller starts, and a new history begins."""
    world = World()
    await world.up("a")
    history_file(tmp_path, "job").write_bytes(b"no history")

    files = HistoryFiles(world.loop, tmp_path)
    files.restore()
    tell(world, 3)
    await files.close()

    assert "is damaged" in caplog.text
    assert total(decode(history_file(tmp_path, "job").read_bytes()).buckets, "steps") == 6
    assert (tmp_path / "history-job.bin.damaged").exists()


async def test_a_folder_that_can_not_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is told once; what is in memory is still there to be asked for."""
    (tmp_path / "file").write_text("in the way")
    world = World()
    await world.up("a")
    tell(world, 3)

    files = HistoryFiles(world.loop, tmp_path / "file" / "folder")
    await files.close()
    await files.close()

    assert caplog.text.count("can't be written") == 1
    raw = await files.raw("job")
    assert raw is not None
    assert total(decode(raw).buckets, "steps") == 6


async def test_a_finished_job_is_written_once_more_and_let_go(tmp_path: Path) -> None:
    """Its last state is in the file, and its memory is free; a question for it is answered from the file."""
    world = World()
    await world.up("a")
    tell(world, 5)
    files = HistoryFiles(world.loop, tmp_path)
    keeping = asyncio.create_task(files.keep())
    world.loop.jobs["job"].change(state="finished", since_wall_s=world.loop.wall())

    await files.close()
    keeping.cancel()

    assert world.loop.histories.by_job == {}
    raw = await files.raw("job")
    assert raw is not None
    assert decode(raw).facts.turns[-1].state == "finished"


def test_histories_are_kept_beside_the_journal() -> None:
    """In the run folder if there is one; nowhere for a database server."""
    assert folder_of("sqlite:////var/lib/ops/ops.db", None) == Path("/var/lib/ops")
    assert folder_of("sqlite:////var/lib/ops/ops.db", Path("/runs/a")) == Path("/runs/a")
    assert folder_of("postgresql+psycopg://me@host/ops", None) is None
