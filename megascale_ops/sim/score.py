# SPDX-License-Identifier: Apache-2.0
"""The verdicts against the truth: which incident is about which fault, and did it name the right class and culprit?"""

from collections.abc import Iterable, Sequence

import msgspec

from megascale_ops.schema.events import Incident
from megascale_ops.schema.health import Verdict
from megascale_ops.sim.clock import START_WALL_S
from megascale_ops.sim.faults import Truth
from megascale_ops.sim.kinds import KINDS

# An hour: what is noticed later than that of a fault is about another one. A slow rank may be told of while it is slow.
LATEST_S = 3600.0
# A fault of the last quarter of an hour may still be waited for when the time is over: it is not counted.
PENDING_S = 900.0
# A verdict that names more ranks than a node has accuses none.
MOST_NAMED = 8


class FaultLine(msgspec.Struct, frozen=True):
    """One fault that happened, and what was made of it."""

    at_s: float
    kind: str
    cause: str
    rank: int
    node: str
    incident: str = ""  # the first that was about it
    detected_after_s: float = -1.0
    is_right: bool = False  # a verdict named its class and its culprit
    is_pending: bool = False  # the time was over before it had to be noticed


class IncidentLine(msgspec.Struct, frozen=True):
    """One incident, and what it was about."""

    id: str
    at_s: float
    state: str
    fault: str
    culprits: tuple[int, ...]
    nodes: tuple[str, ...]
    action: str
    reason: str
    about: int = -1  # the number of the fault; -1: of none
    is_named: bool = False  # it accuses
    is_right: bool = False
    cost_s: float = 0.0  # what it has cost, by the ledger


class Score(msgspec.Struct, frozen=True):
    """All of them; precision and recall are -1 where there is nothing to count."""

    faults: tuple[FaultLine, ...]
    incidents: tuple[IncidentLine, ...]
    precision: float
    recall: float


def score(truths: Sequence[Truth], incidents: Iterable[Incident], costs: dict[str, float], until_s: float) -> Score:
    """Compare; ``costs``: seconds by incident, ``until_s``: how long was simulated."""
    lines = [_line(one, truths, costs) for one in incidents if one.verdict is not None]
    faults = tuple(_fault(number, truth, lines, until_s) for number, truth in enumerate(truths))
    named = [line for line in lines if line.is_named]
    counted = [fault for fault in faults if not fault.is_pending]
    return Score(
        faults,
        tuple(lines),
        _share(sum(line.is_right for line in named), len(named)),
        _share(sum(fault.is_right for fault in counted), len(counted)),
    )


def _share(some: int, of_all: int) -> float:
    return round(some / of_all, 4) if of_all else -1.0


def _line(incident: Incident, truths: Sequence[Truth], costs: dict[str, float]) -> IncidentLine:
    verdict = incident.verdict
    assert verdict is not None
    at_s = round(incident.marks.detected - START_WALL_S, 1)
    about = _about(incident, at_s, truths)
    return IncidentLine(
        id=incident.id,
        at_s=at_s,
        state=incident.state,
        fault=verdict.fault,
        culprits=verdict.culprits[: MOST_NAMED + 1],
        nodes=verdict.nodes[: MOST_NAMED + 1],
        action=verdict.action,
        reason=verdict.reason,
        about=about,
        is_named=verdict.fault != "unknown",
        is_right=about >= 0 and is_right(verdict, truths[about], incident.round),
        cost_s=round(costs.get(incident.id, 0.0), 1),
    )


def _about(incident: Incident, at_s: float, truths: Sequence[Truth]) -> int:
    """Return the fault that an incident is about: the newest that fits its verdict, else the newest; -1 for none."""
    verdict = incident.verdict
    assert verdict is not None
    recent = [
        number
        for number, truth in enumerate(truths)
        if truth.at_s <= at_s + 1.0 and at_s <= truth.at_s + truth.fault.lasts_s + LATEST_S
    ]
    fitting = [number for number in recent if is_right(verdict, truths[number], incident.round)]
    # A slow rank explains no other verdict than one about it.
    others = [number for number in recent if truths[number].fault.kind != "slow"]
    return (fitting or others or [-1])[-1]


def is_right(verdict: Verdict, truth: Truth, round_: int) -> bool:
    """Return whether a verdict of a round names the class of a fault, and its rank of then or its node."""
    kind = KINDS[truth.fault.kind]
    if verdict.fault not in kind.classes:
        return False
    if kind.blames == "job":
        return True
    if kind.blames == "none":
        return not verdict.culprits
    if kind.blames == "node":
        return verdict.nodes == (truth.node,)
    return truth.ranks.get(round_) in verdict.culprits and len(verdict.culprits) <= MOST_NAMED


def _fault(number: int, truth: Truth, lines: Sequence[IncidentLine], until_s: float) -> FaultLine:
    mine = [line for line in lines if line.about == number]
    first = min(mine, key=lambda line: line.at_s, default=None)
    right = any(line.is_right for line in mine)
    return FaultLine(
        at_s=round(truth.at_s, 1),
        kind=truth.fault.kind,
        cause=truth.fault.cause,
        rank=truth.rank,
        node=truth.node,
        incident=first.id if first is not None else "",
        detected_after_s=round(max(0.0, first.at_s - truth.at_s), 1) if first is not None else -1.0,
        is_right=right,
        is_pending=not right and truth.at_s > until_s - PENDING_S,
    )
