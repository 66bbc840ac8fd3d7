# SPDX-License-Identifier: Apache-2.0
"""What the controller tells Prometheus: all of the table and nothing else, and of nothing that is gone."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megascale_ops.controller.cluster.node_clocks import NodeClocks
from megascale_ops.controller.config import ControllerConfig
from megascale_ops.controller.journal.store import Store, open_store
from megascale_ops.controller.metrics import job_samples as figures
from megascale_ops.controller.metrics.page import Metrics
from megascale_ops.controller.nodes.book import DRAINED
from megascale_ops.controller.nodes.evidence import Accusation
from megascale_ops.controller.notifying import Notifying
from megascale_ops.diagnosis.skew.report import SkewReport
from megascale_ops.diagnosis.skew.window import SkewWatch
from megascale_ops.notify.config import NotifyConfig, Target
from megascale_ops.schema.health import (
    CheckedFigure,
    CheckedFinding,
    HardwareFinding,
    SelfCheck,
    SelfCheckView,
    Verdict,
)
from megascale_ops.schema.messages import Leave
from megascale_ops.schema.metrics import METRICS, Kind, metrics_of
from megascale_ops.schema.progress import StepWork
from tests.fakes.scraped import OPEN_METRICS, open_samples, samples, values
from tests.fakes.training_job import Training

Found = dict[str, dict[tuple[str, ...], float]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A journal for the figures about journals."""
    opened = open_store(f"sqlite:///{tmp_path}/ops.db")
    yield opened
    opened.close()


async def scraped(world: Training, store: Store, metrics: Metrics | None = None) -> Found:
    """Return every sample by name and the values of its labels."""
    page = await (metrics or Metrics(world.loop, store)).page()
    found: Found = {}
    for sample in samples(page.body):
        found.setdefault(sample.name, {})[values(sample)] = sample.value
    return found


async def trained(seconds: int = 30) -> Training:
    """Return a job of four ranks that has made some steps."""
    world = Training(nproc=4)
    await world.up("a", step=-1)
    for _ in range(seconds):
        world.second()
    return world


def report(ranks: int) -> SkewReport:
    """Return what the skew engine could have found; of the last rank it knows nothing."""
    late_s = np.linspace(0.0, 0.003, ranks, dtype=np.float32)
    late_s[-1] = np.nan
    zeros = np.zeros(ranks)
    return SkewReport(10.0, 1.0, zeros + 0.25, late_s, late_s, late_s, zeros, (), (), (), 99, 1, 0.01)


def slow(rank: int, cost: float = 0.1) -> Verdict:
    """Return a straggler's verdict."""
    return Verdict("straggler", "slow", 0.9, culprits=(rank,), cause="gpu", cost=cost, round=1)


async def test_all_of_the_table_is_told_and_nothing_else(store: Store) -> None:
    """A job that crashed, with a straggler, a bad GPU, collectives and checkpoints: each metric has a series."""
    world = await trained()
    await world.crash()
    for _ in range(10):
        world.second()
    job = world.loop.jobs["job"]
    world.loop.transitions.warn(job, "straggler:1", slow(1))
    watch = world.loop.slowness.skewing._watches["job"] = SkewWatch(4)
    watch.report = report(4)
    saved = StepWork(world.step + 1, 1.0, checkpoint_s=0.5)
    rank = world.rank(0).report(world.round)
    world.loop.histories.of(job).ingest_steps(0, "a", rank.mesh, (saved,), world.loop.wall())
    xid = HardwareFinding("xid_79", "Xid 79", "kernel_log", gpu="GPU-1", is_bad=True, last_wall_s=world.loop.wall())
    world.loop.hardware.book.ingest_findings("a", (xid,))
    world.loop.exported["sent"] += 1
    world.loop.nodes.accuse(Accusation("a", "xid_79", world.loop.wall(), "Xid 79"))
    world.loop.nodes.note_engine("a", DRAINED, "node a is drained")
    bad = CheckedFinding("bad", "GPU 1", "slow", check="gemm")
    rate = CheckedFigure("gemm_bf16", "8 of them", 6e14, 3e14, 6.6e14)
    check = SelfCheck("a", "quick", "bad", findings=(bad,), figures=(rate,))
    world.loop.nodes.keep_check(SelfCheckView("a", "done", asked_wall_s=world.loop.wall(), check=check))

    config = ControllerConfig(notify=NotifyConfig(targets={"a": Target(kind="command", command=("true",))}))
    metrics = Metrics(world.loop, store, Notifying(config, world.loop))

    found = await scraped(world, store, metrics)

    told = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in found}
    assert told == {metric.name for metric in metrics_of("controller")}
    for name, series in found.items():
        metric = METRICS.get(name)
        if metric is not None and metric.kind is not Kind.HISTOGRAM:
            assert {len(labels) for labels in series} == {len(metric.labels)}, name


