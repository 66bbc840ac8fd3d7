# SPDX-License-Identifier: Apache-2.0
"""Rank by time as pictures need it: the slow rank stands out, equals are compared with equals, thousands are folded."""

import numpy as np
import pytest

from megascale_ops.schema.history import Facts, History
from megascale_ops.schema.identity import Mesh
from megascale_ops.trace.heatmap import MOST_ALONE, equals, fold, lay_out, step_times, worst
from tests.fakes.step_histories import history_of


def test_the_slow_rank_is_late_and_the_others_are_not() -> None:
    """In the steps in which it was slow; all ranks show the same step time."""
    times = lay_out(history_of(4, 40, slow=(2,), slow_steps=range(20, 40)))

    assert times is not None
    late = times.lateness
    assert np.nanmax(np.abs(late[[0, 1, 3]])) < 1e-6
    assert np.nanmax(late[2]) == pytest.approx(0.22, abs=1e-5)
    assert np.nanmax(late[2, :8]) < 1e-6
    assert np.nanmax(np.nanmax(times.step, axis=0) - np.nanmin(times.step, axis=0)) < 1e-6
    assert worst(times)[0] == 2
    assert times.reached[-1] == 39


def test_only_equals_are_compared() -> None:
    """A pipeline stage that works more than the other makes none of its ranks late."""
    meshes = [Mesh(pp=rank // 2, tp=0, dp=rank % 2) for rank in range(4)]
    history = history_of(4, 20, slow=(2, 3), slow_steps=range(20), meshes=meshes)

    times = lay_out(history)

    assert times is not None
    assert np.nanmax(np.abs(times.lateness)) < 1e-6
    assert equals(history.facts.places, 5) == [[0, 1], [2, 3], [4]]


def test_columns_are_as_wide_as_a_step() -> None:
    """A job with steps of ten seconds is no picture of gaps."""
    times = lay_out(history_of(2, 30, step_s=10.0))

    assert times is not None
    assert times.edges_s[1] - times.edges_s[0] == 16.0
    assert np.isfinite(times.step).all()


def test_a_pause_of_days_makes_columns_wider_and_not_more() -> None:
    """At most as many as a screen has pixels for."""
    early, late = history_of(2, 5), history_of(2, 5)
    moved = tuple(bucket._replace(start_s=bucket.start_s + 5 * 86_400) for bucket in late.buckets)

    times = lay_out(History(early.facts, (*early.buckets, *moved)), most_columns=100)

    assert times is not None
    assert len(times.reached) <= 100
    assert times.steps.sum() == 20


def test_thousands_of_ranks_are_folded_and_the_worst_stay_alone() -> None:
    """2,000 ranks in at most 512 rows: the slow one and the named one by themselves, every rank in one row."""
    history = history_of(2000, 3, slow=(777,), slow_steps=range(3))
    times = lay_out(history)
    assert times is not None

    rows = fold(times, history.facts.places, named=(5,))

    assert len(rows.labels) <= 512
    alone = [row[0] for row in rows.ranks if len(row) == 1]
    assert {5, 777} <= set(alone)
    assert all(len(row) == 1 for row in rows.ranks[:MOST_ALONE])
    assert sorted(rank for row in rows.ranks for rank in row) == list(range(2000))
    assert rows.labels[rows.ranks.index((777,))] == "rank 777 · node-97"
    assert np.nanmax(rows.lateness[rows.ranks.index((777,))]) == pytest.approx(0.22, abs=1e-5)


def test_a_folded_row_shows_the_latest_of_its_ranks() -> None:
    """Folding must not hide a rank that was not named."""
    history = history_of(40, 3, slow=(7, 8, 9), slow_steps=range(3))
    times = lay_out(history)
    assert times is not None

    rows = fold(times, history.facts.places, most_rows=4)

    assert len(rows.labels) == 4
    folded = next(place for place, row in enumerate(rows.ranks) if 9 in row)
    assert np.nanmax(rows.lateness[folded]) == pytest.approx(0.22, abs=1e-5)


def test_the_ledger_gets_what_the_slow_rank_cost() -> None:
    """As much as the others waited for it, as far as its own work explains it; and checkpoints."""
    history = history_of(4, 40, slow=(2,), slow_steps=range(40), checkpoint_every=10)
    times = lay_out(history)
    assert times is not None

    steps = step_times(times, equals(history.facts.places, 4))

    assert sum(step.covered_s for step in steps) == pytest.approx(40 * 1.2 + 4 * 0.5, rel=1e-5)
    assert sum(step.straggle_s for step in steps) == pytest.approx(40 * 0.22, rel=1e-4)
    assert sum(step.checkpoint_s for step in steps) == pytest.approx(4 * 0.5, rel=1e-5)


def test_a_history_without_steps_is_no_picture() -> None:
    """None, and no warning of NumPy's."""
    assert lay_out(History(Facts(job="gpt"))) is None
