# SPDX-License-Identifier: Apache-2.0
"""The life of a node as one table: what may happen in which state, and where it leads.

A node outlives its jobs. What one job has seen of it counts for the next one, so its state is the controller's, not a
job's. An event either stands in ``TABLE`` for a state, or in ``ILLEGAL`` with the reason why it cannot happen there;
an illegal move raises and changes nothing. ``step`` gives the node's next life, with the deadline by which its state
ends by itself or is told again: a quarantine that is forgotten keeps good machines idle for weeks.

Who moves a node: ``CONDEMNED``, ``SPARED`` and what follows from checks and deadlines are the controller's, on evidence
that is journaled with the move; the rest a person's. Events that end in ``_BUSY`` are for a node whose ranks run: they
run on until their round ends. Those that end in ``_CLEAN`` and ``_OUT`` are checks of a node that was healthy, and of
one that was in quarantine.

Pure: a life and an event with its time in, the next life out.
"""

import enum

import msgspec

from megascale_ops.errors import MegascaleError
from megascale_ops.schema.health import NodeLife

BY_CONTROLLER = "controller"

# A day: a GPU or a link that is flaky shows it again within hours; a suspicion that a day did not confirm is over.
SUSPECT_S = 86_400.0
# A day on probation, for the same reason.
BACK_S = 86_400.0
# An hour, doubled each time up to a day: a node that passes every check and fails every job must not come and go, and
# a false quarantine must not cost a machine for weeks.
QUARANTINE_S, LONGEST_QUARANTINE_S = 3600.0, 86_400.0
# An hour: a round that still holds a node by then ends for another reason or not at all, and people are told.
DRAIN_S = 3600.0
# A day: how often what only a person can end is told again.
RETELL_S = 86_400.0
# 180 s: the runner ends a quick check after 120 s; starting it and the answer take seconds.
CHECK_S = 180.0


class IllegalNodeMoveError(MegascaleError):
    """An event came in a state where it cannot happen; nothing was changed."""


