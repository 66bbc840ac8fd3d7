# SPDX-License-Identifier: Apache-2.0
"""Whom to tell of what, and when: once of each incident, never more in an hour than a target wants.

An incident is told when its verdict stands: something was decided, or it is over, or it has been open for so long that
a person should look. One that turned out harmless before that is not told at all. A target whose severity it reaches
only later hears of it then. After a controller's restart nothing is told again.

Pure: the time is passed in.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megascale_ops.notify.config import SEVERITIES, Target
from megascale_ops.schema.events import Incident

# 15 s: most transient faults have ended by then. A hang without proof may stay for nine minutes, and a person
# needs the message before.
SETTLE_S = 15.0
HOUR_S = 3600.0
_RANKS = {name: place for place, name in enumerate(SEVERITIES)}
_WARNINGS = ("watching", "over", "harmless")


class Notice(NamedTuple):
    """One thing to tell one target; ``left_out``: how many it was not told since the last one."""

    target: str
    event: str
    severity: str
    incident: Incident
    left_out: int


class _Known:
    """What was told of one incident, and to whom."""

    __slots__ = ("closed", "first_s", "incident", "is_settled", "opened")

    def __init__(self, now_s: float) -> None:
        self.incident: Incident | None = None
        self.first_s = now_s
        self.is_settled = False
        self.opened: set[str] = set()
        self.closed: set[str] = set()


class Choice:
    """What is told to the targets of one controller."""

    def __init__(self, targets: Mapping[str, Target]) -> None:
        self._targets = targets
        self._known: dict[str, _Known] = {}
        self._sent: dict[str, deque[float]] = {name: deque() for name in targets}
        self._left_out = dict.fromkeys(targets, 0)
        self._untold: dict[str, int] = {}  # left out since the last reading

    def know(self, incidents: Iterable[Incident], now_s: float) -> None:
        """Take note of incidents that a controller before has told; their end is still told."""
        for incident in incidents:
            known = self._known[incident.id] = _Known(now_s)
            known.incident, known.is_settled = incident, True
            wanted = [name for name, target in self._targets.items() if wants(target, incident)]
            known.opened.update(wanted)
            if is_over(incident):
                known.closed.update(wanted)

    def poll(self, incidents: Mapping[str, Incident], now_s: float, *, is_last: bool = False) -> list[Notice]:
        """Return what is to be told now.

        Args:
            incidents: the newest of all jobs, by id.
            now_s: monotonic seconds.
            is_last: nothing is asked after this; what has not settled yet is told as it stands.
        """
        notices: list[Notice] = []
        for name in [name for name in self._known if name not in incidents]:
            del self._known[name]
        for name, incident in incidents.items():
            known = self._known.get(name)
            if known is None:
                known = self._known[name] = _Known(now_s)
            if known.incident is incident and known.is_settled:
                continue
            known.incident = incident
            known.is_settled = is_last or _is_settled(incident, now_s - known.first_s)
            if known.is_settled:
                notices.extend(self._tell(incident, known, now_s))
        return notices

    def _tell(self, incident: Incident, known: _Known, now_s: float) -> Iterable[Notice]:
        ended = is_over(incident)
        for name, target in self._targets.items():
            if name not in known.opened:
                if incident.state == "harmless" or not wants(target, incident):
                    continue
                known.opened.add(name)
                event = "opened"
            elif ended and target.solved and name not in known.closed:
                event = "solved"
            else:
                continue
            if ended:
                known.closed.add(name)
            if self._may_send(name, now_s):
                yield Notice(name, event, severity_of(incident), incident, self._left_out[name])
                self._left_out[name] = 0
            else:
                self._leave_out(name, 1)

    def _may_send(self, name: str, now_s: float) -> bool:
        sent = self._sent[name]
        while sent and sent[0] <= now_s - HOUR_S:
            sent.popleft()
        if len(sent) >= self._targets[name].per_hour:
            return False
        sent.append(now_s)
        return True

    def _leave_out(self, name: str, count: int) -> None:
        self._left_out[name] += count
        self._untold[name] = self._untold.get(name, 0) + 1

    def refuse(self, notice: Notice) -> None:
        """Take note that a target's queue was full, so that it was not told after all."""
        self._leave_out(notice.target, notice.left_out + 1)

    def take_left_out(self) -> dict[str, int]:
        """Return how many were left out since the last call, by target."""
        untold, self._untold = self._untold, {}
        return untold


def severity_of(incident: Incident) -> str:
    """Return how bad an incident is: what was done about it tells that."""
    if incident.state in _WARNINGS:
        return "warning"
    return "critical" if incident.verdict is not None and incident.verdict.action == "stop" else "error"


def wants(target: Target, incident: Incident) -> bool:
    """Say whether a target is to be told of such an incident."""
    fault = incident.verdict.fault if incident.verdict else "unknown"
    if target.faults and fault not in target.faults:
        return False
    return _RANKS[severity_of(incident)] >= _RANKS[target.severity]


def is_over(incident: Incident) -> bool:
    """Say whether nothing more comes of it."""
    return incident.state not in ("open", "watching")


def _is_settled(incident: Incident, age_s: float) -> bool:
    """Say whether what is known is worth a person's time."""
    if incident.state != "open":
        return True
    verdict = incident.verdict
    return verdict is not None and (
        verdict.action in ("restart", "evict", "stop") or incident.marks.ordered > 0 or age_s >= SETTLE_S
    )
