# SPDX-License-Identifier: Apache-2.0
"""Samples of heartbeats become warnings, a table for people, and nothing worse whatever comes in."""

import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest
from megascale_agents.collectives.sample import RankFeed
from megascale_agents.collectives.source import Ended

from megascale_ops.diagnosis.skew.window import SkewWatch
from megascale_ops.diagnosis.stragglers.causes import Parts
from megascale_ops.errors import RefusedError
from megascale_ops.link import Link
from megascale_ops.schema.collectives import (
    LARGE_EVERY_S,
    LARGE_WORLD,
    CollectiveSample,
    SampledLine,
    SkewView,
    is_sampled,
    pack_rows,
)
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.messages import Heartbeat, JobReport
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import StepWork
from tests.fakes.controlled_job import World
from tests.fakes.served_controller import serve_controller
from tests.fakes.traffic import Fault, Met, Shape, Traffic, slower

STEP_S = 0.05


class Source:
    """What one rank has finished and not told."""

    def __init__(self) -> None:
        self.waiting: list[Ended] = []
        self.host_timed = False

    def drain_ended(self) -> tuple[list[Ended], int]:
        """Hand it out."""
        found, self.waiting = self.waiting, []
        return found, 0


class Told:
    """Made-up traffic, told as agents would: sampled, packed, by one node."""

    def __init__(self, shape: Shape | None = None, seed: int = 1) -> None:
        self.traffic = Traffic(shape or Shape(dp=4, layers=1), seed, step_s=STEP_S, transfer_s=(1e-4, 1e-4, 2e-3))
        ranks = self.traffic.shape.ranks
        self.sources = [Source() for _ in range(ranks)]
        self.feeds = [RankFeed(rank, source, 64.0) for rank, source in enumerate(self.sources)]
        self.now_s = 1000.0

    def steps(self, count: int, fault: Fault | None = None) -> tuple[CollectiveSample, ...]:
        """Make steps; return what is told of them."""
        for _ in range(count):
            for met in self.traffic.step(spread=fault):
                self._note(met)
        self.now_s += count * STEP_S
        return tuple(sample for feed in self.feeds if (sample := feed.drain_sample(self.now_s)) is not None)

    def _note(self, met: Met) -> None:
        for group, ranks in enumerate(met.ranks.tolist()):
            for at, rank in enumerate(ranks):
                start_s = met.start_s[group, at] + self.traffic.clock_s[rank]
                end_s = met.end_s[group, at] + self.traffic.clock_s[rank]
                name = f"{met.kind}-{met.communicator[group]}"
                self.sources[rank].waiting.append(
                    Ended(name, "all_reduce", met.seq, 4096, int(start_s * 1e9), int(end_s * 1e9))
                )


def beat(
    world: World, samples: tuple[CollectiveSample, ...], works: dict[int, tuple[StepWork, ...]] | None = None
) -> None:
    """Send a heartbeat with samples, and with steps where they are given."""
    world.now_s += 1.0
    world.train(world.rank(0).step + 20)
    world.seq["a"] = world.seq.get("a", 0) + 1
    reports = tuple(
        msgspec.structs.replace(rank.report(world.round), work=(works or {}).get(rank.rank, ()))
        for rank in world.ranks["a"]
    )
    world.loop.heartbeat(
        Heartbeat(
            node="a", agent_id="agent-a", seq=world.seq["a"], mono_s=world.now_s, wall_s=world.now_s, full=True,
            jobs=(JobReport("job", world.round, "/run/job", reports, samples),),
        )
    )  # fmt: skip
    world.loop.tick()


def straggling(world: World) -> dict[str, tuple[int, ...]]:
    """Return the warnings of the job: key -> culprits."""
    warnings = world.loop.jobs["job"].round.warnings
    return {key: incident.verdict.culprits for key, incident in warnings.items() if incident.verdict is not None}


