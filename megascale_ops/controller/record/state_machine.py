# SPDX-License-Identifier: Apache-2.0
"""The life of a job as one table: what may happen in which state, where it leads, and what is ordered.

A job is in exactly one state. An event either stands in ``TABLE`` for that state, and then the row holds everything
that follows, or it stands in ``ILLEGAL`` with the reason why it cannot happen there. ``react`` looks the row up and
changes nothing by itself: the job's owner journals the move first and sends the orders second.

Some events come in pairs because the table has no memory: a job that was full goes back to ``running``, a job with
fewer nodes than it could use goes back to ``degraded`` (the events that end in ``_short``).
"""

import enum
from typing import NamedTuple

from megascale_ops.errors import MegascaleError
from megascale_ops.schema.events import OVER


class IllegalMoveError(MegascaleError):
    """An event came in a state where it cannot happen; nothing was changed."""


class State(enum.StrEnum):
    """Where a job stands."""

    RUNNING = "running"  # all nodes it can use, every rank steps
    SUSPECT = "suspect"  # something looks wrong, half the patience is gone
    CONFIRMING = "confirming"  # evidence is gathered while it still can be, and weighed until patience is gone
    STOPPING = "stopping"  # all ranks are being stopped
    DIAGNOSING = "diagnosing"  # all evidence is in; which rank is to blame, and may the job restart?
    REPLACING = "replacing"  # waiting for enough nodes to form a round (a new job begins here)
    RESTARTING = "restarting"  # the round is formed, ranks are starting
    CATCHING_UP = "catching_up"  # all ranks are up, on the way to where training was
    DEGRADED = "degraded"  # every rank steps, on fewer nodes than it could use
    FAILED = "failed"
    FINISHED = "finished"
    STOPPED = "stopped"  # by hand, before it was done


class EventKind(enum.StrEnum):
    """What can happen to a job."""

    NODES_READY = "nodes_ready"  # enough runners joined: a round can be formed
    RANKS_UP = "ranks_up"
    CAUGHT_UP = "caught_up"
    CAUGHT_UP_SHORT = "caught_up_short"  # with fewer nodes than it could use
    SILENCE = "silence"
    MOVED = "moved"  # the suspects move again
    MOVED_SHORT = "moved_short"  # same, with fewer nodes than it could use
    MOVED_EARLY = "moved_early"  # same, before the job had caught up
    LOOK = "look"  # others wait for the suspects: evidence is gathered early, or once more
    LOST = "lost"  # the suspects' patience is used up
    EVIDENCE_COMPLETE = "evidence_complete"  # or its deadline passed
    LEFT_ALONE = "left_alone"  # the policy, or a dry run, leaves the suspects as they are
    LEFT_ALONE_SHORT = "left_alone_short"  # same, with fewer nodes than it could use
    LEFT_ALONE_EARLY = "left_alone_early"  # same, before the job had caught up
    CUT_LOSSES = "cut_losses"  # a warning has cost as much as a restart
    RANK_FAILED = "rank_failed"
    NODE_LOST = "node_lost"
    NODE_OFFERED = "node_offered"
    ALL_STOPPED = "all_stopped"  # or its deadline passed
    VERDICT_RESTART = "verdict_restart"
    VERDICT_STOP = "verdict_stop"
    TIMED_OUT = "timed_out"  # too few nodes for too long
    RANKS_FINISHED = "ranks_finished"  # every node reports that its ranks succeeded
    GAVE_UP = "gave_up"  # a runner cannot go on
    CANCELLED = "cancelled"  # a person stopped it, or the engine that owns its nodes
    STARTED_AGAIN = "started_again"  # a new runner came for a job that was over


class Act(enum.StrEnum):
    """What a move orders. The loop addresses it to nodes."""

    DUMP_STACKS = "dump_stacks"  # agents
    DUMP_FLIGHT_RECORDER = "dump_flight_recorder"  # agents
    PRESERVE = "preserve"  # agents
    KILL_CULPRITS = "kill"  # agents of the culprits: a frozen process ignores everything else
    RESTART = "restart"  # runners
    SHUTDOWN = "shutdown"  # runners


class Move(NamedTuple):
    """One row's right-hand side."""

    state: State
    acts: tuple[Act, ...] = ()


