# SPDX-License-Identifier: Apache-2.0
"""One number, one definition: whatever shows a figure of a job shows the same one, to the last digit."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.cards import plain_incident
from megascale_ops.cli.main import main
from megascale_ops.cli.sources.ended import status_left
from megascale_ops.cli.sources.told_costs import Told
from megascale_ops.cli.terminal.tables import status_view
from megascale_ops.cli.top.pace_lines import progress
from megascale_ops.cli.top.verdict import Look
from megascale_ops.cli.whatif import others, predict
from megascale_ops.controller.history.files import HistoryFiles
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import open_store
from megascale_ops.controller.live.feed import Feed, Sources
from megascale_ops.controller.metrics import job_samples
from megascale_ops.diagnosis.skew.detector import Skew
from megascale_ops.diagnosis.skew.verdicts import view
from megascale_ops.diagnosis.statistics.cooperative import run_through
from megascale_ops.diagnosis.stragglers.causes import verdict_of
from megascale_ops.diagnosis.stragglers.own_work import Held
from megascale_ops.diagnosis.stragglers.peer_group import Group
from megascale_ops.runner.summary import summary
from megascale_ops.schema.events import Incident, JobStatus, Status
from megascale_ops.schema.live import Frame
from megascale_ops.schema.messages import Heartbeat, JobReport, Leave
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import StepWork
from megascale_ops.schema.wording import percent
from megascale_ops.trace.gather import open_boxes
from megascale_ops.trace.operations import rows_of
from tests.fakes.boxes import box
from tests.fakes.controlled_job import World
from tests.fakes.paced_ranks import Fault, PacedRanks, no_fault


def _steps(world: World, job: PacedRanks, steps: int, fault: Fault = no_fault) -> None:
    """Let a paced job make steps, each told in a heartbeat of its own time."""
    for _ in range(steps):
        row = job.works(fault)
        job.step += 1
        world.now_s += max(work.wall_s for work in row)
        world.train(job.step)
        world.seq["a"] = world.seq.get("a", 0) + 1
        reports = []
        for rank in world.ranks["a"]:
            report = rank.report(world.round)
            reports.append(type(report)(**{**{name: getattr(report, name) for name in report.__struct_fields__},
                                           "work": (row[rank.rank],)}))  # fmt: skip
        world.loop.heartbeat(
            Heartbeat(
                node="a", agent_id="agent-a", seq=world.seq["a"], mono_s=world.now_s, wall_s=world.now_s, full=True,
                jobs=(JobReport("job", world.round, "/run/job", tuple(reports)),),
            )
        )  # fmt: skip
        world.loop.tick()


def _slow(_step: int, rank: int) -> dict[str, float]:
    return {"forward_s": 0.012} if rank == 2 else {}


def _frame(world: World) -> Frame:
    loop, feed = world.loop, Feed("job")
    sources = Sources(loop.jobs, loop.registry, loop.incidents, loop.histories.by_job)
    account = loop.goodput("job")
    for _pause in feed.gather(sources, now_s=loop.clock(), wall_s=loop.wall(), lag_s=0.0, goodput=account):
        pass
    assert feed.frame is not None
    return feed.frame


def _printed(job: JobStatus) -> str:
    console = Console(width=400)
    with console.capture() as printed:
        console.print(status_view(Status(1, 0.0, 0.0, (job,))))
    return printed.get()


def _status(world: World) -> JobStatus:
    found = world.loop.status("job")
    assert found is not None
    return found.jobs[0]


async def _trained(world: World, slow_steps: int = 200) -> Incident:
    """Let rank 2 of four be slow for some hundred steps; return the warning."""
    await world.up("a", step=0)
    job = PacedRanks(1)
    _steps(world, job, 80)
    _steps(world, job, slow_steps, _slow)
    (warning,) = world.loop.jobs["job"].round.warnings.values()
    return warning


async def test_a_slow_rank_has_one_cost_and_one_excess_everywhere() -> None:
    """Headline, list, so far, reason, status, skew and metrics; and when it is over, card, course and list."""
    world = World(nproc=4, policy=JobPolicy(actions={"straggler": "warn"}))
    warning = await _trained(world)
    verdict = warning.verdict
    assert verdict is not None
    cost, excess = percent(verdict.cost), percent(verdict.excess)

    frame = _frame(world)

    assert frame.headline is not None
    assert frame.incidents is not None
    told = {
        "headline": frame.headline.sentence,
        "reason on the page": frame.headline.reason,
        "list": frame.incidents[0].reason,
        "card": plain_incident(warning).replace("\n", " "),
        "status": _printed(_status(world)),
    }
    assert {name: cost in text for name, text in told.items()} == dict.fromkeys(told, True), told
    assert f"(+{excess})" in verdict.reason
    assert [score for _, score in job_samples.stragglers(world.loop.jobs["job"])] == [verdict.cost]
    row = next(one for one in view("job", Skew([]).report(4), [verdict], {}, JobPolicy()).ranks if one.rank == 2)
    assert (row.cost, row.above) == (verdict.cost, verdict.excess)


async def test_what_a_warning_is_said_to_cost_so_far_is_what_its_reason_says() -> None:
    """The one is told every ten seconds, the other when it changes: both quote the verdict that stands."""
    world = World(nproc=4)
    warning = await _trained(world, 800)
    assert warning.verdict is not None

    so_far = warning.done

    assert f"it costs {percent(warning.verdict.cost)} of every step" in so_far
    assert warning.course is not None
    assert warning.course.paid_s > 1.0


async def test_goodput_of_a_finished_job_is_the_same_wherever_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Page, top, status, the run's last line, the status of what it left, its report, and a replayed journal's page."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("MEGASCALE_CONTROLLER", raising=False)
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)
    folder = tmp_path / "megascale-ops" / "job"
    world = World(nproc=4)
    await _trained(world)
    exits = (world.exit(0, -9, step=280),)
    world.ask(world.new_join(cause="failure", exits=exits, previous_round=1))
    await world.settle()
    await world.run_round(270)
    job = PacedRanks(2)
    job.step = 270
    _steps(world, job, 100)
    world.loop.leave(Leave("job", "a", "runner-a", "cancelled", round=2))
    live = _status(world)  # before the next tick
    world.loop.tick()
    page = _frame(world)
    await HistoryFiles(world.loop, folder).close()
    store = open_store(f"sqlite:///{folder / 'journal.db'}")
    incidents = tuple(world.memory.incidents.values())
    store.submit(Batch(job="job", record=world.memory.records["job"], incidents=incidents))
    store.close()
    world.restart_controller()
    HistoryFiles(world.loop, folder).restore()
    replayed = _frame(world)
    left = status_left(folder / "journal.db", "job").jobs[0]
    assert main(["report", "job", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)

    shares = [live.goodput, _status(world).goodput, left.goodput, report["goodput"]]
    shares += [frame.pace.goodput for frame in (page, replayed) if frame.pace is not None]

    assert 0.1 < live.goodput < 0.99
    assert shares == [live.goodput] * 6
    words = percent(live.goodput)
    assert page.pace is not None
    for text in (
        _printed(left),
        summary(left, "job", 1.0, "/run", "--job job"),
        "".join(line.plain for line in progress(page.pace, Look(200))),
    ):
        assert words in text
    assert {live.step, left.step, page.pace.step} == {370}


def _of_box(path: Path) -> list[StepWork]:
    """Return the steps of a box as its agent tells them: what its collectives took was waited."""
    with BoxReader(path) as box:
        waited_s = {one.seq: (one.ended_mono_ns - one.started_mono_ns) * 1e-9 for one in box.collectives()}
        return [StepWork(one.step, wall_s=one.wall_s, waiting_s=waited_s[one.step]) for one in box.steps()]


def test_whatif_and_the_verdict_say_the_same_of_the_same_steps(tmp_path: Path) -> None:
    """One replays collectives, the other compares the ranks' own work: of the same black boxes they agree."""
    group, policy, late = Group(), JobPolicy(), 2
    paths = [box(tmp_path, rank, 4, steps=64, late_ms=6.0 if rank == late else 0.1 * rank) for rank in range(4)]
    for rank, path in enumerate(paths):
        group.ingest_steps(rank, "a", _of_box(path), 1)
    run_through(group.advance(policy))
    place = group.places[late]
    held = Held(intermittent=False, since_step=0, named_at=group.count, window=48, share=policy.straggler_share)

    verdict = verdict_of(group, group.rank(place), held, policy, 1)
    records = open_boxes(paths)
    found = predict(rows_of(list(records.records_of(records.ranks)), 48), "toy", [late])

    assert percent(verdict.cost) == percent(found.lines[0].saved) == "5.7 %"
    assert [*others(found, {late: Told("toy-1", verdict.cost, 0)})] == []


