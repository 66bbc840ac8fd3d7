# SPDX-License-Identifier: Apache-2.0
"""How values spread, counted by upper bounds: what the metrics show as a histogram.

Counting a value takes a search among a dozen bounds and no lock: a distribution has one owner, which is whatever
measures, and others get a copy.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence


class Distribution:
    """Counts of what was measured, by upper bounds; the last is of all above. Owned by whatever measures.

    Args:
        bounds: upper bounds, rising; a value that equals one counts below it, as Prometheus reads ``le``.
        counts: of values between one bound and the next, one more than there are bounds; none: nothing was counted yet.
        total: sum of the values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] = (), total: float = 0.0) -> None:
        self.bounds = tuple(bounds)
        self.counts = list(counts) or [0] * (len(self.bounds) + 1)
        self.total = total

    def copy(self) -> "Distribution":
        """Return what was counted until now, not to change any more."""
        return Distribution(self.bounds, self.counts, self.total)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def below(self) -> list[tuple[float, int]]:
        """Return for each upper bound, and for infinity, how many values are not above it."""
        found, below = [], 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            below += count
            found.append((bound, below))
        return found
