# SPDX-License-Identifier: Apache-2.0
"""Which ranks are slow by more than chance: cumulative sums of many equals, with a stated rate of false alarms.

The tests are those of ``stragglers`` (``false_alarms`` has the theory), on columns instead of one rank after the other:
each unit's excess over its equals, block by block, in units of the run's own noise, is added up above an allowance.
Three allowances: 1 and 0.5 for what is clearly slow, and half of the smallest excess worth naming for what is a little
slow or creeps. Each has a third of the false alarms that are granted. Excesses are shares of the time.

A unit is a rank, or a line whose transfers are compared with its siblings'. Pure.
"""

from typing import NamedTuple

import numpy as np

from megascale_ops.diagnosis.skew.tables import Floats, Longs, some_of
from megascale_ops.diagnosis.statistics import false_alarms
from megascale_ops.diagnosis.statistics.accumulated_cost import AccumulatedCost, Threshold
from megascale_ops.diagnosis.statistics.levels import MOST_INNOCENT, Alarm, Levels
from megascale_ops.diagnosis.statistics.noise import means_of, noise_of, noise_of_late

KEPT = 64
WARM_UP = 3
# As in ``stragglers``: enough for a first idea of the noise; and a name needs so many blocks.
LEAST = PERSISTENT = 8
# As there: 16 blocks show noise that began of late.
LATELY = 16
_ALLOWANCES = (1.0, 0.5)
_LEAST_ALLOWANCE = 0.2
_SAMPLED = 64
_UNSURE = 16
_LEAST_NOISE = 0.002
_MOST_BLOCKS_OF_MEANS = 32
_STRETCHES, _LEAST_STRETCH = 4, 3
# 128 means of 1, 2, 4 ... blocks: all that was ever seen, for drift.
_TREND = 128


class Held(NamedTuple):
    """Since when a unit is named."""

    named_at: int  # blocks seen then
    window: int  # blocks that it took
    worth: float  # what an excess had to be


