# SPDX-License-Identifier: Apache-2.0
"""Cumulative sums of many units are those of each unit by itself, and strike when they should."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.diagnosis.statistics.accumulated_cost import AccumulatedCost, Threshold
from megascale_ops.diagnosis.statistics.false_alarms import CUT
from megascale_ops.diagnosis.stragglers.own_work import MediansOfOthers

TESTS = (Threshold(0.5, 9.0), Threshold(0.2, 12.0))


class Alone:
    """One unit's sums, written down as the definition has them."""

    def __init__(self) -> None:
        self.totals = [0.0 for _ in TESTS]
        self.began = [0 for _ in TESTS]

    def add(self, x: float, at: int) -> bool:
        """Add one look; say whether it strikes."""
        strikes = False
        for test, (allowance, height) in enumerate(TESTS):
            total = self.totals[test] + min(max(x, -CUT), CUT) - allowance
            if total <= 0.0:
                self.began[test] = at
            strikes = strikes or total > height
            self.totals[test] = min(max(total, 0.0), 2 * height)
        return strikes


@given(seed=st.integers(0, 10_000), units=st.integers(2, 60), missing=st.integers(0, 10))
def test_all_at_once_is_one_after_the_other(seed: int, units: int, missing: int) -> None:
    """Sums, since when they rise, and who strikes; also where some tell nothing, in any order."""
    order = random.Random(seed)  # noqa: S311  no secret
    costs, alone = AccumulatedCost(tests=2, units=units), [Alone() for _ in range(units)]

    for at in range(1, 14):
        places = order.sample(range(units), max(2, units - missing))
        noises = [order.choice([0.0, 0.0, 1.0, 4.0, 100.0]) + order.gauss(0, 1) for _ in places]

        strikes = costs.add(np.array(noises), TESTS, at, np.array(places))

        expected = [alone[place].add(x, at) for place, x in zip(places, noises, strict=True)]
        assert strikes.tolist() == expected
        assert costs.began.T.tolist() == [one.began for one in alone]
        assert pytest.approx(np.array([one.totals for one in alone])) == costs.totals.T


@given(seed=st.integers(0, 10_000), looks=st.integers(2, 30), units=st.integers(1, 6))
def test_sums_that_are_added_up_again_are_those_of_a_larger_noise(seed: int, looks: int, units: int) -> None:
    """As if the larger noise had been known since the sums began to rise; where nothing is known nothing changes."""
    order = random.Random(seed)  # noqa: S311  no secret
    excess = np.array([[order.choice([0.0, 3.0, 9.0]) + order.gauss(0, 1) for _ in range(looks)] for _ in range(units)])
    excess[order.randrange(units), order.randrange(looks)] = math.nan
    costs, again = AccumulatedCost(2, units), AccumulatedCost(1, units)
    for at in range(looks):
        costs.add(excess[:, at], TESTS, at + 1)
    began = costs.began.copy()

    costs.add_again(0, np.arange(units), excess / 2.0, TESTS[0], looks)

    for at in range(looks):
        later = np.where(began[0] < at + 1, excess[:, at] / 2.0, math.nan)
        again.add(later, [Threshold(TESTS[0].allowance, math.inf)], at + 1)
    assert costs.totals[0] == pytest.approx(np.minimum(again.totals[0], 2 * TESTS[0].height))
    rising = costs.totals[0] > 0
    assert costs.began[0][rising].tolist() == np.maximum(again.began[0], began[0])[rising].tolist()


def test_a_sum_is_scaled_and_found_and_begins_anew() -> None:
    """Half of the unit, twice the sum; and one that begins anew is not found any more."""
    costs = AccumulatedCost(tests=2, units=3)
    for at in range(1, 4):
        costs.add(np.array([0.0, 0.0, 3.0]), TESTS, at)

    costs.scale(2.0)

    assert costs.totals[:, 2].tolist() == pytest.approx([15.0, 16.8])
    assert (costs.above(0, 14.0).tolist(), costs.above(1, 17.0).tolist()) == ([2], [])
    costs.clear(2)
    assert (costs.above(0, 14.0).tolist(), costs.totals[:, 2].tolist()) == ([], [0.0, 0.0])


def test_new_units_begin_when_they_come() -> None:
    """Those that are there keep their sums."""
    costs = AccumulatedCost(tests=2, units=1)
    costs.add(np.array([3.0]), TESTS, 1)

    costs.grow(3, began=7)

    assert costs.totals[0].tolist() == [2.5, 0.0, 0.0]
    assert costs.began[0].tolist() == [0, 7, 7]


def test_calm_are_those_that_are_not_half_suspicious() -> None:
    """All of those asked for, where the calm ones are too few to tell a noise."""
    costs = AccumulatedCost(tests=2, units=5)
    costs.totals[0] = [0.0, 1.0, 2.0, 8.0, 9.0]
    heights = [9.0, 12.0]

    assert costs.calm_of(np.arange(5), heights).tolist() == [0, 1, 2]
    assert costs.calm_of(np.array([2, 3, 4]), heights).tolist() == [2, 3, 4]


@given(st.lists(st.floats(0.0, 10.0), min_size=2, max_size=9))
def test_the_median_of_the_others_is_found_by_two_limits(values: list[float]) -> None:
    """For each value, as sorting the others would find it."""
    found = MediansOfOthers(values).of(np.array(values))

    for at, median in enumerate(found.tolist()):
        others = sorted(values[:at] + values[at + 1 :])
        middle = len(others) // 2
        expected = others[middle] if len(others) % 2 else (others[middle - 1] + others[middle]) / 2
        assert median == pytest.approx(expected)
