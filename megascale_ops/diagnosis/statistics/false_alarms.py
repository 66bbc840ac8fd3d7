# SPDX-License-Identifier: Apache-2.0
"""How noisy a run is, and which threshold follows from that for a wanted rate of false alarms.

**Noise.** Each rank has a row of excesses: by how much its own work took longer than that of its equals, step by step.
The spread of the *differences* between neighbours tells the noise and is blind to a rank that is slow all the time, to
one that became slow, and to drift. Real noise is not white (a neighbour's process starves a rank for half a second), so
the same is done with means of 8, 32 and 128 steps, which would spread √8, √32 and √128 times less if it were; the
largest answer counts. In the means a step that stands alone is cut, as it is in a sum. Tails count too: the spread is
the root mean square after cutting at four spreads, not the median's alone.

**Noise of late.** A job may become noisy from one step to the next (from now on sequences differ in length), and what
was learnt before says nothing of it. So an alarm is held against what the *other* ranks did in the steps that raised
it: their spread about each other, times what memory adds. Noise that keeps the share m of what it was from step to step
has differences that spread √(1-m) times as much as it does itself, and means that spread √((1+m)/(1-m)) times as much
as those of independent steps. Of two ranks the other one's excess is the suspect's own with the other sign: its
differences tell the spread, and its memory is not asked for.

**Threshold.** A cumulative sum S = max(0, S + x - k) of excesses x in units of the noise, cut at ±4, raises an alarm
above h. Siegmund (Sequential Analysis, 1985) gives the mean number of steps between two false alarms:
(exp(2kb) - 2kb - 1) / (2k²) with b = h + 1.166. It is solved for h. The excesses are not exactly normal, so the rate is
an estimate; that the noise is rather overestimated than under- makes it err to the safe side.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

# 1.4826: a normal distribution's standard deviation in units of its median absolute deviation.
_MAD_TO_SPREAD = 1.4826
BLOCK = 8
# Means of 8, 32 and 128 steps.
_TOGETHER = (1, 4, 16)
_LEAST_DIFFERENCES = 8
# The last eight steps of five ranks tell a spread to an eighth. Those of three would, of four ranks of which one is 5 %
# slower, leave 35 of 100 named within 20 steps instead of 50.
ENOUGH_DIFFERENCES = 35
CUT = 4.0
# A quarter: by less the estimate wavers by itself, and a sum that lost at each rise and never won at a fall would leak.
RISE = 1.25
# Of noise that remembers more than 0.95 a window of 64 steps can't tell how much.
_MOST_MEMORY = 0.95
_DAY_S = 86_400.0


def noise_s(rows: Iterable[Sequence[float]], blocks: Iterable[Sequence[float]] = ()) -> float:
    """Return the standard deviation of one step's excess.

    Args:
        rows: for each rank its last excesses, step by step.
        blocks: for each rank the means of BLOCK steps each (``block_mean``), further back.
    """
    noise_s = _spread([after - before for row in rows for before, after in pairwise(row)])
    blocks = [list(row) for row in blocks]
    for together in _TOGETHER:
        means = [
            [statistics.fmean(row[at : at + together]) for at in range(0, len(row) - together + 1, together)]
            for row in blocks
        ]
        steps = [after - before for row in means for before, after in pairwise(row)]
        # Fewer than eight differences of means say more about chance than about noise.
        if len(steps) >= _LEAST_DIFFERENCES:
            noise_s = max(noise_s, _spread(steps) * math.sqrt(BLOCK * together))
    return noise_s


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


def noise_of_late_s(rows: Sequence[Sequence[float]], steps: int) -> float:
    """Return the standard deviation of one step's excess as the last steps show it; 0 where too little is known.

    Args:
        rows: for each rank that is not suspected its last excesses, step by step.
        steps: how many of the last steps tell the spread; of five ranks or more the last BLOCK of them tell it, too,
            and the larger one counts. All of them tell the memory. One rank alone has none: its excess is the
            suspect's with the other sign, and becoming slow would pass for memory.
    """
    length = min((len(row) for row in rows), default=0)
    if length < 2 or (min(steps, length) - 1) * len(rows) < _LEAST_DIFFERENCES:
        return 0.0
    if len(rows) == 1:
        return _spread([after - before for before, after in pairwise(list(rows[0])[-steps:])])
    columns = list(zip(*(list(row)[-length:] for row in rows), strict=True))
    # Against each other, not against zero: the suspect itself shifts the median that they were compared with.
    middles = [statistics.fmean(column) for column in columns]
    about = [[value - middle for value in column] for column, middle in zip(columns, middles, strict=True)]
    apart = [list(row) for row in zip(*about, strict=True)]
    remembered = total = 0.0
    for row in apart:
        mean = statistics.fmean(row)
        remembered += sum((before - mean) * (after - mean) for before, after in pairwise(row))
        total += sum((value - mean) ** 2 for value in row)
    # An alarm may be eight steps old, and so may the noise: of sixteen steps half would be as quiet as before.
    lasts = {steps, min(steps, BLOCK)} if (BLOCK - 1) * len(rows) >= ENOUGH_DIFFERENCES else {steps}
    spread = max(
        _spread([after - before for row in apart for before, after in pairwise(row[-last:])]) for last in lasts
    )
    return with_memory(spread, remembered / total if total else 0.0, len(rows), length)


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


def _spread(differences: Sequence[float]) -> float:
    """Return the standard deviation of what was subtracted, without far outliers."""
    if not differences:
        return 0.0
    robust = _MAD_TO_SPREAD * statistics.median(abs(one) for one in differences)
    if robust <= 0:
        return 0.0
    cut = CUT * robust
    rms = math.sqrt(statistics.fmean(min(abs(one), cut) ** 2 for one in differences))
    return max(robust, rms) / math.sqrt(2)


def steps_between_alarms(ranks: int, step_s: float, alarms_per_day: float) -> float:
    """Return how rarely one rank's test may be wrong, so that all ranks' together are ``alarms_per_day`` times."""
    return max(1.0, ranks * _DAY_S / (max(step_s, 1e-6) * max(alarms_per_day, 1e-9)))


# Asked twice a step and suspect, answered anew when the noise is: every eighth step.
@lru_cache(maxsize=256)
def threshold(allowance: float, steps_between: float) -> float:
    """Return the height h of a cumulative sum with ``allowance`` k that is wrong once in ``steps_between`` steps."""
    b = 1.0
    for _ in range(20):
        b = math.log(2 * allowance**2 * steps_between + 1 + 2 * allowance * b) / (2 * allowance)
    return max(2 * CUT, b - 1.166)


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
