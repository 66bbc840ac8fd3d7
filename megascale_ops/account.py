# SPDX-License-Identifier: Apache-2.0
"""How much of a job's time was training: the one reckoning of every figure that is told of it.

The page, ``status``, ``top``, metrics, what a run says at its end and the report all show figures of an ``Account``,
each with its window: the whole job, its last hour, now (the last five minutes; a job that is over has none). A living
controller reckons it from what it keeps; of a run that is over it is reckoned from the same numbers in the run's file.
So all say the same to the last digit.

Time before the record of steps began is not known, and no ratio is told where more than a twentieth is not. Pure: told
the time.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megascale_ops.ledger import EFFECTIVE, US, Ledger, Painted, StepTime
from megascale_ops.schema.events import OVER, Incident
from megascale_ops.schema.history import Facts, Turn

HOUR_S = 3600.0
# 5 minutes: ten long steps and a checkpoint, so that neither makes it swing; and what was mended shows soon.
NOW_S = 300.0
# 2 s: a job that is new is seen at the next tick; a record that begins later has missed something.
_PROMPT_S = 2.0
# Three steps and 15 s (a block of ten seconds, its grace, a heartbeat) without a finished step: training stands still.
_STEPS, _PATIENCE_S = 3.0, 15.0
_MOST_UNKNOWN = 0.05
# 4: a hundredth of a per cent. Rounded here, so that output with fewer digits agrees everywhere.
_DIGITS = 4
_TRAINS = ("running", "degraded")


class Account(NamedTuple):
    """One job's account; seconds, and ratios in 0..1, -1 where not known.

    ``rows`` and ``hour`` have the rows of the ledger and add up to ``wall_s`` and ``hour_s``. ``ratio`` is the share of
    training, ``effective`` that of all steps that count, slowed down or not; ``*_now``: of the last ``NOW_S``.
    ``incidents``: by id, what each has cost.
    """

    until_wall_s: float
    wall_s: float
    rows: dict[str, float]
    ratio: float
    effective: float
    hour_s: float
    hour: dict[str, float]
    ratio_hour: float
    effective_hour: float
    ratio_now: float
    effective_now: float
    incidents: dict[str, dict[str, float]]
    notes: tuple[str, ...] = ()


class Kept(NamedTuple):
    """What is kept of a job's time, by its controller or in the file that one has left.

    Attributes:
        began_s: when the job was started, wall clock seconds.
        turns: its states, oldest first.
        known_s: since when its steps are kept.
        steps: blocks of them, oldest first.
        step_s: a step of late, 0 where it is not known.
    """

    began_s: float
    turns: Sequence[Turn]
    known_s: float
    steps: Sequence[StepTime]
    step_s: float = 0.0


def kept_in(facts: Facts) -> Kept | None:
    """Return what a history's file has kept; None of an older program's, which kept no account."""
    if not facts.known_wall_s:
        return None
    steps = [StepTime(*one) for one in facts.costs]
    return Kept(facts.began_wall_s, facts.turns, facts.known_wall_s, steps, facts.step_s)


def reckon(kept: Kept, incidents: Iterable[Incident], until_s: float, *, is_over: bool) -> Account:
    """Return a job's account as of ``until_s`` (``ends_at``); ``incidents`` are the job's own."""
    painted = paint(kept, incidents, until_s)
    whole, hour = painted.ledger(), painted.ledger(until_s - HOUR_S)
    now = painted.ledger(until_s - NOW_S) if not is_over else None
    return Account(
        until_wall_s=until_s,
        wall_s=whole.wall_us / US,
        rows=_seconds(whole.rows),
        ratio=ratio(whole, "train"),
        effective=ratio(whole, *EFFECTIVE),
        hour_s=hour.wall_us / US,
        hour=_seconds(hour.rows),
        ratio_hour=ratio(hour, "train"),
        effective_hour=ratio(hour, *EFFECTIVE),
        ratio_now=ratio(now, "train") if now is not None else -1.0,
        effective_now=ratio(now, *EFFECTIVE) if now is not None else -1.0,
        incidents={name: _seconds(rows) for name, rows in painted.by_incident().items()},
        notes=whole.notes,
    )


def paint(kept: Kept, incidents: Iterable[Incident], until_s: float) -> Painted:
    """Return the job's time by what it went into, up to ``until_s``."""
    return Painted(kept.began_s, until_s, _turns(kept), incidents, kept.steps)


def ends_at(kept: Kept, state: str, since_s: float, wall_s: float) -> float:
    """Return where an account ends: a step that is under way is no loss.

    Args:
        kept: of the job.
        state: in which it is.
        since_s: since when.
        wall_s: now.

    Returns:
        When the job ended; the end of its last finished step while it trains; else now.
    """
    if state in OVER:
        return since_s
    if state not in _TRAINS or not kept.steps:
        return wall_s
    last_s = kept.steps[-1].until_s
    patience_s = _PATIENCE_S + _STEPS * kept.step_s
    return last_s if max(since_s, wall_s - patience_s) <= last_s <= wall_s else wall_s


def ratio(ledger: Ledger, *rows: str) -> float:
    """Return the share of some rows of a ledger, -1 where too much of its time is not known."""
    if not ledger.wall_us or ledger.share("unknown") > _MOST_UNKNOWN:
        return -1.0
    return round(ledger.share(*rows), _DIGITS)


def _turns(kept: Kept) -> Sequence[Turn]:
    """Return the states of the job, with a nameless one for the time of which nothing is kept."""
    turns = kept.turns
    known_s = max(kept.known_s, turns[0].wall_s) if turns else kept.known_s
    if not turns or known_s - kept.began_s <= _PROMPT_S:
        return turns
    before = [turn for turn in turns if turn.wall_s <= known_s]
    after = turns[len(before) :]
    at = [Turn(known_s, before[-1].state, before[-1].round)] if before else []
    return [Turn(kept.began_s, "", 0), *at, *after]


def _seconds(rows: Mapping[str, int]) -> dict[str, float]:
    return {row: us / US for row, us in rows.items()}