_S, _E = State, EventKind
_STOP = (Act.PRESERVE, Act.RESTART)
_STOP_SUSPECTS = (Act.PRESERVE, Act.KILL_CULPRITS, Act.RESTART)
_END = (Act.SHUTDOWN,)
# Evidence.
LOOKS = (Act.DUMP_STACKS, Act.DUMP_FLIGHT_RECORDER)

# What a dry run does not order. The end of a job is sent to all, or nodes that were not hit would wait without end.
ACTS_THAT_CHANGE = (Act.KILL_CULPRITS, Act.RESTART)
FINAL = tuple(State(name) for name in OVER)
# A round exists and its ranks are meant to run.
ACTIVE = (State.RESTARTING, State.CATCHING_UP, State.RUNNING, State.DEGRADED, State.SUSPECT, State.CONFIRMING)

# A round ends: its ranks are stopped, its cause is sought.
ENDING = (State.STOPPING, State.DIAGNOSING)

# A round is formed, and its ranks have not come as far as the round before.
STARTING = (State.RESTARTING, State.CATCHING_UP)
# Steps are made, as far as reported.
TRAINING = (State.RUNNING, State.DEGRADED)

TABLE: dict[tuple[State, EventKind], Move] = {
    # The straight road.
    (_S.REPLACING, _E.NODES_READY): Move(_S.RESTARTING),
    (_S.REPLACING, _E.TIMED_OUT): Move(_S.FAILED, _END),
    (_S.RESTARTING, _E.RANKS_UP): Move(_S.CATCHING_UP),
    (_S.CATCHING_UP, _E.CAUGHT_UP): Move(_S.RUNNING),
    (_S.CATCHING_UP, _E.CAUGHT_UP_SHORT): Move(_S.DEGRADED),
    # Silence: suspect first, evidence second, stop last. Any movement on the way ends the suspicion.
    (_S.RUNNING, _E.SILENCE): Move(_S.SUSPECT),
    (_S.DEGRADED, _E.SILENCE): Move(_S.SUSPECT),
    (_S.CATCHING_UP, _E.SILENCE): Move(_S.SUSPECT),
    (_S.SUSPECT, _E.MOVED): Move(_S.RUNNING),
    (_S.SUSPECT, _E.MOVED_SHORT): Move(_S.DEGRADED),
    (_S.SUSPECT, _E.MOVED_EARLY): Move(_S.CATCHING_UP),
    (_S.SUSPECT, _E.LOOK): Move(_S.CONFIRMING, LOOKS),
    (_S.SUSPECT, _E.LOST): Move(_S.CONFIRMING, LOOKS),
    (_S.CONFIRMING, _E.LOOK): Move(_S.CONFIRMING, LOOKS),
    (_S.CONFIRMING, _E.MOVED): Move(_S.RUNNING),
    (_S.CONFIRMING, _E.MOVED_SHORT): Move(_S.DEGRADED),
    (_S.CONFIRMING, _E.MOVED_EARLY): Move(_S.CATCHING_UP),
    (_S.CONFIRMING, _E.EVIDENCE_COMPLETE): Move(_S.STOPPING, _STOP_SUSPECTS),
    # Not every suspect is stopped: the policy may spare some, and a dry run spares all.
    (_S.CONFIRMING, _E.LEFT_ALONE): Move(_S.RUNNING),
    (_S.CONFIRMING, _E.LEFT_ALONE_SHORT): Move(_S.DEGRADED),
    (_S.CONFIRMING, _E.LEFT_ALONE_EARLY): Move(_S.CATCHING_UP),
    # What only slows the job down is worth a restart once it has cost as much.
    (_S.RUNNING, _E.CUT_LOSSES): Move(_S.STOPPING, _STOP),
    (_S.DEGRADED, _E.CUT_LOSSES): Move(_S.STOPPING, _STOP),
    # A new node for a job that could use it.
    (_S.DEGRADED, _E.NODE_OFFERED): Move(_S.STOPPING, (Act.RESTART,)),
    # Stop, diagnose, replace.
    (_S.STOPPING, _E.ALL_STOPPED): Move(_S.DIAGNOSING),
    (_S.DIAGNOSING, _E.VERDICT_RESTART): Move(_S.REPLACING),
    (_S.DIAGNOSING, _E.VERDICT_STOP): Move(_S.FAILED, _END),
    # A name may be used again once its job is over.
    (_S.FAILED, _E.STARTED_AGAIN): Move(_S.REPLACING),
    (_S.FINISHED, _E.STARTED_AGAIN): Move(_S.REPLACING),
    (_S.STOPPED, _E.STARTED_AGAIN): Move(_S.REPLACING),
    # Death needs no confirmation.
    **{(state, _E.RANK_FAILED): Move(_S.STOPPING, _STOP) for state in ACTIVE},
    **{(state, _E.NODE_LOST): Move(_S.STOPPING, _STOP) for state in ACTIVE},
    # The end can come at any time.
    **{(state, _E.RANKS_FINISHED): Move(_S.FINISHED) for state in (*ACTIVE, _S.STOPPING, _S.REPLACING)},
    **{(state, _E.GAVE_UP): Move(_S.FAILED, _END) for state in State if state not in FINAL},
    **{(state, _E.CANCELLED): Move(_S.STOPPED, _END) for state in State if state not in FINAL},
}

