# SPDX-License-Identifier: Apache-2.0
"""Thresholds keep the rate of false alarms that they state."""

import random
import statistics

import numpy as np
import pytest

from megascale_ops.diagnosis.statistics import false_alarms
from megascale_ops.diagnosis.statistics.noise import noise_of, noise_of_late

NO_MEANS = np.empty((0, 0))


@pytest.mark.parametrize(("allowance", "between"), [(0.5, 500.0), (0.5, 2000.0), (0.25, 1000.0)])
def test_a_threshold_is_wrong_as_rarely_as_it_says(allowance: float, between: float) -> None:
    """On white noise the steps between false alarms are those that were asked for, or more."""
    order = random.Random(1)  # noqa: S311  no secret
    height = false_alarms.threshold(allowance, between)
    total, alarms, steps = 0.0, 0, 100_000
    for _ in range(steps):
        total = max(0.0, total + order.gauss(0, 1) - allowance)
        if total > height:
            total, alarms = 0.0, alarms + 1

    assert alarms <= 1.4 * steps / between


def test_noise_is_that_of_white_noise() -> None:
    """And a level, a jump of it and a drift are no noise."""
    order = random.Random(1)  # noqa: S311  no secret
    rows = [[order.gauss(0.0, 2.0) + (50.0 if n > 32 else 0.0) + 0.01 * n for n in range(64)] for _ in range(4)]

    assert noise_of(np.array(rows), NO_MEANS, all_of_them=False) == pytest.approx(2.0, rel=0.2)


def test_noise_that_remembers_counts_for_more() -> None:
    """Its long means spread more than those of white noise would."""
    order = random.Random(1)  # noqa: S311  no secret
    rows = []
    for _ in range(8):
        level, row = 0.0, []
        for _ in range(512):
            level = 0.9 * level + order.gauss(0.0, 1.0)
            row.append(level)
        rows.append(row)
    blocks = [[sum(row[at : at + 8]) / 8 for at in range(0, 512, 8)] for row in rows]

    known = np.array(rows)
    assert noise_of(known, np.array(blocks), all_of_them=False) > 4 * noise_of(known, NO_MEANS, all_of_them=False)


def _row(slow: dict[int, float]) -> list[float]:
    order = random.Random(1)  # noqa: S311  no secret
    return [order.gauss(0.0, 1.0) + slow.get(number, 0.0) for number in range(64)]


@pytest.mark.parametrize("slow", [{60: 100.0}, {63: 100.0}, {56: 100.0}, {60: -100.0}, {59: -100.0, 60: 100.0}])
def test_a_step_that_stands_alone_is_no_noise(slow: dict[int, float]) -> None:
    """One garbage collection: its block's mean stays within what a sum takes of it."""
    assert false_alarms.block_mean(_row(slow)) == pytest.approx(false_alarms.block_mean(_row({})), abs=0.8)


def test_a_rank_that_is_starved_for_a_while_is_noise() -> None:
    """Slow steps in a row are taken as they are, also such as began in the block before."""
    assert false_alarms.block_mean(_row(dict.fromkeys(range(58, 61), 100.0))) > 30.0
    assert false_alarms.block_mean(_row(dict.fromkeys(range(54, 57), 100.0))) > 10.0


def test_a_row_without_spread_has_the_mean_that_it_has() -> None:
    """All equal but for one: nothing says what is far."""
    assert false_alarms.block_mean([1.0] * 63 + [9.0]) == 2.0


@pytest.mark.parametrize("steps", [1, 2, 7, 8, 9, 32, 64])
def test_means_of_many_rows_are_those_of_each(steps: int) -> None:
    """Rows with single spikes, with some in a row, and without any noise: taken together as they are one by one."""
    chance = np.random.default_rng(steps)
    rows = chance.normal(size=(60, steps)) * (chance.random((60, 1)) > 0.1)
    rows += 50.0 * (chance.random((60, steps)) < 0.1) - 50.0 * (chance.random((60, steps)) < 0.1)

    assert false_alarms.block_means(rows) == pytest.approx([false_alarms.block_mean(row) for row in rows.tolist()])
    assert false_alarms.trimmed_means(np.sort(rows, axis=1)) == pytest.approx(
        [false_alarms.trimmed_mean(row) for row in rows.tolist()]
    )


@pytest.mark.parametrize("memory", [0.0, 0.5, 0.8, 0.9])
def test_noise_of_late_is_what_sums_of_steps_show(memory: float) -> None:
    """Four rows of 64 steps are enough to see how much noise remembers, on the average of 100 such."""
    order = random.Random(1)  # noqa: S311  no secret
    found = []
    for _ in range(100):
        rows = []
        for _ in range(4):
            level, row = order.gauss(0.0, 1.0) / (1 - memory**2) ** 0.5, []
            for _ in range(64):
                level = memory * level + order.gauss(0.0, 1.0)
                row.append(level)
            rows.append(row)
        found.append(noise_of_late(np.array(rows), 64))
        assert noise_of_late(np.array(rows, np.float32), 64) == pytest.approx(found[-1], rel=1e-3)

    # Steps that each add 1 and keep a share m of what was: a sum of n of them spreads √n / (1 - m).
    assert statistics.median(found) == pytest.approx(1 / (1 - memory), rel=0.15)


@pytest.mark.parametrize("ranks", [5, 64])
def test_noise_that_is_as_new_as_the_alarm_is_seen_whole(ranks: int) -> None:
    """Eight uneven steps behind many even ones: of the last sixteen half would be as quiet as before."""
    order = random.Random(1)  # noqa: S311  no secret
    found = []
    for _ in range(20):
        rows = [[order.gauss(0.0, 0.01 if step < 24 else 1.0) for step in range(32)] for _ in range(ranks)]
        found.append(noise_of_late(np.array(rows), 16))
        assert noise_of_late(np.array(rows, np.float32), 16) == pytest.approx(found[-1], rel=1e-3)

    assert statistics.median(found) == pytest.approx(1.0, rel=0.15)


def test_one_row_alone_tells_its_noise_and_no_memory() -> None:
    """Two ranks: what one is slower the other is faster, and a level is no noise."""
    order = random.Random(1)  # noqa: S311  no secret
    row = [order.gauss(0.0, 2.0) + (50.0 if n > 56 else 0.0) for n in range(64)]

    assert noise_of_late(np.array([row]), 64) == pytest.approx(2.0, rel=0.25)
    assert noise_of_late(np.array([row], np.float32), 64) == pytest.approx(2.0, rel=0.25)


def test_chance_of_rare_events() -> None:
    """As Poisson has it."""
    assert false_alarms.chance_of_at_least(1, 0.1) == pytest.approx(0.0952, abs=1e-4)
    assert false_alarms.chance_of_at_least(4, 0.1) == pytest.approx(3.8e-6, rel=0.05)


def test_nothing_has_no_noise() -> None:
    """And no mean."""
    assert noise_of(np.empty((0, 5)), NO_MEANS) == 0.0
    assert noise_of_late(np.empty((0, 5)), 16) == 0.0
    assert false_alarms.trimmed_mean([]) == 0.0
