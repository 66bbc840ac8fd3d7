# SPDX-License-Identifier: Apache-2.0
"""The ports of this node's adapters over time: what went down, fell, slowed down or is not there any more.

A count of flaps is the sum of what a counter grew by: after a reset (the driver was loaded anew, ``perfquery -R``) what
it has counted since counts, and a look without it changes nothing. A counter that the driver refuses rests for ten
minutes and then twice as long each time, since each try costs a line in the kernel's log; a state for half a minute.
"""

import logging
from collections import deque
from typing import NamedTuple

from megascale_agents.collectors import infiniband
from megascale_agents.collectors.collector import NotHereError, Pace
from megascale_agents.collectors.infiniband import FACTS, Look, Port
from megascale_agents.hardware import findings
from megascale_agents.hardware.findings import PortView
from megascale_ops.schema.health import HardwareFinding

log = logging.getLogger(__name__)

# A day, as the alerts: an older state counts as the node's normal one.
FORGOTTEN_S = 86_400.0
# 10 min: three lines in a day's kernel log for a counter, where every look would be 8,640. 6 h: a driver that is loaded
# anew may report it. All else depends on state and rate: 30 s to 10 min.
FIRST_REST_S, MOST_REST_S = 600.0, 21_600.0
FIRST_FACT_REST_S, MOST_FACT_REST_S = 30.0, 600.0


class _Rest(NamedTuple):
    until_s: float
    length_s: float


class _Past:
    """What is kept of one port."""

    def __init__(self, now_s: float) -> None:
        self.port: Port | None = None
        self.seen_s = now_s
        self.was_up = False
        self.kind = ""  # as last reported with its link layer
        self.uncounted = False  # it was seen to fall, and the counter has not grown since
        self.downed: int | None = None
        self.downs: deque[tuple[float, int]] = deque()  # when, and by how much the counter grew
        self.best: tuple[float, int] = (0.0, 0)
        self.best_s = now_s

    def add(self, port: Port, now_s: float) -> None:
        """Take the port as of this look."""
        grown = self._grown(port)
        # Seen, and no counter shows it: EFA has none, one that is full stays, and a port that falls back to ARMED
        # keeps its link. A counter that grows only at the look after means the same fall.
        if grown and self.uncounted:
            grown, self.uncounted = grown - 1, False
        elif not grown and port.is_up is False and self.port is not None and self.port.is_up:
            grown, self.uncounted = 1, True
        if grown:
            self.downs.append((now_s, grown))
        self._compare_kind(port)
        self.port, self.seen_s = port, now_s
        self.was_up = self.was_up or bool(port.is_up)
        rate_bytes_s = port.rate_bytes_s if port.is_up and port.rate_bytes_s is not None else -1.0
        if rate_bytes_s >= self.best[0] or (rate_bytes_s >= 0 and now_s - self.best_s > FORGOTTEN_S):
            self.best, self.best_s = (rate_bytes_s, port.lanes), now_s

    def _grown(self, port: Port) -> int:
        """Return by how much the counter of falls grew; less than before: it began at 0 again."""
        if port.downed is None:
            return 0
        before, self.downed = self.downed, port.downed
        return 0 if before is None else port.downed - before if port.downed >= before else port.downed

    def _compare_kind(self, port: Port) -> None:
        """Forget its rate where it has become another kind of link (InfiniBand, then Ethernet): nothing got slower."""
        if port.kind.startswith("unknown"):
            return
        if self.kind and port.kind != self.kind:
            self.best = (0.0, 0)
        self.kind = port.kind

    def view(self, now_s: float) -> PortView | None:
        """Return what is to be said of it; None of one that has been gone for a day."""
        while self.downs and now_s - self.downs[0][0] > findings.HELD_S:
            self.downs.popleft()
        if self.port is None or now_s - self.seen_s > FORGOTTEN_S:
            return None
        flaps = sum(grown for _, grown in self.downs)
        return PortView(self.port, self.was_up, now_s > self.seen_s, flaps, *self.best)