class Sums:
    """The tests of all units that are equals.

    Args:
        units: how many there are.
    """

    def __init__(self, units: int) -> None:
        self.units = units
        self.count = 0
        self.noise = 0.0
        self.center = 0.0
        self.names = 0
        self.held: dict[int, Held] = {}
        self._kept = np.full((units, KEPT), np.nan, np.float32)
        self._costs = AccumulatedCost(tests=3, units=units)
        self._levels = Levels(units)
        # A unit that is the slowest works all of the time.
        self._levels.most_innocent = MOST_INNOCENT / (1 + MOST_INNOCENT)
        self._means: list[Floats] = []
        self._seen = 0
        self.trend = np.full((units, _TREND), np.nan, np.float32)
        self.trend_blocks = 1  # each value of the trend is the mean of so many blocks
        self.trend_count = 0
        self._trend_open = np.zeros((2, units), np.float32)  # sum and count of what is not in the trend yet
        self._trend_waiting = 0
        self._late: dict[int, tuple[int, float]] = {}  # noise of so many last blocks: as of which count, and how much
        self._tested: tuple[tuple[float, ...], list[Threshold]] = ((), [])

    def grow(self, units: int) -> None:
        """Make room for more units; those that are there keep their places."""
        more = units - self.units
        if more <= 0:
            return
        empty = np.full((more, KEPT), np.nan, np.float32)
        self._kept = np.concatenate([self._kept, empty])
        self._costs.grow(units, began=self.count)
        self._levels.grow(units)
        fill = np.full(more, np.nan, np.float32)
        self._means = [np.concatenate([mean, fill]) for mean in self._means]
        self.trend = np.concatenate([self.trend, np.full((more, _TREND), np.nan, np.float32)])
        self._trend_open = np.concatenate([self._trend_open, np.zeros((2, more), np.float32)], axis=1)
        self.units = units

    def add(self, excess: Floats, worth: float, between: float) -> list[int]:
        """Take blocks in; return the units whose sums are above their thresholds.

        Args:
            excess: units, blocks: shares of the time; NaN where nothing is known.
            worth: the least excess that is worth a name.
            between: how many blocks of one unit shall lie between two false alarms of one test.
        """
        striking: set[int] = set()
        for block in range(excess.shape[1]):
            column = excess[:, block]
            if np.isnan(column).all():
                continue
            self._seen += 1
            if self._seen > WARM_UP:
                striking |= self._take(column, worth, between)
        return sorted(striking)

    def _take(self, column: Floats, worth: float, between: float) -> set[int]:
        ready = self.noise > 0
        self._kept[:, self.count % KEPT] = column
        self.count += 1
        self._note_trend(column)
        striking: set[int] = set()
        if ready:
            tests = self._tests(worth, between)
            noises = (column - self.center - self._levels.usual) / self.noise
            strikes = self._costs.add(noises, tests, self.count, noise=self.noise)
            striking.update(np.flatnonzero(strikes).tolist())
            if self._levels.add(column - self.center, false_alarms.CUT * self.noise, worth):
                calm = self._costs.are_calm([one.height for one in tests])
                self._costs.shift(self._levels.settle(calm, list(self.held)), self.noise, self.count)
        if self.count >= LEAST and (not ready or self.count % false_alarms.BLOCK == 0):
            self._calibrate(worth, between)
        return striking

    def _tests(self, worth: float, between: float) -> list[Threshold]:
        """Return allowance and threshold of each test."""
        small = min(max(worth / 2 / self.noise, _LEAST_ALLOWANCE), _ALLOWANCES[-1])
        if self._tested[0] != (small, between):
            tests = [Threshold(each, false_alarms.threshold(each, between)) for each in (*_ALLOWANCES, small)]
            self._tested = ((small, between), tests)
        return self._tested[1]

    def _calibrate(self, worth: float, between: float) -> None:
        """Learn the noise from what is kept: of at most 64 units."""
        kept = self.last(KEPT)
        self._means.append(means_of(kept[:, -false_alarms.BLOCK :]))
        del self._means[:-_MOST_BLOCKS_OF_MEANS]
        # Not from units that have just become slow: where a third of all have, their change would pass for noise.
        sampled = some_of(self.units, _SAMPLED)
        calm = self._calm_of(sampled)
        noise = noise_of(kept[calm], np.stack(self._means, axis=1)[calm], all_of_them=len(calm) == len(sampled))
        noise = max(noise, _LEAST_NOISE) * (1 + _UNSURE / self.count)
        if noise > false_alarms.RISE * self.noise:
            self._know(noise, worth, between)
        self.noise = noise
        middles = np.sort([false_alarms.trimmed_mean(row) for row in _known(kept[sampled])])
        self.center = max(0.0, float(middles[(len(middles) - 1) // 2])) if len(middles) > 2 else 0.0

    def last(self, blocks: int) -> Floats:
        """Return the newest blocks: units, blocks; oldest first."""
        blocks = min(blocks, self.count, KEPT)
        return self._kept[:, np.arange(self.count - blocks, self.count) % KEPT]

    def window(self, unit: int, worth: float, between: float) -> int:
        """Return for how many blocks a unit has been striking."""
        tests = self._tests(worth, between)
        above = [test for test, (_, height) in enumerate(tests) if self._costs.totals[test, unit] > height]
        return max((self.count - int(self._costs.began[test, unit]) for test in above), default=0)

    def usual(self, unit: int) -> float:
        """Return by how much a unit is usually slower than its equals, where their levels differ."""
        return float(self._levels.usual[unit])

    def over_usual(self, unit: int, blocks: int) -> float:
        """Return by how much a unit's typical excess in the newest blocks is above its usual level."""
        return self.excess(unit, blocks) - self.usual(unit)

    def excess(self, unit: int, blocks: int) -> float:
        """Return a unit's typical excess in the newest blocks, 0 where nothing is known."""
        row = self.last(blocks)[unit]
        return max(false_alarms.trimmed_mean(row[~np.isnan(row)].tolist()), self.recurring(unit, blocks))

    def recurring(self, unit: int, blocks: int) -> float:
        """Return the median of the means of four stretches of the newest blocks; 0 of too few.

        What comes back every few blocks is in most of the stretches, where no median of the blocks sees it; a burst is
        in two of them at most.
        """
        row = self.last(blocks)[unit]
        row = row[~np.isnan(row)]
        if len(row) < _STRETCHES * _LEAST_STRETCH:
            return 0.0
        return float(np.median([stretch.mean() for stretch in np.array_split(row, _STRETCHES)]))

    def median(self, unit: int, blocks: int) -> float:
        """Return the median of a unit's excess in the newest blocks; 0 where nothing is known."""
        row = self.last(blocks)[unit]
        row = row[~np.isnan(row)]
        return float(np.median(row)) if len(row) else 0.0

    def is_steady(self, unit: int) -> bool:
        """Whether a unit that is named exceeds its equals in most blocks, and not now and then."""
        held = self.held[unit]
        blocks = max(PERSISTENT, min(KEPT, self.count - held.named_at + held.window))
        return 2 * self.median(unit, blocks) >= self.excess(unit, blocks)

    def next_highest(self, blocks: int) -> float:
        """Return the excess of the slowest unit that is not named."""
        rows = np.delete(self.last(blocks), list(self.held), axis=0)
        return float(np.nanmax(means_of(rows), initial=0.0)) if rows.size else 0.0

    def stands(self, unit: int, window: int, worth: float, between: float) -> bool:
        """Hold an alarm against the noise of late, and against how far innocent units stray; it may be none."""
        if not self._levels.outlasts(unit, window, self.over_usual(unit, min(window, KEPT)), worth):
            return False
        noise = self._noise_of_late(unit, max(LATELY, -(-window // LATELY) * LATELY) if self.units > 2 else window + 1)
        if noise > self.noise:
            self._know(noise, worth, between)
            if self.window(unit, worth, between) < PERSISTENT:
                return False
        tests = self._tests(worth, between)
        others = self._calm_of(np.delete(np.arange(self.units), [unit, *self.held]))
        others = others[some_of(len(others), _SAMPLED)]
        now = self.last(KEPT)[others] - self._levels.own[others][:, None] - self.center
        own = self.last(KEPT)[unit] - self._levels.usual[unit] - self.center
        alarms = [
            Alarm(self.count - int(self._costs.began[test, unit]), float(self._costs.since[test, unit]))
            for test, one in enumerate(tests)
            if self._costs.totals[test, unit] > one.height
        ]
        return self._levels.strays(unit, alarms, between, own, now, false_alarms.CUT * self.noise)

    def _know(self, noise: float, worth: float, between: float) -> None:
        """Take over a new noise; the sums are in its units, so a larger one makes them less."""
        before, self.noise = self.noise, noise
        kept = min(self.count, KEPT)
        tests = self._tests(worth, between)
        high = [self._costs.above(test, one.height / 2) for test, one in enumerate(tests)]
        self._costs.scale(before / noise)
        for test, (units, one) in enumerate(zip(high, tests, strict=True)):
            remembered = units[self.count - self._costs.began[test, units] <= kept]
            noises = self.last(kept)[remembered] - self._levels.usual[remembered][:, None] - self.center
            self._costs.add_again(test, remembered, noises / self.noise, one, self.count, self.noise)

    def _noise_of_late(self, suspect: int, blocks: int) -> float:
        """Return how noisy the others were in the newest blocks: of few all but the suspect, of many the calm ones."""
        free = np.ones(self.units, bool)
        free[list(self.held)] = False
        if self.units <= 2 * _SAMPLED:
            free[suspect] = False
            return noise_of_late(self.last(KEPT)[self._calm_of(np.flatnonzero(free))], blocks)
        known = self._late.get(blocks)
        if known is None or known[0] != self.count:
            calm = self._calm_of(np.flatnonzero(free))
            calm = calm[some_of(len(calm), _SAMPLED)]
            known = self._late[blocks] = self.count, noise_of_late(self.last(KEPT)[calm], blocks)
        return known[1]

    def _calm_of(self, units: Longs) -> Longs:
        """Return the units that are not half as suspicious as one that is named, all where those are too few."""
        heights = [one.height for one in self._tested[1]]
        return self._costs.calm_of(units, heights) if heights else units

    def hold(self, unit: int, window: int, worth: float) -> None:
        """Name a unit."""
        self.held[unit] = Held(self.count, min(window, KEPT), worth)
        self.names += 1

    def release(self, worth: float) -> list[int]:
        """Take back the names of those that have been well for as long as it took to name them; return them.

        A unit without rows keeps its name. What is not worth it since ``worth`` was raised is not named any more,
        either, and at once.
        """
        well = []
        for unit, held in list(self.held.items()):
            window = max(20, held.window)
            is_well = self.count - held.named_at >= window and self.over_usual(unit, window) < worth / 2
            is_well = is_well and self._is_known(unit, window)
            if is_well or (worth > held.worth and self.over_usual(unit, held.window) < worth):
                del self.held[unit]
                self._costs.clear(unit, began=self.count)
                well.append(unit)
        return well

    def _is_known(self, unit: int, blocks: int) -> bool:
        """Whether a unit has reported at least half of the newest blocks: silence is no proof of health."""
        row = self.last(blocks)[unit]
        return 2 * int(np.isnan(row).sum()) <= len(row)

    def _note_trend(self, column: Floats) -> None:
        there = ~np.isnan(column)
        self._trend_open[0, there] += column[there]
        self._trend_open[1] += there
        self._trend_waiting += 1
        if self._trend_waiting < self.trend_blocks:
            return
        if self.trend_count == _TREND:
            self.trend[:, : _TREND // 2] = means_of(self.trend.reshape(-1, 2)).reshape(self.units, -1)
            self.trend_count //= 2
            self.trend_blocks *= 2
            return
        total, count = self._trend_open
        self.trend[:, self.trend_count] = np.where(count > 0, total / np.maximum(count, 1), np.float32(np.nan))
        self.trend_count += 1
        self._trend_open[:] = 0
        self._trend_waiting = 0

    def slope(self, unit: int, blocks: int) -> float:
        """Return by how much a unit's excess grows with each block: the median of all pairs' slopes (Theil, Sen)."""
        values = min(self.trend_count, max(8, blocks // self.trend_blocks))
        row = self.trend[unit, self.trend_count - values : self.trend_count].astype(np.float64)
        known = np.flatnonzero(~np.isnan(row))
        if len(known) < 8:
            return 0.0
        first, second = np.triu_indices(len(known), 1)
        slopes = (row[known[second]] - row[known[first]]) / (known[second] - known[first])
        return float(np.median(slopes)) / self.trend_blocks


def _known(rows: Floats) -> list[list[float]]:
    """Return rows without NaN, and without those that are empty then."""
    known = [row[~np.isnan(row)].tolist() for row in rows]
    return [row for row in known if row]
