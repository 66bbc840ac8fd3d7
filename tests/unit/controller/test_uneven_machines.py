# SPDX-License-Identifier: Apache-2.0
"""Thousands of machines are not quite alike: the slowest of them holds nobody up while chance makes others slower."""

import numpy as np
import pytest

from megascale_ops.diagnosis.statistics.cooperative import run_through
from megascale_ops.diagnosis.stragglers.causes import verdict_of
from megascale_ops.diagnosis.stragglers.peer_group import Group
from megascale_ops.diagnosis.stragglers.step_table import CPU_S, FORWARD_S, RANK, STEP, WAITING_S, WALL_S
from megascale_ops.schema.policy import JobPolicy

RANKS, STEP_S, NOISE, COLUMNS = 1_500, 6.0, 0.01, 16
POLICY = JobPolicy()


def _watched(slower: dict[int, float], *, noise: float = NOISE, steps: int = 150) -> tuple[Group, dict[int, float]]:
    """Return a group after some steps, and who was ever named with what it was said to cost at most.

    Args:
        slower: by rank, by which share of a step it works longer than its equals.
        noise: of each rank's own work in each step, as a share of a step.
        steps: how many.
    """
    group, chance, costs = Group(), np.random.default_rng(1), {}
    for rank in range(RANKS):
        group.admit(rank, f"node{rank // 8}")
    places = np.arange(RANKS)
    share = np.zeros(RANKS)
    share[list(slower)] = list(slower.values())
    for step in range(steps):
        own_s = STEP_S * (0.8 + share + noise * chance.standard_normal(RANKS))
        rows = np.zeros((RANKS, COLUMNS))
        rows[:, RANK], rows[:, STEP], rows[:, WALL_S] = places, step, own_s.max() + 0.2 * STEP_S
        rows[:, FORWARD_S] = rows[:, CPU_S] = own_s
        rows[:, WAITING_S] = rows[:, WALL_S] - own_s
        group.take_rows(places, rows, 1)
        run_through(group.advance(POLICY))
        for place, held in group.held.items():
            cost = verdict_of(group, group.rank(place), held, POLICY, 1).cost
            costs[place] = max(cost, costs.get(place, 0.0))
    return group, costs


def test_a_machine_that_is_two_percent_slower_is_not_named_where_chance_makes_others_slower() -> None:
    """Its eight ranks need 2.2 % of a step more than their equals, for good; of 1,500 one is 3 % slower in any step."""
    _group, costs = _watched(dict.fromkeys(range(800, 808), 0.022))

    assert costs == {}


def test_where_nobody_else_is_slow_two_percent_are_named() -> None:
    """The same machine in a job without such noise holds all the others up, each of its ranks."""
    group, costs = _watched({800: 0.03}, noise=0.002)

    assert set(group.held) == {800}
    assert costs[800] == pytest.approx(0.03 - 3.2 * 0.002, abs=0.01)


@pytest.mark.parametrize("slower", [{700: 0.1}, {700: 0.1, 1_201: 0.1, 33: 0.09}], ids=["one", "three"])
def test_who_holds_all_up_is_named_also_beside_others_that_do(slower: dict[int, float]) -> None:
    """Ten percent in the same noise, alone or three at a time; what they cost is what they are beyond the noise."""
    group, costs = _watched(slower)

    assert set(group.held) == set(slower)
    assert costs[700] == pytest.approx(0.1 - 3.2 * NOISE, abs=0.02)