class NodeState(enum.StrEnum):
    """Where a node stands."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    UNDER_CHECK = "under check"
    BACK = "back"


class NodeEvent(enum.StrEnum):
    """What can happen to a node."""

    ACCUSED = "accused"  # evidence against it, for the first time
    CONDEMNED = "condemned"  # again, or while it was on probation: it goes, and runs nothing now
    CONDEMNED_BUSY = "condemned_busy"  # the same while a round runs on it
    SPARED = "spared"  # it would go, but so many have gone today that a person must decide
    VACATED = "vacated"  # no round runs on it any more
    CHECK_BEGAN = "check_began"
    CHECK_PASSED = "check_passed"
    CHECK_PASSED_CLEAN = "check_passed_clean"
    CHECK_FAILED = "check_failed"
    CHECK_UNMADE = "check_unmade"  # it could not be made, or no answer came
    CHECK_UNMADE_CLEAN = "check_unmade_clean"
    CHECK_UNMADE_OUT = "check_unmade_out"
    EXPIRED = "expired"  # nothing more was found for a day
    SERVED = "served"  # its time in quarantine is over
    TOLD_AGAIN = "told_again"  # it stands where only a person, or the end of a round, can take it from
    QUARANTINED_BY_HAND = "quarantined_by_hand"
    DRAINED_BY_HAND = "drained_by_hand"  # a quarantine by hand while a round runs on it
    RELEASED = "released"
    RESUMED_ELSEWHERE = "resumed_elsewhere"  # others put it back into service in the engine that owns it


_S, _E = NodeState, NodeEvent

# In rounds that are formed now it has no place.
BARRED = frozenset({_S.DRAINING, _S.QUARANTINED, _S.UNDER_CHECK})
# Evidence has put it out.
LEAVES = frozenset({_E.CONDEMNED, _E.CONDEMNED_BUSY, _E.CHECK_FAILED})
_BY_HAND = (_E.QUARANTINED_BY_HAND, _E.DRAINED_BY_HAND)
_IN = (_S.HEALTHY, _S.SUSPECT, _S.BACK)

TABLE: dict[tuple[NodeState, NodeEvent], NodeState] = {
    # Suspect first: evidence that comes once costs a check, evidence that comes twice a place.
    (_S.HEALTHY, _E.ACCUSED): _S.SUSPECT,
    **{(state, _E.CONDEMNED): _S.QUARANTINED for state in (_S.SUSPECT, _S.BACK)},
    **{(state, _E.CONDEMNED_BUSY): _S.DRAINING for state in (_S.SUSPECT, _S.BACK)},
    **{(state, _E.SPARED): _S.SUSPECT for state in (_S.SUSPECT, _S.BACK, _S.UNDER_CHECK)},
    (_S.DRAINING, _E.VACATED): _S.QUARANTINED,
    # A check decides; what could not be measured is held against no node.
    **{(state, _E.CHECK_BEGAN): _S.UNDER_CHECK for state in (*_IN, _S.QUARANTINED)},
    (_S.UNDER_CHECK, _E.CHECK_PASSED): _S.BACK,
    (_S.UNDER_CHECK, _E.CHECK_PASSED_CLEAN): _S.HEALTHY,
    (_S.UNDER_CHECK, _E.CHECK_FAILED): _S.QUARANTINED,
    (_S.UNDER_CHECK, _E.CHECK_UNMADE): _S.SUSPECT,
    (_S.UNDER_CHECK, _E.CHECK_UNMADE_CLEAN): _S.HEALTHY,
    (_S.UNDER_CHECK, _E.CHECK_UNMADE_OUT): _S.QUARANTINED,
    # Time ends what evidence does not.
    (_S.SUSPECT, _E.EXPIRED): _S.HEALTHY,
    (_S.BACK, _E.EXPIRED): _S.HEALTHY,
    (_S.QUARANTINED, _E.SERVED): _S.SUSPECT,
    (_S.QUARANTINED, _E.TOLD_AGAIN): _S.QUARANTINED,
    (_S.DRAINING, _E.TOLD_AGAIN): _S.DRAINING,
    # Who owns the cluster says that it is good: what evidence has put out is measured before it takes part again.
    **{(state, _E.RESUMED_ELSEWHERE): _S.SUSPECT for state in (_S.QUARANTINED, _S.DRAINING)},
    # A person may do it anywhere.
    **{(state, _E.QUARANTINED_BY_HAND): _S.QUARANTINED for state in _S},
    **{(state, _E.DRAINED_BY_HAND): _S.DRAINING for state in _S},
    **{(state, _E.RELEASED): _S.HEALTHY for state in _S if state is not _S.HEALTHY},
}

_NOT_CHECKED = "no check of it is under way"
_TAKES_PART = "it takes part"

# Why an event cannot happen in the states where the table has no row for it.
ILLEGAL: dict[NodeEvent, str] = {
    _E.ACCUSED: "it is suspected already, or out",
    _E.CONDEMNED: "a node is condemned that was suspected first, and is not out already",
    _E.CONDEMNED_BUSY: "a node is condemned that was suspected first, and is not out already",
    _E.SPARED: "nothing would move it out here",
    _E.VACATED: "it is not draining",
    _E.CHECK_BEGAN: "its ranks run, or a check of it is under way",
    _E.CHECK_PASSED: _NOT_CHECKED,
    _E.CHECK_PASSED_CLEAN: _NOT_CHECKED,
    _E.CHECK_FAILED: _NOT_CHECKED,
    _E.CHECK_UNMADE: _NOT_CHECKED,
    _E.CHECK_UNMADE_CLEAN: _NOT_CHECKED,
    _E.CHECK_UNMADE_OUT: _NOT_CHECKED,
    _E.EXPIRED: "there is no suspicion and no probation that could end",
    _E.SERVED: "it is not in quarantine",
    _E.TOLD_AGAIN: _TAKES_PART,
    _E.QUARANTINED_BY_HAND: "a person may do it anywhere",
    _E.DRAINED_BY_HAND: "a person may do it anywhere",
    _E.RELEASED: "there is nothing to release it from",
    _E.RESUMED_ELSEWHERE: "it is not out",
}


class Happening(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happens to a node: all that its next life depends on."""

    event: str
    wall_s: float
    by: str = BY_CONTROLLER
    reason: str = ""
    key: str = ""
    for_s: float = 0.0


