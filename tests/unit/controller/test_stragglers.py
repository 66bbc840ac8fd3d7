# SPDX-License-Identifier: Apache-2.0
"""Who is slow, on made-up jobs with seeded noise: the right rank, soon, with its cause; and never another."""

import random
import re
from collections.abc import Callable
from itertools import islice

import pytest

from megascale_ops.diagnosis.stragglers import peer_group
from megascale_ops.diagnosis.stragglers.causes import figures_of, verdict_of
from megascale_ops.diagnosis.stragglers.detector import Watch
from megascale_ops.diagnosis.stragglers.peer_group import WARM_UP
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import StepWork
from megascale_ops.schema.wording import percent
from tests.fakes.paced_ranks import Fault, Noise, PacedRanks, gaussian, no_fault
from tests.matrix import wide

SEEDS = range(20)


def slower(share: float, part: str = "forward_s", rank: int = 2, **more: float) -> Fault:
    """Return a fault that adds a share of a 50 ms step to one part of every step of one rank."""
    return lambda _step, number: {part: share * 0.05, **more} if number == rank else {}


def now_and_then(share: float, every: int) -> Fault:
    """Return a fault that adds a share of a 50 ms step to one step of so many of rank 2."""
    return lambda step, number: {"forward_s": share * 0.05} if number == 2 and step % every == 0 else {}


def verdict(job: PacedRanks) -> Verdict:
    """Return the only verdict."""
    ((group, rank, held),) = job.watch.held()
    return verdict_of(group, rank, held, job.policy, 1)


def test_the_card_goes_on_to_show_the_figure_that_alarmed() -> None:
    """A rank that is well again keeps its name for 20 steps: it was as slow as it was, and costs what it costs now."""
    job = PacedRanks(3)
    job.run(60)
    job.until_named(slower(0.5), 20)
    ((group, rank, held),) = job.watch.held()
    alarm = figures_of(group, rank, held, alarm=True)
    first = verdict_of(group, rank, held, job.policy, 1, alarm)

    job.run(15)
    ((group, rank, held),) = job.watch.held()
    later = verdict_of(group, rank, held, job.policy, 1, alarm)
    newest = verdict_of(group, rank, held, job.policy, 1)

    figure = f"(+{percent(round(alarm.share, 4))}) since step {held.since_step}"
    assert alarm.share > 0.3
    assert figure in first.reason
    assert "of late" not in first.reason
    assert figure in later.reason
    # The newer figure is the rank's work, not its cost, which stands behind it.
    assert re.search(
        rf"; of late it is [+-][0-9.]+ %, and that costs {re.escape(percent(later.cost))} of ", later.reason
    )
    assert figure not in newest.reason
    assert later.confidence == first.confidence
    assert later.cost == newest.cost < first.cost
    assert (first.excess, later.excess) == (round(alarm.share, 4), newest.excess)
    assert later.excess < first.excess


def test_a_rank_that_is_suddenly_very_slow_costs_no_more_than_the_step_that_it_makes() -> None:
    """Three steps' time more in a step is three quarters of it, and not all of every step."""
    job = PacedRanks(3)
    job.run(60)

    job.until_named(slower(3.0), 20)
    ((group, rank, held),) = job.watch.held()

    cost = verdict_of(group, rank, held, job.policy, 1).cost
    assert 0.5 < cost < 0.9


def test_a_part_in_which_a_slow_rank_needs_less_is_told_as_less() -> None:
    """It never prints "-18.7 ms more": the sign is in the word."""
    job = PacedRanks(3)
    job.run(60)
    job.until_named(lambda _step, rank: {"forward_s": 0.03, "data_s": -0.01} if rank == 1 else {}, 20)
    ((group, rank, held),) = job.watch.held()

    told = [one.text for one in verdict_of(group, rank, held, job.policy, 1).evidence if "equals" in one.text]

    assert any(text.startswith("forward: ") and text.endswith(" more than its equals") for text in told)
    assert any(text.startswith("data: ") and text.endswith(" less than its equals") for text in told)
    assert not [text for text in told if ": -" in text]


