# SPDX-License-Identifier: Apache-2.0
"""A slowness must outlast those of others that passed; a fault where none have passed waits for nothing."""

import numpy as np
import pytest

from megascale_ops.diagnosis.statistics.episodes import ALONE, EVERY, LONG, Episodes

WORTH = 0.02
UNITS = 16


class Told:
    """Units of which some are slow from one look on until another."""

    def __init__(self, units: int = UNITS) -> None:
        self.episodes = Episodes(units)
        self.units = units
        self.at = 0
        self.slow: dict[int, float] = {}

    def run(self, looks: int, slow: dict[int, float] | None = None) -> None:
        """Let looks pass: who is slow in them, by how much."""
        self.slow = slow or {}
        for _ in range(looks // EVERY):
            self.at += EVERY
            typical = np.zeros(self.units)
            typical[list(self.slow)] = list(self.slow.values())
            self.episodes.look(typical, WORTH, WORTH, self.at)

    def lasts(self, unit: int) -> bool:
        """Return whether what a unit has now has lasted."""
        return self.episodes.outlasts(unit, 8, self.slow.get(unit, 0.1), WORTH)


def test_where_nobody_was_slow_nobody_waits() -> None:
    """Eight looks are enough."""
    told = Told()
    told.run(100)
    told.run(8, {3: 0.1})

    assert told.lasts(3)


def test_three_that_become_slow_together_wait_for_nothing() -> None:
    """They have one cause, which may be a fault."""
    told = Told(64)
    told.run(100)
    told.run(8, {3: 0.1, 20: 0.1, 40: 0.1})

    assert told.lasts(3)
    assert told.lasts(40)


@pytest.mark.parametrize("share", [0.1, 0.07])
def test_what_passed_on_two_others_must_be_outlasted_twice(share: float) -> None:
    """Also by one that is a little less slow or more; after twice as long it is a fault."""
    told = Told()
    for unit in (1, 9):
        told.run(160, {unit: 0.1})
        told.run(40)
    told.run(300, {3: share})
    before = told.lasts(3)
    told.run(40, {3: share})

    assert not before
    assert told.lasts(3)


def test_who_is_slower_than_all_that_passed_waits_for_nothing() -> None:
    """It is held against those of its size."""
    told = Told()
    for unit in (1, 9):
        told.run(160, {unit: 0.05})
        told.run(40)
    told.run(8, {3: 0.3})

    assert told.lasts(3)


def test_one_unit_that_is_slow_now_and_then_hides_another_for_a_while_only() -> None:
    """A sick one is no kind of noise."""
    told = Told()
    for _ in range(5):
        told.run(400, {1: 0.1})
        told.run(40)
    told.run(ALONE - 8, {3: 0.1})
    before = told.lasts(3)
    told.run(8, {3: 0.1})

    assert not before
    assert told.lasts(3)


def test_while_several_are_slow_since_different_times_the_next_one_waits_long() -> None:
    """And not for ever."""
    told = Told()
    slow: dict[int, float] = {}
    for unit in (1, 5, 9):
        slow[unit] = 0.1
        told.run(40, slow)
    slow[13] = 0.1
    told.run(LONG - 8, slow)
    before = told.lasts(13)
    told.run(8, slow)

    assert not before
    assert told.lasts(13)


def test_neighbours_count_once() -> None:
    """Eight ranks of one machine are slow since another time: one cause, and the ninth does not wait for it."""
    told = Told(64)
    told.run(100)
    machine = dict.fromkeys(range(8, 16), 0.1)
    told.run(40, machine)
    told.run(ALONE, machine | {40: 0.1})

    assert told.lasts(40)


def test_what_was_slow_long_ago_is_forgotten() -> None:
    """Two spans later nobody waits any more, and units that come later have room."""
    told = Told()
    for unit in (1, 9):
        told.run(160, {unit: 0.1})
        told.run(40)
    told.episodes.grow(UNITS + 4)
    told.units += 4
    told.run(9_000)
    told.run(8, {17: 0.1})

    assert told.lasts(17)


def test_silence_ends_nothing() -> None:
    """A unit of which nothing is known stays what it was."""
    told = Told()
    told.run(40, {3: 0.1})
    told.episodes.look(np.full(UNITS, np.nan), WORTH, WORTH, told.at + EVERY)
    told.at += EVERY
    told.run(8, {3: 0.1})

    assert told.episodes.outlasts(3, 8, 0.1, WORTH)
    told.run(8)
    told.run(8, {5: 0.1})
    assert not told.lasts(5)  # the one before was longer than the eight looks of this one