class PortWatch:
    """Adapters' ports. Every 10 s: their counters are read by slow firmware; at most 0.1 % of a core.

    Args:
        sys_root: Where /sys is.
        exclude: Patterns of adapters and files that are never read, between commas.
    """

    name = "fabric"
    pace = Pace(10.0, 10.0, 0.001)

    def __init__(self, sys_root: str, exclude: str = "") -> None:
        self.views: tuple[PortView, ...] = ()
        self.refused: dict[tuple[str, str], int] = {}  # how many files of a port are refused now
        self._sys_root = sys_root
        self._excluded = tuple(pattern for one in exclude.split(",") if (pattern := one.strip()))
        self._past: dict[tuple[str, str], _Past] = {}
        self._rests: dict[str, _Rest] = {}
        self._resting: frozenset[str] = frozenset()  # replaced whole: the reading thread uses it

    @property
    def ports(self) -> tuple[Port, ...]:
        """The ports that are there."""
        return tuple(view.port for view in self.views if not view.is_gone)

    def read(self) -> Look:
        """See ``Watch.read``. All adapters gone are no node without adapters."""
        found = infiniband.read(self._sys_root, self._excluded, self._resting)
        if not found.ports and not self._past:
            raise NotHereError("no InfiniBand, RoCE or EFA adapter on this node")
        return found

    def ingest_reading(self, raw: Look, now_s: float) -> list[HardwareFinding]:
        """See ``Watch.ingest_reading``."""
        self._rest(raw, now_s)
        ports = infiniband.parse(raw.ports)
        self._follow_names(ports)
        for port in ports:
            self._past.setdefault((port.device, port.port), _Past(now_s)).add(port, now_s)
        views = {key: past.view(now_s) for key, past in sorted(self._past.items())}
        self._past = {key: past for key, past in self._past.items() if views[key] is not None}
        self.views = tuple(view for view in views.values() if view is not None)
        return findings.of_fabric(self.views)

    def _follow_names(self, ports: tuple[Port, ...]) -> None:
        """Let a port's past go with its adapter to a new name (udev's rules, a reset of bnxt_re), by its node GUID.

        Only where one adapter that is there has that GUID, and one that is not: copies of a GUID identify nothing.
        """
        there = {(port.device, port.port) for port in ports}
        new = [port for port in ports if port.guid and (port.device, port.port) not in self._past]
        for port in new:
            twins = [other for other in ports if other.guid == port.guid and other.port == port.port]
            olds = [
                key
                for key, past in self._past.items()
                if past.port and past.port.guid == port.guid and key[1] == port.port and key not in there
            ]
            if len(twins) == len(olds) == 1:
                self._past[port.device, port.port] = self._past.pop(olds[0])

    def _rest(self, raw: Look, now_s: float) -> None:
        """Pause files that were refused, each time for longer; a file that can be read again is no longer refused."""
        for (device, port), files in raw.ports.items():
            for file in files:
                self._rests.pop(f"{device}/{port}/{file}", None)
        for name, why in raw.refused.items():
            is_fact = name.rpartition("/")[2] in FACTS
            first_s, most_s = (FIRST_FACT_REST_S, MOST_FACT_REST_S) if is_fact else (FIRST_REST_S, MOST_REST_S)
            before = self._rests.get(name)
            if before is None:
                log.info("the driver does not tell %s (%s); --fabric-exclude leaves it alone", name, why)
            length_s = min(most_s, 2 * before.length_s) if before is not None else first_s
            self._rests[name] = _Rest(now_s + length_s, length_s)
        there = {f"{device}/{port}" for device, port in raw.ports}
        self._rests = {name: rest for name, rest in self._rests.items() if "/".join(name.split("/")[:2]) in there}
        self._resting = frozenset(name for name, rest in self._rests.items() if rest.until_s > now_s)
        counts: dict[tuple[str, str], int] = {}
        for name in self._rests:
            device, port, _ = name.split("/", 2)
            counts[device, port] = counts.get((device, port), 0) + 1
        self.refused = counts
