# SPDX-License-Identifier: Apache-2.0
"""Steps wait for the next heartbeat unless something about them is new."""

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from megascale_agents.ranks.rounds import Rounds
from megascale_agents.ranks.step_change import LEARNED_STEPS, StepHabit
from megascale_agents.uplink import urgency
from megascale_agents.uplink.heartbeat import Composer

from megascale_ops.blackbox.records import StepRecord
from megascale_ops.schema.progress import StepWork
from tests.fakes.node import FakeNode


def steps(
    count: int, wall_s: float = 0.05, waiting_s: float = 0.01, noise: float = 0.0, seed: int = 1
) -> list[StepWork]:
    """Return steps of about these times."""
    order = random.Random(seed)  # noqa: S311  no secret
    return [
        StepWork(step, wall_s * (1 + order.gauss(0, noise)), waiting_s=waiting_s * (1 + order.gauss(0, noise)))
        for step in range(count)
    ]


def trained(noise: float = 0.0) -> StepHabit:
    """Return the habit of a rank that has made 300 steps, ten at a time."""
    habit = StepHabit()
    for batch in range(30):
        habit.is_news(steps(10, noise=noise, seed=batch))
    return habit


def test_the_first_steps_are_news() -> None:
    """Nothing is known yet of what is usual."""
    habit = StepHabit()

    told = [habit.is_news(steps(10)) for _ in range(5)]

    assert told == [seen < LEARNED_STEPS for seen in (0, 10, 20, 30, 40)]


def test_steps_as_ever_can_wait() -> None:
    """Of a job with 3 % of noise fewer than one batch in ten is taken for news."""
    habit = trained(noise=0.03)

    false = sum(habit.is_news(steps(10, noise=0.03, seed=1000 + batch)) for batch in range(1000))

    assert false < 100


def test_a_slow_start_hides_nothing() -> None:
    """A first step of two seconds, and a rank that becomes slow three seconds later."""
    habit = StepHabit()
    habit.is_news([StepWork(0, 2.0, waiting_s=0.01), *steps(9, noise=0.02)])
    for batch in range(5):
        habit.is_news(steps(10, noise=0.02, seed=batch))

    assert habit.is_news(steps(10, 0.06, noise=0.02))


def test_a_rank_that_is_slow_now_and_then_is_news() -> None:
    """One step of ten is twice as long: the median does not see it."""
    assert trained(noise=0.02).is_news([*steps(9, noise=0.02), StepWork(9, 0.1, waiting_s=0.01)])


@pytest.mark.parametrize(("slower", "noise"), [(0.2, 0.05), (0.05, 0.01), (0.02, 0.0)])
def test_a_rank_that_becomes_slow_is_news_for_twenty_steps(slower: float, noise: float) -> None:
    """All ranks see it in the wall time, whichever it is."""
    habit = trained(noise=noise)

    told = [habit.is_news(steps(10, 0.05 * (1 + slower), noise=noise, seed=5000 + batch)) for batch in range(2)]

    assert told == [True, True]


def test_own_work_that_grows_behind_the_others_is_news() -> None:
    """The step takes as long as ever, since the rank waits less."""
    assert trained().is_news(steps(10, waiting_s=0.005))


def test_a_checkpoint_is_no_news() -> None:
    """It is no part of what is compared."""
    habit = trained()
    saved = [*steps(9), StepWork(9, 5.05, waiting_s=0.01, checkpoint_s=5.0)]

    assert not habit.is_news(saved)


def test_a_loss_that_is_no_number_is_news() -> None:
    """However long the steps take."""
    assert trained().is_news([StepWork(0, 0.05, waiting_s=0.01, loss_is_finite=False)])


def test_what_has_become_usual_is_no_news() -> None:
    """A job that stays slower goes back to a heartbeat a second."""
    habit = trained()
    for batch in range(50):
        habit.is_news(steps(10, 0.06, seed=batch))

    assert not habit.is_news(steps(10, 0.06))


class Stepping:
    """Two ranks that step together."""

    def __init__(self, folder: Path) -> None:
        self.node = FakeNode(folder)
        self.node.start_round(2)
        self.rounds = Rounds(str(self.node.root), self.node.node, lambda _: None)
        self.rounds.refresh(0.0)
        self.composer = Composer(self.node.node, "agent-1")
        self.made = 0

    def step(self, count: int, wall_s: float = 0.05, loss: float | None = None) -> None:
        """Let both make steps."""
        for _ in range(count):
            for rank in (0, 1):
                box = self.node.boxes[rank]
                box.add_step(StepRecord(self.made, 0.0, wall_s, loss=loss))
                box.set_now(self.made, "forward")
            self.made += 1

    def cannot_wait(self) -> bool:
        """Ask."""
        return urgency.cannot_wait([rank for _, rank in self.rounds.ranks()])

    def told(self) -> list[int]:
        """Compose a heartbeat; return the steps that it tells of the first rank."""
        jobs = self.composer.compose(self.rounds.ranks(), None, (float(self.made), 0.0)).jobs
        return [one.step for one in jobs[0].ranks[0].work]


@pytest.fixture
def stepping(tmp_path: Path) -> Iterator[Stepping]:
    """Two ranks with 100 steps behind them."""
    made = Stepping(tmp_path)
    for _ in range(10):
        made.step(10)
        made.cannot_wait()
        made.told()
    yield made
    made.rounds.close()
    made.node.kill_all()


def test_what_was_looked_at_is_told_all_the_same(stepping: Stepping) -> None:
    """Ten steps as ever wait, and go up with the next ten, each once and in order."""
    stepping.step(10)
    assert not stepping.cannot_wait()
    stepping.step(10)

    assert stepping.told() == list(range(100, 120))


def test_nine_steps_are_not_looked_at(stepping: Stepping) -> None:
    """Not even when they are slow: the heartbeat after them is in time."""
    stepping.step(9, wall_s=0.5)

    assert not stepping.cannot_wait()


def test_slow_steps_are_told_at_once(stepping: Stepping) -> None:
    """And so is a loss that is no number."""
    stepping.step(10, wall_s=0.06)
    assert stepping.cannot_wait()
    stepping.told()
    stepping.step(10, wall_s=0.05, loss=math.nan)
    assert stepping.cannot_wait()


def test_after_news_five_steps_are_looked_at(stepping: Stepping) -> None:
    """The first ten may hold too few slow ones to name a rank; steps as ever are looked at by ten again."""
    stepping.step(10, wall_s=0.06)
    assert stepping.cannot_wait()
    stepping.told()

    stepping.step(5, wall_s=0.06)
    assert stepping.cannot_wait()
    stepping.told()
    for _ in range(40):
        stepping.step(5, wall_s=0.06)
        stepping.cannot_wait()
        stepping.told()
    stepping.step(5, wall_s=0.06)

    assert not stepping.cannot_wait()


def test_steps_that_would_not_fit_are_told_before_it_is_too_late(stepping: Stepping) -> None:
    """Of steps of 5 ms none is lost as long as a heartbeat has room for those between two looks."""
    stepping.step(12)
    assert not stepping.cannot_wait()
    stepping.step(12)

    assert stepping.cannot_wait()
    assert stepping.told() == list(range(100, 124))
