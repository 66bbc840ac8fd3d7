# SPDX-License-Identifier: Apache-2.0
"""Who holds the others up, on made-up traffic with seeded noise: the culprit soon, and never a victim."""

from collections.abc import Callable

import numpy as np
import pytest

from megascale_ops.diagnosis.skew.detector import Skew
from megascale_ops.diagnosis.skew.matching import match
from megascale_ops.diagnosis.skew.tables import PATIENCE, Kind, Line, arrange
from megascale_ops.diagnosis.skew.verdicts import rank_verdict
from megascale_ops.schema.policy import JobPolicy
from tests.fakes.skew_columns import Columns, analyse, code
from tests.fakes.traffic import DP, PP, Fault, Shape, Traffic, slower
from tests.fakes.traffic_passes import Passes
from tests.matrix import wide

FLAT = Shape(dp=4)
MESH = Shape(tp=4, pp=2, dp=4)
SEEDS = range(20)


def until_named(passes: Passes, rank: int, since: int, most: int, **faults: object) -> tuple[int, set[int]]:
    """Return after how many slow steps the rank was named (0: not at all), and who else was at any time."""
    others: set[int] = set()
    for made, report in passes.run(since + most, 5, **faults):  # type: ignore[arg-type]  # faults
        named = {culprit.rank for culprit in report.culprits}
        others |= named - {rank}
        if rank in named:
            return made - since, others
    return 0, others


@pytest.mark.parametrize("shape", [FLAT, MESH], ids=["data parallel", "three axes"])
def test_5_percent_are_named_within_20_steps_in_every_run(shape: Shape) -> None:
    """Of 20 (with three axes: 5) with pieces of work that vary by 3 % and steps by 1 %; no other is."""
    for seed in SEEDS if shape is FLAT else range(5):
        passes = Passes(Traffic(shape, seed, noise=0.03, step_noise=0.01))

        steps, others = until_named(
            passes, 1, 60, 20, fault_of=lambda step_s: slower(shape.ranks, 1, 0.05 * step_s, since=60)
        )

        assert (0 < steps <= 20, others) == (True, set()), (seed, steps)


@pytest.mark.parametrize("memory", [0.0, 0.8], ids=["white", "noise that remembers 5 steps"])
def test_nobody_is_named_in_2000_clean_steps(memory: float) -> None:
    """In a run of each kind of noise."""
    for seed in range(1):
        traffic = Traffic(FLAT, 100 + seed, noise=0.03, step_noise=0.01, memory=memory)

        assert Passes(traffic).named(2000, 20) == set(), seed


def uneven(ranks: int, seed: int, since: int = 40) -> Callable[[float], Fault]:
    """Return sequences that differ in length from some step on, by chance on each rank: up to 1.5 steps more."""

    def of(step_s: float) -> Fault:
        order = np.random.default_rng(seed)
        return lambda step: order.uniform(0.0, 1.5 * step_s, ranks) if step >= since else np.zeros(ranks)

    return of


@pytest.mark.parametrize("ranks", wide([2, 4, 8], keep=[2]))
def test_a_job_that_becomes_uneven_names_nobody(ranks: int) -> None:
    """What 40 even steps taught of its noise is no measure for the steps after."""
    for seed in SEEDS:
        passes = Passes(Traffic(Shape(dp=ranks), seed, noise=0.005, step_noise=0.002))

        assert passes.named(150, 5, first_of=uneven(ranks, seed)) == set(), seed


@pytest.mark.parametrize("ranks", wide([2, 4, 8], keep=[2, 8]))
def test_20_percent_are_named_at_the_second_look(ranks: int) -> None:
    """In every run, of two ranks and of eight: noise of late is a reason to look twice, not to wait."""
    for seed in SEEDS:
        passes = Passes(Traffic(Shape(dp=ranks), seed, noise=0.03, step_noise=0.01))

        steps, others = until_named(passes, 1, 60, 20, fault_of=lambda step_s: slower(ranks, 1, 0.2 * step_s, since=60))

        assert (steps, others) == (10, set()), seed


