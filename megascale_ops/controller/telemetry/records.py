# SPDX-License-Identifier: Apache-2.0
"""What is told of incidents and steps: spans and logs as plain values, without OpenTelemetry's library.

Identities follow from what a record is about, so a controller that is started again gives an incident the same ones:
its log, which is sent when it is judged, and its span, which is sent when it is over, belong together. Pure.
"""

import hashlib
from typing import NamedTuple

from megascale_ops.cards import plain_incident
from megascale_ops.schema.events import Incident, Marks

Value = str | bool | int | float | list[int] | list[str]

# 128 ranks and nodes: what a person reads; their number is sent beside them.
MOST_NAMED = 128
# States that an incident does not leave.
OVER = frozenset({"recovered", "ended", "harmless", "over"})
_WARNINGS = frozenset({"watching", "over", "harmless"})
_RESTARTS = frozenset({"restart", "evict"})
# The events of an incident's span, in this order.
_STAGES = ("named", "ordered", "stopped", "formed", "stepped", "caught_up")
assert set(_STAGES) < set(Marks.__struct_fields__)


class Identity(NamedTuple):
    """The numbers of a trace and of a span in it; never 0, which means none."""

    trace: int
    span: int


class Span(NamedTuple):
    """Something that took its time; wall clock seconds."""

    name: str
    identity: Identity
    began_s: float
    ended_s: float
    attributes: dict[str, Value]
    events: tuple[tuple[str, float], ...] = ()
    error: str = ""  # why it ended badly


class Log(NamedTuple):
    """Something that was said at a moment."""

    text: str
    identity: Identity  # of the span that it belongs to
    at_s: float
    attributes: dict[str, Value]
    is_error: bool = False  # else a warning


class Steps(NamedTuple):
    """How far a job was at a moment."""

    round: int
    step: int
    wall_s: float


def incident_span(incident: Incident, job_id: str, now_s: float) -> Span:
    """Return the span of an incident that is over: from when it was detected to its end."""
    marks = incident.marks
    began_s = marks.detected or marks.began or now_s
    ended_s = max(began_s, marks.caught_up or now_s)
    stages = ((name, getattr(marks, name)) for name in _STAGES)
    verdict = incident.verdict
    return Span(
        f"incident {verdict.fault if verdict is not None else 'not judged'}",
        _identity(incident.id, job_id),
        began_s,
        ended_s,
        {
            **_about(incident, job_id),
            "megascale.state": incident.state,
            "megascale.done": incident.done,
            "megascale.began_s": marks.began,
            "megascale.restart": bool(marks.ordered and verdict is not None and verdict.action in _RESTARTS),
            **({"megascale.recovered_s": marks.stepped - began_s} if marks.stepped else {}),
            **(
                {"megascale.steps_lost": max(0, incident.step_before - incident.step_after)}
                if min(incident.step_before, incident.step_after) >= 0
                else {}
            ),
        },
        tuple((name, at_s) for name, at_s in stages if at_s),
        (verdict.reason if verdict is not None else incident.done) if incident.state == "ended" else "",
    )


def verdict_log(incident: Incident, job_id: str, now_s: float) -> Log:
    """Return the log of an incident's verdict, with the text of its card."""
    identity, about = _identity(incident.id, job_id), _about(incident, job_id)
    return Log(plain_incident(incident), identity, now_s, about, is_error=incident.state not in _WARNINGS)


def steps_span(job: str, job_id: str, before: Steps, now: Steps, world_size: int) -> Span:
    """Return the span of the steps of one round between two looks."""
    count = now.step - before.step
    return Span(
        "steps",
        _identity(f"{job} round {now.round} step {now.step}", job_id),
        before.wall_s,
        max(before.wall_s, now.wall_s),
        {
            "megascale.job": job,
            "megascale.job_id": job_id,
            "megascale.round": now.round,
            "megascale.ranks.count": world_size,
            "megascale.step.first": before.step + 1,
            "megascale.step.last": now.step,
            "megascale.step.count": count,
            "megascale.step.mean_s": max(0.0, now.wall_s - before.wall_s) / count,
        },
    )


def judged_as(incident: Incident) -> tuple[object, ...] | None:
    """Return what of a verdict is worth a log when it changes, None without a verdict: figures of warnings are not."""
    verdict = incident.verdict
    return None if verdict is None else (verdict.fault, verdict.culprits, verdict.nodes, verdict.action)


def _about(incident: Incident, job_id: str) -> dict[str, Value]:
    verdict = incident.verdict
    found: dict[str, Value] = {
        "megascale.job": incident.job,
        "megascale.job_id": job_id,
        "megascale.round": incident.round,
        "megascale.incident": incident.id,
    }
    if verdict is None:
        return found
    return found | {
        "megascale.class": verdict.fault,
        **({"megascale.cause": verdict.cause} if verdict.cause else {}),
        "megascale.ranks": list(verdict.culprits[:MOST_NAMED]),
        "megascale.ranks.blamed": len(verdict.culprits),
        "megascale.nodes": list(verdict.nodes[:MOST_NAMED]),
        "megascale.confidence": verdict.confidence,
        "megascale.action": verdict.action,
        "megascale.reason": verdict.reason,
    }


def _identity(about: str, job_id: str) -> Identity:
    drawn = hashlib.sha256(f"{job_id} {about}".encode()).digest()
    return Identity(int.from_bytes(drawn[:16], "big") or 1, int.from_bytes(drawn[16:24], "big") or 1)
