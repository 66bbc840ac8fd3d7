# SPDX-License-Identifier: Apache-2.0
"""The means of whole blocks of some units, the newest of each: what shows noise that lasts longer than a block.

Kept as rows, not as a queue of each: they are written and read all at once. Pure.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Places = npt.NDArray[np.intp]


class BlockMeans:
    """Means by place. Owned by its detector.

    Args:
        kept: how many of each.
    """

    def __init__(self, kept: int) -> None:
        self._rows: dict[int, int] = {}  # by place
        # (units, blocks), the newest last, NaN before the first.
        self._cells: npt.NDArray[np.float64] = np.full((0, kept), np.nan)
        self._counts = np.zeros(0, np.intp)

    def add(self, places: Places, means: Floats) -> None:
        """Note the newest block of some units, none of them twice."""
        rows = self._rows_of(places)
        self._cells[rows, :-1] = self._cells[rows, 1:]
        self._cells[rows, -1] = means
        self._counts[rows] += 1

    def of(self, places: Places) -> Floats:
        """Return the means of some units (units, blocks), the newest last, NaN before a unit's first."""
        rows = self._rows_of(places)
        longest = min(int(self._counts[rows].max(initial=0)), self._cells.shape[1])
        found: Floats = self._cells[rows, self._cells.shape[1] - longest :]
        return found

    def _rows_of(self, places: Places) -> Places:
        """Return where the means of these are, making room for those of which none is known."""
        known = self._rows
        rows = [known.setdefault(place, len(known)) for place in places.tolist()]
        missing = len(known) - len(self._counts)
        if missing:
            self._cells = np.concatenate([self._cells, np.full((missing, self._cells.shape[1]), np.nan)])
            self._counts = np.concatenate([self._counts, np.zeros(missing, np.intp)])
        return np.array(rows, np.intp)
