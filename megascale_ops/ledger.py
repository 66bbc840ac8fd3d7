# SPDX-License-Identifier: Apache-2.0
"""Where the wall time of a job went, each microsecond in one row, and what is not known in a row of its own.

The span is painted over in three coats, a later one over an earlier one:

1. the states that the job was in (starting, restarting, training);
2. what each incident that stopped the job cost, by its marks: from the fault until it was detected, until it was
   judged, until a new round was formed, until its first step, until training was where it had been;
3. what is left of training is divided by the steps that ended in it: their time, what of it all ranks waited for the
   slowest one, what went into checkpoints, and what no step covers.

Whatever of a start or restart was waiting for nodes is idle. Everything is counted in whole microseconds, so the rows
add up to the wall time exactly: over the whole span, since any moment of it, and of each incident. Time for which no
steps were recorded is not known, and never guessed.

The controller keeps it while a job lives, the report draws it afterwards. Pure: plain values in, plain values out.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from megascale_ops.schema.events import OVER, Incident
from megascale_ops.schema.history import Turn

US = 1_000_000
# What each row holds, in the order in which it is shown.
ROWS = {
    "train": "steps that count, without what follows",
    "straggle": "inside steps: the typical rank waited for the slowest of its equals",
    "checkpoint": "inside steps: the training process was busy with a checkpoint",
    "recompute": "steps made a second time after a restart, until training was where it had been",
    "idle": "waiting for nodes: too few had joined to form a round",
    "start": "the first start: starting processes, until the first step",
    "detect": "from a fault until it was noticed",
    "diagnose": "from then until it was decided what to do: evidence and verdict",
    "check": "nodes measured themselves before they took part again",
    "restart": "stopping ranks, forming a new round, starting its processes",
    "reload": "processes run again: imports, reading the checkpoint, until the first step of every rank",
    "other": "no finished step covers it: a step that was cut off, evaluation between steps, the end of the script",
    "unknown": "not known: no steps were recorded for it",
}
# Steps that count, whatever they were slowed down by: the share of them is the effective training time.
EFFECTIVE = ("train", "straggle", "checkpoint")
_TRAINING = frozenset({"running", "degraded", "suspect", "confirming"})
_STARTING = frozenset({"replacing", "restarting", "catching_up"})
_STEPPING = _TRAINING | {"catching_up"}
_FINAL = frozenset(OVER)
_WAITS_FOR_NODES = "replacing"
# What begins at each mark of an incident; "" ends it.
_AFTER_MARK = {
    "began": "detect", "detected": "diagnose", "named": "diagnose", "ordered": "restart", "stopped": "restart",
    "checking": "check", "checked": "restart",
    "formed": "restart", "stepped": "recompute", "caught_up": "",
}  # fmt: skip


# A warning has a course: until something was done about it, however slowly, steps were made.
_BEFORE_ORDERED = ("began", "detected", "named")


class StepTime(NamedTuple):
    """The steps that ended in one bucket of time, all in seconds.

    ``covered_s`` is what a typical rank's steps took, waiting and checkpoints included.
    """

    start_s: float
    until_s: float
    covered_s: float
    straggle_s: float
    checkpoint_s: float


class Ledger(NamedTuple):
    """Rows of ROWS with their microseconds; they add up to ``wall_us``."""

    wall_us: int
    rows: dict[str, int]
    notes: tuple[str, ...] = ()

    def share(self, *rows: str) -> float:
        """Return the share of the wall time that some rows have together, 0..1."""
        return sum(self.rows[row] for row in rows) / self.wall_us if self.wall_us else 0.0


class _Piece(NamedTuple):
    """A part of the span; ``round`` is that of the state it lies in, ``incident`` the one that it is a cost of."""

    begin: int
    end: int
    row: str  # of ROWS, or "training"
    round: int
    incident: str = ""


_begin, _end = attrgetter("begin"), attrgetter("end")


def keep_ledger(
    began_s: float,
    until_s: float,
    turns: Sequence[Turn],
    incidents: Iterable[Incident],
    steps: Sequence[StepTime],
) -> Ledger:
    """Divide the time between two moments; the arguments are those of ``Painted``."""
    return Painted(began_s, until_s, turns, incidents, steps).ledger()


class Painted:
    """A span with all of its coats, to be read as a whole, since some moment, or by incident.

    Args:
        began_s: when the job was started, wall clock seconds.
        until_s: now, or when it ended.
        turns: the states of the job, oldest first, a nameless one where not known; none: nothing is known but what
            incidents show.
        incidents: of this job; those that stopped nothing cost nothing of their own.
        steps: the steps that ended, by bucket, oldest first.
    """

    def __init__(
        self,
        began_s: float,
        until_s: float,
        turns: Sequence[Turn],
        incidents: Iterable[Incident],
        steps: Sequence[StepTime],
    ) -> None:
        incidents = tuple(incidents)
        begin, end = round(began_s * US), round(max(began_s, until_s) * US)
        self._span = begin, end
        self._steps = steps = sorted(steps, key=attrgetter("until_s"))
        pieces = _states(begin, end, turns)
        waits = [(piece.begin, piece.end) for piece in pieces if piece.row == "idle"]
        last = turns[-1].state if turns else ""
        up = sorted(round(turn.wall_s * US) for turn in turns if turn.state == "catching_up")
        stops = sorted(round(turn.wall_s * US) for turn in turns if turn.state not in _STEPPING)
        for incident in sorted(incidents, key=lambda one: one.marks.detected or one.marks.began):
            for piece in _of_incident(incident, begin, end, up, stops, last):
                _paint(pieces, piece)
        for wait in waits:
            _wait(pieces, *wait)
        ends = [round(one.until_s * US) for one in steps]
        self._pieces = _before_steps(pieces, steps, ends)
        self._stepping = [piece for piece in self._pieces if piece.row in ("training", "recompute")]
        self._ends = ends
        self._begins, self._alone = _alone(steps, ends, self._stepping)
        has_steps = any(round(one.start_s * US) < end for one in steps)
        self._notes = tuple(_notes(turns, incidents, has_steps=has_steps))

    def ledger(self, since_s: float | None = None) -> Ledger:
        """Return all rows, of the whole span or of what of it lies after ``since_s`` (wall clock seconds)."""
        begin, end = self._span
        if since_s is not None:
            begin = min(end, max(begin, round(since_s * US)))
        rows = dict.fromkeys(ROWS, 0)
        for piece in self._pieces[bisect_right(self._pieces, begin, key=_end) :]:
            if piece.row != "training":
                rows[piece.row] += piece.end - max(begin, piece.begin)
        for row, share_us in self._divide(begin).items():
            rows[row] += share_us
        assert sum(rows.values()) == end - begin
        straggle = ("straggle is a lower bound: a rank that is slow in turn with others is seen in part only",)
        return Ledger(end - begin, rows, (*self._notes, *(straggle if rows["straggle"] else ())))

    def by_incident(self) -> dict[str, dict[str, int]]:
        """Return what each incident cost, in microseconds by row; where two lie over each other the later one pays."""
        found: dict[str, dict[str, int]] = {}
        for piece in self._pieces:
            if piece.incident:
                rows = found.setdefault(piece.incident, {})
                rows[piece.row] = rows.get(piece.row, 0) + piece.end - piece.begin
        return found

    def _divide(self, since: int) -> dict[str, int]:
        """Divide training among the steps that ended in it; a round of which no step is known is not known.

        Of a bucket that other rows share, all steps belong to the parts in which steps are made.
        """
        lengths: dict[int, int] = {}
        for piece in self._stepping:
            if piece.row == "training" and piece.end > since:
                lengths[piece.round] = lengths.get(piece.round, 0) + piece.end - max(since, piece.begin)
        sums = {round_: [0.0, 0.0, 0.0] for round_ in lengths}
        first = bisect_right(self._ends, since)  # those before it lie before ``since``
        for step, begin, end, alone in zip(
            self._steps[first:], self._begins[first:], self._ends[first:], self._alone[first:], strict=True
        ):
            if alone is not None and begin >= since:
                of_round = sums[alone]
                of_round[0] += step.covered_s
                of_round[1] += step.straggle_s
                of_round[2] += step.checkpoint_s
            else:
                _spread(step, (begin, end), self._stepping, since, sums)
        shares = dict.fromkeys(("train", "straggle", "checkpoint", "other", "unknown"), 0)
        for round_, length in lengths.items():
            covered_s, straggle_s, checkpoint_s = sums[round_]
            if not covered_s:
                shares["unknown"] += length
                continue
            covered = min(length, round(covered_s * US))
            checkpoint = min(covered, round(checkpoint_s * US))
            straggle = min(covered - checkpoint, round(straggle_s * US))
            shares["checkpoint"] += checkpoint
            shares["straggle"] += straggle
            shares["train"] += covered - checkpoint - straggle
            shares["other"] += length - covered
        return shares


def _states(begin: int, end: int, turns: Sequence[Turn]) -> list[_Piece]:
    """Return the span by state. The first start lasts until the job trains for the first time."""
    if not turns:
        return [_Piece(begin, end, "unknown", 0)] if end > begin else []
    times = [begin]
    for turn in turns[1:]:
        times.append(min(end, max(times[-1], round(turn.wall_s * US))))
    times.append(end)
    pieces = []
    trained = turns[0].state not in _STARTING
    for turn, (since, until) in zip(turns, pairwise(times), strict=True):
        trained = trained or turn.state not in _STARTING
        if turn.state in _FINAL or not turn.state:
            row = "unknown"
        elif turn.state == _WAITS_FOR_NODES:
            row = "idle"
        elif not trained:
            row = "start"
        else:  # catching up begins when ranks are up: what lies before their first step is found by the steps
            row = "training" if turn.state in _TRAINING or turn.state == "catching_up" else "restart"
        if until > since:
            pieces.append(_Piece(since, until, row, turn.round))
    return pieces


def _of_incident(
    incident: Incident, begin: int, end: int, up: Sequence[int], stops: Sequence[int], last: str
) -> list[_Piece]:
    """Return what an incident cost, by its marks; nothing when it stopped nothing.

    ``up``: when ranks came up; ``stops``: when rounds ended.
    """
    marks = incident.marks
    judged_now = incident.state == "open" and last not in _TRAINING | {""}
    if not (marks.ordered or marks.stopped or judged_now):
        return []
    passed: list[tuple[int, str]] = []
    for name, row in _AFTER_MARK.items():
        wall_s = getattr(marks, name)
        if wall_s and not (name in _BEFORE_ORDERED and incident.course is not None):
            at = min(end, max(begin, round(wall_s * US), passed[-1][0] if passed else begin))
            passed.append((at, row))
    formed = min(end, max(begin, round(marks.formed * US)))
    stepped = round(marks.stepped * US) or end
    first = bisect_left(up, formed)
    if marks.formed and first < len(up) and up[first] < stepped:
        insort(passed, (min(end, max(up[first], formed)), "reload"), key=lambda one: one[0])
    if incident.state == "open":
        passed.append((end, ""))
    elif marks.stepped and not marks.caught_up and incident.step_after >= 0:
        # The next fault came before training was where it had been: until then all steps were made again.
        since = passed[-1][0]
        over = bisect_right(stops, since)
        passed.append((min(end, stops[over]) if over < len(stops) else end, ""))
    return [
        _Piece(since, until, row, incident.round, incident.id)
        for (since, row), (until, _) in pairwise(passed)
        if row and until > since
    ]


def _paint(pieces: list[_Piece], over: _Piece) -> None:
    """Lay a piece over the others, which follow each other without gaps."""
    first = bisect_right(pieces, over.begin, key=_end)
    behind = bisect_left(pieces, over.end, key=_begin)
    if first >= behind:
        return
    head, tail = pieces[first], pieces[behind - 1]
    painted = [over._replace(begin=max(head.begin, over.begin), end=min(tail.end, over.end))]
    if head.begin < over.begin:
        painted.insert(0, head._replace(end=over.begin))
    if tail.end > over.end:
        painted.append(tail._replace(begin=over.end))
    pieces[first:behind] = painted


def _wait(pieces: list[_Piece], begin: int, end: int) -> None:
    """Turn what of a restart lay in a wait for nodes into idle time."""
    first = bisect_right(pieces, begin, key=_end)
    behind = bisect_left(pieces, end, key=_begin)
    for piece in [one for one in pieces[first:behind] if one.row == "restart"]:
        _paint(pieces, piece._replace(begin=max(begin, piece.begin), end=min(end, piece.end), row="idle"))


def _before_steps(pieces: list[_Piece], steps: Sequence[StepTime], ends: Sequence[int]) -> list[_Piece]:
    """Take the time before a round's first step out of its training: its ranks were not known to be starting still.

    ``steps`` are in order of their ``ends``.
    """
    spans: dict[int, list[int]] = {}  # by round: where its training begins, and its last piece ends
    for piece in pieces:
        if piece.row == "training":
            spans.setdefault(piece.round, [piece.begin, 0])
    for piece in pieces:
        if piece.round in spans:
            spans[piece.round][1] = piece.end
    cuts: dict[int, tuple[int, str]] = {}
    for round_, (first, last) in sorted(spans.items()):
        place = bisect_right(ends, first)
        begin = round(steps[place].start_s * US) if place < len(steps) else last
        if begin < last:
            cuts[round_] = begin, "reload" if cuts else "start"
    painted = []
    for piece in pieces:
        cut, row = cuts.get(piece.round, (piece.begin, "")) if piece.row == "training" else (piece.begin, "")
        if piece.begin < cut:
            painted.append(piece._replace(row=row, end=min(piece.end, cut)))
        if cut < piece.end:
            painted.append(piece._replace(begin=max(piece.begin, cut)))
    return painted


def _alone(
    steps: Sequence[StepTime], ends: Sequence[int], stepping: Sequence[_Piece]
) -> tuple[list[int], list[int | None]]:
    """Return when the steps of each bucket began, and the round in whose training all of them lie, None where several.

    A step longer than its bucket began before it. Nearly all lie in the same piece as those before them.
    """
    begins: list[int] = []
    rounds: list[int | None] = []
    piece = stepping[0] if stepping else None
    for step, end in zip(steps, ends, strict=True):
        begin = min(round(step.start_s * US), end - round(step.covered_s * US))
        if piece is not None and not piece.begin <= begin < piece.end:
            piece = stepping[min(bisect_right(stepping, begin, key=_end), len(stepping) - 1)]
        alone = piece is not None and piece.begin <= begin < end <= piece.end and piece.row == "training"
        begins.append(begin)
        rounds.append(piece.round if piece is not None and alone else None)
    return begins, rounds


def _spread(
    step: StepTime, span: tuple[int, int], stepping: Sequence[_Piece], since: int, sums: dict[int, list[float]]
) -> None:
    """Add a bucket's steps to the rounds in whose training after ``since`` they lie."""
    begin, until = span
    whole = 0
    inside: dict[int, int] = {}
    for piece in stepping[bisect_right(stepping, begin, key=_end) : bisect_left(stepping, until, key=_begin)]:
        whole += min(until, piece.end) - max(begin, piece.begin)
        if piece.row == "training":
            late = min(until, piece.end) - max(begin, piece.begin, since)
            inside[piece.round] = inside.get(piece.round, 0) + max(0, late)
    for round_, late in inside.items():
        if late:
            part = late / whole
            of_round = sums[round_]
            of_round[0] += part * step.covered_s
            of_round[1] += part * step.straggle_s
            of_round[2] += part * step.checkpoint_s


def _notes(turns: Sequence[Turn], incidents: Iterable[Incident], *, has_steps: bool) -> Iterable[str]:
    if not turns:
        yield "the states of the job are not known (its history is missing): only what incidents tell is divided"
    elif not has_steps:
        yield "no finished steps were reported: what was trained is not known"
    lost = [one for one in incidents if one.marks.stepped and one.step_before >= 0 and one.step_after < 0]
    if lost:
        yield "the script does not say its own step numbers: steps that were made twice count as train"
