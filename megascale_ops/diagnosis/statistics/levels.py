# SPDX-License-Identifier: Apache-2.0
"""How far innocent units stray, over how long: what an excess must be more than, whatever the noise remembers.

The height of a cumulative sum holds for noise without memory. What remembers (a clock that changes with the heat, a
neighbour's job) stays away from its mean for as long as it remembers, and machines that are not alike stay there for
good. So a sum that is high is one half of an alarm. The other half is its mean excess since it began, held against the
means over as many steps that *innocent* units had, before and now.

**Usual level.** Each unit's mean of all that is remembered, as far as the units' levels differ by more than noise would
make them differ: means of even and of odd blocks are two independent looks at a level, so their half sum spreads by
levels and noise, their half difference by noise alone. A level above what is to be expected among so many (Student's t,
one in a hundred jobs) is no unevenness but a slow unit: what is beyond is not usual. Where it is more than machines in
service differ by, nothing is. In a fleet of equals the usual level is 0, and in an uneven one a unit is held against
its own past. It is never below 0: as slow as its equals is well.

**Straying.** Means of blocks of 8, 32, 128, 512 and 2,048 steps about the usual level: their mean square over units and
blocks, and how alike a unit's successive ones are (r). Of n blocks that remember n(1-r²)/(1+r²) count (Bartlett, 1935);
so many degrees of freedom has the mean square, and Student's t of them gives the bar: with unequal machines or with
noise that remembers longer than anything was watched, one for each unit. Of few units t is no bar at all (thirty times
what was seen): who is further out than machines in service differ by is slow, whatever t says. A unit is held against
others: one that strays alone has no excuse. What is under suspicion counts for the others little until it has passed
by itself, named or not.

**Coming and going.** What is rare and large has a small mean square: ``episodes`` holds it against what has passed.

**Now.** Noise that has just changed is in no record: where the other units stray more than the record says by more than
chance, what they do now counts.

A unit is a rank, or a line, known by its place; a look is a step, or a block of time. Pure.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_ops.diagnosis.statistics.episodes import EVERY, Episodes
from megascale_ops.diagnosis.statistics.false_alarms import BLOCK, quantile_of_t
from megascale_ops.diagnosis.statistics.medians import median, median_and_quantile, medians_of_columns
from megascale_ops.diagnosis.statistics.sampling import some_of

Floats = npt.NDArray[np.floating]
Mask = npt.NDArray[np.bool_]

TOGETHER = 4
LENGTHS = tuple(BLOCK * TOGETHER**scale for scale in range(5))
# Blocks: 2,048 looks of the short ones, as many as give r to a sixth of the long ones. Twice as many are halved.
_REMEMBERED = np.array([256, 64, 32, 32, 32], np.float32)
# A quarter of the work: machines in service differ, and stray, by less; what is slower from the first look is slow.
MOST_INNOCENT = 0.25
# 4,096 looks: what has been so for so long is usual.
_LONGEST_SUSPICION = 512
# A suspect's mean square counts for the others at most six times as much as a typical one's.
_MOST_OF_TYPICAL = 6.0
# Of two or three a slow one moves what the others are compared with.
_COMPARABLE = 4
# Of fewer units a median is chance; from six on one or two slow ones must not hide each other.
_ROBUST = 6
# A median's degrees of freedom, as a share of the mean square's.
_MEDIANS_SHARE = 0.4
# Four spreads: the median difference is √2 times 0.6745 of one. Of at most so many units, over so many medians.
_WHITE, _SAMPLED, _MEDIANS_OF_WHITE = 4.2, 64, 16
_MAD_TO_SPREAD, _FIFTH_TO_SPREAD = 1.4826, 1 / 0.8416
# One job in a hundred may have a machine further out than this.
_ODD_LEVEL = 0.01
# One in a hundred, of one side.
_SIGNIFICANT = 2.33
# One in a thousand: asked again with every block.
_UNLIKELY = 3.1
# Below 12 degrees of freedom Student's t at one in ten millions is twice the normal one.
_ENOUGH = 12.0
_MOST_ALIKE = 0.999
_ENOUGH_FOR_SKEW = 100.0
# An alarm has been held against the height of its sum already.
_OF_TWO = 8.0
# Above it, all units' figures stand for those of all but the suspect.
_MANY = 128
# Blocks: 16 looks, in which a unit's level is learnt whatever it is.
_NEW = 2
# Of what chance makes of a level.
_CLEARLY = 4.0
_COUNT, _SQUARE, _UPPER, _CUBE, _PRODUCT = range(5)


class Straying(NamedTuple):
    """How far means over a number of looks stray."""

    variance: float
    freedom: float
    skew: float


class Alarm(NamedTuple):
    """A sum that is high."""

    window: int  # looks since it began
    excess: float  # what was added since


class _Pooled(NamedTuple):
    """What blocks of one length of all units show."""

    variance: float
    alike: float  # successive blocks
    freedom: float
    skew: float  # what is sure of it


class Levels:
    """The levels of all units that are equals. Owned by its detector.

    Attributes:
        own: (units) by how much each is usually slower than its equals, or faster.
        usual: (units) the same, 0 where it is faster.
        most_innocent: Who is slower than its equals by more is slow, however they stray and differ.
    """

    def __init__(self, units: int = 0) -> None:
        scales = len(LENGTHS)
        self.own = np.zeros(units)
        self.usual = np.zeros(units)
        self.most_innocent = math.inf
        self._halves = np.zeros((2, units))  # means of even and of odd blocks
        self._halves_count = np.zeros((2, units), np.float32)
        self._open = np.zeros((scales, units))
        self._newest = np.full((BLOCK, units), np.nan, np.float32)
        self._open_count = np.zeros((scales, units), np.float32)
        self._before = np.full((scales, units), np.nan, np.float32)
        self._known = np.zeros((5, scales, units), np.float32)
        self._pending = np.zeros((5, scales, units), np.float32)
        self._suspected = np.zeros(units, np.int32)  # blocks
        self._held = np.zeros(units, bool)
        self._looks = self._blocks = 0
        self._episodes = Episodes(units)
        self._white = 0.0  # the median difference of two looks, one after the other
        self._pools: dict[tuple[int, int], _Pooled | None] = {}

    def grow(self, units: int) -> None:
        """Make room for so many units; those that are there keep their places."""
        more = units - len(self.own)
        if more <= 0:
            return
        for name in (
            *("own", "usual", "_halves", "_halves_count", "_open", "_open_count"),
            *("_newest", "_before", "_known", "_pending", "_suspected", "_held"),
        ):
            array = getattr(self, name)
            fill = np.full((*array.shape[:-1], more), np.nan if name in {"_before", "_newest"} else 0, array.dtype)
            setattr(self, name, np.concatenate([array, fill], axis=-1))
        self._episodes.grow(units)
        self._pools.clear()

    def add(self, excess: Floats, most: float, worth: float = math.inf) -> bool:
        """Add a look; return whether a block is full, and ``settle`` is due.

        Args:
            excess: (units) the excess of each, NaN where nothing is known.
            most: what is further from the usual level is cut, as it is in the sums.
            worth: the least excess that is worth a name; what is more and passes is noted (``episodes``).
        """
        about = excess - self.own[: len(excess)]
        self._newest[self._looks % BLOCK, : len(about)] = about
        about = np.minimum(np.maximum(about, -most), most)
        missing = np.isnan(about)
        if missing.any():
            self._open[0, : len(about)] += np.where(missing, 0.0, about)
            self._open_count[0, : len(about)] += ~missing
        else:  # nearly always
            self._open[0, : len(about)] += about
            self._open_count[0, : len(about)] += 1
        self._looks += 1
        if self._looks % EVERY == 0:
            self._note_white()
            least = max(worth, min(most / 2, _WHITE * self._white))
            self._episodes.look(_medians(self._newest), least, worth, self._looks)
        return self._looks % BLOCK == 0

    def _note_white(self) -> None:
        """Learn how far a look typically is from the one before: what remembers is hardly in it."""
        some = np.array(some_of(len(self.own), _SAMPLED), np.intp)
        apart = np.abs(np.diff(self._newest[:, some], axis=0))
        apart = apart[~np.isnan(apart)]
        if len(apart):
            self._white += (median(apart) - self._white) / min(self._looks / EVERY, _MEDIANS_OF_WHITE)

    def outlasts(self, unit: int, window: int, excess: float, worth: float) -> bool:
        """Return whether a suspect has been slow for longer than units that are well are (see ``episodes``)."""
        return self._episodes.outlasts(unit, window, excess, worth)

    def settle(self, calm: Mask, held: list[int]) -> Floats:
        """Close a block: note how far units strayed, and what is usual; return (units) by how much that has risen.

        Args:
            calm: (units) those that are not under suspicion.
            held: those that are named: nothing is learnt from them.
        """
        self._blocks += 1
        self._held[:] = False
        self._held[held] = True
        newest = self._note_blocks(calm & ~self._held)
        self._suspected = np.where(calm & ~self._held, 0, self._suspected + 1)
        passed = (calm & ~self._held) | (self._suspected > _LONGEST_SUSPICION)
        self._suspected[passed] = 0
        if held:
            self._pending[:, :, passed & self._held] = 0.0  # that has not passed, it stays
        if passed.all():  # nearly always
            self._known += self._pending
            self._pending[:] = 0.0
        else:
            self._known[:, :, passed] += self._pending[:, :, passed]
            self._pending[:, :, passed] = 0.0
        old = self._known[_COUNT] > 2 * _REMEMBERED[:, None]
        if old.any():
            self._known *= np.where(old, np.float32(0.5), np.float32(1.0))
        self._pools.clear()
        learnt = passed | (self._halves_count.sum(axis=0) < _NEW)
        before = self.usual
        self._note_levels(newest, learnt & ~self._held & ~np.isnan(newest))
        return self.usual - before

    def _note_blocks(self, calm: Mask) -> Floats:
        """Note the blocks that are full, short ones first; return the means of the shortest."""
        newest: Floats = np.zeros(0)
        for scale, length in enumerate(LENGTHS):
            if self._looks % length:
                break
            count = self._open_count[scale]
            # Half of them at least: a mean of a few steps strays further.
            least = BLOCK if scale == 0 else TOGETHER
            mean = np.where(2 * count >= least, self._open[scale] / np.maximum(count, 1), np.nan)
            self._open[scale] = 0.0
            self._open_count[scale] = 0.0
            if scale == 0:
                newest = mean.copy()
                # When some are slow, the others seem fast: that is no straying.
                well = mean[calm & ~np.isnan(mean)]
                if 2 <= len(well) < len(mean):
                    mean -= median(well)
            there = ~np.isnan(mean)
            known = np.where(there, mean, 0.0)
            noted = self._pending[:, scale]
            noted[_COUNT] += there
            noted[_SQUARE] += known**2
            noted[_UPPER] += np.maximum(known, 0.0) ** 2
            noted[_CUBE] += known**3
            noted[_PRODUCT] += np.nan_to_num(known * self._before[scale])
            self._before[scale] = mean
            if scale + 1 < len(LENGTHS):
                self._open[scale + 1] += known
                self._open_count[scale + 1] += there
        return newest

    def _note_levels(self, newest: Floats, counted: Mask) -> None:
        """Learn what is usual for each unit from a block more."""
        half = self._blocks % 2
        count = self._halves_count[half]
        count[counted] = np.minimum(count[counted] + 1, _REMEMBERED[0])
        level = self.own + newest
        mean = self._halves[half]
        mean[counted] += (level[counted] - mean[counted]) / count[counted]
        known = (self._halves_count > 0).all(axis=0)
        if np.count_nonzero(known) < 3:
            return
        places = np.flatnonzero(known & ~self._held)
        if len(places) < 3:
            return
        usual = (self._halves[0] + self._halves[1])[places] / 2
        chance = (self._halves[0] - self._halves[1])[places] / 2
        uneven, noise, freedom = _unevenness(usual, chance)
        limit = np.minimum(quantile_of_t(freedom, _ODD_LEVEL / len(self.own)) * uneven, self.most_innocent)
        share = uneven**2 / np.maximum(uneven**2 + noise**2, 1e-30)
        were_equal = not self.own.any()
        # All of it is news where it is more than machines differ by, not just what is beyond.
        self.own[places] = np.where(usual > self.most_innocent, 0.0, np.clip(share * usual, -limit, limit))
        uneven_ones = np.count_nonzero(np.abs(self.own[places]) > _CLEARLY * noise)
        if were_equal and uneven_ones >= 2:  # what was noted so far was levels
            for noted in (self._known, self._pending, self._open, self._open_count):
                noted[:] = 0.0
            self._before[:] = np.nan
        self.usual = np.maximum(self.own, 0.0)

    def straying(self, unit: int, window: int) -> Straying | None:
        """Return how far means over so many looks stray, of units that are well; None: nothing is known yet."""
        if self._blocks < 2:
            return None  # levels are not known yet
        window = max(window, BLOCK)
        best: tuple[int, _Pooled] | None = None
        for scale, length in enumerate(LENGTHS):
            if length > window:
                break
            pooled = self._pool(scale, unit)
            if pooled is not None and (best is None or pooled.freedom >= min(_ENOUGH, best[1].freedom)):
                best = scale, pooled
        if best is None:
            return None
        scale, pooled = best
        alike = min(max(pooled.alike, 0.0), _MOST_ALIKE)
        shrinks = min(1.0, LENGTHS[scale] / window * (1 + alike) / (1 - alike))
        return Straying(pooled.variance * shrinks, pooled.freedom, pooled.skew * math.sqrt(shrinks))

    def strays(
        self, unit: int, alarms: Iterable[Alarm], between: float, newest: Floats, now: Floats, most: float
    ) -> bool:
        """Return whether a suspect is further out than units that are well stray.

        Args:
            unit: the suspect.
            alarms: its sums that are high.
            between: how many looks of one unit shall lie between two false alarms.
            newest: (looks) by how much it exceeded its usual level in the newest looks, NaN where nothing is known.
            now: (units, looks) the same of others that are not suspected.
            most: where single looks are cut.
        """
        newest = newest[~np.isnan(newest)]
        now = now[~np.isnan(now).any(axis=1)]
        if not len(newest):
            return False
        if len(self.own) < _COMPARABLE and self._freedom(unit) < _ENOUGH:
            return True  # two or three say nothing about each other so soon: the sums alone decide
        means = [(alarm.window, alarm.excess / alarm.window) for alarm in alarms]
        longest = max((window for window, _ in means), default=0)
        # A sum may have begun by chance before the unit became slow.
        cut = np.clip(newest, -most, most)
        windows = (BLOCK * 2**doubled for doubled in range(4))
        means += [(one, float(cut[-one:].mean())) for one in windows if one <= min(longest, len(newest))]
        return any(self._is_out(unit, window, window / between, mean, newest, now) for window, mean in means)

    def _freedom(self, unit: int) -> float:
        pooled = self._pool(0, unit)
        return pooled.freedom if pooled is not None else 0.0

    def _is_out(self, unit: int, window: int, chance: float, excess: float, newest: Floats, now: Floats) -> bool:
        last = newest[-window:]
        middle = median(last)
        # Cut, a unit that is far out is as if it were at the cut: where most of the looks are further, so is the mean.
        excess = max(excess, min(middle, float(last.mean())))
        return excess > self._bar(unit, window, chance, now)

    def _bar(self, unit: int, window: int, chance: float, now: Floats) -> float:
        """Return what the mean excess over its usual level of a unit must be more than.

        Args:
            unit: the suspect.
            window: over how many looks.
            chance: how probable it may be that innocence exceeds it.
            now: (units, looks) what others exceed their usual levels by in the newest of these looks.
        """
        found = self.straying(unit, window)
        if found is None:
            return self.most_innocent
        variance, freedom, skew = found
        if len(now) >= 3:
            means = now[:, -window:].mean(axis=1)
            middle = median(means) if len(means) >= _ROBUST else 0.0
            spread = _MAD_TO_SPREAD * median(np.abs(means - middle))
            before = self.straying(unit, min(window, now.shape[1]))
            few = max(1.0, _MEDIANS_SHARE * len(means))
            ratio = spread**2 / before.variance if before is not None and before.variance > 0 else 0.0
            if ratio > _chance_ratio(few, freedom):
                variance, freedom = variance * ratio, few
        bar = quantile_of_t(freedom, min(_OF_TWO * chance, _ODD_LEVEL))
        # What is skewed goes further up (Cornish and Fisher's first term).
        return min((bar + skew * (bar * bar - 1) / 6) * math.sqrt(variance), self.most_innocent)

    def _pool(self, scale: int, suspect: int) -> _Pooled | None:
        """Return what blocks of one length show of all units, of few without the suspect."""
        units = len(self.own)
        key = scale, suspect if units <= _MANY else -1
        if key not in self._pools:
            there = (self._known[_COUNT, scale] + self._pending[_COUNT, scale] >= 1) & ~self._held
            if units <= _MANY:
                there[suspect] = False
            self._pools[key] = _pooled(self._known[:, scale, there], self._pending[:, scale, there], units)
        return self._pools[key]


def _pooled(known: Floats, pending: Floats, units: int) -> _Pooled | None:
    if not known.shape[1]:
        return None
    count = known[_COUNT] + pending[_COUNT]
    typical = median((known[_SQUARE] + pending[_SQUARE]) / count)
    weights = np.minimum(1.0, _MOST_OF_TYPICAL * typical * count / np.maximum(pending[_SQUARE], 1e-30))
    count, squares, upper, _, products = known + weights * pending
    square, above = float(squares.sum()), float(upper.sum())
    variance, seen = square / float(count.sum()), float(count.mean())
    # Half a standard error more: r of few blocks is chance, and it is the large one that would be missed.
    alike = min(max(float(products.sum()) / square, 0.0), _MOST_ALIKE) if square > 0 else 0.0
    freedom = len(count) * max(1.0, seen * (1 - alike**2) / (1 + alike**2))
    alike = min(alike + 0.5 / math.sqrt(max(float(np.maximum(count - 1, 0).sum()), 1.0)), _MOST_ALIKE)
    above *= 2 / float(count.sum())
    spread = math.sqrt(max(float(known[_SQUARE].sum()), 1e-30) / max(float(known[_COUNT].sum()), 1.0))
    cube = float(known[_CUBE].sum()) / max(float(known[_COUNT].sum()), 1.0)
    # What is sure of it, and not while it is hardly more than chance.
    skew = cube / spread**3 - 2 * math.sqrt(6 / (freedom + 6)) if freedom > _ENOUGH_FOR_SKEW else 0.0
    if units < _COMPARABLE:  # below, not above
        return _Pooled(above, alike, max(1.0, freedom / 2), max(skew, 0.0))
    return _Pooled(variance, alike, freedom, max(skew, 0.0))


def _unevenness(usual: Floats, chance: Floats) -> tuple[Floats, Floats, float]:
    """Return how far the levels of units differ, and by chance, as each one's equals show it; and of what freedom.

    Args:
        usual: (units) half sums of two looks.
        chance: (units) half differences.
    """
    units = len(usual)
    if units < _ROBUST:
        spreads = [
            np.array([np.delete(values, unit).std(ddof=1) for unit in range(units)]) for values in (usual, chance)
        ]
        freedom = units - 2.0
    else:
        spreads = [np.full(units, _spread(values)) for values in (usual, chance)]
        freedom = max(1.0, _MEDIANS_SHARE * (units - 1))
    both, noise = spreads
    is_uneven = both**2 > _chance_ratio(freedom, freedom, _UNLIKELY) * noise**2
    uneven: Floats = np.where(is_uneven, np.sqrt(np.maximum(both**2 - noise**2, 0.0)), 0.0)
    return uneven, noise, freedom


def _spread(values: Floats) -> float:
    """Return a standard deviation of which a fifth of the units is no part, if it lies above the others."""
    middle, upper = median_and_quantile(values, 0.8)
    around = _MAD_TO_SPREAD * median(np.abs(values - middle))
    return max(around, _FIFTH_TO_SPREAD * (upper - middle))


def _chance_ratio(first: float, second: float, normal: float = _SIGNIFICANT) -> float:
    """Return above what the ratio of two equal variances seldom is (about; of the logarithm)."""
    return math.exp(normal * math.sqrt(2 / first + 2 / second) * (1 + 1 / second))


def _medians(looks: Floats) -> Floats:
    """Return the median of each column (looks, units) without NaN."""
    if not np.isnan(looks).any():
        return medians_of_columns(looks)
    ordered = np.sort(looks, axis=0)  # NaN last
    known = np.count_nonzero(~np.isnan(looks), axis=0)
    middle: Floats = ordered[np.maximum(known - 1, 0) // 2, np.arange(looks.shape[1])]
    return middle
