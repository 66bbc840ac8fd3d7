# SPDX-License-Identifier: Apache-2.0
"""How much of a job's time was training: its ledger while it lives, whole, of its last hour, now, and by incident.

Reckoning takes 2 ms for a job of some incidents and 10 ms for one of fifty, whatever its number of ranks (the steps
are reckoned as they come, in ``step_costs``); it is made anew at most once a second for small jobs, every ten seconds
for large ones. While a job trains, the account reaches to the end of its last finished step: a step that is under way
is no loss. *Now* is the last five minutes of the account; a job that is over has none. Time before the controller's
own record of steps began is not known, and no ratio is given where more than a twentieth is not.

Pure: the time is an argument.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megascale_ops.controller.history.step_history import StepHistory
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.record.state_machine import FINAL, State
from megascale_ops.ledger import EFFECTIVE, US, Ledger, Painted
from megascale_ops.schema.events import Incident
from megascale_ops.schema.history import Turn

HOUR_S = 3600.0
# 5 minutes: ten long steps and a checkpoint, so that neither makes it swing; and what was mended shows soon.
NOW_S = 300.0
SMALL_JOB, EVERY_S, EVERY_LARGE_S = 64, 1.0, 10.0
# 2 s: a job that is new is seen at the next tick; a record that begins later has missed something.
_PROMPT_S = 2.0
# Three steps and 15 s (a block of ten seconds, its grace, a heartbeat) without a finished step: training stands still.
_STEPS, _PATIENCE_S = 3.0, 15.0
_MOST_UNKNOWN = 0.05
_TRAINS = frozenset({State.RUNNING, State.DEGRADED})


class Goodput(NamedTuple):
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


def reckon(job: Job, history: StepHistory, incidents: Iterable[Incident], wall_s: float) -> Goodput | None:
    """Return a job's account; None before it has begun.

    Args:
        job: the job.
        history: of its present life.
        incidents: of this job.
        wall_s: now.
    """
    record = job.record
    began_s = record.started_wall_s
    if not began_s:
        return None
    until_s = record.since_wall_s if job.is_over else _until_s(job, history, wall_s)
    ours = [incident for incident in incidents if incident.job == job.name]
    painted = Painted(began_s, until_s, _turns(history, began_s), ours, history.costs.closed)
    whole, hour = painted.ledger(), painted.ledger(until_s - HOUR_S)
    now = painted.ledger(until_s - NOW_S) if not job.is_over else None
    return Goodput(
        until_wall_s=until_s,
        wall_s=whole.wall_us / US,
        rows=_seconds(whole.rows),
        ratio=_ratio(whole, "train"),
        effective=_ratio(whole, *EFFECTIVE),
        hour_s=hour.wall_us / US,
        hour=_seconds(hour.rows),
        ratio_hour=_ratio(hour, "train"),
        effective_hour=_ratio(hour, *EFFECTIVE),
        ratio_now=_ratio(now, "train") if now is not None else -1.0,
        effective_now=_ratio(now, *EFFECTIVE) if now is not None else -1.0,
        incidents={name: _seconds(rows) for name, rows in painted.by_incident().items()},
        notes=whole.notes,
    )


def _until_s(job: Job, history: StepHistory, wall_s: float) -> float:
    """Return the end of the last finished step while the job trains, now when it does not."""
    closed = history.costs.closed
    if job.state not in _TRAINS or not closed:
        return wall_s
    last_s = closed[-1].until_s
    patience_s = _PATIENCE_S + _STEPS * history.costs.step_s
    return last_s if max(job.record.since_wall_s, wall_s - patience_s) <= last_s <= wall_s else wall_s


def _turns(history: StepHistory, began_s: float) -> list[Turn]:
    """Return the states of the job, with a nameless one for the time of which the history knows nothing."""
    turns = history.turns
    known_s = max(history.known_s, turns[0].wall_s) if turns else history.known_s
    if not turns or known_s - began_s <= _PROMPT_S:
        return turns
    before = [turn for turn in turns if turn.wall_s <= known_s]
    after = turns[len(before) :]
    at = [Turn(known_s, before[-1].state, before[-1].round)] if before else []
    return [Turn(began_s, "", 0), *at, *after]


def _ratio(ledger: Ledger, *rows: str) -> float:
    if not ledger.wall_us or ledger.share("unknown") > _MOST_UNKNOWN:
        return -1.0
    return ledger.share(*rows)


def _seconds(rows: Mapping[str, int]) -> dict[str, float]:
    return {row: us / US for row, us in rows.items()}


class Accounts:
    """The accounts of all jobs, each kept as long as it is new enough. Owned by the loop."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, State, Goodput]] = {}
        self.paid: dict[tuple[str, str], float] = {}  # by job and stage: what incidents that are over have cost
        self._paid_for: set[str] = set()

    def of(
        self, job: Job, history: StepHistory | None, incidents: Mapping[str, Incident], now_s: float, wall_s: float
    ) -> Goodput | None:
        """Return a job's account, as of now or of a while ago.

        Args:
            job: the job.
            history: of its present life; None: nothing is kept of it.
            incidents: all that are known, by id.
            now_s: monotonic seconds.
            wall_s: wall clock seconds.
        """
        known = self._known.get(job.name)
        if history is None:
            return known[2] if known is not None else None
        every_s = EVERY_S if job.record.world_size <= SMALL_JOB else EVERY_LARGE_S
        if known is not None and known[1] is job.state and (now_s - known[0] < every_s or job.state in FINAL):
            return known[2]
        made = reckon(job, history, incidents.values(), wall_s)
        if made is not None:
            self._known[job.name] = now_s, job.state, made
            self._pay(job.name, made, incidents)
        return made

    def _pay(self, name: str, made: Goodput, incidents: Mapping[str, Incident]) -> None:
        """Add up by stage what incidents have cost, each once: when it is over, for then it changes no more."""
        for incident, rows in made.incidents.items():
            if incident in self._paid_for or incidents[incident].state == "open":
                continue
            self._paid_for.add(incident)
            for stage, cost_s in rows.items():
                self.paid[name, stage] = self.paid.get((name, stage), 0.0) + cost_s
        if len(self._paid_for) > 2 * len(incidents) + 64:
            self._paid_for &= incidents.keys()

    def forget_time(self) -> None:
        """The wall clock was stepped: everything is reckoned anew."""
        self._known.clear()