@pytest.mark.parametrize("noise", [0.01, 0.02, 0.05])
def test_20_percent_are_named_within_20_steps(noise: float) -> None:
    """In every run, whatever the noise of up to 5 % of a step; and none was named before."""
    for seed in SEEDS:
        job = PacedRanks(seed, noise=gaussian(noise * 0.05))
        assert job.run(60) == set()

        steps, named = job.until_named(slower(0.2), 20)

        assert (steps > 0, named) == (True, {2}), (seed, steps)


def test_5_percent_are_named_within_100_steps() -> None:
    """In every run where steps vary by 2 %."""
    for seed in SEEDS:
        job = PacedRanks(seed)
        job.run(60)

        steps, named = job.until_named(slower(0.05), 100)

        assert (steps > 0, named) == (True, {2}), (seed, steps)


def test_5_percent_are_named_within_25_steps_after_the_garbage_of_start_up() -> None:
    """Each rank's first large garbage collection, 100 ms in one of its first steps, is not what noise is."""
    for seed in SEEDS:
        collected = random.Random(seed).choices(range(10, 40), k=4)  # noqa: S311  no secret
        job = PacedRanks(seed, noise=gaussian(0.0007))

        def collect(step: int, rank: int, at: list[int] = collected) -> dict[str, float]:
            return {"gc_s": 0.1, "forward_s": 0.1} if step == at[rank] else {}

        assert job.run(100, collect) == set()
        assert job.run(25, slower(0.05)) == {2}, seed


def test_a_rank_that_is_slow_from_the_first_step_is_named() -> None:
    """The comparison is with its equals, not with its own past."""
    steps, named = PacedRanks(1).until_named(slower(0.2), 40)

    assert (0 < steps <= 40, named) == (True, {2})


def test_drift_is_named() -> None:
    """1 % a minute: named when it is about 2 %, within three minutes."""
    job = PacedRanks(1)
    job.run(60)

    steps, named = job.until_named(
        lambda step, rank: {"forward_s": 0.05 * 0.01 * (step - 60) / 1200} if rank == 2 else {}, 3600
    )

    assert (1200 < steps <= 3600, named) == (True, {2})


def test_one_slow_step_in_fifty_is_named() -> None:
    """Three times the step, once in fifty; the cost is the mean."""
    job = PacedRanks(1)
    job.run(100)

    steps, named = job.until_named(lambda step, rank: {"forward_s": 0.1} if rank == 2 and step % 50 == 7 else {}, 600)

    assert (steps > 0, named) == (True, {2})
    assert verdict(job).cost == pytest.approx(0.04, abs=0.01)
    assert "one step of 5" in verdict(job).reason


def test_one_slow_step_alone_names_nobody() -> None:
    """Thirty times a step, once."""
    job = PacedRanks(1)

    named = job.run(400, lambda step, rank: {"forward_s": 1.5} if (rank, step) == (2, 200) else {})

    assert named == set()


def _wandering(spread_s: float, memory: float) -> Callable[[], Noise]:
    """Return noise that remembers: the share ``memory`` of what it was."""

    def make() -> Noise:
        level: dict[int, float] = {}

        def noise(_step: int, rank: int, order: random.Random) -> float:
            level[rank] = memory * level.get(rank, 0.0) + order.gauss(0.0, spread_s)
            return level[rank]

        return noise

    return make


