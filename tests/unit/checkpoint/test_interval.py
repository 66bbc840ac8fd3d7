# SPDX-License-Identifier: Apache-2.0
"""How often to save: the formulas beside the complete model, and the model beside failures that are drawn."""

import math
import random

import pytest

from megascale_ops.checkpoint.interval import Costs, daly, failures_seen, lost_share, plan, young
from megascale_ops.errors import UsageError


def best_by_search(costs: Costs) -> float:
    """The least share that any interval loses, by trying three thousand of them."""
    tries = (costs.between_failures_s * 10 ** (exponent / 500.0) for exponent in range(-2500, 500))
    return min(lost_share(costs, interval_s) for interval_s in tries)


@pytest.mark.parametrize("stall_s", [0.05, 1.0, 30.0, 300.0, 1500.0])
@pytest.mark.parametrize("restart_s", [0.0, 120.0])
def test_dalys_interval_loses_hardly_more_than_the_best_one(stall_s: float, restart_s: float) -> None:
    """Within a hundredth of the whole time up to stalls of a third of the time between failures."""
    costs = Costs(stall_s, 0.0, 4500.0, restart_s)

    found = plan(costs)

    assert found.bound_by == "daly"
    assert found.lost_share - best_by_search(costs) < 0.01


def test_for_short_stalls_young_and_daly_agree_and_for_long_ones_daly_is_better() -> None:
    """Young's is the first order of Daly's."""
    assert daly(0.01, 86400.0) == pytest.approx(young(0.01, 86400.0), rel=1e-3)
    costs = Costs(1500.0, 0.0, 4500.0)
    assert lost_share(costs, daly(1500.0, 4500.0)) < lost_share(costs, young(1500.0, 4500.0))


def test_figures_by_hand() -> None:
    """Stall 60 s, a failure a day: sqrt(2 * 60 * 86400) = 3220 s by Young; Daly 3180 s, by the series."""
    half = 60.0 / (2 * 86400.0)
    series = math.sqrt(2 * 60 * 86400) * (1 + math.sqrt(half) / 3 + half / 9) - 60

    assert young(60.0, 86400.0) == pytest.approx(3219.94, abs=0.01)
    assert daly(60.0, 86400.0) == pytest.approx(series)
    assert daly(9000.0, 4500.0) == 4500.0


@pytest.mark.parametrize("write_s", [0.0, 40.0])
def test_the_share_is_what_drawn_failures_cost(write_s: float) -> None:
    """A job that is simulated failure by failure, within a hundredth of the time; a late write costs as it says."""
    costs, interval_s, dice = Costs(10.0, write_s, 1000.0, 50.0), 140.0, random.Random(3)  # noqa: S311  not a secret
    clock_s = done_s = 0.0
    while done_s < 3e6:
        failure_s = dice.expovariate(1 / costs.between_failures_s)
        if failure_s >= interval_s + costs.stall_s:
            done_s, clock_s = done_s + interval_s, clock_s + interval_s + costs.stall_s
            continue
        clock_s += failure_s
        while (again_s := dice.expovariate(1 / costs.between_failures_s)) < costs.restart_s + write_s:
            clock_s += again_s
        clock_s += costs.restart_s + write_s

    assert lost_share(costs, interval_s) == pytest.approx(1 - done_s / clock_s, abs=0.01)


def test_without_a_failure_the_time_observed_is_a_bound() -> None:
    """Three times the mean passes without one in 5 % of all cases."""
    seen, none = failures_seen(36000.0, 4), failures_seen(36000.0, 0)

    assert (seen.between_s, seen.is_bound) == (9000.0, False)
    assert none.is_bound
    assert math.exp(-36000.0 / none.between_s) == pytest.approx(0.05)
    with pytest.raises(UsageError, match="no time was observed"):
        failures_seen(0.0, 0)


def test_a_save_that_stalls_nothing_is_made_as_often_as_it_can_be_written() -> None:
    """The write bounds it, else a step; restarts are all that is lost then."""
    by_write = plan(Costs(0.0, 30.0, 3600.0, 60.0, 0.5))
    by_step = plan(Costs(0.0, 0.0, 3600.0, 60.0, 0.5))
    unknown = plan(Costs(0.0, 0.0, 3600.0, 60.0))

    assert (by_write.bound_by, by_write.interval_s, by_write.steps) == ("write", 30.0, 60)
    assert (by_step.bound_by, by_step.interval_s, by_step.steps) == ("step", 0.5, 1)
    assert (unknown.interval_s, unknown.steps) == (0.0, 0)
    assert unknown.lost_share == pytest.approx(1 - math.exp(-60 / 3600))


def test_steps_are_whole_and_one_at_least() -> None:
    """The interval in steps is what a script counts."""
    assert plan(Costs(1.0, 0.0, 86400.0, 0.0, 2.0)).steps == round(daly(1.0, 86400.0) / 2.0)
    assert plan(Costs(1.0, 0.0, 100.0, 0.0, 500.0)).steps == 1


def test_nothing_is_done_where_failures_come_faster_than_saves() -> None:
    """All is lost, and no exponential overflows."""
    assert plan(Costs(1e6, 0.0, 1.0)).lost_share == 1.0
    assert lost_share(Costs(1.0, 0.0, 100.0), 0.0) == 1.0


@pytest.mark.parametrize("costs", [Costs(-1.0, 0.0, 9.0), Costs(math.nan, 0.0, 9.0), Costs(1.0, 0.0, math.inf)])
def test_what_is_no_cost_is_refused(costs: Costs) -> None:
    """The sentence names it."""
    with pytest.raises(UsageError, match=r"must be a number of seconds, 0 or more"):
        plan(costs)
    with pytest.raises(UsageError, match="the time between two failures must be more"):
        plan(Costs(1.0, 0.0, 0.0))