def step(life: NodeLife, happening: Happening) -> NodeLife:
    """Return a node's next life.

    Raises:
        IllegalNodeMoveError: the event cannot happen in its state; nothing was changed.
    """
    state, event = NodeState(life.state), NodeEvent(happening.event)
    after = TABLE.get((state, event))
    if after is None:
        raise IllegalNodeMoveError(f"node {life.node} is {state}: {ILLEGAL[event]}")
    wall_s = happening.wall_s
    by_hand = event in _BY_HAND
    strikes = 0 if event in (_E.RELEASED, _E.EXPIRED) else life.strikes + (event in LEAVES)
    is_held = not happening.for_s if by_hand else life.is_held and event in (_E.VACATED, _E.TOLD_AGAIN)
    for_s = happening.for_s if by_hand else life.for_s if event in (_E.VACATED, _E.TOLD_AGAIN) else 0.0
    changes: dict[str, object] = {
        "state": after.value,
        "by": happening.by,
        "reason": happening.reason,
        "strikes": strikes,
        "was": state.value if after is _S.UNDER_CHECK else "",
        "served_wall_s": life.until_wall_s if (state, event) == (_S.QUARANTINED, _E.CHECK_BEGAN) else 0.0,
        "is_checked": state is _S.UNDER_CHECK and after in (_S.SUSPECT, _S.QUARANTINED) and not by_hand,
        "is_held": is_held,
        "for_s": for_s,
        "is_spared": event is _E.SPARED,
    }
    if event is not _E.TOLD_AGAIN:
        changes["since_wall_s"] = wall_s
    if happening.key:
        changes |= {"key": happening.key, "accused_wall_s": wall_s}
    if event in (_E.RELEASED, _E.CHECK_PASSED, _E.CHECK_PASSED_CLEAN):
        changes["cleared_wall_s"] = wall_s
    lasts_s = {
        _S.HEALTHY: 0.0,
        _S.SUSPECT: SUSPECT_S,
        _S.BACK: BACK_S,
        _S.DRAINING: DRAIN_S,
        _S.UNDER_CHECK: CHECK_S,
        _S.QUARANTINED: RETELL_S if is_held else for_s or quarantine_s(strikes),
    }[after]
    until_wall_s = wall_s + lasts_s if after is not _S.HEALTHY else 0.0
    if event is _E.CHECK_UNMADE_OUT:  # as if it had not been asked for
        until_wall_s = max(wall_s, life.served_wall_s)
    return msgspec.structs.replace(life, until_wall_s=until_wall_s, **changes)


def quarantine_s(strikes: int) -> float:
    """Return how long a quarantine by evidence lasts, seconds; ``strikes`` counts this one."""
    return min(LONGEST_QUARANTINE_S, QUARANTINE_S * 2.0 ** min(20, max(0, strikes - 1)))


def at_deadline(life: NodeLife) -> NodeEvent | None:
    """Return what happens to a node whose state's time is over; None: nothing does, it is healthy."""
    state = NodeState(life.state)
    if state is _S.HEALTHY:
        return None
    if state is _S.UNDER_CHECK:
        return unmade(life)
    if state is _S.DRAINING or life.is_held:
        return _E.TOLD_AGAIN
    return _E.SERVED if state is _S.QUARANTINED else _E.EXPIRED


def unmade(life: NodeLife) -> NodeEvent:
    """Return what a check means of which no result came, or none that says anything."""
    events = {_S.QUARANTINED.value: _E.CHECK_UNMADE_OUT, _S.HEALTHY.value: _E.CHECK_UNMADE_CLEAN}
    return events.get(life.was, _E.CHECK_UNMADE)


def is_to_check(life: NodeLife) -> bool:
    """Return whether a node measures itself before it may take part, once in each such state.

    What was put out for the first time may come back as soon as a check finds nothing; what fails again and passes
    again serves its time first, and is a suspect then.
    """
    if life.is_checked or life.is_held or life.for_s:
        return False
    return life.state == _S.SUSPECT or (life.state == _S.QUARANTINED and life.strikes == 1)


def diagram() -> str:
    """Return the table as a mermaid state diagram; events that lead the same way share an arrow."""
    arrows: dict[tuple[NodeState, NodeState], list[str]] = {}
    for (state, event), after in TABLE.items():
        arrows.setdefault((state, after), []).append(str(event))
    lines = ["stateDiagram-v2", "    [*] --> healthy"]
    names = {state: state.value.replace(" ", "_") for state in _S}
    lines += [f"    {names[a]} --> {names[b]}: {', '.join(events)}" for (a, b), events in arrows.items()]
    return "\n".join(lines)
