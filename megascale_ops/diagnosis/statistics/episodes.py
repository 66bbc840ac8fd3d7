# SPDX-License-Identifier: Apache-2.0
"""How long units that are well are slow for a while: what a slowness must outlast before it counts for a fault.

A job of cron, a scrub, a neighbour's burst or a second way to run makes a unit slow from one look to the next, as a
fault does, and then it passes. While it lasts nothing tells it from a fault but what the *other* units do. So every
unit's slow times are noted as they come and go, those that no name was given for, too: how long each was and how
large. A suspect has to be slow

- for twice as long as the longest that others had and that passed, of its size (two thirds of it at least). If slow
  times are as long as chance makes them, the next one is twice as long as the longest of n with a probability that
  falls as 1/n²: over a whole job that is about one false name more, and not one each time;
- for ``LONG`` looks, while several others on other machines are slow by as much and became so at other times: the first
  slow times of a job, of which none has passed yet. So, too, where an eighth was slow from the first looks on.

Both ask for several others: the slow times of a unit or two, however often they come, hide no other for longer than
``ALONE`` looks. Those that become slow together have one cause, and count as none. A unit that is slower than all that
has passed is held to nothing, and where no unit is slow for a while, as in white noise, none waits.

A slow time begins where the median of eight looks is worth a name and more than white noise makes of it, and ends where
it is less than half of that. A unit is known by its place; ``at`` counts looks. Pure.
"""

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Mask = npt.NDArray[np.bool_]

# Looks from one median of eight to the next.
EVERY = 4
_HALF = 4
# What is longer ago than two such spans is forgotten: as long as what has been so becomes usual (``levels``).
_SPAN = 4_096
# Sizes by factors of one and a half from the least that is worth a name: the last is 17 times as much, and more.
_SIZES, _FACTOR = 8, 1.5
# 43 minutes of steps of 5 s. Longer slow times are told by those that have passed.
LONG = 512
# A unit that is sick now and then must not hide another one for long.
ALONE = 64
# Of the others; of few two: one may be slow, and another one by chance.
_SHARE, _LEAST = 1 / 32, 2
# In the first looks it is not known which units became slow together; as many as these are no faults then.
_START, _SHARE_AT_START, _LEAST_AT_START = 16, 1 / 8, 3
# Those that became slow within so many looks of each other did so together; ALONE where noise hides when that was.
_TOGETHER = 12


class Episodes:
    """The slow times of all units that are equals. Owned by ``Levels``."""

    def __init__(self, units: int = 0) -> None:
        self._began = np.full(units, -1, np.int64)  # -1: it is not slow
        self._sum = np.zeros(units)
        self._count = np.zeros(units, np.int32)
        # The longest by least size, in this span and in the one before.
        self._ended = np.zeros((2, _SIZES, units), np.int32)
        self._span = 0
        self._at = 0
        self._least = 0.0

    def grow(self, units: int) -> None:
        """Make room for so many units; those that are there keep their places."""
        more = units - len(self._began)
        if more > 0:
            self._began = np.concatenate([self._began, np.full(more, -1)])
            self._sum = np.concatenate([self._sum, np.zeros(more)])
            self._count = np.concatenate([self._count, np.zeros(more, np.int32)])
            self._ended = np.concatenate([self._ended, np.zeros((2, _SIZES, more), np.int32)], axis=2)

    def look(self, typical: Floats, least: float, worth: float, at: int) -> None:
        """Note who is slow now.

        Args:
            typical: (units) the median of each one's newest eight looks; NaN changes nothing.
            least: from what on a unit is slow.
            worth: the least that is worth a name, in the same unit.
            at: how many looks there were; EVERY more than the time before.
        """
        if at // _SPAN > self._span:
            self._span = at // _SPAN
            self._ended = np.stack([np.zeros_like(self._ended[0]), self._ended[0]])
        self._at, self._least = at, least
        was_slow = self._began >= 0
        is_slow = np.where(was_slow, ~(typical < least / 2), typical >= least)
        begins, ends = np.flatnonzero(is_slow & ~was_slow), np.flatnonzero(was_slow & ~is_slow)
        if len(ends):
            sizes = _sizes_of(self._sum[ends] / self._count[ends], worth).tolist()
            lengths = (at - EVERY - self._began[ends]).tolist()
            for unit, size, length in zip(ends.tolist(), sizes, lengths, strict=True):
                known = self._ended[0, : size + 1, unit]
                np.maximum(known, length, out=known)
            self._began[ends] = -1
        if len(begins):
            self._began[begins] = at - EVERY
            self._sum[begins] = self._count[begins] = 0
        counted = is_slow & ~np.isnan(typical)
        self._sum[counted] += typical[counted]
        self._count[counted] += 1

    def outlasts(self, unit: int, window: int, excess: float, worth: float) -> bool:
        """Return whether a suspect has been slow for longer than units that are well are.

        Args:
            unit: the suspect.
            window: for how many looks it has been suspected.
            excess: by how much it is slower in these looks.
            worth: the least that is worth a name.
        """
        if not self._at:
            return False  # of the others nothing is known yet
        began = int(self._began[unit])
        if began >= 0:
            window, excess = self._at - began + _HALF, float(self._sum[unit] / self._count[unit])
        size = max(0, int(_sizes_of(np.array([excess]), worth)[0]) - 1)
        passed = self._ended[:, size].max(axis=0)
        of_any = int(passed.max())
        passed[unit] = 0
        many = max(_LEAST, _SHARE * len(passed))
        slow = (self._began >= 0) & (self._sum * _FACTOR >= excess * self._count)
        slow[unit] = False
        since = began if began >= 0 else self._at - window
        together = _TOGETHER if excess >= 2 * self._least else ALONE
        apart = slow & (np.abs(self._began - since) > together)
        unseen = since <= _START and _machines(slow) >= max(_LEAST_AT_START, _SHARE_AT_START * len(slow))
        if unseen or _machines(apart) >= many:
            return window >= max(2 * int(passed.max()), LONG)
        if np.count_nonzero((passed > 0) | apart) >= many:
            # Not slow now, it comes and goes as they do.
            return window >= max(2 * int(passed.max()), 0 if began >= 0 else LONG)
        return window >= min(2 * of_any, ALONE)


def _machines(slow: Mask) -> int:
    """Return how many there are, neighbours counted once: they may share a machine, and what is wrong with it."""
    return int(np.count_nonzero(np.diff(slow.astype(np.int8), prepend=0) > 0))


def _sizes_of(excess: Floats, worth: float) -> npt.NDArray[np.intp]:
    """Return the number of the largest size that each excess reaches."""
    ratio = np.maximum(excess / max(worth, 1e-12), 1.0)
    found: npt.NDArray[np.intp] = np.minimum(np.log(ratio) / math.log(_FACTOR), _SIZES - 1).astype(np.intp)
    return found