async def test_a_rank_that_only_collectives_show_is_a_warning() -> None:
    """No steps are told at all, as of a script without an optimizer; the warning ends when the rank is well again."""
    world = World(nproc=4)
    await world.up("a")
    told = Told()
    for _ in range(6):
        beat(world, told.steps(20))
    assert straggling(world) == {}

    for _ in range(4):
        beat(world, told.steps(20, slower(4, 2, 0.2 * STEP_S)))

    assert straggling(world) == {"straggler:2": (2,)}
    (warning,) = world.loop.jobs["job"].round.warnings.values()
    assert warning.verdict is not None
    assert warning.verdict.fault == "straggler"
    assert warning.verdict.cost == pytest.approx(0.16, abs=0.05)
    assert "rank hours a day" in warning.verdict.reason
    assert "rank 2 on a works" in warning.verdict.reason
    shown = world.loop.slowness.skewing.view(world.loop.jobs["job"])
    assert (shown.state, shown.ranks[0].rank, shown.silent) == ("watching", 2, ())
    assert shown.ranks[0].verdict == "slow"
    assert world.state == "running"

    for _ in range(16):
        beat(world, told.steps(20))

    assert straggling(world) == {}
    assert world.memory.incidents[warning.id].state == "over"


def steps_of_the_hosts(second: int, order: random.Random, *, slow: bool) -> dict[int, tuple[StepWork, ...]]:
    """Return twenty steps of four ranks, of which rank 2 may need a fifth longer."""
    works: dict[int, tuple[StepWork, ...]] = {}
    for rank in range(4):
        rows = []
        for number in range(20):
            own_s = STEP_S * (1.2 if slow and rank == 2 else 1.0) + order.gauss(0, 0.0005)
            wall_s = STEP_S * (1.2 if slow else 1.0) + 0.002
            waiting_s = max(0.0, wall_s - own_s)
            rows.append(StepWork(20 * second + number, wall_s, waiting_s=waiting_s, forward_s=own_s, cpu_s=own_s))
        works[rank] = tuple(rows)
    return works


async def test_a_rank_that_both_engines_see_has_one_warning() -> None:
    """It is the hosts' word that stands, for it knows the cause; no second one is opened."""
    world = World(nproc=4)
    await world.up("a")
    told, order = Told(), random.Random(1)  # noqa: S311  no secret
    for second in range(14):
        slow = second >= 6
        samples = told.steps(20, slower(4, 2, 0.2 * STEP_S) if slow else None)
        beat(world, samples, steps_of_the_hosts(second, order, slow=slow))

    assert straggling(world) == {"straggler:2": (2,)}
    (warning,) = world.loop.jobs["job"].round.warnings.values()
    assert warning.verdict is not None
    assert (warning.verdict.cause, warning.verdict.evidence[0].name) == ("compute", "own_work")
    assert world.loop.jobs["job"].record.incidents == 1


@pytest.mark.parametrize(("host_timed", "causes"), [(False, ["gpu"]), (True, [])])
async def test_waits_that_the_host_alone_knows_of_accuse_nobody(*, host_timed: bool, causes: list[str]) -> None:
    """It leaves a slow ring early, and then waits where only its steps show it: in a reduction below Python."""
    world = World(nproc=4)
    await world.up("a")
    told, order = Told(), random.Random(1)  # noqa: S311  no secret
    for source in told.sources:
        source.host_timed = host_timed
    for second in range(14):
        samples = told.steps(20, slower(4, 2, 0.2 * STEP_S) if second >= 6 else None)
        beat(world, samples, steps_of_the_hosts(second, order, slow=False))

    found = [one.verdict for one in world.loop.jobs["job"].round.warnings.values()]
    assert [one.cause for one in found if one is not None] == causes


async def test_a_round_that_ends_between_two_pieces_of_a_pass_names_nobody() -> None:
    """What steps and collectives have shown is of ranks that are gone."""
    world = World(nproc=4)
    await world.up("a")
    told, order, fault = Told(), random.Random(1), slower(4, 2, 0.2 * STEP_S)  # noqa: S311  no secret
    for second in range(10):
        slow = second >= 6
        beat(world, told.steps(20, fault if slow else None), steps_of_the_hosts(second, order, slow=slow))
    assert straggling(world) == {"straggler:2": (2,)}
    job, slowness = world.loop.jobs["job"], world.loop.slowness
    world.now_s += 2.0
    slowness.take_collectives(job, "a", JobReport("job", world.round, "/run/job", (), told.steps(20, fault)))

    pieces = slowness.pieces(job)
    before = sum(1 for _ in islice(pieces, 3))
    slowness._end(job, "another round began")
    after = sum(1 for _ in pieces)

    assert before == 3
    assert after > 3
    assert straggling(world) == {}
    assert slowness.skewing.view(job).state.startswith("waiting")


