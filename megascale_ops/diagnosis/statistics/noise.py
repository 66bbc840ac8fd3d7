# SPDX-License-Identifier: Apache-2.0
"""How noisy a run is: what differences between steps, and means of many, show of the excesses of its ranks.

**Noise.** Each rank has a row of excesses: by how much its own work took longer than that of its equals, step by step.
The spread of the *differences* between neighbours gives the noise and is blind to a rank that is slow all the time, to
one that became slow, and to drift. Real noise is not white (a neighbour's process starves a rank for half a second), so
the same is done with means of 8, 32 and 128 steps, which would spread √8, √32 and √128 times less if it were; the
largest answer counts. In the means a step that stands alone is cut, as it is in a sum. Tails count too: the spread is
the root mean square after cutting at four spreads, not the median's alone.

**Noise of late.** A job may become noisy from one step to the next (from now on sequences differ in length), and what
was learnt before does not include it. So an alarm is held against what the *other* ranks did in the steps that raised
it: their spread about each other, times what memory adds. Noise that keeps the share m of what it was from step to step
has differences that spread √(1-m) times as much as it does itself, and means that spread √((1+m)/(1-m)) times as much
as those of independent steps. Of two ranks the other one's excess is the suspect's own with the other sign: its
differences give the spread, and its memory is not asked for.

A unit is a rank, or a line; a step may be a block of time. The newest stands last, NaN where nothing is known. Pure.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from megascale_ops.diagnosis.statistics import false_alarms
from megascale_ops.diagnosis.statistics.medians import median

Real = TypeVar("Real", bound=np.floating)
Floats = npt.NDArray[np.floating]

_MAD_TO_SPREAD = 1.4826
# Fewer differences are chance rather than noise.
_LEAST_DIFFERENCES = 8


def noise_of(rows: Floats, means: Floats, *, all_of_them: bool = True) -> float:
    """Return the standard deviation of one excess.

    Args:
        rows: (units, steps) the newest excesses.
        means: (units, n) means of BLOCK steps each, further back.
        all_of_them: whether suspects are among them; one that has just become slow is then left out here.
    """
    spread = _spread_of_most if all_of_them else _spread
    noise = spread(rows[:, 1:] - rows[:, :-1])
    for together in (1, 4, 16):
        whole = means.shape[1] // together * together
        if whole:
            grouped = means if together == 1 else means[:, :whole].reshape(len(means), -1, together).mean(axis=2)
            steps = grouped[:, 1:] - grouped[:, :-1]
            if np.count_nonzero(~np.isnan(steps)) >= _LEAST_DIFFERENCES:
                noise = max(noise, spread(steps) * float(np.sqrt(false_alarms.BLOCK * together)))
    return noise


def noise_of_late(rows: Floats, steps: int) -> float:
    """Return the standard deviation of one excess as the newest steps show it; 0 where too little is known.

    Args:
        rows: (units, steps) of units that are not suspected.
        steps: how many of the newest give the spread; of five units or more the last BLOCK give it, too, and the larger
            one counts. All of them give the memory, which one unit alone has not: its excess is the suspect's with the
            other sign, and becoming slow would pass for memory.
    """
    units = len(rows)
    # Against each other, not against zero: the suspect itself shifts the median that they were compared with.
    apart = rows - means_of(rows.T) if units > 1 else rows
    changes = np.diff(apart[:, -steps:], axis=1)
    if np.count_nonzero(~np.isnan(changes)) < _LEAST_DIFFERENCES:
        return 0.0
    if units == 1:
        return _spread(changes)
    away = apart - means_of(apart)[:, None]
    total = float(np.nansum(away * away, dtype=np.float64))
    remembered = float(np.nansum(away[:, :-1] * away[:, 1:], dtype=np.float64))
    spread = _spread(changes)
    # An alarm may be eight steps old, and so may the noise: of sixteen steps half would be as quiet as before.
    newest = changes[:, -(false_alarms.BLOCK - 1) :]
    if np.count_nonzero(~np.isnan(newest)) >= false_alarms.ENOUGH_DIFFERENCES:
        spread = max(spread, _spread(newest))
    return false_alarms.with_memory(spread, remembered / total if total else 0.0, units, rows.shape[1])


def _spread_of_most(differences: Floats) -> float:
    """Return the standard deviation of what was subtracted, without the unit that has most.

    A unit that has just become slow would make its own change look like noise, and be named much later or not at all.
    """
    units = len(differences)
    if units > 2:
        squares = np.where(np.isnan(differences), np.float32(0), differences**2).sum(axis=1)
        differences = np.delete(differences, int(np.argmax(squares)), axis=0)
    # Of few units, those without the noisiest are quieter than all: by a fifth of three, by nothing of many.
    return _spread(differences) * (1 + (0.6 / units if units > 2 else 0.0))


def _spread(differences: Floats) -> float:
    """Return the standard deviation of what was subtracted, without far outliers."""
    away = np.abs(differences[~np.isnan(differences)])
    robust = _MAD_TO_SPREAD * median(away) if len(away) else 0.0
    if robust <= 0:
        return 0.0
    rms = float(np.sqrt(np.mean(np.minimum(away, false_alarms.CUT * robust) ** 2, dtype=np.float64)))
    return max(robust, rms) / float(np.sqrt(2))


def means_of(rows: "npt.NDArray[Real]") -> "npt.NDArray[Real]":
    """Return the mean of each row without NaN; NaN for a row of nothing else."""
    there = ~np.isnan(rows)
    count = np.count_nonzero(there, axis=1)
    sums = np.where(there, rows, 0).sum(axis=1)
    return np.where(count > 0, sums / np.maximum(count, 1), np.nan).astype(rows.dtype)
