# SPDX-License-Identifier: Apache-2.0
"""The book of incidents: opened when something is lost, marked as recovery goes on, closed when training is back.

Pure functions on frozen structs: each takes an incident and returns the next one.
"""

from collections.abc import Collection, Iterable
from itertools import chain, islice

import msgspec

from megascale_ops.schema.courses import HOUR_S, Course, is_worse
from megascale_ops.schema.events import Incident, Marks
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import EvidenceItem

_replace = msgspec.structs.replace

MARKS = frozenset(Marks.__struct_fields__)
# 512 pieces of up to 4,000 characters: 2 MB at worst, in the journal and in one answer.
MOST_EVIDENCE = 512
MOST_TEXT = 4000
# Kinds of evidence of which only the newest look is kept: a suspect is looked at several times.
LOOKED_AT_AGAIN = frozenset({"stacks", "flight_recorder", "collectives", "process"})


def open_incident(
    incident_id: str, *, job: str, run_dir: str, verdict: Verdict, detected: float, now: float, step: int
) -> Incident:
    """Return a new incident; ``now`` is when it got its verdict, ``detected`` when it was first noticed."""
    return Incident(
        id=incident_id,
        job=job,
        round=verdict.round,
        marks=Marks(began=min(verdict.since_wall_s or detected, detected), detected=detected, named=now),
        verdict=verdict,
        step_before=step,
        folder=f"{run_dir}/incidents/{incident_id}" if run_dir else "",
    )


def mark(incident: Incident, name: str, wall_s: float) -> Incident:
    """Note when a mark was passed; the first time counts."""
    assert name in MARKS, name
    if getattr(incident.marks, name):
        return incident
    return _replace(incident, marks=_replace(incident.marks, **{name: wall_s}))


def judge(incident: Incident, verdict: Verdict) -> Incident:
    """Give the incident its final verdict."""
    began = min(verdict.since_wall_s or incident.marks.began, incident.marks.detected)
    return _replace(incident, verdict=verdict, marks=_replace(incident.marks, began=began))


def follow(incident: Incident, verdict: Verdict, wall_s: float) -> Incident:
    """Give a warning its newest verdict, and remember the worst."""
    course = incident.course or Course()
    if is_worse(verdict, course.worst):
        course = _replace(course, worst=verdict, worst_wall_s=wall_s)
    return _replace(incident, verdict=verdict, course=course)


def pay(incident: Incident, paid_s: float, ranks: int, unit: str) -> Incident:
    """Add what a warning has cost each rank; ``unit``: of what ranks are counted in (GPU, rank)."""
    course = incident.course or Course()
    hours = course.rank_hours + paid_s * ranks / HOUR_S
    return _replace(incident, course=_replace(course, paid_s=course.paid_s + paid_s, rank_hours=hours, unit=unit))


def end_course(incident: Incident, wall_s: float) -> Incident:
    """Keep of a warning what it was at its worst: its last numbers are those of a fault that has faded."""
    course = _replace(incident.course or Course(), until_wall_s=wall_s)
    return _replace(incident, course=course, verdict=course.worst or incident.verdict)


def close(incident: Incident, state: str, done: str = "") -> Incident:
    """Close it as recovered, ended or harmless; ``done`` adds to what was done."""
    return _replace(incident, state=state, done=_sentence(incident.done, done))


def add_evidence(incident: Incident, items: Iterable[EvidenceItem], named: Collection[int] | None = None) -> Incident:
    """Add pieces of evidence, texts cut and bounded in number; a later look at a rank replaces the one before.

    Of more than there is room for (12,288 ranks give 24,576) those about the ranks that the verdict names stay;
    ``named``: these ranks, where the caller has them as a set.
    """
    cut = tuple(item if len(item.text) <= MOST_TEXT else _replace(item, text=item.text[:MOST_TEXT]) for item in items)
    anew = {(item.kind, item.rank) for item in cut if item.ok and item.rank >= 0 and item.kind in LOOKED_AT_AGAIN}
    ranks = {rank for _, rank in anew}
    kept = tuple(one for one in incident.evidence if one.rank not in ranks or (one.kind, one.rank) not in anew)
    found = kept + cut
    if len(found) > MOST_EVIDENCE:
        if named is None:
            named = frozenset(incident.verdict.culprits if incident.verdict is not None else ())
        # Of equals the first to come are kept.
        about = [one for one in found if one.rank in named]
        found = tuple(islice(chain(about, (one for one in found if one.rank not in named)), MOST_EVIDENCE))
    return _replace(incident, evidence=found)


def _sentence(before: str, more: str) -> str:
    return f"{before}; {more}" if before and more else before or more