_NO_ROUND = "no round is forming here"
_NOT_SUSPECT = "nobody is suspected here"
_NO_EVIDENCE = "no evidence was asked for here"
_ENDING = "the round is ending or over: one more death adds evidence, not a move"
_OVER = "the job is over"

# Why an event cannot happen in the states where the table has no row for it.
ILLEGAL: dict[EventKind, str] = {
    _E.NODES_READY: _NO_ROUND,
    _E.TIMED_OUT: _NO_ROUND,
    _E.RANKS_UP: "only a round that was just formed waits for its ranks",
    _E.CAUGHT_UP: "only a round whose ranks are up can catch up",
    _E.CAUGHT_UP_SHORT: "only a round whose ranks are up can catch up",
    _E.SILENCE: "silence is judged only while all ranks are up and nobody is suspected yet",
    _E.MOVED: _NOT_SUSPECT,
    _E.MOVED_SHORT: _NOT_SUSPECT,
    _E.MOVED_EARLY: _NOT_SUSPECT,
    _E.LOOK: _NOT_SUSPECT,
    _E.LOST: "nobody is lost who was not suspected first",
    _E.EVIDENCE_COMPLETE: _NO_EVIDENCE,
    _E.LEFT_ALONE: _NO_EVIDENCE,
    _E.LEFT_ALONE_SHORT: _NO_EVIDENCE,
    _E.LEFT_ALONE_EARLY: _NO_EVIDENCE,
    _E.CUT_LOSSES: "warnings are weighed only while training makes steps",
    _E.RANK_FAILED: _ENDING,
    _E.NODE_LOST: _ENDING,
    _E.NODE_OFFERED: "a full job has no use for it, a changing one takes it without being stopped",
    _E.ALL_STOPPED: "nothing is being stopped here",
    _E.VERDICT_RESTART: "a verdict on the round is given once, when all of it has stopped",
    _E.VERDICT_STOP: "a verdict on the round is given once, when all of it has stopped",
    _E.RANKS_FINISHED: "while diagnosing, every node has stopped for another reason",
    _E.GAVE_UP: _OVER,
    _E.CANCELLED: _OVER,
    _E.STARTED_AGAIN: "the job is not over",
}


def is_legal(state: State, event: EventKind) -> bool:
    """Return whether ``event`` can happen in ``state``."""
    return (state, event) in TABLE


def react(state: State, event: EventKind) -> Move:
    """Return where ``event`` leads from ``state`` and what is to be ordered.

    Raises:
        IllegalMoveError: the event cannot happen there; nothing was changed.
    """
    move = TABLE.get((state, event))
    if move is None:
        raise IllegalMoveError(f"{event} cannot happen to a job that is {state}: {ILLEGAL[event]}")
    return move


def diagram() -> str:
    """Return the table as a mermaid state diagram; events that lead the same way share an arrow."""
    arrows: dict[tuple[State, State], list[str]] = {}
    for (state, event), move in TABLE.items():
        arrows.setdefault((state, move.state), []).append(str(event))
    lines = ["stateDiagram-v2", "    [*] --> replacing"]
    lines += [f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in arrows.items()]
    lines += [f"    {state} --> [*]" for state in FINAL]
    return "\n".join(lines)
