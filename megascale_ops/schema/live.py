# SPDX-License-Identifier: Apache-2.0
"""What a page or a terminal sees of one job while it lives: frames, one a second, sooner when something happens.

A frame has nine parts. The first frame of a stream holds all of them (``whole``); each later one holds what has
changed since the frame before, and ``merge`` puts the two together. What is known of each rank stands in columns:
one little-endian typed array for each fact, base64 in JSON, place ``n`` belongs to rank ``n``. So 12,288 healthy ranks
cost a few hundred bytes a second, and a browser reads a column without looking at single numbers.

``GET /v1/live?job=J`` streams frames as server-sent events (event ``frame``, data: a ``Frame``); with
``headline=first`` an event ``headline`` may come before them, a frame with no more than the top of a page needs;
``GET /v1/live/snapshot?job=J`` answers with one whole frame. Without a job the one that needs a look most is chosen.
"""

import sys
from array import array
from typing import TYPE_CHECKING

import msgspec

from megascale_ops.schema.history import Turn

if TYPE_CHECKING:
    from collections.abc import Iterable

LIVE_VERSION = 1
# What a rank is, by its number in the column ``judged``, from well to worse. "gone": its process is no more;
# "unheard": no agent has reported it in this round. "starting" came later and so stands last: the rank has made no step
# in this round yet, and is not held against it.
JUDGED = ("ok", "slow", "suspect", "lost", "gone", "unheard", "starting")
# How urgent a headline is: no action; to be looked at; acted upon, or to be; over. "waiting": no rank steps yet.
LEVELS = ("calm", "watch", "act", "waiting", "over")
# In ``behind`` and ``quiet``, and for a node: not known.
UNKNOWN = 65_535
# 1,024 ranks: 45 KB of UUIDs, once a round. Of a larger job those of culprits are sent, with the headline.
MOST_GPUS = 1024
# Type codes of ``array`` for each column: unsigned 8, 16, 32 bit and signed 16 bit numbers.
TYPES = {
    "node": "H", "local": "B", "pid": "I", "tp": "h", "pp": "h", "dp": "h", "ep": "h",
    "behind": "H", "quiet": "H", "phase": "B", "judged": "B", "own": "B", "waiting": "B",
}  # fmt: skip


