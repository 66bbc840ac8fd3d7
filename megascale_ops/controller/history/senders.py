# SPDX-License-Identifier: Apache-2.0
"""When a heartbeat was sent, by our clock, from its sender's monotonic one.

So heartbeats that waited while the controller was away come out at their own time. The sender's clock is mapped to ours
by the least delay seen of late.

Pure: when a heartbeat came is an argument.
"""

from collections.abc import Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Sender = tuple[str, str]

# 1e-3: clocks drift by up to 1e-4; a node's least delay decays ten times faster than that, and a heartbeat that
# waited for two minutes is misplaced by 0.1 s.
_FORGET = 1e-3
_MOST_SENDERS = 131_072  # as many agents as are known at most
_LEAST = 64


class Senders:
    """The clocks of all agents, by node and what each serves; ours is its own and ``offset_s``, as of ``mono_s``."""

    def __init__(self) -> None:
        self._places: dict[Sender, int] = {}
        self._free = list(range(_LEAST - 1, -1, -1))
        self._agents = np.full(_LEAST, "", object)
        self._offset_s, self._mono_s = np.zeros(_LEAST), np.zeros(_LEAST)

    def sent_wall_s(self, sender: Sender, agent_id: str, mono_s: float, wall_s: float) -> float:
        """Return when a heartbeat was sent, seconds of our wall clock.

        Args:
            sender: its node and what its agent serves.
            agent_id: the agent's; another one has another clock.
            mono_s: when it was sent, by its own clock.
            wall_s: when it came.
        """
        offset_s = wall_s - mono_s
        place = self._places.get(sender)
        if place is None or self._agents[place] != agent_id:
            place = self._add(sender)
            self._agents[place] = agent_id
        else:
            passed_s, known_s = mono_s - self._mono_s.item(place), self._offset_s.item(place)
            if passed_s > 0.0:
                known_s += _FORGET * passed_s
            offset_s = min(known_s, offset_s)
        self._offset_s[place], self._mono_s[place] = offset_s, mono_s
        return mono_s + offset_s

    def sent_wall_s_all(
        self, senders: Sequence[Sender], agent_ids: npt.NDArray[np.object_], mono_s: Numbers, wall_s: float
    ) -> Numbers:
        """Do the same with heartbeats of many agents that came at once, one of each."""
        places = np.array([*map(self._places.get, senders, repeat(-1))], np.intp)
        is_known = (places >= 0) & (self._agents[places] == agent_ids)
        sent_wall_s = np.empty(len(places))
        here, own_s = places[is_known], mono_s[is_known]
        offset_s = self._offset_s[here] + _FORGET * np.maximum(0.0, own_s - self._mono_s[here])
        offset_s = np.minimum(offset_s, wall_s - own_s)
        self._offset_s[here], self._mono_s[here] = offset_s, own_s
        sent_wall_s[is_known] = own_s + offset_s
        for number in np.flatnonzero(~is_known).tolist():
            sent_wall_s[number] = self.sent_wall_s(senders[number], str(agent_ids[number]), mono_s.item(number), wall_s)
        return sent_wall_s

    def _add(self, sender: Sender) -> int:
        """Make room for an agent that is new; of too many the one that has come first is forgotten."""
        before = self._places.pop(sender, None)
        if before is not None:
            self._free.append(before)
        while len(self._places) >= _MOST_SENDERS:
            self._free.append(self._places.pop(next(iter(self._places))))
        if not self._free:
            size = len(self._agents)
            self._agents = np.concatenate([self._agents, np.full(size, "", object)])
            self._offset_s, self._mono_s = (
                np.concatenate([one, np.zeros(size)]) for one in (self._offset_s, self._mono_s)
            )
            self._free = list(range(2 * size - 1, size - 1, -1))
        place = self._places[sender] = self._free.pop()
        return place