def watch(told: Told, beats: int, spoil: Callable[[CollectiveSample], CollectiveSample] | None = None) -> SkewWatch:
    """Return a watch that was told some seconds of traffic, rank 2 slow from the seventh on."""
    found = SkewWatch(told.traffic.shape.ranks)
    for second in range(beats):
        samples = told.steps(20, slower(told.traffic.shape.ranks, 2, 0.2 * STEP_S) if second >= 6 else None)
        found.ingest_samples("a", [spoil(sample) if spoil else sample for sample in samples])
        found.poll_window(100.0 + 2 * second, STEP_S, JobPolicy(), lambda: 0.0)
    return found


def named(found: SkewWatch) -> list[int]:
    """Return who is named."""
    return [culprit.rank for culprit in found.report.culprits] if found.report else []


@pytest.mark.parametrize("for_a_while", [4, 6, 1])
def test_a_rate_that_changed_for_a_while_does_not_stick(for_a_while: int) -> None:
    """400 collectives a second, rank 2 is late by 8 % of the time, one of 16 is told; for two seconds more or fewer."""
    found, noise, seq = SkewWatch(4), np.random.default_rng(1), 0
    for second in range(60):
        bits = for_a_while if second in (10, 11) else 4
        rows: list[list[tuple[int, int, int, int]]] = [[] for _ in range(4)]
        for _ in range(400):
            own_ns = 2e6 * (1 + 0.02 * noise.standard_normal(4)) * (1, 1, 1.1, 1)
            for rank in range(4) if is_sampled(seq, bits) else ():
                rows[rank].append((0, seq, int(1e5 + own_ns.max() - own_ns[rank]), int(own_ns[rank])))
            seq += 1
        line = SampledLine("0", "all_reduce", 12, bits)
        samples = [CollectiveSample(rank, (line,), pack_rows(rows[rank]), 1.0, 400) for rank in range(4)]
        found.ingest_samples("a", samples)
        found.poll_window(100.0 + 1.5 * second, 0.1, JobPolicy(), lambda: 0.0)

    assert found.report is not None
    (culprit,) = found.report.culprits
    assert (culprit.rank, culprit.excess, culprit.cost) == (
        2,
        pytest.approx(0.08, rel=0.1),
        pytest.approx(0.08, rel=0.1),
    )


def test_lines_that_come_and_go_are_forgotten() -> None:
    """Rates that change all the time are one table; lines that were not sent again make room."""
    found = SkewWatch(4)
    for turn in range(120):  # 480 lines: three times as many as may stay
        lines = [SampledLine("0", "all_reduce", 12, turn % 5), SampledLine(f"{turn}", "all_reduce")]
        for rank in range(4):
            found.ingest_samples("a", [CollectiveSample(rank, tuple(lines), pack_rows([(0, turn, 10, 10)]), 1.0, 1)])
        found.poll_window(100.0 + 2 * turn, 0.1, JobPolicy(), lambda: 0.0)

    assert len(found._tables.places) <= 2 * 4 * 17