class Place(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a rank runs: rank -> node -> GPU. ``gpu`` is a UUID, "" where it is not known."""

    rank: int
    node: str = ""
    local_rank: int = -1
    gpu: str = ""


class Headline(msgspec.Struct, frozen=True, omit_defaults=True):
    """The one sentence about a job now, and what to type next."""

    level: str  # of LEVELS
    sentence: str
    reason: str = ""
    fault: str = ""  # class of the verdict, "" without one
    culprits: tuple[int, ...] = ()
    places: tuple[Place, ...] = ()  # of the first few culprits
    since_wall_s: float = 0.0
    confidence: float = -1.0  # in 0..1; -1: nothing is judged
    sure_of: str = ""  # what the confidence is of, as `Verdict` has it
    incident: str = ""
    done: str = ""  # what was done about it so far
    command: str = ""
    also: int = 0  # other open incidents and warnings


class Pace(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far the job is. Ages are seconds as of the frame; -1 where not known."""

    state: str
    round: int = 0
    world_size: int = 0
    nodes: int = 0
    step: int = -1  # furthest finished
    step_s: float = 0.0  # a typical recent step
    stepped_age_s: float = -1.0  # since the furthest step was reached
    state_age_s: float = -1.0
    alive_s: float = -1.0  # wall clock since the job began
    goodput: float = -1.0  # over the job's life, 0..1
    goodput_hour: float = -1.0  # over the last hour
    goodput_now: float = -1.0  # over the last five minutes; not known of a job that is over
    restarts: int = 0
    counts: tuple[int, ...] = ()  # ranks by JUDGED
    stepped: int = -1  # ranks that have made a step in this round, while it starts; -1: it does not start
    start_s: float = 0.0  # what the last start took, from its round to the first step of every rank; 0: not known
    start_age_s: float = -1.0  # since this round was formed


class Layout(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which rank is where; changes with a round. Columns as in TYPES, b"" where nothing is known of any rank."""

    nodes: tuple[str, ...] = ()
    node: bytes = b""  # place in ``nodes``
    local: bytes = b""
    pid: bytes = b""
    tp: bytes = b""
    pp: bytes = b""
    dp: bytes = b""
    ep: bytes = b""
    gpus: tuple[str, ...] = ()  # by rank: UUID of its GPU, "" where not known; () of a large job (``MOST_GPUS``)


class Columns(msgspec.Struct, frozen=True, omit_defaults=True):
    """What each rank does now; in a frame that is not whole a column that did not change is missing (None)."""

    phases: tuple[str, ...] | None = None
    phase: bytes | None = None  # place in ``phases``, 255: not known
    behind: bytes | None = None  # steps behind the furthest rank
    quiet: bytes | None = None  # whole seconds without a sign of progress
    judged: bytes | None = None  # place in JUDGED
    own: bytes | None = None  # recent own work in % of the median rank's, at most 255; 0: not known
    waiting: bytes | None = None  # share of its recent steps that it waited for others, in %; 255: not known


class Ledger(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the job's time went: the rows of ``megascale_ops.ledger`` that have any, in their order, in seconds."""

    wall_s: float = 0.0  # of the whole job; what ``rows`` add up to
    rows: dict[str, float] = msgspec.field(default_factory=dict)
    hour_s: float = 0.0  # of the last hour, or less of a younger job; what ``hour`` adds up to
    hour: dict[str, float] = msgspec.field(default_factory=dict)


class Slot(msgspec.Struct, frozen=True, omit_defaults=True):
    """One stretch of time: a column of the strip and of the heat map."""

    start_s: float  # wall clock
    length_s: float
    step: int = -1
    median_s: float = 0.0  # mean step of the median rank; 0: no step ended here
    longest_s: float = 0.0  # longest step of any rank
    loss: float | None = None  # mean of the values reported by ranks, six digits; None: no values
    astray: int = 0  # how often a rank's loss was no finite number
    cells: bytes = b""  # by row: own work of the slowest rank in it, in % of the median rank's (as ``Columns.own``)


class Times(msgspec.Struct, frozen=True, omit_defaults=True):
    """The strip of step times and the heat map. A row of the map is ``row_ranks`` neighbouring ranks.

    In a frame that is not whole only the slots that changed are sent; each replaces all that it overlaps.
    """

    row_ranks: int = 1
    rows: int = 0
    slots: tuple[Slot, ...] = ()
    turns: tuple[Turn, ...] = ()


class IncidentLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One incident of the list, newest first; the whole of it is at ``/v1/incidents/ID``."""

    id: str
    state: str  # of ``Incident.state``
    what: str = ""  # the rank or node, and what happened to it
    fault: str = ""
    reason: str = ""
    culprits: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    began_wall_s: float = 0.0
    recovered_s: float = -1.0  # from the fault to the first new step of every rank
    steps_lost: int = -1
    done: str = ""
    undo: str = ""  # how to take back what was done, or have it done otherwise
    undo_command: str = ""
    course: str = ""  # of a warning: how long, how bad, at what cost
    is_ordered: bool = False  # something was done about it: a restart, or the job's end


class NodeLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node of the job, or one that waits for it, that is not simply healthy as a machine."""

    node: str
    state: str  # of schema.health.NODE_STATES
    means: str = ""  # what that state means for jobs
    reason: str = ""
    by: str = ""
    since_wall_s: float = 0.0
    until_wall_s: float = 0.0  # 0: until a person ends it
    command: str = ""  # what a person may type
    engine: str = ""  # what the engine that owns the node has done with it, or could not do


class JobLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of the controller's jobs; those that ended long ago are not told."""

    job: str
    state: str
    level: str
    world_size: int = 0
    step: int = -1
    since_wall_s: float = 0.0  # when it entered its state
    what: str = ""  # what is wrong with it, or was when it failed; "" when nothing is, or nothing is judged yet


class CheckLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """The newest self-check of one of the job's nodes; the whole of it is at ``/v1/nodes/NODE/check``."""

    node: str
    status: str  # good, warn, bad, unmeasured; waiting: it is being made
    wall_s: float = 0.0  # when it was asked for
    worst: str = ""  # its worst finding, or why there is no result
    figures: tuple[str, ...] = ()  # as people read them
    reason: str = ""  # why it was asked for


class Frame(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that there is to see, or what of it has changed. A part that did not change is None."""

    version: int
    seq: int  # counts frames of a stream; in a stream a gap never happens: a slow reader gets a whole frame
    wall_s: float  # the controller's clock when this was gathered
    job: str = ""  # "": no job has joined yet
    whole: bool = False
    lag_s: float = 0.0  # the recent lag of the controller's own loop
    headline: Headline | None = None
    pace: Pace | None = None
    layout: Layout | None = None
    columns: Columns | None = None
    times: Times | None = None
    incidents: tuple[IncidentLine, ...] | None = None
    jobs: tuple[JobLine, ...] | None = None
    ledger: Ledger | None = None
    lives: tuple[NodeLine, ...] | None = None
    checks: tuple[CheckLine, ...] | None = None


def numbers(name: str, column: bytes | None) -> "array[int]":
    """Return a column's numbers by rank; ``name`` is the column's field in ``Layout`` or ``Columns``."""
    found: array[int] = array(TYPES[name])
    found.frombytes(column or b"")
    if sys.byteorder == "big":
        found.byteswap()
    return found


def packed(name: str, values: "Iterable[int]") -> bytes:
    """Return numbers as a column.

    Raises:
        OverflowError: a number is too large for the column's type.
    """
    made = array(TYPES[name], values)
    if sys.byteorder == "big":
        made.byteswap()
    return made.tobytes()


def merge(known: Frame | None, new: Frame) -> Frame:
    """Return what is known after ``new`` has come on top of ``known``."""
    if known is None or new.whole:
        return new
    changes = {name: part for name in _PARTS if (part := getattr(new, name)) is not None}
    if known.columns is not None and new.columns is not None:
        changes["columns"] = _over(known.columns, new.columns)
    if known.times is not None and new.times is not None:
        changes["times"] = msgspec.structs.replace(new.times, slots=_laid_over(known.times.slots, new.times.slots))
    return msgspec.structs.replace(known, seq=new.seq, wall_s=new.wall_s, job=new.job, lag_s=new.lag_s, **changes)


_PARTS = ("headline", "pace", "layout", "columns", "times", "incidents", "jobs", "ledger", "lives", "checks")


def _over(known: Columns, new: Columns) -> Columns:
    told = {name: column for name in Columns.__struct_fields__ if (column := getattr(new, name)) is not None}
    return msgspec.structs.replace(known, **told)


def _laid_over(known: tuple[Slot, ...], new: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """Return the slots in order of time; what a new one overlaps is gone."""
    kept = [
        slot
        for slot in known
        if not any(
            slot.start_s < over.start_s + over.length_s and over.start_s < slot.start_s + slot.length_s for over in new
        )
    ]
    return tuple(sorted((*kept, *new), key=lambda slot: slot.start_s))
