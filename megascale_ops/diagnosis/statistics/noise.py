# SPDX-License-Identifier: Apache-2.0
"""How noisy rows of excesses are: what ``false_alarms`` says of a few ranks, on columns of thousands at once.

Shapes: units (ranks, or lines), blocks of time, the newest last; NaN where nothing is known. Pure.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from megascale_ops.diagnosis.statistics import false_alarms

Real = TypeVar("Real", bound=np.floating)
Floats = npt.NDArray[np.floating]

_MAD_TO_SPREAD = 1.4826
# Fewer differences say more about chance than about noise.
_LEAST_DIFFERENCES = 8


def noise_of(rows: Floats, means: Floats, *, all_of_them: bool = True) -> float:
    """Return the standard deviation of one block's excess, as .

    Args:
        rows: units, blocks: the newest excesses.
        means: units, n: means of ``calibration.BLOCK`` blocks each, further back.
        all_of_them: whether suspects are among them; one that has just become slow is then left out here.
    """
    spread = _spread_of_most if all_of_them else _spread
    noise = spread(np.diff(rows, axis=1))
    for together in (1, 4, 16):
        whole = means.shape[1] // together * together
        if whole:
            grouped = means[:, :whole].reshape(len(means), -1, together).mean(axis=2)
            steps = np.diff(grouped, axis=1)
            if np.count_nonzero(~np.isnan(steps)) >= _LEAST_DIFFERENCES:
                noise = max(noise, spread(steps) * float(np.sqrt(false_alarms.BLOCK * together)))
    return noise


def noise_of_late(rows: Floats, blocks: int) -> float:
    """Return the standard deviation of one block's excess as the newest blocks show it; 0 where too little is known.

    As ``calibration.noise_of_late_s``: a job that has just become uneven is noisier than all that was learnt before.

    Args:
        rows: units that are not suspected, blocks.
        blocks: how many of the newest tell the spread; of five units or more the last ``calibration.BLOCK`` tell it,
            too, and the larger one counts. All of them tell the memory, which one unit alone has not.
    """
    units = len(rows)
    # Against each other, not against zero: the suspect itself shifts the median that they were compared with.
    apart = rows - means_of(rows.T) if units > 1 else rows
    steps = np.diff(apart[:, -blocks:], axis=1)
    if np.count_nonzero(~np.isnan(steps)) < _LEAST_DIFFERENCES:
        return 0.0
    if units == 1:
        return _spread(steps)
    away = apart - means_of(apart)[:, None]
    total = float(np.nansum(away * away, dtype=np.float64))
    remembered = float(np.nansum(away[:, :-1] * away[:, 1:], dtype=np.float64))
    spread = _spread(steps)
    newest = steps[:, -(false_alarms.BLOCK - 1) :]
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
    robust = _MAD_TO_SPREAD * float(np.median(away)) if len(away) else 0.0
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
