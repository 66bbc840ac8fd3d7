# SPDX-License-Identifier: Apache-2.0
"""A job for Prometheus: plain functions from what the controller knows to labels and numbers. Pure."""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megascale_ops.controller.cluster.node_view import NodeView, Share
from megascale_ops.controller.detectors.skew import STRAGGLER
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.record.state_machine import ACTIVE, State
from megascale_ops.exposition import Sample
from megascale_ops.schema.events import Incident
from megascale_ops.schema.fault_classes import Hang, class_of
from megascale_ops.schema.health import STATUSES, SelfCheckView

CAUSES = ("compute", "input", "host", "starved", "gc", "launch", "gpu", "throttled")
# Of stragglers, and of ranks that a verdict names: a broken switch may name hundreds.
MOST_STRAGGLERS = 20
# A warning holds or no longer does; whatever stopped the job has its state for a name.
_OUTCOMES = {"watching": "warned", "over": "warned"}
# An hour: long enough to be scraped and viewed; a controller after thousands of jobs exports few.
SHOWN_AFTER_S = 3600.0


class Ranks(NamedTuple):
    """What the ranks of a round have in common."""

    step: int  # that every rank has finished, -1 before
    step_s: float  # median of their medians, 0 where not known
    moved_age_s: float  # since the last of them moved; -1: none is known to


class RanksSoFar:
    """Ranks that were looked at, node by node; 12,288 of them take 5 ms."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._typical_s: list[float] = []
        self._moved_age_s = -1.0

    def add(self, view: NodeView, share: Share, now_s: float) -> None:
        """Look at the ranks of one node."""
        moved_mono_s = 0.0
        for report in share.ranks.values():
            progress = report.progress
            if progress is not None:
                self._steps.append(progress.step)
                moved_mono_s = max(moved_mono_s, progress.moved_mono_s)
                if progress.step_p50_s > 0:
                    self._typical_s.append(progress.step_p50_s)
        if moved_mono_s:
            age_s = max(0.0, view.sent_mono_s - moved_mono_s) + max(0.0, now_s - view.heard_s)
            self._moved_age_s = age_s if self._moved_age_s < 0 else min(self._moved_age_s, age_s)

    def result(self) -> Ranks:
        """Return what all of them have in common."""
        typical_s = statistics.median(self._typical_s) if self._typical_s else 0.0
        return Ranks(min(self._steps, default=-1), typical_s, self._moved_age_s)


def stuck_s(job: Job, ranks: Ranks) -> float:
    """Return for how long nothing has moved; a heartbeat's second is no standstill."""
    if job.state not in ACTIVE or job.state in (State.RESTARTING, State.STOPPING) or ranks.moved_age_s < 0:
        return 0.0
    return ranks.moved_age_s


def judged(job: Job) -> dict[str, int]:
    """Return how many ranks are ok, slow, suspect, lost."""
    slow = {rank for incident in _slow(job) for rank in (incident.verdict.culprits if incident.verdict else ())}
    suspects = set(job.suspicion.verdict.culprits) if job.suspicion is not None else set()
    is_lost = job.suspicion is not None and bool(job.suspicion.lost)
    return {
        "ok": max(0, job.record.world_size - len(slow | suspects)),
        "slow": len(slow - suspects),
        "suspect": 0 if is_lost else len(suspects),
        "lost": len(suspects) if is_lost else 0,
    }


def stragglers(job: Job) -> list[tuple[tuple[str, str], float]]:
    """Return rank and cause of the worst stragglers, with what each costs."""
    found = [
        ((str(incident.verdict.culprits[0]), incident.verdict.cause or "unknown"), incident.verdict.cost)
        for incident in _slow(job)
        if incident.verdict is not None and incident.verdict.culprits
    ]
    return sorted(found, key=lambda one: -one[1])[:MOST_STRAGGLERS]


