# SPDX-License-Identifier: Apache-2.0
"""What steps cost: counted once, by number, bounded however long a job lives."""

import pytest

from megascale_ops.controller.history.step_costs import GRACE_S, StepCosts
from megascale_ops.diagnosis.statistics.cooperative import run_through
from megascale_ops.schema.progress import MOST_WORK, StepWork
from tests.matrix import wide

T0 = 1_790_000_000.0


def told(costs: StepCosts, steps: range, *, ranks: int = 4, step_s: float = 0.5, slow: int = -1) -> None:
    """Tell steps of equal ranks; a slow one works 0.2 s longer while the others wait."""
    for step in steps:
        for rank in range(ranks):
            wall_s = step_s + (0.2 if slow >= 0 else 0.0)
            waited_s = 0.2 if slow >= 0 and rank != slow else 0.0
            work = StepWork(step, wall_s, waiting_s=waited_s)
            costs.ingest_steps(rank, [(work, T0 + (step + 1) * wall_s)], 1.0, ranks)
        run_through(costs.pieces(T0 + (step + 1) * step_s, ()))


def covered_s(costs: StepCosts) -> float:
    """Return how much time all steps cover."""
    return sum(one.covered_s for one in costs.closed)


def test_steps_cover_their_time_once_whoever_tells_them_when() -> None:
    """100 steps of half a second are 50 s: also when ranks tell late, in bursts, or some of them not at all."""
    even, bursts = StepCosts(), StepCosts()
    told(even, range(100))
    even.end_round(())

    for first in range(0, 100, 20):
        for rank in (0, 1, 3):
            works = [(StepWork(step, 0.5), T0 + (step + 1) * 0.5) for step in range(first, first + 20)]
            bursts.ingest_steps(rank, works, 1.0, 4)
        run_through(bursts.pieces(T0 + first * 0.5, ()))
    bursts.end_round(())

    assert covered_s(even) == pytest.approx(50.0)
    assert covered_s(bursts) == pytest.approx(50.0)
    assert sum(even.durations.counts) == sum(bursts.durations.counts) == 100
    assert even.durations.total == pytest.approx(50.0)


def test_who_is_late_after_its_block_was_closed_is_too_late() -> None:
    """A rank that tells ten seconds later changes nothing."""
    costs = StepCosts()
    told(costs, range(10), ranks=3)
    run_through(costs.pieces(T0 + 5 + GRACE_S + 1, ()))
    before = covered_s(costs)

    costs.ingest_steps(3, [(StepWork(2, 0.5), T0 + 1.5)], 1.0, 4)
    costs.end_round(())

    assert before == covered_s(costs) == pytest.approx(5.0)


def test_a_slow_rank_costs_what_a_typical_one_waits_for_it() -> None:
    """0.2 s of every step; of ranks that do different work only equals are compared."""
    costs, stages = StepCosts(), StepCosts()
    told(costs, range(40), slow=2)
    costs.end_round(())

    told(stages, range(40), slow=2)
    stages.end_round(range(4))

    assert sum(one.straggle_s for one in costs.closed) == pytest.approx(40 * 0.2)
    assert sum(one.straggle_s for one in stages.closed) < 40 * 0.2


def test_steps_that_are_counted_anew_in_each_epoch_go_on_counting() -> None:
    """Numbers that go back on one rank after the other are the next lap, not late reports."""
    costs = StepCosts()

    for lap in range(3):
        for rank in range(2):
            works = [(StepWork(step, 0.5), T0 + lap * 5 + (step + 1) * 0.5) for step in range(10)]
            costs.ingest_steps(rank, works, 1.0, 2)
        run_through(costs.pieces(T0 + lap * 5, ()))
    costs.end_round(())

    assert covered_s(costs) == pytest.approx(15.0)


@pytest.mark.parametrize("days", wide([1, 7], keep=[1]))
def test_a_week_stays_small_and_true(days: int) -> None:
    """Blocks are joined as they age: some hundreds, in order, and nothing is lost; the last minutes stay fine."""
    costs = StepCosts()
    for step in range(days * 8_640):
        costs.ingest_steps(0, [(StepWork(step, 10.0), T0 + (step + 1) * 10.0)], 1.0, 1)
        run_through(costs.pieces(T0 + (step + 1) * 10.0 + GRACE_S, ()))

    assert len(costs.closed) < 400
    assert covered_s(costs) == pytest.approx(days * 86_400.0)
    assert costs.closed[-2].until_s - costs.closed[-2].start_s == pytest.approx(10.0)


def test_steps_that_a_report_has_no_room_for_count() -> None:
    """Of a toy's 64 steps a second the newest 32 are told, each for two."""
    costs = StepCosts()

    for second in range(1, 11):
        first = 64 * second - MOST_WORK
        works = [(StepWork(first + k, 1 / 64), T0 + (first + k + 1) / 64) for k in range(MOST_WORK)]
        costs.ingest_steps(0, works, 2.0, 1)
        run_through(costs.pieces(T0 + second, ()))
    costs.end_round(())

    assert covered_s(costs) == pytest.approx(10.0, rel=0.01)