def test_of_a_large_job_a_pass_hears_of_every_rank() -> None:
    """More than 512 ranks tell every five seconds, each node at its own time: a pass waits until all have."""
    found, passes = SkewWatch(LARGE_WORLD + 8), []
    line, seq = SampledLine("0", "all_reduce"), 0
    for second in range(60):
        told = [rank for rank in range(found.world_size) if rank // 8 % 5 == second % 5]
        rows = pack_rows([(0, seq + one, 10_000, 1_000_000) for one in range(5)])
        seq += 5 * (second % 5 == 4)
        found.ingest_samples("a", [CollectiveSample(rank, (line,), rows, 5.0, 5) for rank in told])
        if found.poll_window(100.0 + second, 1.0, JobPolicy(), lambda: 0.0) is not None:
            passes.append(second)

    assert np.diff(passes).min() >= LARGE_EVERY_S
    assert found.report is not None
    assert found.report.span_s == pytest.approx(60, rel=0.15)
    assert found.report.unmatched == 0


@pytest.mark.parametrize("step_s", [0.5, 10.0], ids=["sampled in some steps only", "longer than a second"])
def test_what_is_late_at_one_place_of_a_step_is_named(step_s: float) -> None:
    """Rank 2 comes a fifth of a step late to its first collective only: with it, told or not, comes the step's loss."""
    traffic = Traffic(Shape(tp=4, dp=1, layers=20), 1, step_s=step_s, step_noise=0.005)
    traffic.clock_s[:] = 100.0
    sources = [Source() for _ in range(4)]
    feeds = [RankFeed(rank, source, 64.0) for rank, source in enumerate(sources)]
    found, waiting, told_s = SkewWatch(4), list[tuple[int, Ended]](), 0
    for step in range(70):
        for met in traffic.step(first=slower(4, 2, 0.2 * step_s) if step >= 10 else None):
            times = zip(met.ranks[0].tolist(), met.start_s[0], met.end_s[0], strict=True)
            for rank, start_s, end_s in times:
                start_ns, end_ns = int((start_s + 100) * 1e9), int((end_s + 100) * 1e9)
                waiting.append((rank, Ended(f"{met.kind}", "all_reduce", met.seq, 4096, start_ns, end_ns)))
        for second in range(told_s + 1, int(traffic.ready_s.min())):
            told_s = second
            for rank, ended in waiting:
                if ended.ended_ns <= (second + 100) * 10**9:
                    sources[rank].waiting.append(ended)
            waiting = [(rank, ended) for rank, ended in waiting if ended.ended_ns > (second + 100) * 10**9]
            found.ingest_samples("a", [one for feed in feeds if (one := feed.drain_sample(float(second))) is not None])
            found.poll_window(1000.0 + second, step_s, JobPolicy(), lambda: 0.0)

    assert named(found) == [2]
    assert found.report is not None
    assert found.report.culprits[0].cost == pytest.approx(1 / 6, rel=0.3)


def test_a_rank_that_never_reports_hides_nobody() -> None:
    """The others are matched without it, and it is said to be silent."""
    told = Told()

    found = watch(told, 12, lambda sample: sample if sample.rank != 0 else CollectiveSample(0))

    assert named(found) == [2]
    assert found.report is not None
    assert found.report.silent == (0,)


def test_a_rank_that_falls_silent_hides_nobody() -> None:
    """Its last rows are waited for, two passes long, then the others are looked at without it."""
    told = Told()
    seen = [0]

    def spoil(sample: CollectiveSample) -> CollectiveSample:
        seen[0] += 1
        return CollectiveSample(0) if sample.rank == 0 and seen[0] > 12 else sample

    assert named(watch(told, 16, spoil)) == [2]


def test_reports_of_different_phase_lose_nothing() -> None:
    """Rank 1 tells everything a second later than the others: what it had not told is waited for."""
    told = Told()
    late: list[CollectiveSample] = []

    def spoil(sample: CollectiveSample) -> CollectiveSample:
        if sample.rank != 1:
            return sample
        late.append(sample)
        return late[-2] if len(late) > 1 else CollectiveSample(1)

    found = watch(told, 14, spoil)

    assert named(found) == [2]
    assert found.skew.unmatched == 0


@pytest.mark.parametrize(
    "sample",
    [
        CollectiveSample(-1, rows=b"x" * 13),
        CollectiveSample(10**9, rows=b"x" * 13),
        CollectiveSample(0, rows=b"x" * 12),
        CollectiveSample(0, (SampledLine("g", "f", 10**9, -(10**9)),), b"\xff" * 26, span_s=float("1e300")),
        CollectiveSample(0, (), pack_rows([(0, 1, 5, 5)]), 1.0),
        CollectiveSample(0, (SampledLine("g", "f"),), pack_rows([(7, 2**63, 5, 5)] * 3), -1.0),
    ],
    ids=["negative rank", "enormous rank", "torn row", "wild numbers", "no lines", "unknown line"],
)
def test_garbage_is_counted_and_harms_nobody(sample: CollectiveSample) -> None:
    """Among good samples; the right rank is still named."""
    told = Told()
    found = SkewWatch(4)
    for second in range(14):
        samples = told.steps(20, slower(4, 2, 0.2 * STEP_S) if second >= 6 else None)
        found.ingest_samples("a", [sample, *samples])
        found.poll_window(100.0 + 2 * second, STEP_S, JobPolicy(), lambda: 0.0)

    assert named(found) == [2]
    assert found.lost + found.skew.unmatched > 0


def test_a_pass_that_costs_much_is_made_less_often() -> None:
    """A fiftieth of a core at most: after one of 2 s the next is made 100 s later."""
    told, calls = Told(), [0]
    found = SkewWatch(4)

    def slowly() -> float:
        calls[0] += 1
        return 2.0 if calls[0] > 1 else 0.0  # the first piece takes it all

    made = []
    for second in range(150):
        found.ingest_samples("a", told.steps(20))
        calls[0] = 0
        if found.poll_window(100.0 + second, STEP_S, JobPolicy(), slowly):
            made.append(second)

    assert made == [1, 101]


def test_a_pass_in_pieces_finds_what_one_in_one_go_does() -> None:
    """Samples that come between two pieces wait for the next pass, and no second pass begins meanwhile."""
    slow = np.array([0.0, 0.0, 0.05 * STEP_S, 0.0])
    told = Told()
    beats = [told.steps(20, lambda _step: slow) for _ in range(12)]
    whole, cut = SkewWatch(4), SkewWatch(4)
    cut.ingest_samples("a", beats[0])
    for second, beat in enumerate(beats):
        now_s = 100.0 + 2 * second
        whole.ingest_samples("a", beat)
        whole.poll_window(now_s, STEP_S, JobPolicy(), lambda: 0.0)
        later = beats[second + 1 : second + 2]
        for _ in cut.pieces(now_s, STEP_S, JobPolicy(), lambda: 0.0):
            while later:
                cut.ingest_samples("a", later.pop())
            assert cut.poll_window(now_s + 1000.0, STEP_S, JobPolicy(), lambda: 0.0) is None
        while later:
            cut.ingest_samples("a", later.pop())

    assert named(cut) == named(whole) == [2]
    assert cut.report is not None
    assert whole.report is not None
    np.testing.assert_array_equal(cut.report.waiting, whole.report.waiting)
    np.testing.assert_array_equal(cut.report.excess, whole.report.excess)
    assert (cut.lost, cut.skew.unmatched) == (whole.lost, whole.skew.unmatched)


def test_a_pass_that_is_given_up_is_not_the_last() -> None:
    """The client disconnected between two pieces: what it had taken is gone, and the next pass is made."""
    told, found = Told(), SkewWatch(4)
    for second in range(3):
        found.ingest_samples("a", told.steps(20))
        pieces = found.pieces(100.0 + 2 * second, STEP_S, JobPolicy(), lambda: 0.0)
        assert next(pieces, True) is (None if second else True)
        pieces.close()
    found.ingest_samples("a", told.steps(20))

    assert found.poll_window(110.0, STEP_S, JobPolicy(), lambda: 0.0) is not None


def test_stages_of_unknown_place_are_compared_inside_their_groups_only() -> None:
    """An unknown mesh, sends and receives that show a pipeline: a stage with more work is not accused."""
    shape = Shape(tp=2, pp=4, dp=2, layers=2)
    heavy = np.zeros(16)
    heavy[12:] = 0.5 * STEP_S

    def run(*, meshes: bool, sends: int) -> list[int]:
        told = Told(shape)
        found = SkewWatch(16)
        for second in range(12):
            # From some step on: a quarter that is slower from the first step may be machines of another kind.
            samples = told.steps(20, lambda _step, late=second >= 6: heavy * late)
            for rank in range(16 if meshes else 0):
                found.know(rank, "a", Mesh(pp=rank // 4))
            found.ingest_samples("a", [msgspec.structs.replace(sample, point_to_point=sends) for sample in samples])
            found.poll_window(100.0 + 2 * second, STEP_S, JobPolicy(), lambda: 0.0)
        return named(found)

    assert run(meshes=True, sends=1) == []
    assert run(meshes=False, sends=1) == []
    assert run(meshes=False, sends=0) != []


async def test_people_can_see_it_over_http(tmp_path: Path) -> None:
    """A job without collectives says that it waits for them; an unknown one gets a sentence."""
    async with serve_controller(tmp_path) as served, Link(served.url) as link:
        with pytest.raises(RefusedError, match="there is no job 'nobody'"):
            await link.skew("nobody")


def test_old_and_new_neighbours_understand_each_other() -> None:
    """A report without collectives is the same as before, and one with them is understood by who knows none."""
    report = JobReport("job", 1)

    assert b"collectives" not in msgspec.json.encode(report)
    with_them = JobReport("job", 1, collectives=(CollectiveSample(0, (SampledLine("g", "f"),), b"\0" * 13),))

    class Old(msgspec.Struct):
        job: str
        round: int

    assert msgspec.json.decode(msgspec.json.encode(with_them), type=Old).job == "job"
    assert SkewView("job", "off").ranks == ()
    assert len(Parts(*[0.0] * 8)) == 8