async def test_whatif_says_of_which_steps_its_figure_and_a_verdict_s_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warning of other steps than the black boxes still hold: both figures, each with its steps."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MEGASCALE_BOX_ROOT", str(tmp_path / "boxes"))
    monkeypatch.delenv("MEGASCALE_CONTROLLER", raising=False)
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)
    world = World(nproc=4, policy=JobPolicy(actions={"straggler": "warn"}))
    warning = await _trained(world)
    assert warning.verdict is not None
    folder = tmp_path / "state" / "megascale-ops" / "job"
    folder.mkdir(parents=True)
    store = open_store(f"sqlite:///{folder / 'journal.db'}")
    store.submit(Batch(job="job", record=world.memory.records["job"], incidents=(warning,)))
    store.close()
    for rank in range(4):
        box(tmp_path / "boxes" / "job", rank, 4, job="job", late_ms=6.0 if rank == 2 else 0.0)

    assert main(["whatif", "job"]) == 0
    said = capsys.readouterr().out
    assert main(["whatif", "job", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]

    (note,) = notes
    assert f"note: {note}" in said
    cost = percent(warning.verdict.cost)
    assert note == (
        f"incident {warning.id} says that rank 2 costs {cost} of every step, which is of steps "
        f"that ranks reported since step {warning.verdict.since_step:,}; the 6.0 % here are of the collectives of "
        "steps 1 to 29, replayed"
    )