def test_many_that_become_slow_at_once_are_all_named_and_nobody_else() -> None:
    """50 of 160 ranks; what they have become is no noise, so a single one that follows is found as soon as ever."""
    passes = Passes(Traffic(Shape(dp=160, layers=1), 1, noise=0.03, step_noise=0.01))
    slow = np.zeros(160)

    def fault_of(step_s: float) -> Fault:
        def fault(step: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
            slow[:50] = 0.2 * step_s * (step >= 60)
            slow[100] = 0.1 * step_s * (step >= 90)
            return slow

        return fault

    named = {made: {one.rank for one in report.culprits} for made, report in passes.run(110, 5, fault_of=fault_of)}

    assert named[90] == set(range(50))
    assert named[110] == {*range(50), 100}


def test_a_victim_is_never_named() -> None:
    """One rank is late before each step, and for that all of its tensor group in their data groups: blameless."""
    passes = Passes(Traffic(MESH, 3))

    reports = [
        report for _, report in passes.run(120, 5, first_of=lambda step_s: slower(32, 5, 0.1 * step_s, since=40))
    ]

    assert {culprit.rank for report in reports for culprit in report.culprits} == {5}
    last = reports[-1]
    # Ranks 4, 6 and 7 waited for rank 5 in their tensor group, and are late elsewhere by just that.
    assert min(last.waiting[[4, 6, 7]]) > last.waiting[5] + 0.05
    assert max(abs(last.excess[[4, 6, 7]])) < 0.02
    (culprit,) = last.culprits
    assert culprit.excess == pytest.approx(0.1, abs=0.02)
    assert culprit.cost == pytest.approx(0.1, abs=0.02)
    assert last.gpu_hours_a_day(culprit.cost) == pytest.approx(0.1 * 32 * 24, rel=0.25)


def test_stages_are_not_compared_with_each_other() -> None:
    """A stage with twice the work is as it should be; in one class with the others its ranks would be named."""
    heavy = np.zeros(32)
    heavy[16:] = 0.5
    stages = Passes(Traffic(MESH, 3))
    one = Passes(Traffic(MESH, 3), classes=np.zeros(32, np.int32))

    apart = stages.named(60, 5, fault_of=lambda _step_s: lambda _step: heavy)
    mixed = one.named(60, 5, fault_of=lambda _step_s: lambda _step: heavy)

    assert apart == set()
    assert mixed
    assert mixed <= set(range(16, 32))


def drifting(step_s: float) -> Fault:
    """One per cent of a step more each minute, from the 60th step on."""

    def fault(step: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        more = np.zeros(4)
        more[2] = 0.01 * step_s * max(0, step - 60) * step_s / 60
        return more

    return fault


def test_drift_of_1_percent_a_minute_is_named_and_told() -> None:
    """When it is some per cent; and its slope is in the report."""
    passes = Passes(Traffic(FLAT, 5))

    reports = [report for _, report in passes.run(560, 20, fault_of=drifting)]

    assert {culprit.rank for report in reports for culprit in report.culprits} == {2}
    assert len([report for report in reports if report.culprits]) > len(reports) / 3
    (culprit,) = reports[-1].culprits
    assert culprit.a_minute == pytest.approx(0.01, rel=0.4)


def test_one_slow_step_in_fifty_is_named() -> None:
    """Half a step more, once in fifty: nothing that a mean of the last steps would show."""
    passes = Passes(Traffic(FLAT, 5))

    def now_and_then(step_s: float) -> Fault:
        return lambda step: slower(4, 3, 1.5 * step_s * (step % 50 == 13))(step)

    reports = [report for _, report in passes.run(500, 10, first_of=now_and_then)]

    assert {culprit.rank for report in reports for culprit in report.culprits} == {3}
    (culprit,) = reports[-1].culprits
    assert culprit.every == pytest.approx(50, rel=0.2)
    assert culprit.cost == pytest.approx(1.5 / 50, rel=0.4)


def test_checkpoints_of_one_rank_are_no_late_starts() -> None:
    """The same rank, whose recorder says that it wrote checkpoints in that time."""
    passes = Passes(Traffic(FLAT, 5))
    named: set[int] = set()

    def now_and_then(step_s: float) -> Fault:
        return lambda step: slower(4, 3, 1.5 * step_s * (step % 50 == 13))(step)

    for made, report in passes.run(500, 10, first_of=now_and_then):
        if made % 50 == 10:
            passes.skew.late_starts.excuse(3, 1.5 * passes.step_s)
        named |= {culprit.rank for culprit in report.culprits}

    assert named == set()


def test_a_name_is_taken_back() -> None:
    """When the rank is as fast as the others again for as long as it took to name it, and not before."""
    passes = Passes(Traffic(FLAT, 5))

    def for_a_while(step_s: float) -> Fault:
        return lambda step: slower(4, 1, 0.2 * step_s * (40 <= step < 80))(step)

    names = {
        made: {culprit.rank for culprit in report.culprits} for made, report in passes.run(160, 5, fault_of=for_a_while)
    }

    assert names[80] == {1}
    assert names[160] == set()


def test_a_slow_link_is_told_from_slow_ranks() -> None:
    """A data-parallel ring that moves its data six times more slowly: its communicator is named, and no rank."""
    traffic = Traffic(MESH, 5)
    traffic.slow_links[DP, 6] = 6.0
    passes = Passes(traffic)

    reports = [report for _, report in passes.run(60, 5)]

    assert not any(report.culprits for report in reports)
    (link,) = reports[-1].links
    assert (link.kind, link.ranks) == ("ring", tuple(range(18, 32, 4)))
    assert link.ratio == pytest.approx(6, rel=0.1)
    assert reports[-1].links[0].cost > 0.02


def test_a_slow_network_card_is_found_by_the_rings_that_it_is_in() -> None:
    """Its pipeline pair and its data ring are both slow: what they share is named."""
    traffic = Traffic(Shape(tp=2, pp=3, dp=4), 5, transfer_s=(0.002, 0.05, 0.1))
    traffic.slow_links[DP, 2] = 5.0  # ranks 8, 10, 12, 14: stage 1, tensor 0
    traffic.slow_links[PP, 2] = 5.0  # ranks 2, 10
    traffic.slow_links[PP, 10] = 5.0  # ranks 10, 18
    passes = Passes(traffic)

    reports = [report for _, report in passes.run(80, 5)]

    (link,) = reports[-1].links
    assert (link.kind, link.ranks) == ("rank", (10,))


def test_a_rank_that_nobody_waits_for_is_not_named() -> None:
    """Its time is its own where the collective is as long as that for all."""
    passes = Passes(Traffic(FLAT, 5), JobPolicy(straggler_share=0.2))

    assert passes.named(100, 5, fault_of=lambda step_s: slower(4, 1, 0.05 * step_s)) == set()


@pytest.mark.parametrize(("sign", "slow"), [(-1, set()), (1, set(range(0, 1024, 8)))], ids=["faster", "slower"])
def test_one_gpu_of_each_node_does_not_stand_for_all(sign: int, slow: set[int]) -> None:
    """The first GPU of 128 nodes differs by 4 %: the other 896 are what is normal, not those that a stride meets."""
    traffic = Traffic(Shape(tp=8, dp=128, layers=2), 1, noise=0.02, step_noise=0.005)
    first = np.where(np.arange(1024) % 8 == 0, sign * 0.04, 0.0)

    *_, (_, report) = Passes(traffic).run(60, 5, fault_of=lambda _: lambda _: first)

    assert {culprit.rank for culprit in report.culprits} == slow


def test_every_third_step_late_is_counted_as_every_third() -> None:
    """One of three data-loader workers is slow: half a step more in each third step costs a sixth of the time."""
    passes = Passes(Traffic(FLAT, 5))

    def each_third(step_s: float) -> Fault:
        return lambda step: slower(4, 2, 0.5 * step_s * (step % 3 == 0 and step >= 60))(step)

    *_, (_, report) = passes.run(400, 10, first_of=each_third)

    (culprit,) = report.culprits
    assert culprit.every == pytest.approx(3, rel=0.2)
    assert culprit.cost == pytest.approx(0.5 / 3, rel=0.2)


@pytest.mark.parametrize("each", [3, 4])
def test_what_is_late_by_a_fifth_every_few_steps_is_named(each: int) -> None:
    """Too little for a late start by itself, and in less than half of the steps: but it recurs, and costs its share."""
    passes = Passes(Traffic(FLAT, 5))

    def recurring(step_s: float) -> Fault:
        return lambda step: slower(4, 2, 0.2 * step_s * (step % each == 0 and step >= 60))(step)

    reports = [report for _, report in passes.run(300, 10, first_of=recurring)]

    assert {culprit.rank for report in reports for culprit in report.culprits} == {2}
    assert reports[-1].culprits[0].cost == pytest.approx(0.2 / each, rel=0.25)


@pytest.mark.parametrize("ranks", [4, 16])
def test_a_burst_is_nothing_that_recurs(ranks: int) -> None:
    """Three steps in a row that are half as long again, once in a hundred: an evaluation of one rank, say."""
    passes = Passes(Traffic(Shape(dp=ranks), 5))

    def burst(step_s: float) -> Fault:
        return lambda step: slower(ranks, 2, 0.2 * step_s * (step % 100 in (70, 71, 72)))(step)

    assert passes.named(600, 10, first_of=burst) == set()


def test_two_that_are_slow_are_told_together() -> None:
    """Either alone would save nothing, since the other is as slow: the verdict gives one figure for both."""
    *_, (_, report) = Passes(Traffic(Shape(dp=8), 5)).run(
        60, 5, fault_of=lambda step_s: lambda _: np.isin(np.arange(8), (1, 6)) * 0.2 * step_s
    )

    assert {culprit.rank: culprit.together for culprit in report.culprits} == {1: (6,), 6: (1,)}
    verdict = rank_verdict(report.culprits[0], report, "compute", "a", JobPolicy(), 1)
    assert "fixing it and rank 6 together saves 1" in verdict.reason


def test_who_has_other_equals_now_is_not_named_by_the_old_ones() -> None:
    """Stages become known while a rank is named: it is named once, and not any more when it is well."""
    passes = Passes(Traffic(Shape(dp=8), 5))
    names = {}

    def for_a_while(step_s: float) -> Fault:
        return lambda step: slower(8, 2, 0.2 * step_s * (20 <= step < 120))(step)

    for made, report in passes.run(240, 5, fault_of=for_a_while):
        names[made] = [culprit.rank for culprit in report.culprits]
        if made == 60:
            passes.classes = passes.classes + 1

    assert names[60] == names[120] == [2]
    assert names[240] == []


def test_a_slow_rank_that_tells_nothing_any_more_is_no_slow_link_and_not_well() -> None:
    """Rank 5 is slow, then its agent starves: that the others wait for it is no transfer, and its name stays."""
    traffic, reports = Traffic(Shape(tp=4, dp=4, layers=2), 3), []
    lines: list[Line] = []
    skew, kinds = Skew(lines), list[Kind]()
    for turn in range(60):
        met = [one for _ in range(5) for one in traffic.step(spread=slower(16, 5, 0.3) if turn >= 8 else None)]
        coded = code(traffic.columns(met))
        if not kinds:
            lines[:] = coded.lines
            kinds = arrange(coded.lines, coded.place_rank, coded.place_line)
        rows = coded.rows._replace(age=np.full(len(coded.rows.age), PATIENCE, np.uint8))
        if turn >= 24:
            rows = rows.pick(coded.place_rank[rows.place] != 5)
        skew.add(match(rows, kinds, len(coded.place_rank)).grids, traffic.classes, 6.0, 1.2, JobPolicy())
        reports.append(skew.report(16))

    assert not any(report.links for report in reports)
    assert [culprit.rank for culprit in reports[-1].culprits] == [5]
    assert reports[-1].silent == (5,)
    assert reports[23].silent == ()


@pytest.mark.parametrize("names", ["9 10 11 12", "f1 e1 0a 0b"], ids=["numbers of torch", "hashes"])
def test_siblings_are_those_that_were_made_in_the_same_turn(names: str) -> None:
    """Two groups for each of two pairs of ranks: the first ones do the same, and the second ones."""
    first, second, third, fourth = (Line(name, "all_reduce") for name in names.split())
    lines = [first, second, third, fourth]

    kinds = arrange(lines, np.array([0, 1, 0, 1, 2, 3, 2, 3], np.int32), np.repeat(np.arange(4, dtype=np.int32), 2))

    assert sorted(kind.lines.tolist() for kind in kinds) == [[0, 2], [1, 3]]


class TestAnalyse:
    """One stretch of records, judged at once."""

    @staticmethod
    def columns(rank: int = 5, share: float = 0.2, steps: int = 60) -> tuple[Traffic, Columns]:
        """Return the records of a job with one slow rank."""
        traffic = Traffic(MESH, 5)
        met = [one for _ in range(steps) for one in traffic.step(spread=slower(32, rank, share, since=steps // 2))]
        return traffic, traffic.columns(met)

    def test_it_needs_no_order_and_no_common_clock(self) -> None:
        """Rows shuffled, each rank's clock beginning somewhere else: the same answer."""
        traffic, columns = self.columns()
        order = np.random.default_rng(1).permutation(len(columns.rank))

        straight = analyse(columns, classes=traffic.classes, step_s=2.0)
        shuffled = analyse(columns.pick(order), classes=traffic.classes, step_s=2.0)

        assert [culprit.rank for culprit in straight.culprits] == [5]
        assert [culprit.rank for culprit in shuffled.culprits] == [5]
        assert shuffled.culprits[0].cost == pytest.approx(straight.culprits[0].cost, rel=1e-3)

    def test_lost_rows_and_jumping_clocks_are_counted_and_borne(self) -> None:
        """One row in a hundred lost, a hundred clocks set back, a rank that tells nothing: the right one is named."""
        traffic, columns = self.columns()
        order = np.random.default_rng(1)
        keep = (order.random(len(columns.rank)) > 0.01) & (columns.rank != 9)
        columns = columns.pick(keep)
        columns.end_ns[order.integers(0, len(columns.rank), 100)] -= 10**12

        report = analyse(columns, classes=traffic.classes, step_s=2.0)

        assert [culprit.rank for culprit in report.culprits] == [5]
        assert report.unmatched >= 90
        assert report.silent == (9,)

    def test_nothing_says_nothing(self) -> None:
        """No rows, and rows of one rank alone."""
        _, columns = self.columns()
        nothing = analyse(columns.pick(columns.rank < 0))
        alone = analyse(columns.pick(columns.rank == 3))

        assert (nothing.culprits, nothing.matched) == ((), 0)
        assert (alone.culprits, alone.matched) == ((), 0)
        assert alone.unmatched > 0


def test_lateness_is_told_over_the_newest_passes_and_not_only_the_last() -> None:
    """Of passes that hold a single step each, median and 99th percentile are those of many steps: they differ."""
    passes = Passes(Traffic(FLAT, 3, noise=0.0, step_noise=0.0))

    def now_and_then(step_s: float) -> Fault:
        return lambda step: np.array([0.0, 0.5 * step_s if step % 8 == 7 else 0.0, 0.0, 0.0])

    *_, (_, report) = passes.run(32, 1, first_of=now_and_then)

    assert report.late_p99_s[1] > 0.4 * passes.step_s
    assert report.late_p50_s[1] < 0.1 * passes.step_s
