# SPDX-License-Identifier: Apache-2.0
"""How far each node's wall clock is from the controller's, from the clock that its heartbeats carry.

A heartbeat was sent a little before it came, so each shows the node's clock less what it took on its way. The one that
took least is the most exact: the largest difference of this minute and the one before. Pure: the time is an argument.
"""

from collections.abc import Iterator
from typing import NamedTuple

MINUTE_S = 60.0


class _Seen(NamedTuple):
    since_s: float
    best_s: float  # of this minute
    before_s: float  # of the one before


class NodeClocks:
    """The clocks of all nodes; one that is silent for three minutes is forgotten."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def note(self, node: str, ahead_s: float, now_s: float) -> None:
        """Note a heartbeat that came now (monotonic seconds) and whose clock stood ``ahead_s`` before ours."""
        seen = self._seen.get(node)
        if seen is None or now_s - seen.since_s >= 2 * MINUTE_S:
            self._seen[node] = _Seen(now_s, ahead_s, ahead_s)
        elif now_s - seen.since_s >= MINUTE_S:
            self._seen[node] = _Seen(now_s, ahead_s, seen.best_s)
        elif ahead_s > seen.best_s:
            self._seen[node] = seen._replace(best_s=ahead_s)

    def ahead_s(self, now_s: float) -> Iterator[tuple[str, float]]:
        """Yield each node and how far its clock is ahead of ours; negative: it is behind."""
        for node in [node for node, seen in self._seen.items() if now_s - seen.since_s > 3 * MINUTE_S]:
            del self._seen[node]
        for node, seen in self._seen.items():
            yield node, max(seen.best_s, seen.before_s)

    def clear(self) -> None:
        """Our own clock was stepped: all differences are void."""
        self._seen.clear()
