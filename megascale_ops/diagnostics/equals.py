# SPDX-License-Identifier: Apache-2.0
"""Name what is slower than its equals, and nothing in clean noise: the statistics of every comparison.

A thing is compared with the median of the others, not with a number from a data sheet: power, cooling, clocks and
versions move all GPUs of a fleet alike, and an absolute bar low enough for all of them lets a GPU pass that is 20 %
slow. It is named when its shortfall is more than three bars: the kind's own (what is not worth a name), what equals
differ by in health, and what its own repetitions differ by.

How much equals differ is estimated from themselves, by the median absolute deviation, which up to half of them being
slow does not move much. Of few equals that estimate is poor; so it is shrunk towards the kind's usual spread, which
weighs as much as four observations (the deviation of n equals weighs 0.37 n, its efficiency for normal noise), and the
quantile is widened for the degrees of freedom that remain, as Student's is. Below five there is no estimate.
The chance to name any in clean noise is one in a thousand a comparison, whatever their number.

Simulated, normal noise, thousands of draws (``tests/unit/diagnostics/test_equals.py`` holds it): with equals that
differ by 0.3 % one that is 5 % slow is named in 98 % of draws or more, of 2 to 512; by 1 % in half of them, and
a healthy one in none of a hundred. Two that differ by 2 % each without fault can't be told from one that is 5 % slow:
with fewer than five equals the comparison trusts the kind's usual spread.

Pure. Source of the efficiency: Rousseeuw and Croux 1993, Alternatives to the Median Absolute Deviation.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import NormalDist, median
from typing import NamedTuple

from megascale_ops.diagnostics.figures import KINDS, Kind
from megascale_ops.diagnostics.report import Figure

# Chance that a comparison of healthy equals names one of them: a quick check makes about ten comparisons.
FALSE_NAMES = 0.001
# Half the rate, or twice the time: that is named whatever the others differ by. Of five where two are slow and the rest
# noisy the spread is estimated as larger than that.
MOST_BAR, MOST_BAR_OF_TIME = 0.5, 1.0
# 1.4826: the median absolute deviation of normal noise times this is its standard deviation.
_MAD_TO_SIGMA = 1.4826
_MAD_EFFICIENCY = 0.37
_PRIOR_WEIGHT = 4.0
_FEWEST_FOR_SPREAD = 5
# 1.2533: the standard error of a median of normal noise, in units of the mean's.
_MEDIAN_ERROR = 1.2533


class Slow(NamedTuple):
    """One that is slower than its equals.

    Attributes:
        figure: Its own.
        others: The median of the others.
        short: By which share of that it falls short; of a time, by which it is longer.
        bar: From which share on it would have been named.
    """

    figure: Figure
    others: float
    short: float
    bar: float


class Comparison(NamedTuple):
    """One kind of figure over its equals; ``bar`` is the least that could have been told of any of them."""

    kind: Kind
    size: int
    median: float
    bar: float
    slow: tuple[Slow, ...]


def compare(figures: Iterable[Figure]) -> list[Comparison]:
    """Compare each kind of figure among its equals; those without equals, or of a kind without a bar, are left out."""
    groups: defaultdict[tuple[str, str], list[Figure]] = defaultdict(list)
    for one in figures:
        kind = KINDS.get(one.name)
        if kind is not None and kind.bar and one.peers and math.isfinite(one.value) and one.value > 0:
            groups[one.name, one.peers].append(one)
    return [_compared(KINDS[name], group) for (name, _), group in groups.items() if len(group) > 1]


def _compared(kind: Kind, group: Sequence[Figure]) -> Comparison:
    ranked = sorted(one.value for one in group)
    middle = median(ranked)
    spread, weight = _spread(kind, ranked, middle)
    common = _quantile(len(group), weight) * spread
    errors = [_own_error(one, middle) for one in group]
    usual = median(errors)
    slow, least = [], math.inf
    for one, error in zip(group, errors, strict=True):
        others = _median_without(ranked, one.value)
        # Ten repetitions tell their own error poorly: what equals have in the middle is its least.
        bar = max(kind.bar, common, _quantile(len(group), math.inf) * max(error, usual))
        bar = min(bar, max(kind.bar, MOST_BAR_OF_TIME if kind.lower_is_better else MOST_BAR))
        short = (one.value - others) / others if kind.lower_is_better else (others - one.value) / others
        least = min(least, bar)
        if short > bar:
            slow.append(Slow(one, others, short, bar))
    slow.sort(key=lambda found: -found.short)
    return Comparison(kind, len(group), middle, least, tuple(slow))


def _spread(kind: Kind, ranked: Sequence[float], middle: float) -> tuple[float, float]:
    """Return the standard deviation of equals as a share, and the degrees of freedom that it rests on."""
    if len(ranked) < _FEWEST_FOR_SPREAD:
        return kind.spread, math.inf
    seen = _MAD_TO_SIGMA * median(abs(value - middle) for value in ranked) / middle
    weight = _MAD_EFFICIENCY * len(ranked)
    whole = weight + _PRIOR_WEIGHT
    return math.sqrt((_PRIOR_WEIGHT * kind.spread**2 + weight * seen**2) / whole), whole


def _quantile(count: int, freedom: float) -> float:
    """Return how many standard deviations the least of ``count`` may fall short (Student's, to its first order)."""
    z = NormalDist().inv_cdf(1.0 - FALSE_NAMES / count)
    return z + (z**3 + z) / (4.0 * freedom)


def _own_error(figure: Figure, middle: float) -> float:
    """Return the standard error of a figure by its repetitions, as a share of the group's median."""
    samples = figure.samples
    if len(samples) < _FEWEST_FOR_SPREAD:
        return 0.0
    own = median(samples)
    sigma = _MAD_TO_SIGMA * median(abs(value - own) for value in samples)
    return _MEDIAN_ERROR * sigma / math.sqrt(len(samples)) / middle


def _median_without(ranked: Sequence[float], value: float) -> float:
    """Return the median of all but one of these values."""
    rest = len(ranked) - 1
    at = bisect_left(ranked, value)
    low, high = (rest - 1) // 2, rest // 2
    return (ranked[low + (low >= at)] + ranked[high + (high >= at)]) / 2
