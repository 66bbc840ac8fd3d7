# SPDX-License-Identifier: Apache-2.0
"""What changes with every heartbeat, of all agents, as columns: thousands of heartbeats are taken in as one.

Each agent has a place, which its ``NodeView`` knows. Of a node whose ranks only go on, or stand, what they told is kept
here, too, until it is read (``registry.Share``).

Pure: numbers in, numbers out.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from megascale_ops.controller.cluster.steady import Told

Places = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
NOWHERE = 0  # no agent has it: one that is not known is looked for there
_LEAST = 64
_FLOATS = ("back_s", "floor_mono_s", "fresh_s", "heard_s", "sent_mono_s", "stood_mono_s", "told_mono_s")
_COUNTS = ("awaited", "order", "seq", "size", "stirred")


class Holder:
    """What many nodes told alike: NumPy would take a tuple for a row."""

    __slots__ = ("told",)

    def __init__(self, told: "Told") -> None:
        self.told = told


class Columns:
    """The columns, by place. Owned by the registry.

    ``awaited``: of which round (a number of the registry's) heartbeats can be taken in together, 0: of none; only then
    hold ``agents``, ``size`` (ranks of that round) and ``is_placed``, and only then is something in ``told``.
    ``order``: of the agents that were heard, rises.
    """

    __slots__ = (*_FLOATS, *_COUNTS, "_free", "_heard", "agents", "is_known", "is_placed", "told")

    back_s: Numbers
    floor_mono_s: Numbers
    fresh_s: Numbers
    heard_s: Numbers
    sent_mono_s: Numbers
    stood_mono_s: Numbers
    told_mono_s: Numbers
    awaited: Counts
    order: Counts
    seq: Counts
    size: Counts
    stirred: Counts

    def __init__(self) -> None:
        for name in _FLOATS:
            setattr(self, name, np.zeros(_LEAST))
        for name in _COUNTS:
            setattr(self, name, np.zeros(_LEAST, np.int64))
        self.is_known: Flags = np.zeros(_LEAST, bool)
        self.is_placed: Flags = np.zeros(_LEAST, bool)
        self.agents = np.full(_LEAST, "", object)
        self.told = np.full(_LEAST, None, object)
        self._free = list(range(_LEAST - 1, NOWHERE, -1))
        self._heard = 0

    def add(self) -> int:
        """Return a place that is free, with nothing in it."""
        if not self._free:
            self._grow()
        place = self._free.pop()
        self.is_known[place] = True
        return place

    def drop(self, place: int) -> None:
        """Let go of a place."""
        for name in self.__slots__:
            if not name.startswith("_"):
                column = getattr(self, name)
                column[place] = "" if name == "agents" else None if name == "told" else 0
        self._free.append(place)

    def _grow(self) -> None:
        size = len(self.seq)
        for name in self.__slots__:
            if not name.startswith("_"):
                column = getattr(self, name)
                more = np.full(size, "" if name == "agents" else None if name == "told" else 0, column.dtype)
                setattr(self, name, np.concatenate([column, more]))
        self._free = list(range(2 * size - 1, size - 1, -1))

    def hear(self, place: int) -> None:
        """Put an agent last in the order of those that were heard."""
        self._heard += 1
        self.order[place] = self._heard

    def hear_all(self, places: Places) -> None:
        """Do the same with many, one after the other."""
        self.order[places] = np.arange(self._heard + 1, self._heard + 1 + len(places))
        self._heard += len(places)

    def silent(self, since_s: float) -> list[int]:
        """Return the places that were not heard since then, the longest silent first."""
        found = np.flatnonzero(self.is_known & (self.heard_s <= since_s))
        return self._sorted(found) if len(found) else []

    def in_order(self) -> list[int]:
        """Return all places, the longest silent first."""
        return self._sorted(np.flatnonzero(self.is_known))

    def _sorted(self, places: Places) -> list[int]:
        found: list[int] = places[np.argsort(self.order[places])].tolist()
        return found