async def test_the_figures_are_those_of_the_job(store: Store) -> None:
    """Steps, ranks, time: what one knows of the run is what is told."""
    world = await trained(60)

    found = await scraped(world, store)

    job = ("job",)
    assert found["megascale_job_world_size"] == {job: 4}
    assert found["megascale_job_step"] == {job: 59}
    assert found["megascale_job_ranks"]["job", "ok"] == 4
    assert found["megascale_job_last_step_timestamp_seconds"][job] == pytest.approx(world.loop.wall(), abs=2.0)
    assert found["megascale_job_state_info"]["job", "running"] == 1
    assert found["megascale_step_duration_seconds_count"][job] >= 50
    assert found["megascale_hang_suspected"] == {("job", "none"): 0}
    assert found["megascale_stuck_seconds"][job] < 2
    assert found["megascale_goodput_ratio"]["job", "hour"] > 0.9
    assert found["megascale_goodput_ratio"]["job", "now"] > 0.9
    classes = found["megascale_wall_seconds"]
    assert sum(classes.values()) == pytest.approx(found["megascale_job_wall_seconds"][job], abs=1e-6)
    assert found["megascale_rank_comm_wait_ratio"]["job", "3"] == pytest.approx(0.1)
    assert found["megascale_agent_heard_timestamp_seconds"]["a",] == pytest.approx(world.loop.wall(), abs=1.0)


async def test_series_are_counted(store: Store) -> None:
    """What the controller says of its own page is true, and said at its end."""
    world = await trained(3)

    found = await scraped(world, store)

    assert found["megascale_controller_series"] == {(): sum(len(series) for series in found.values())}
    assert list(found)[-1] == "megascale_controller_series"


async def test_open_metrics_tell_the_same(store: Store) -> None:
    """A scraper that accepts OpenMetrics gets what its parser reads, to the last line, with the same series."""
    world = await trained(10)
    metrics = Metrics(world.loop, store)
    classic = await metrics.page()

    page = await metrics.page(OPEN_METRICS)

    assert page.content_type.startswith("application/openmetrics-text; version=1.0.0;")
    assert page.body.endswith(b"\n# EOF\n")
    told = {(one.name, values(one)) for one in open_samples(page.body)}
    assert told == {(one.name, values(one)) for one in samples(classic.body)}


async def test_an_incident_is_counted_once_under_its_last_name(store: Store) -> None:
    """While it is open it is open; when it is over it is counted, in this scrape and in none that follows."""
    world = await trained(10)
    metrics = Metrics(world.loop, store)
    before = await scraped(world, store, metrics)
    job = world.loop.jobs["job"]
    exits = (world.exit(0, -9),)
    world.ask(world.new_join(cause="failure", exits=exits, previous_round=job.record.round))
    await world.settle()
    during = await scraped(world, store, metrics)
    await world.wait(1.0, beating=False)
    await world.run_round(8)
    world.train(20)
    await world.wait(2.0)
    after = [await scraped(world, store, metrics) for _ in range(2)]

    assert "megascale_incidents_total" not in before
    assert during["megascale_incident_open"] == {("job", "killed"): 1}
    ((who, confidence),) = during["megascale_suspect_confidence_ratio"].items()
    assert who == ("job", "0", "killed")
    assert 0.5 < confidence <= 1.0
    assert "megascale_suspect_confidence_ratio" not in before | after[0]
    assert [one["megascale_incidents_total"] for one in after] == [{("job", "killed", "recovered"): 1}] * 2
    assert [one["megascale_restarts_total"] for one in after] == [{("job", "killed"): 1}] * 2
    assert "megascale_incident_open" not in after[0]


async def test_only_the_worst_stragglers_are_named(store: Store) -> None:
    """Thirty slow ranks: thirty are counted, the twenty that cost most are named."""
    world = await trained(3)
    job = world.loop.jobs["job"]
    for rank in range(30):
        world.loop.transitions.warn(job, f"straggler:{rank}", slow(rank, 0.01 * rank))

    found = await scraped(world, store)

    scores = found["megascale_straggler_score_ratio"]
    assert len(scores) == figures.MOST_STRAGGLERS
    assert min(scores.values()) == pytest.approx(0.10)
    assert found["megascale_straggler_suspects"]["job", "gpu"] == 30
    assert found["megascale_straggler_suspects"]["job", "input"] == 0


async def test_a_job_that_is_over_is_told_of_for_an_hour(store: Store) -> None:
    """Then its series are gone, and only the count of jobs remembers it."""
    world = await trained(10)
    world.loop.leave(Leave("job", "a", "runner-a", "cancelled", round=1))
    world.loop.tick()
    at_once = await scraped(world, store)
    world.now_s += 3601

    later = await scraped(world, store)

    assert at_once["megascale_job_state_info"]["job", "stopped"] == 1
    assert "megascale_rank_comm_wait_ratio" not in at_once
    assert not [name for name in later if "job" in METRICS.get(name, METRICS["megascale_jobs"]).labels]
    assert later["megascale_jobs"]["stopped",] == 1


async def test_a_hang_is_told_by_its_class(store: Store) -> None:
    """From the suspicion on."""
    world = await trained(20)
    world.rank(1).state, world.rank(1).stopped_since_s = "T", world.now_s
    await world.wait(1.0)

    found = await scraped(world, store)

    assert found["megascale_hang_suspected"] == {("job", "frozen"): 1}
    assert sum(found["megascale_job_ranks"]["job", name] for name in ("suspect", "lost")) == 1


def test_a_clock_is_as_far_off_as_its_fastest_heartbeat_says() -> None:
    """Delays only ever make a clock look late; the best of a minute or two counts, and who has gone is forgotten."""
    clocks = NodeClocks()
    clocks.note("b", 0.0, 0.0)
    told = {}
    for second in range(200):
        clocks.note("a", 5.0 - (0.002 if second == 70 else 0.5), float(second))
        told[second] = dict(clocks.ahead_s(float(second)))["a"]

    assert [told[second] for second in (60, 70, 130, 185)] == pytest.approx([4.5, 4.998, 4.998, 4.5])
    assert "b" not in dict(clocks.ahead_s(200.0))