CLEAN: dict[str, Callable[[], Noise]] = {
    "white": lambda: gaussian(0.001),
    "quiet": lambda: gaussian(1e-6),
    "steps alternate short and long": lambda: lambda step, _rank, order: 0.05 * (step % 2) + order.gauss(0.0, 0.001),
    "sequence lengths differ, alike on all": lambda: (
        lambda step, _rank, order: 0.04 * ((step * 7) % 5) / 4 + order.gauss(0.0, 0.001)
    ),
    "sequence lengths differ, by chance on each": lambda: lambda _step, _rank, order: 0.05 * order.uniform(-0.3, 0.6),
    "a few sequences are very long": lambda: lambda _step, _rank, order: 0.025 * (order.lognormvariate(0, 0.5) - 1),
    "hiccups": lambda: (
        lambda _step, _rank, order: order.gauss(0.0, 0.001) + (order.random() < 0.02) * order.expovariate(20.0)
    ),
    "sequence lengths differ from step 40 on, by chance on each": lambda: (
        lambda step, _rank, order: order.gauss(0.0, 0.0003) if step < 40 else 0.03 * (order.uniform(0.4, 2.4) - 1)
    ),
    "noise that remembers 5 steps": _wandering(0.0005, 0.8),
    "noise that remembers 10 steps": _wandering(0.0005, 0.9),
}


# A run is 0.3 to 0.4 s, nearly all of it the judge's: ten of each kind would be a tenth of all unit tests.
RUNS = [
    *(pytest.param(kind, range(1), id=kind) for kind in CLEAN),
    *(pytest.param(kind, range(1, 10), id=f"{kind}, further seeds", marks=pytest.mark.matrix) for kind in CLEAN),
]


@pytest.mark.parametrize(("kind", "seeds"), RUNS)
def test_nobody_is_named_in_2000_clean_steps(kind: str, seeds: range) -> None:
    """In ten runs of each kind of noise that all ranks share, nine of them left to the matrix."""
    for seed in seeds:
        assert PacedRanks(100 + seed, noise=CLEAN[kind]()).run(2000) == set(), seed


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 20), marks=pytest.mark.matrix)], ids=str)
def test_a_slowness_that_passed_by_itself_teaches(seeds: range) -> None:
    """A neighbour takes a third of a rank's time for 12 steps, every 100: named once, and then no more."""
    names = []
    for seed in seeds:
        job = PacedRanks(seed, noise=gaussian(0.0005))
        job.run(60)
        for number in range(10):
            job.run(12, slower(0.5, rank=number % 4))
            job.run(88)
        names.append(sum(group.names for group in job.watch.groups.values()))

    assert set(names) == {1}


@pytest.mark.parametrize("ranks", [2, 3, 5, 16])
def test_any_number_of_equals_will_do(ranks: int) -> None:
    """The right one of two is named, and of sixteen; and none where none is slow."""
    job = PacedRanks(3, ranks=ranks)
    assert job.run(500) == set()

    _, named = job.until_named(slower(0.2, rank=1), 20)

    assert named == {1}


@pytest.mark.parametrize(
    ("cause", "fault"),
    [
        ("input", slower(0.2, "data_s")),
        ("compute", slower(0.2, "forward_s", cpu_s=0.01)),
        ("compute", slower(0.2, "backward_s", cpu_s=0.01)),
        ("host", slower(0.2, "forward_s")),
        ("gc", slower(0.2, "forward_s", gc_s=0.009, cpu_s=0.01)),
        ("launch", slower(0.2, "other_s")),
    ],
)
def test_the_cause_is_where_the_excess_lies(cause: str, fault: Fault) -> None:
    """Each part that can be slow gives its own word, and the numbers are in the reason."""
    job = PacedRanks(5)
    job.run(60)
    job.run(30, fault)

    found = verdict(job)

    assert (found.fault, found.cause, found.culprits, found.nodes) == ("straggler", cause, (2,), ("node-2",))
    assert found.cost == pytest.approx(0.01 / 0.0525, abs=0.06)
    assert "that costs" in found.reason
    assert any("one false name in 10 days" in finding.text for finding in found.evidence)


def test_a_checkpoint_of_one_rank_is_no_slowness() -> None:
    """Rank 0 saves every tenth step, for a whole step."""
    job = PacedRanks(1)

    named = job.run(1000, lambda step, rank: {"checkpoint_s": 0.05} if rank == 0 and step % 10 == 0 else {})

    assert named == set()


