# SPDX-License-Identifier: Apache-2.0
"""The cumulative sums of all ranks of a group: which rank has worked longer than its equals for too long.

S = max(0, S + x - k) with allowance k and x the excess in units of the noise, cut at ±CUT; above a height it strikes.
``false_alarms`` says where both come from.

A step of 1,024 ranks and more is added up by NumPy where that is installed.
"""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megascale_ops.diagnosis.statistics.arrays import are_fast
from megascale_ops.diagnosis.statistics.false_alarms import CUT
from megascale_ops.diagnosis.stragglers.own_work import MediansOfOthers

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Threshold(NamedTuple):
    """One of the sums."""

    allowance: float
    height: float


class Step(NamedTuple):
    """How the excesses of a step are measured."""

    at: int  # how many steps the group has judged, this one with them
    others_s: MediansOfOthers
    center_s: float
    unit_s: float  # the noise; 0: not known yet, nothing is added up
    jump_s: float  # an excess above it strikes by itself
    tests: Sequence[Threshold]


class Sums:
    """Sums of all ranks of a group, by place. Owned by the group."""

    def __init__(self, tests: int) -> None:
        self.totals = tuple(array("d") for _ in range(tests))
        self.began = tuple(array("q") for _ in range(tests))  # the group's count of steps when it last was zero

    def grow(self, ranks: int) -> None:
        """Make room for so many ranks."""
        more = bytes(8 * (ranks - len(self.totals[0])))
        for totals, began in zip(self.totals, self.began, strict=True):
            totals.frombytes(more)
            began.frombytes(more)

    def of(self, place: int) -> list[float]:
        """Return the sums of one rank."""
        return [totals[place] for totals in self.totals]

    def clear(self, place: int) -> None:
        """Begin anew with one rank."""
        for totals in self.totals:
            totals[place] = 0.0

    def add(self, places: Sequence[int], own_s: Sequence[float], step: Step, excess_s: "array[float]") -> list[int]:
        """Add a step of some ranks.

        Args:
            places: whose it is.
            own_s: how long each of them worked in it.
            step: how it is measured.
            excess_s: is filled at their places.

        Returns:
            The places of those who strike.
        """
        if are_fast(len(places)):
            return self._add_fast(places, own_s, step, excess_s)
        others_s, unit_s, center_s = step.others_s, step.unit_s, step.center_s
        columns = list(zip(step.tests, self.totals, self.began, strict=True)) if unit_s else []
        striking = []
        for place, own in zip(places, own_s, strict=True):
            excess = excess_s[place] = own - others_s(own)
            if not columns:
                continue
            x = min(max((excess - center_s) / unit_s, -CUT), CUT)
            strikes = excess > step.jump_s
            for (allowance, height), totals, began in columns:
                total = totals[place] + x - allowance
                if total <= 0.0:
                    began[place] = step.at
                    total = 0.0
                elif total > height:
                    strikes = True
                    # Twice the threshold is enough to know; a higher sum would only take longer to come down.
                    total = min(total, 2 * height)
                totals[place] = total
            if strikes:
                striking.append(place)
        return striking

    def _add_fast(
        self, places: Sequence[int], own_s: Sequence[float], step: Step, excess_s: "array[float]"
    ) -> list[int]:
        import numpy as np

        where = np.array(places)
        excess = np.array(own_s)
        excess -= _medians_of_others(step.others_s, excess)
        np.frombuffer(excess_s)[where] = excess
        if not step.unit_s:
            return []
        x = np.clip((excess - step.center_s) / step.unit_s, -CUT, CUT)
        strikes = excess > step.jump_s
        for (allowance, height), totals, began in zip(step.tests, self.totals, self.began, strict=True):
            all_totals, all_began = np.frombuffer(totals), np.frombuffer(began, np.int64)
            total = all_totals[where] + x - allowance
            all_began[where[total <= 0.0]] = step.at
            strikes |= total > height
            all_totals[where] = np.clip(total, 0.0, 2 * height)
        found: list[int] = where[strikes].tolist()
        return found

    def scale(self, factor: float) -> None:
        """Multiply all sums: their unit has changed."""
        for totals in self.totals:
            if are_fast(len(totals)):
                import numpy as np

                column = np.frombuffer(totals)
                column *= factor
            else:
                totals[:] = array("d", (factor * total for total in totals))

    def above(self, test: int, height: float) -> list[int]:
        """Return the places whose sum is above a height."""
        totals = self.totals[test]
        if are_fast(len(totals)):
            import numpy as np

            found: list[int] = np.flatnonzero(np.frombuffer(totals) > height).tolist()
            return found
        return [place for place, total in enumerate(totals) if total > height]


def _medians_of_others(others_s: MediansOfOthers, own_s: "npt.NDArray[np.float64]") -> "npt.NDArray[np.float64]":
    import numpy as np

    at_or_below = np.where(own_s > others_s.start, others_s.below, others_s.at)
    return np.where(own_s <= others_s.until, others_s.above, at_or_below)
