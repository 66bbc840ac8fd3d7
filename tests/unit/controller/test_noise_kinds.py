# SPDX-License-Identifier: Apache-2.0
"""Noise of many kinds gets nobody named, and a rank that changes in it does; ``benchmarks/noise.py`` has more of it."""

import numpy as np
import pytest

from megascale_ops.diagnosis.skew.cusum import Sums
from megascale_ops.diagnosis.statistics import false_alarms
from megascale_ops.diagnosis.statistics.levels import Levels
from tests.fakes.noisy_collectives import NoisyCollectives
from tests.fakes.noisy_ranks import KINDS, NoisyRanks
from tests.real.recorded_steps import FOLDER, read

Engine = type[NoisyRanks] | type[NoisyCollectives]

STEPS, RANKS = 300, 16
WRONG_BEFORE = [
    *("memory 0.95", "memory 0.98", "memory 0.99", "memory 0.999", "walk", "thermal", "nodes"),
    *("uneven", "skewed machines", "generations", "long sequences"),
]


@pytest.mark.parametrize("kind", WRONG_BEFORE)
def test_noise_names_hardly_anybody(kind: str) -> None:
    """Each kind of which most of the ranks were named; one of 16 at most, for chance is not excluded."""
    job = NoisyRanks(RANKS, 5.0)
    for shares in KINDS[kind](np.random.default_rng(2), STEPS, RANKS):
        job.one(shares)

    assert job.names <= 1


@pytest.mark.parametrize("kind", ["periodic", "regimes", "bursts"])
def test_what_comes_and_goes_is_learnt(kind: str) -> None:
    """The first time it can't be told from a slow rank; ranks are not named again and again for it."""
    job = NoisyRanks(RANKS, 5.0)
    names = []
    for shares in KINDS[kind](np.random.default_rng(2), 2 * STEPS, RANKS):
        job.one(shares)
        names.append(job.names)

    assert names[-1] - names[STEPS] <= 2


@pytest.mark.parametrize("engine", [NoisyRanks, NoisyCollectives])
def test_what_comes_and_goes_names_few_from_the_first_step(engine: Engine) -> None:
    """Of 64 ranks with two ways to run 13 were named within 60 steps: now one is, and others when it has lasted."""
    job = engine(64, 5.0)
    for shares in KINDS["regimes"](np.random.default_rng(3), 60, 64):
        job.one(shares)

    assert job.names <= 2


@pytest.mark.parametrize("engine", [NoisyRanks, NoisyCollectives])
@pytest.mark.parametrize("well", [0, 120])
@pytest.mark.parametrize(("share", "within"), [(0.05, 40), (0.2, 26)])
def test_in_white_noise_nobody_waits_for_that(engine: Engine, share: float, within: int, well: int) -> None:
    """Slow from the first step, or from one step to the next: named as soon as sums of excesses are high."""
    chance = np.random.default_rng(4)
    job = engine(RANKS, 5.0)
    for step in range(well + within + 5):
        shares = 0.01 * chance.standard_normal(RANKS)
        shares[5] += share * (step >= well)
        job.one(shares)
        assert step >= well or job.names == 0

    assert job.named() == {5}


def test_a_fault_among_ranks_that_take_turns_is_named_when_it_outlasts_them() -> None:
    """Every rank is 20 % slower for 24 steps of 200, one of them for good from some step on."""
    chance = np.random.default_rng(5)
    job = NoisyRanks(RANKS, 5.0)
    starts = chance.integers(0, 200, RANKS)
    well, named_at = 500, 0
    for step in range(well + 200):
        shares = 0.2 * ((step + starts) % 200 < 24) + 0.005 * chance.standard_normal(RANKS)
        shares[5] = 0.2 if step >= well else shares[5]
        job.one(shares)
        assert step >= well or job.names == 0
        named_at = named_at or step * (5 in job.named())

    assert named_at >= well + 2 * 24
    assert job.named() == {5}