def named(job: Job) -> list[tuple[tuple[str, str], float]]:
    """Return (rank, class of fault) and the confidence of what verdicts name now, the surest first."""
    if job.is_over:
        return []
    incidents = [*job.round.warnings.values(), *([job.incident] if job.incident is not None else [])]
    verdicts = [incident.verdict for incident in incidents if incident.verdict is not None]
    if job.suspicion is not None:
        verdicts.append(job.suspicion.verdict)
    surest: dict[tuple[int, str], float] = {}
    for verdict in verdicts:
        for rank in verdict.culprits:
            surest[rank, verdict.fault] = max(verdict.confidence, surest.get((rank, verdict.fault), 0.0))
    found = sorted(surest.items(), key=lambda one: (-one[1], one[0]))
    return [((str(rank), fault), confidence) for (rank, fault), confidence in found[:MOST_STRAGGLERS]]


def suspects(job: Job) -> dict[str, int]:
    """Return how many ranks are slow for each cause."""
    counts = Counter(incident.verdict.cause or "unknown" for incident in _slow(job) if incident.verdict is not None)
    return {**dict.fromkeys(CAUSES, 0), **counts}


def hang(job: Job) -> str:
    """Return the class of the hang that is suspected, or judged and not yet over; "" for none."""
    if job.suspicion is not None and not job.is_over:
        return job.suspicion.verdict.fault
    verdict = job.incident.verdict if job.incident is not None else None
    return verdict.fault if verdict is not None and class_of(verdict.fault).hang is not Hang.NO else ""


def fault_of(incident: Incident) -> str:
    """Return an incident's class."""
    return incident.verdict.fault if incident.verdict is not None else "unknown"


def open_faults(job: Job) -> dict[str, int]:
    """Return how many incidents and warnings of each class hold now."""
    holding = [*job.round.warnings.values(), *([job.incident] if job.incident is not None else [])]
    return Counter(fault_of(incident) for incident in holding)


def restarts(job: Job) -> dict[str, int]:
    """Return how often the job was restarted for each cause."""
    return job.record.restarted


def shown(jobs: Iterable[Job], wall_s: float) -> list[Job]:
    """Return the jobs that are shown: those that live, and those that have ended of late."""
    return [job for job in jobs if not job.is_over or wall_s - job.record.since_wall_s < SHOWN_AFTER_S]


def _slow(job: Job) -> Iterator[Incident]:
    return (incident for key, incident in job.round.warnings.items() if key.startswith(STRAGGLER))


class IncidentCount:
    """Incidents by job, fault and outcome, each counted once: a warning when it is seen, any other when it is over."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self._counted: set[str] = set()

    def poll_incidents(self, known: dict[str, Incident]) -> None:
        """Count what is new; the class of one that is open may still change."""
        for name, incident in known.items():
            if name not in self._counted and incident.state != "open":
                self._counted.add(name)
                self.counts[incident.job, fault_of(incident), _OUTCOMES.get(incident.state, incident.state)] += 1
        if len(self._counted) > 2 * len(known) + 64:
            self._counted &= known.keys()


def self_checks(views: Iterable[SelfCheckView]) -> dict[str, list[Sample]]:
    """Return the newest self-check of each node that had one: when, how it ended, the worst finding, the figures."""
    asked: list[Sample] = []
    status: list[Sample] = []
    worst: list[Sample] = []
    medians: dict[tuple[str, str], float] = {}
    for view in views:
        found = view.check
        if found is None:
            continue
        asked.append(((view.node,), view.asked_wall_s))
        status.append(((view.node,), float(STATUSES.index(found.status))))
        wrong = next((one for one in found.findings if one.severity != "note"), None)
        if wrong is not None:
            worst.append(((view.node, wrong.check, wrong.of), 1.0))
        for figure in found.figures:
            medians.setdefault((view.node, figure.name), figure.value)
    return {
        "megascale_node_check_timestamp_seconds": asked,
        "megascale_node_check_status": status,
        "megascale_node_check_worst_info": worst,
        "megascale_node_check_median": list(medians.items()),
    }
