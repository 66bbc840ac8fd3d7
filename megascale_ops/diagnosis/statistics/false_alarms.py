# SPDX-License-Identifier: Apache-2.0
"""Which threshold of a cumulative sum follows from a wanted rate of false alarms, and means that few steps can't move.

``noise`` measures how noisy a run is.

**Threshold.** A cumulative sum S = max(0, S + x - k) of excesses x in units of the noise, cut at ±4, raises an alarm
above h. Siegmund (Sequential Analysis, 1985) gives the mean number of steps between two false alarms:
(exp(2kb) - 2kb - 1) / (2k²) with b = h + 1.166. It is solved for h. The excesses are not exactly normal, so the rate is
an estimate; that the noise is rather overestimated than under- makes it err to the safe side.
"""

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from megascale_ops.diagnosis.statistics.medians import medians_of_sorted

Floats = npt.NDArray[np.floating]

# 1.4826: a normal distribution's standard deviation in units of its median absolute deviation.
_MAD_TO_SPREAD = 1.4826
BLOCK = 8
# The last eight steps of five ranks give a spread to an eighth. Those of three would, of four ranks of which one is 5 %
# slower, leave 35 of 100 named within 20 steps instead of 50.
ENOUGH_DIFFERENCES = 35
CUT = 4.0
# A quarter: by less the estimate wavers by itself, and a sum that lost at each rise and never won at a fall would leak.
RISE = 1.25
# A window of 64 steps can't measure an autocorrelation above 0.95.
_MOST_MEMORY = 0.95
_DAY_S = 86_400.0
# Student's t of so many degrees of freedom is the normal one.
_NORMAL = 1e4
_NORMAL_DISTRIBUTION = statistics.NormalDist()


def block_mean(row: Sequence[float]) -> float:
    """Return the mean of a row's last BLOCK steps, such as stand alone cut at CUT spreads about the row's middle.

    A sum cuts them, too: uncut, one garbage collection of 100 ms would pass for 35 ms of noise in each of 512 steps.
    Two in a row on the same side are kept as they are: what starves a rank for a while is the noise that is meant here.
    """
    middle = statistics.median(row)
    spread = _MAD_TO_SPREAD * statistics.median(abs(one - middle) for one in row)
    last = row[-BLOCK:]
    if spread <= 0:
        return statistics.fmean(last)
    low, high = middle - CUT * spread, middle + CUT * spread
    sides = [(one > high) - (one < low) for one in row[-BLOCK - 1 :]]
    if len(sides) == len(last):
        sides = [0, *sides]  # nothing is known of what came before
    sides.append(0)
    total = 0.0
    for one, before, side, after in zip(last, sides, sides[1:], sides[2:], strict=False):
        total += one if side in {before, after} else min(max(one, low), high)
    return total / len(last)


def block_means(rows: Floats, ordered: Floats | None = None) -> Floats:
    """Return :func:`block_mean` of each of many rows (units, steps), none of them with NaN.

    ``ordered``: the same rows with their values in order, where they are known.
    """
    middle = medians_of_sorted(np.sort(rows, axis=1) if ordered is None else ordered)[:, None]
    spread = _MAD_TO_SPREAD * medians_of_sorted(np.sort(np.abs(rows - middle), axis=1))[:, None]
    last = rows[:, -BLOCK:]
    low, high = middle - CUT * spread, middle + CUT * spread
    some = rows[:, -BLOCK - 1 :]
    # 0 of what comes after, and of what came before where nothing is known of it.
    sides = np.zeros((len(rows), last.shape[1] + 2), np.int8)
    sides[:, -1 - some.shape[1] : -1] = (some > high).astype(np.int8) - (some < low)
    side = sides[:, 1:-1]
    are_kept = (side == sides[:, :-2]) | (side == sides[:, 2:]) | (spread <= 0)
    found: Floats = np.where(are_kept, last, np.minimum(np.maximum(last, low), high)).mean(axis=1)
    return found


def trimmed_means(ordered: Floats) -> Floats:
    """Return :func:`trimmed_mean` of each of many rows (units, steps) with their values in order, none of them NaN."""
    steps = ordered.shape[1]
    drop = steps // 5
    found: Floats = ordered[:, drop : steps - drop].mean(axis=1)
    return found


def with_memory(spread: float, memory: float, rows: int, length: int) -> float:
    """Return how noisy sums of steps are, in terms of one step, from what differences of steps show.

    Args:
        spread: of the differences, over √2.
        memory: which share of what it was the noise keeps from step to step, as a row of steps about its mean shows it.
        rows: the values were taken about the mean of so many ranks.
        length: of a row.
    """
    # About its own mean a row of n shows (1 + 3m)/n less memory than there is (Kendall, Biometrika, 1954): of 0.9 and
    # 64 steps a sum would seem to spread two thirds of what it does.
    memory = min(max(memory + (1 + 3 * memory) / length, 0.0), _MOST_MEMORY)
    # Values about the mean of n spread √((n-1)/n) times as much as the values themselves.
    return spread * math.sqrt((1 + memory) * rows / (rows - 1)) / (1 - memory)


def steps_between_alarms(ranks: int, step_s: float, alarms_per_day: float) -> float:
    """Return how rarely one rank's test may be wrong, so that all ranks' together are ``alarms_per_day`` times."""
    return max(1.0, ranks * _DAY_S / (max(step_s, 1e-6) * max(alarms_per_day, 1e-9)))


# Called twice a step and suspect, recomputed with the noise: every eighth step.
@lru_cache(maxsize=256)
def threshold(allowance: float, steps_between: float) -> float:
    """Return the height h of a cumulative sum with ``allowance`` k that is wrong once in ``steps_between`` steps."""
    b = 1.0
    for _ in range(20):
        b = math.log(2 * allowance**2 * steps_between + 1 + 2 * allowance * b) / (2 * allowance)
    return max(2 * CUT, b - 1.166)


@lru_cache(maxsize=1024)
def quantile_of_t(freedom: float, chance: float) -> float:
    """Return what Student's t of so many degrees of freedom exceeds with a small chance (Hill, CACM 13, 1970)."""
    n, p = max(freedom, 1.0), min(2 * max(chance, 1e-15), 1.0)
    if n > _NORMAL:
        return -_NORMAL_DISTRIBUTION.inv_cdf(p / 2)
    if n < 2:  # between the two that have a closed form
        one, two = math.cos(p * math.pi / 2) / math.sin(p * math.pi / 2), math.sqrt(2 / (p * (2 - p)) - 2)
        return math.exp((2 - n) * math.log(max(one, 1e-9)) + (n - 1) * math.log(max(two, 1e-9)))
    a = 1 / (n - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * n
    y = (d * p) ** (2 / n)
    if y > 0.05 + a:
        x = _NORMAL_DISTRIBUTION.inv_cdf(p / 2)
        y = x * x
        c += 0.3 * (n - 4.5) * (x + 0.6) if n < 5 else 0.0
        c += (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = math.expm1(a * y * y)
    else:
        small = 1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)
        y = (small * y - 1) * (n + 1) / (n + 2) + 1 / y
    return math.sqrt(n * y)


def chance_of_at_least(count: int, expected: float) -> float:
    """Return the probability of ``count`` or more rare events where ``expected`` are (Poisson)."""
    term = total = math.exp(-expected)
    for number in range(1, count):
        term *= expected / number
        total += term
    return max(0.0, 1.0 - total)


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean of the middle three fifths; 0 of nothing."""
    ordered = sorted(values)
    drop = len(ordered) // 5
    return statistics.fmean(ordered[drop : len(ordered) - drop]) if ordered else 0.0