def test_a_rank_far_beyond_what_machines_differ_by_has_no_usual_level() -> None:
    """Four uneven machines, and one that takes twice as long from the first step on: nothing of it is usual."""
    chance = np.random.default_rng(6)
    machines = np.array([0.0, 0.05, -0.06, 0.8])
    job = NoisyCollectives(4, 5.0)
    for _ in range(40):
        job.one(machines + 0.01 * chance.standard_normal(4))

    assert job.named() == {3}


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_changes_among_uneven_ones_is_named_and_no_other(seed: int) -> None:
    """Machines that differ by 5 % for good are held against their own past; 10 % more on one of them is news."""
    chance = np.random.default_rng(seed)
    machines = 0.05 * chance.standard_normal(RANKS)
    slow = int(np.argsort(machines)[RANKS // 2])
    job = NoisyRanks(RANKS, 5.0)
    for step in range(300):
        shares = machines + 0.01 * chance.standard_normal(RANKS)
        shares[slow] += 0.1 * (step >= 250)
        job.one(shares)
        assert step >= 250 or job.names == 0

    assert job.named() == {slow}


def test_sums_of_collectives_are_held_against_the_same() -> None:
    """Machines that differ for good: arrival skew names none of them, and one that becomes slower."""
    chance = np.random.default_rng(1)
    machines = 0.05 * chance.standard_normal(RANKS)
    sums, named = Sums(RANKS), set()
    for block in range(300):
        shares = machines + 0.01 * chance.standard_normal(RANKS)
        shares[3] += 0.2 * (block >= 250)
        excess = (shares - np.median(shares)).astype(np.float32)[:, None]
        for unit in sums.add(excess, 0.02, 1e8):
            if sums.window(unit, 0.02, 1e8) >= 8 and sums.stands(unit, 8, 0.02, 1e8):
                named.add(unit)
        assert block >= 250 or not named

    assert named == {3}


@pytest.mark.parametrize("name", ["starved", "transformer_lengths_differ"])
def test_recorded_runs_name_nobody(name: str) -> None:
    """Real steps of four ranks on two busy cores."""
    recorded = read(FOLDER / f"{name}.steps")
    job = NoisyRanks(4, 0.0)
    for own_s, wall_s in zip(recorded.own_s, recorded.wall_s, strict=True):
        job.tell(own_s, float(wall_s))

    assert len(recorded.wall_s) == 1_000
    assert job.names == 0


def test_levels_of_equals_are_none_and_a_slow_one_is_not_usual() -> None:
    """What is usual is learnt only where the others differ, too."""
    chance = np.random.default_rng(1)
    levels = Levels(8)
    slow = np.where(np.arange(8) == 3, 0.2, 0.0)
    for _ in range(160):
        if levels.add(slow + 0.01 * chance.standard_normal(8), 0.04):
            levels.settle(np.ones(8, bool), [])

    assert levels.usual.max() < 0.02


def test_units_that_come_later_have_room() -> None:
    """Those that were there keep what is known of them."""
    levels = Levels(3)
    for _ in range(16):
        if levels.add(np.array([0.0, 0.1, np.nan]), 1.0):
            levels.settle(np.ones(3, bool), [])
    levels.grow(5)
    for _ in range(16):
        if levels.add(np.array([0.0, 0.1, np.nan, 0.2, 0.3]), 1.0):
            levels.settle(np.ones(5, bool), [])

    assert len(levels.usual) == 5
    assert np.isfinite(levels.usual).all()


@pytest.mark.parametrize(
    ("freedom", "chance", "value"),
    [
        (1, 0.025, 12.706),
        (2, 0.025, 4.303),
        (3, 0.025, 3.182),
        (5, 1e-6, 24.771),
        (30, 0.005, 2.750),
        (1e6, 1e-7, 5.199),
    ],
)
def test_quantiles_of_student_s_t(freedom: float, chance: float, value: float) -> None:
    """As tables have them."""
    assert false_alarms.quantile_of_t(freedom, chance) == pytest.approx(value, rel=1e-3)
