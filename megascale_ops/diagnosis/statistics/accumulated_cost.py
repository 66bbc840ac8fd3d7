# SPDX-License-Identifier: Apache-2.0
"""Cumulative sums of many units at once: which of them has been slower than its equals for too long.

S = max(0, S + x - k), with x the excess in units of the noise, cut at ±CUT, and k the allowance of a test; above the
test's height the unit strikes. ``false_alarms`` derives allowance and height. A sum is capped at twice its
height: that is enough to know, and a higher one would only take longer to come down.

A unit is a rank or a line, known by its place. Shapes: tests, units. The noise changes while sums are kept, so they can
be given in its new unit, and added up again from what is remembered of the excesses. Pure.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_ops.diagnosis.statistics.false_alarms import CUT

Floats = npt.NDArray[np.floating]
Places = npt.NDArray[np.intp]


class Threshold(NamedTuple):
    """One of the tests."""

    allowance: float
    height: float


class AccumulatedCost:
    """The sums of all units that are equals. Owned by its detector.

    Attributes:
        totals: the sums.
        began: the count of looks at which a sum was last zero.
        since: what was added since then, in the caller's own units, without allowances and without a cap.
    """

    def __init__(self, tests: int, units: int = 0) -> None:
        self.totals: npt.NDArray[np.float64] = np.zeros((tests, units))
        self.began: npt.NDArray[np.int64] = np.zeros((tests, units), np.int64)
        self.since: npt.NDArray[np.float64] = np.zeros((tests, units))

    def grow(self, units: int, began: int = 0) -> None:
        """Make room for so many units; those that are there keep their places, new ones begin at look ``began``."""
        tests, there = self.totals.shape
        if units > there:
            fill = np.zeros((tests, units - there))
            self.totals = np.concatenate([self.totals, fill], axis=1)
            self.since = np.concatenate([self.since, fill], axis=1)
            more = np.full((tests, units - there), began, np.int64)
            self.began = np.concatenate([self.began, more], axis=1)

    def clear(self, unit: int, began: int | None = None) -> None:
        """Begin anew with one unit."""
        self.totals[:, unit] = self.since[:, unit] = 0.0
        if began is not None:
            self.began[:, unit] = began

    def add(
        self,
        noises: Floats,
        tests: Sequence[Threshold],
        at: int,
        units: Places | slice = slice(None),
        noise: float = 1.0,
    ) -> npt.NDArray[np.bool_]:
        """Add one look of some units; return which of them strike.

        Args:
            noises: (units) the excess of each in units of the noise; NaN changes nothing.
            tests: allowance and height of each test.
            at: how many looks there were, this one with them.
            units: the place of each, none of them twice; by default all, in order.
            noise: what the excesses were divided by.
        """
        x = np.minimum(np.maximum(noises, -CUT), CUT)  # as clip, in a quarter of the time: three each step and rank
        allowances, heights = np.array(tests).T[:, :, None]
        before = self.totals[:, units]
        total = before + x - allowances
        more = x * noise
        unknown = np.isnan(x)
        if unknown.any():
            total = np.where(unknown, before, total)
            more = np.where(unknown, 0.0, more)
        is_over = total <= 0.0
        self.began[:, units] = np.where(is_over, at, self.began[:, units])
        self.since[:, units] = np.where(is_over, 0.0, self.since[:, units] + more)
        self.totals[:, units] = np.minimum(np.maximum(total, 0.0), 2 * heights)
        strikes: npt.NDArray[np.bool_] = (total > heights).any(axis=0)
        return strikes

    def scale(self, factor: float) -> None:
        """Multiply all sums: their unit has changed."""
        self.totals *= factor

    def shift(self, excess: Floats, noise: float, at: int) -> None:
        """Take so much (units) from each look that is in the sums: it has turned out to be usual."""
        looks = at - self.began
        self.since -= excess * looks
        self.totals = np.maximum(self.totals - excess / noise * looks, 0.0)
        is_over = self.totals <= 0.0
        self.began[is_over] = at
        self.since[is_over] = 0.0

    def above(self, test: int, height: float) -> Places:
        """Return the units whose sum is above a height."""
        return np.flatnonzero(self.totals[test] > height)

    def add_again(
        self, test: int, units: Places, noises: Floats, threshold: Threshold, at: int, noise: float = 1.0
    ) -> None:
        """Add the sums of some units up from what is kept: what was cut before may be within the cut of a larger noise.

        Args:
            test: which of the tests.
            units: whose.
            noises: (units, looks) their excesses in units of the noise now, oldest first, NaN where nothing is known.
            threshold: of the test.
            at: how many looks there were, the newest column with them.
            noise: what the excesses were divided by.
        """
        total, since = np.zeros(len(units)), np.zeros(len(units))
        began = self.began[test, units]
        for look, column in enumerate(np.clip(noises, -CUT, CUT).T, at + 1 - noises.shape[1]):
            is_out = (look <= began) | np.isnan(column)
            total = np.where(is_out, total, total + column - threshold.allowance)
            is_over = (total <= 0.0) & (look > began)
            began = np.where(is_over, look, began)
            since = np.where(is_over, 0.0, since + np.where(is_out, 0.0, column * noise))
            total = np.maximum(total, 0.0)
        self.totals[test, units] = np.minimum(total, 2 * threshold.height)
        self.began[test, units] = began
        self.since[test, units] = since

    def are_calm(self, heights: Sequence[float]) -> npt.NDArray[np.bool_]:
        """Return which of all units are not half as suspicious as one that is named."""
        return np.asarray((2 * self.totals <= np.array(heights)[:, None]).all(axis=0))

    def calm_of(self, units: Places, heights: Sequence[float]) -> Places:
        """Return the units that are not half as suspicious as one that is named, all where those are too few."""
        calm: Places = units[(2 * self.totals[:, units] <= np.array(heights)[:, None]).all(axis=0)]
        return calm if len(calm) >= 2 and 2 * len(calm) >= len(units) else units
