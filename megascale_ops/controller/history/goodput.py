# SPDX-License-Identifier: Apache-2.0
"""The accounts of a controller's jobs: ``megascale_ops.account`` of what it keeps, reckoned as often as is needed.

Reckoning takes 2 ms for a job of some incidents and 10 ms for one of fifty, whatever its number of ranks (the steps
are reckoned as they come, in ``step_costs``); it is made anew at most once a second for small jobs, every ten seconds
for large ones.

Pure: the time is an argument.
"""

from collections.abc import Iterable, Mapping

from megascale_ops import account
from megascale_ops.account import Account, Kept
from megascale_ops.controller.history.step_history import StepHistory
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.record.state_machine import FINAL, State
from megascale_ops.schema.events import Incident
from megascale_ops.schema.history import Facts

SMALL_JOB, EVERY_S, EVERY_LARGE_S = 64, 1.0, 10.0


def reckon(job: Job, history: StepHistory, incidents: Iterable[Incident], wall_s: float) -> Account | None:
    """Return a job's account; None before it has begun.

    Args:
        job: the job.
        history: of its present life.
        incidents: of this job.
        wall_s: now.
    """
    record = job.record
    if not record.started_wall_s:
        return None
    costs = history.costs
    kept = Kept(record.started_wall_s, history.turns, history.known_s, costs.closed, costs.step_s)
    return _account(job, kept, incidents, wall_s)


def reckon_left(job: Job, facts: Facts, incidents: Iterable[Incident]) -> Account | None:
    """Return the account of a job that is over from its file; None where that is of another life, or has none."""
    kept = account.kept_in(facts)
    if kept is None or facts.life != job.record.life or not job.is_over:
        return None
    return _account(job, kept, incidents, facts.until_wall_s)


def _account(job: Job, kept: Kept, incidents: Iterable[Incident], wall_s: float) -> Account:
    ours = [incident for incident in incidents if incident.job == job.name]
    until_s = account.ends_at(kept, job.record.state, job.record.since_wall_s, wall_s)
    return account.reckon(kept, ours, until_s, is_over=job.is_over)


class Accounts:
    """The accounts of all jobs, each kept as long as it is new enough. Owned by the loop."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, State, Account]] = {}
        self.paid: dict[tuple[str, str], float] = {}  # by job and stage: what incidents that are over have cost
        self._paid_for: set[str] = set()

    def of(
        self, job: Job, history: StepHistory | None, incidents: Mapping[str, Incident], now_s: float, wall_s: float
    ) -> Account | None:
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

    def keep(self, job: Job, made: Account) -> None:
        """Keep the account of a job that was over before this controller began; it changes no more."""
        self._known[job.name] = 0.0, job.state, made

    def _pay(self, name: str, made: Account, incidents: Mapping[str, Incident]) -> None:
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
        """The wall clock was stepped: everything is reckoned anew, but of jobs that are over."""
        self._known = {name: known for name, known in self._known.items() if known[1] in FINAL}
