# SPDX-License-Identifier: Apache-2.0
"""The step histories of all jobs: fed by heartbeats, and by the tick when a job changes its state.

A report's steps are placed by its sender's monotonic clock (``senders``).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from megascale_ops.controller.cluster.steady import Fields, Ranks
from megascale_ops.controller.history.senders import Senders
from megascale_ops.controller.history.step_history import StepHistory
from megascale_ops.controller.job.job import Job
from megascale_ops.diagnosis.statistics.cooperative import Pieces, run_through
from megascale_ops.diagnosis.stragglers.step_table import LARGE
from megascale_ops.schema.events import OVER
from megascale_ops.schema.history import Facts, History, Place
from megascale_ops.schema.messages import Heartbeat, JobReport

if TYPE_CHECKING:
    from megascale_ops.diagnosis.stragglers.step_table import Table

# 16 jobs that are over and whose history was not written: a controller without a folder to write to.
MOST_OVER = 16

# The job, the round, the rows, where every rank is, and the ranks that have come or moved since the call before.
HandOn = Callable[[Job, int, "Table", Mapping[int, Place], Iterable[int]], None]


class Histories:
    """One history for each job, of its present life. Owned by the loop.

    Args:
        wall: wall clock seconds, to know since when each history is kept; None: since its job began.
        hand_on: gets the steps that were put by: the job, the round of the steps, and what ``StepHistory`` hands on.
    """

    def __init__(self, wall: Callable[[], float] | None = None, hand_on: HandOn | None = None) -> None:
        self._wall = wall
        self._hand_on = hand_on
        self._round: dict[str, int] = {}  # by job: of what is put by
        self.by_job: dict[str, StepHistory] = {}
        self._lives: dict[str, tuple[int, str, int]] = {}  # by job: life, state and round that were recorded last
        self.senders = Senders()

    def sent_wall_s(self, heartbeat: Heartbeat, wall_s: float) -> float:
        """Return when a heartbeat that came at ``wall_s`` was sent, seconds of our wall clock."""
        sender = heartbeat.node, heartbeat.serves
        return self.senders.sent_wall_s(sender, heartbeat.agent_id, heartbeat.mono_s, wall_s)

    def ingest_report(
        self, job: Job, node: str, report: JobReport, sent_wall_s: float, *, is_over: bool = False
    ) -> bool:
        """Take a node's steps of a job; return whether they were put by, and will be handed on.

        Those of a round that is over are not handed on.
        """
        history = self.of(job)
        are_put_by = job.record.world_size >= LARGE and not is_over
        if are_put_by and self._round.get(job.name) != report.round:
            history.reckon()
            self._round[job.name] = report.round
        take = history.put_by if are_put_by else history.ingest_steps
        for rank in report.ranks:
            if rank.work and rank.round == report.round:
                take(rank.rank, node, rank.mesh, rank.work, sent_wall_s)
        return are_put_by

    def put_rows_by(self, job: Job, round_: int, ranks: Ranks, steps: Sequence[Fields], sent_wall_s: "Table") -> None:
        """Put the steps of many ranks of a large job's round by; see ``StepHistory.put_rows_by``."""
        history = self.of(job)
        if self._round.get(job.name) != round_:
            history.reckon()
            self._round[job.name] = round_
        history.put_rows_by(ranks, steps, sent_wall_s)

    def reckon(self, job: Job) -> None:
        """Hand on what was put by."""
        history = self.by_job.get(job.name)
        if history is not None:
            history.reckon()

    def of(self, job: Job) -> StepHistory:
        """Return the history of a job's present life; one of an earlier life is let go."""
        known = self._lives.get(job.name)
        history = self.by_job.get(job.name)
        if history is None or known is None or known[0] != job.record.life:
            known_s = self._wall() if self._wall is not None else 0.0
            history = self.by_job[job.name] = StepHistory(
                job.record.started_wall_s, known_s=known_s, hand_on=partial(self._pass_on, job)
            )
            self._lives[job.name] = (job.record.life, "", 0)
        return history

    def _pass_on(self, job: Job, rows: "Table", places: Mapping[int, Place], came: Iterable[int]) -> None:
        if self._hand_on is not None:
            self._hand_on(job, self._round[job.name], rows, places, came)

    def poll_job(self, job: Job) -> None:
        """Note a change of the job's state since the last look, and let time pass."""
        run_through(self.pieces(job))

    def pieces(self, job: Job) -> Pieces[None]:
        """Do the same piece by piece; more steps may be taken in between."""
        record = job.record
        now = (record.life, record.state, record.round)
        known = self._lives.get(job.name)
        history = self.by_job.get(job.name)
        if history is not None and self._wall is not None:
            yield from history.pieces(self._wall())
        if now == known or self._lives.get(job.name) != known:
            return
        if known is None and job.is_over:
            return  # it was over before this controller began: what is kept of it is in its file
        self.of(job).turn(record.since_wall_s, record.state, record.round)
        self._lives[job.name] = now
        over = [name for name, (_life, state, _round) in self._lives.items() if state in OVER]
        for name in over[: max(0, len(over) - MOST_OVER)]:
            self.forget(name)

    def shift(self, step_s: float) -> None:
        """Move everything with a wall clock that was stepped."""
        for history in self.by_job.values():
            history.shift(step_s)
        self.senders = Senders()

    def forget(self, name: str) -> None:
        """Let go of a job that is over."""
        self.by_job.pop(name, None)
        self._round.pop(name, None)

    def restore(self, job: Job, kept: History) -> None:
        """Go on with what another controller has kept of this life of the job."""
        facts = kept.facts
        if facts.life != job.record.life:
            return
        self.by_job.pop(job.name, None)
        history = self.of(job)
        history.restore(facts.turns, facts.forgotten_turns, facts.places, kept.buckets)
        if facts.known_wall_s:
            history.known_s = facts.known_wall_s
            history.costs.restore(facts.costs)
        last = facts.turns[-1] if facts.turns else None
        self._lives[job.name] = (facts.life, last.state if last else "", last.round if last else 0)

    def snapshot(self, job: Job, wall_s: float) -> History | None:
        """Return all that is kept of a job, None when that is nothing. Its cells go on being filled."""
        history = self.by_job.get(job.name)
        if history is None:
            return None
        record = job.record
        facts = Facts(
            job=job.name,
            life=record.life,
            round=record.round,
            world_size=record.world_size,
            nodes=(record.min_nodes, record.max_nodes),
            began_wall_s=record.started_wall_s,
            until_wall_s=record.since_wall_s if job.is_over else wall_s,
            turns=tuple(history.turns),
            forgotten_turns=history.forgotten_turns,
            places=history.places(),
            policy=record.policy,
            changed=record.tuned,
            costs=tuple(history.costs.closed),
            known_wall_s=history.known_s,
            step_s=history.costs.step_s,
        )
        return History(facts, history.buckets())
