# SPDX-License-Identifier: Apache-2.0
"""What was said, then and now: verdicts compared by class, ranks, nodes and what is done.

Sentences, confidences and times may differ; whom a person would have called, and what the controller would have done,
must not. A warning that comes and goes is one warning.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from megascale_ops.replay.files import Recording
from megascale_ops.schema.events import Incident
from megascale_ops.schema.recording.entries import Said, Start

_WARNINGS = ("watching", "over")


class Judged(NamedTuple):
    """One verdict, as far as it is compared."""

    fault: str
    culprits: tuple[int, ...]
    nodes: tuple[str, ...]
    action: str
    is_warning: bool

    def __str__(self) -> str:
        """Return it as people read it: killed of rank 1 on node-1, restart."""
        ranks = f" of rank {', '.join(map(str, self.culprits))}" if self.culprits else ""
        nodes = f" on {', '.join(self.nodes)}" if self.nodes else ""
        return f"{self.fault or 'no verdict'}{ranks}{nodes}, {'warning' if self.is_warning else self.action}"


class Difference(NamedTuple):
    """What two series of verdicts do not share."""

    missing: tuple[Judged, ...]  # only in the first
    new: tuple[Judged, ...]  # only in the second

    @property
    def is_none(self) -> bool:
        """Return whether they are the same."""
        return not (self.missing or self.new)


def recorded_incidents(recording: Recording) -> tuple[Incident, ...]:
    """Return the incidents as the controller that was recorded last had them, in order."""
    found: dict[str, Incident] = {}
    for entry in recording.entries:
        if isinstance(entry, Said):
            found[entry.m.id] = entry.m
        elif isinstance(entry, Start):
            for incident in entry.incidents:
                found.setdefault(incident.id, incident)
    return tuple(found.values())


def judged(incidents: Iterable[Incident]) -> tuple[Judged, ...]:
    """Return the verdicts, in order; each warning once."""
    found: list[Judged] = []
    for incident in incidents:
        verdict = incident.verdict
        is_warning = incident.state in _WARNINGS
        one = (
            Judged(verdict.fault, verdict.culprits, verdict.nodes, "warn" if is_warning else verdict.action, is_warning)
            if verdict is not None
            else Judged("", (), (), "none", is_warning)
        )
        if not (is_warning and one in found):
            found.append(one)
    return tuple(found)


def compare(before: Iterable[Judged], after: Iterable[Judged]) -> Difference:
    """Return what differs."""
    first, second = Counter(before), Counter(after)
    return Difference(tuple((first - second).elements()), tuple((second - first).elements()))