def test_a_name_is_taken_back() -> None:
    """When the rank is as fast as the others again; and not before."""
    job = PacedRanks(1)
    job.run(60)
    job.run(200, slower(0.1))
    assert job.named() == {2}

    job.run(100, no_fault)

    assert job.named() == set()


def test_two_slow_ranks_are_both_named() -> None:
    """Of eight; one does not hide the other."""
    job = PacedRanks(1, ranks=8)
    job.run(60)

    job.run(30, lambda _step, rank: {"forward_s": 0.01} if rank in (2, 5) else {})

    assert job.named() == {2, 5}


def test_many_that_become_slow_at_once_are_all_named_and_nobody_else() -> None:
    """50 of 160 ranks, a rack with a sick switch: named a few in each step, soon all of them."""
    job = PacedRanks(1, ranks=160)
    job.run(60)

    named = job.run(30, lambda _step, rank: {"forward_s": 0.01} if rank < 50 else {})

    assert named == set(range(50))


def test_many_that_become_slow_at_once_are_no_noise() -> None:
    """A single one that follows is found as soon as ever."""
    job = PacedRanks(1, ranks=160)
    job.run(60)
    job.run(30, lambda _step, rank: {"forward_s": 0.01} if rank < 50 else {})

    job.run(20, lambda _step, rank: {"forward_s": 0.01 if rank < 50 else 0.005 if rank == 100 else 0.0})

    assert job.named() == {*range(50), 100}


@pytest.mark.parametrize(("ranks", "every"), wide([(1_024, 8), (1_024, 16), (1_000, 8), (256, 4)], keep=[(1_000, 8)]))
def test_the_same_gpu_of_every_node_is_named(ranks: int, every: int) -> None:
    """Local rank 0 of 64 to 128 nodes, of no mesh that is known: who speaks for all must not be those alone."""
    job = PacedRanks(1, ranks=ranks)
    job.run(40)

    named = job.run(40, lambda _step, rank: {"forward_s": 0.005 if rank % every == 0 else 0.0})

    assert named == set(range(0, ranks, every))


def test_two_ranks_that_become_uneven_name_nobody() -> None:
    """There is no third one to tell noise by: how each differs from itself a step ago tells it."""
    for seed in SEEDS:
        noise = CLEAN["sequence lengths differ from step 40 on, by chance on each"]()

        assert PacedRanks(seed, ranks=2, noise=noise).run(300) == set(), seed


# 800 ranks in jobs of each size; where jobs are many, half of them are left to the matrix.
UNEVEN = [
    (8, range(50)),
    (16, range(25)),
    (160, range(5)),
    pytest.param(8, range(50, 100), marks=pytest.mark.matrix),
    pytest.param(16, range(25, 50), marks=pytest.mark.matrix),
]


@pytest.mark.parametrize(("ranks", "seeds"), UNEVEN, ids=str)
def test_many_that_become_uneven_name_nobody(ranks: int, seeds: range) -> None:
    """Ranks whose sequences differ from step 40 on: eight lucky steps among quiet ones are no slow rank."""
    for seed in seeds:
        noise = CLEAN["sequence lengths differ from step 40 on, by chance on each"]()

        assert PacedRanks(seed, ranks=ranks, noise=noise).run(80) == set(), seed


def test_a_rank_that_nobody_waits_for_is_not_named() -> None:
    """Ranks that never meet cost each other nothing."""
    watch, policy = Watch(), JobPolicy()
    for step in range(200):
        for rank in range(4):
            watch.ingest_steps(
                rank, "n", Mesh(), (StepWork(step, wall_s=0.06 if rank == 2 else 0.05 + 1e-5 * (step % 7)),)
            )
        watch.advance(policy, 4)

    assert list(watch.held()) == []


