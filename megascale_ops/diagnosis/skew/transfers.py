# SPDX-License-Identifier: Apache-2.0
"""Which lines move data more slowly than their siblings, by the cumulative sums that also find slow ranks. Pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megascale_ops.diagnosis.skew.cusum import PERSISTENT, Sums
from megascale_ops.diagnosis.skew.measure import Transfers
from megascale_ops.diagnosis.skew.slow_links import SlowLine, SlowLink, locate
from megascale_ops.diagnosis.skew.tables import Line

# A line is slow from a quarter above its siblings on: fabrics differ by a fifth with the distance.
LEAST_RATIO = 1.25


class _Lines(NamedTuple):
    """The transfers of one kind."""

    sums: Sums
    places: dict[int, int]  # line -> unit


class TransferWatch:
    """The transfers of all lines that have siblings."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[object, ...], _Lines] = {}
        self._slow: dict[int, SlowLine] = {}
        self._normal: dict[int, tuple[tuple[object, ...], tuple[int, ...]]] = {}  # by line: its kind and its ranks
        self._ratios: dict[int, float] = {}

    def add(self, found: Transfers, lines: Sequence[Line], block_s: float, worth: float, between: float) -> None:
        """Take the transfers of one kind and pass in, and judge.

        Args:
            found: what was measured.
            lines: all lines.
            block_s: how long a block is.
            worth: the least share of the time that is worth a name.
            between: how many blocks of one line shall lie between two false alarms of one test.
        """
        kind = found.kind
        key = (kind.function, kind.size_bits, kind.ranks.shape[1], (kind.ranks[0] - kind.ranks[0, 0]).tobytes())
        known = self._kinds.setdefault(key, _Lines(Sums(0), {}))
        numbers = kind.lines.tolist()
        for number in numbers:
            known.places.setdefault(number, len(known.places))
        sums = known.sums
        sums.grow(len(known.places))
        units = np.array([known.places[number] for number in numbers])
        excess = np.full((sums.units, found.excess_s.shape[1]), np.nan, np.float32)
        excess[units] = found.excess_s / np.float32(block_s)
        self._ratios.update(zip(numbers, found.ratio.tolist(), strict=True))
        for unit in sums.add(excess, worth, between):
            window = sums.window(unit, worth, between)
            number = next(line for line, place in known.places.items() if place == unit)
            if unit in sums.held or window < PERSISTENT or sums.median(unit, window) < worth:
                continue
            if self._ratios.get(number, 1.0) >= LEAST_RATIO and sums.stands(unit, window, worth, between):
                sums.hold(unit, window, worth)
        sums.release(worth)
        for row, (number, unit) in enumerate(zip(numbers, units.tolist(), strict=True)):
            ranks = tuple(kind.ranks[row].tolist())
            self._slow.pop(number, None)
            self._normal[number] = key, ranks
            if unit in sums.held:
                cost = max(0.0, sums.excess(unit, max(PERSISTENT, sums.held[unit].window)))
                line = lines[number]
                self._slow[number] = SlowLine(line.communicator, line.function, ranks, self._ratios[number], cost)
                del self._normal[number]

    def links(self, nodes: Mapping[int, str]) -> tuple[SlowLink, ...]:
        """Return the links that the slow lines have in common and others of their kinds lack."""
        kinds = {key for key, known in self._kinds.items() if known.sums.held}
        normal = [ranks for key, ranks in self._normal.values() if key in kinds]
        return tuple(locate(list(self._slow.values()), normal, nodes))
