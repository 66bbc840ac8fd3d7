# SPDX-License-Identifier: Apache-2.0
"""What the terminal of a run is told of incidents for which nothing is stopped yet.

A job trains or stands, and its user looks at the terminal where it was started: the runner of the first node is told
who is suspected, where, and what will be done when; that a warning holds; and that either has passed by itself. What is
acted upon is told with the next round. Each once: again only where the class or the ranks have changed.
"""

from megascale_ops.schema.events import Incident
from megascale_ops.schema.messages import Notice

# 64: a runner that was away for an hour reads the newest.
_MOST_KEPT = 64
_PASSED = {"harmless": "open", "over": "watching"}  # by the state that it ends in


class Notices:
    """The notices of a job while its controller lives. Owned by the job."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[str, str, tuple[int, ...]]] = {}  # by incident: state, class, ranks
        self._kept: list[Notice] = []
        self.number = 0  # of the newest

    def note(self, incident: Incident) -> bool:
        """Look at an incident that has changed; return whether there is something to tell."""
        verdict, told = incident.verdict, self._told.get(incident.id)
        if verdict is None:
            return False
        if incident.state in _PASSED:
            if told is None or told[0] != _PASSED[incident.state]:
                return False
            del self._told[incident.id]
        elif incident.state == "watching" or _is_waited_for(incident):
            now = (incident.state, verdict.fault, verdict.culprits)
            if told == now:
                return False
            self._told[incident.id] = now
        else:
            self._told.pop(incident.id, None)  # it is acted upon: the next round tells
            return False
        text = Notice(incident.id, incident.state, verdict.fault, verdict.culprits, verdict.reason, incident.done)
        self._kept = [*self._kept[1 - _MOST_KEPT :], text]
        self.number += 1
        return True

    def since(self, number: int) -> tuple[Notice, ...]:
        """Return what came after that number; nothing where another controller has given it."""
        new = self.number - number
        return tuple(self._kept[-new:]) if new > 0 else ()


def _is_waited_for(incident: Incident) -> bool:
    """Return whether the suspects of an incident are waited for, and until when is known."""
    return incident.state == "open" and not incident.marks.ordered and bool(incident.done)