def test_stages_of_a_pipeline_are_not_compared() -> None:
    """The last stage works longer by design; within its stage a slow rank is still found."""
    watch, policy = Watch(), JobPolicy()
    order = random.Random(1)  # noqa: S311  no secret
    for step in range(120):
        for rank in range(8):
            stage = rank // 4
            own_s = 0.03 + 0.015 * stage + order.gauss(0, 0.0005) + (0.01 if rank == 1 and step >= 60 else 0.0)
            work = StepWork(step, wall_s=0.07, waiting_s=0.07 - own_s, forward_s=own_s)
            watch.ingest_steps(rank, "n", Mesh(pp=stage, tp=0, dp=rank % 4), (work,))
        watch.advance(policy, 8)
        assert step >= 60 or list(watch.held()) == []

    assert [rank.rank for _, rank, _ in watch.held()] == [1]


def test_missing_steps_are_passed_over() -> None:
    """A heartbeat that got lost, or steps too many to be told: what all have told is judged."""
    job = PacedRanks(1)
    job.run(60)
    for step in range(200):
        works = job.works(slower(0.2))
        for rank, work in enumerate(works):
            if (step + rank) % 10 != 0:
                job.watch.ingest_steps(rank, "n", Mesh(), (work,))
        job.watch.advance(job.policy, 4)
        job.step += 1

    assert job.named() == {2}


def test_many_ranks_are_judged_in_pieces_and_what_is_told_in_between_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,500 ranks take three pieces a step. Steps that come between two of them change nothing of what is found."""
    monkeypatch.setattr(peer_group, "MOST_SORTED", 1_024)
    whole, pieces = PacedRanks(1, ranks=2_500), PacedRanks(1, ranks=2_500)
    told, found = [], []

    for step in range(40):
        works = whole.works(slower(0.2, rank=1_700) if step >= 16 else no_fault)
        told.append(works)
        whole.step += 1
        for rank, work in enumerate(works):
            whole.watch.ingest_steps(rank, "n", Mesh(), (work,))
        whole.watch.advance(whole.policy, 2_500)
        found.append(whole.named())

    for rank, work in enumerate(told[0]):
        pieces.watch.ingest_steps(rank, "n", Mesh(), (work,))
    for step, later in enumerate([*told[1:], []]):
        rest = iter(enumerate(later))
        between = 0
        for _ in pieces.watch.pieces(pieces.policy, 2_500):
            between += 1
            for rank, work in islice(rest, 700):
                pieces.watch.ingest_steps(rank, "n", Mesh(), (work,))
        for rank, work in rest:
            pieces.watch.ingest_steps(rank, "n", Mesh(), (work,))
        # Before each of three pieces, and after the group; own work comes in pieces, too.
        assert between >= (6 if step >= WARM_UP else 1)
        assert pieces.named() == found[step]

    assert found[-1] == {1_700}


def test_a_policy_that_changes_changes_the_next_judgement() -> None:
    """What is not worth naming at 10 % is at 2 %."""
    job = PacedRanks(1, policy=JobPolicy(straggler_share=0.1))
    job.run(60)
    assert job.run(200, slower(0.05)) == set()

    job.policy = JobPolicy()

    assert job.run(100, slower(0.05)) == {2}


@pytest.mark.parametrize(("fault", "share"), [(slower(0.15), 0.2), (now_and_then(1.0, every=20), 0.2)])
def test_a_name_that_is_not_worth_a_raised_share_ends(fault: Fault, share: float) -> None:
    """At once, though the rank is as slow as it was; what stays worth it stays named. Nothing is learnt from it."""
    job = PacedRanks(1)
    job.run(60)
    assert job.run(200, fault) == {2}

    job.policy = JobPolicy(straggler_share=0.03)
    job.one(fault)
    at_3 = job.named()
    job.policy = JobPolicy(straggler_share=share)
    job.one(fault)
    at_more = job.named()
    job.policy = JobPolicy()

    assert (at_3, at_more) == ({2}, set())
    assert job.run(25, fault) == {2}
