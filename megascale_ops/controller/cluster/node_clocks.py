# SPDX-License-Identifier: Apache-2.0
"""How far each node's wall clock is from the controller's, from the clock that its heartbeats carry.

A heartbeat was sent a little before it came, so each shows the node's clock less what it took on its way. The one that
took least is the most exact: the largest difference of this minute and the one before. Pure: the time is an argument.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

MINUTE_S = 60.0
_LEAST = 64


class NodeClocks:
    """The clocks of all nodes; one that is silent for three minutes is forgotten."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Our own clock was stepped: all differences are void."""
        self._places: dict[str, int] = {}
        self._free = list(range(_LEAST - 1, -1, -1))
        self._since_s, self._best_s, self._before_s = (np.zeros(_LEAST) for _ in range(3))

    def note(self, node: str, ahead_s: float, now_s: float) -> None:
        """Note a heartbeat that came now (monotonic seconds) and whose clock stood ``ahead_s`` before ours."""
        place = self._places.get(node)
        if place is None:
            place = self._add(node)
            passed_s = 2 * MINUTE_S
        else:
            passed_s = now_s - self._since_s.item(place)
        if passed_s >= MINUTE_S:
            self._before_s[place] = ahead_s if passed_s >= 2 * MINUTE_S else self._best_s[place]
            self._since_s[place], self._best_s[place] = now_s, ahead_s
        elif ahead_s > self._best_s.item(place):
            self._best_s[place] = ahead_s

    def note_all(self, nodes: Sequence[str], ahead_s: npt.NDArray[np.float64], now_s: float) -> None:
        """Do the same with heartbeats of many nodes, one of each."""
        places = np.array([*map(self._places.get, nodes, repeat(-1))], np.intp)
        for number in np.flatnonzero(places < 0).tolist():
            self.note(nodes[number], ahead_s.item(number), now_s)
        is_known = places >= 0
        if not is_known.all():
            places, ahead_s = places[is_known], ahead_s[is_known]
        passed_s = now_s - self._since_s[places]
        ends = passed_s >= MINUTE_S
        if ends.any():
            over = places[ends]
            is_old = passed_s[ends] >= 2 * MINUTE_S
            self._before_s[over] = np.where(is_old, ahead_s[ends], self._best_s[over])
            self._since_s[over], self._best_s[over] = now_s, ahead_s[ends]
        self._best_s[places] = np.maximum(self._best_s[places], ahead_s)

    def _add(self, node: str) -> int:
        if not self._free:
            size = len(self._since_s)
            self._since_s, self._best_s, self._before_s = (
                np.concatenate([one, np.zeros(size)]) for one in (self._since_s, self._best_s, self._before_s)
            )
            self._free = list(range(2 * size - 1, size - 1, -1))
        place = self._places[node] = self._free.pop()
        return place

    def ahead_s(self, now_s: float) -> Iterator[tuple[str, float]]:
        """Yield each node and how far its clock is ahead of ours; negative: it is behind."""
        is_old = now_s - self._since_s > 3 * MINUTE_S
        for node in [node for node, place in self._places.items() if is_old[place]]:
            self._free.append(self._places.pop(node))
        for node, place in self._places.items():
            yield node, max(self._best_s.item(place), self._before_s.item(place))
