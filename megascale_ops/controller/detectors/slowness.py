# SPDX-License-Identifier: Apache-2.0
"""Hand what ranks report to the detectors (stragglers, skew, loss, ranks' own checks), and keep their warnings true.

A warning never stops anything by itself: the policy weighs costs by ``round.warnings``. Small jobs are judged when a
heartbeat brings steps, large ones ten times a second. A rank has one warning at a time: where its host's steps and its
collectives both show that it is slow, the host's verdict stands, for it has the cause.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from megascale_ops.controller.detectors.own_checks import OwnChecks
from megascale_ops.controller.detectors.skew import SLOW_LINK, STRAGGLER, Skewing
from megascale_ops.controller.job import diagnose
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.record.state_machine import ACTIVE
from megascale_ops.diagnosis.statistics.cooperative import Pieces, run_through
from megascale_ops.diagnosis.stragglers.causes import NAMES, Figures, figures_of, verdict_of
from megascale_ops.diagnosis.stragglers.detector import Watch
from megascale_ops.diagnosis.stragglers.loss import LossWatch
from megascale_ops.diagnosis.stragglers.send_queues import LinkWatch
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.history import Place
from megascale_ops.schema.messages import JobReport

if TYPE_CHECKING:
    from megascale_ops.diagnosis.stragglers.own_work import Held, Rank
    from megascale_ops.diagnosis.stragglers.peer_group import Group
    from megascale_ops.diagnosis.stragglers.step_table import Table

# 20 %: a warning's cost is published again when it has changed by so much, and at most every 5 s.
_NEWS_SHARE = 0.2
_NEWS_S = 5.0


class _Watched:
    """One round of one job under watch."""

    __slots__ = ("alarms", "by_steps", "links", "losses", "round", "steps", "told_s")

    def __init__(self, round_: int) -> None:
        self.round = round_
        self.steps = Watch()
        self.links = LinkWatch()
        self.losses = LossWatch()
        self.by_steps: dict[str, Verdict] = {}  # slow ranks by the hosts' steps, as of the last judgement
        self.told_s: dict[str, float] = {}  # by key of a warning
        self.alarms: dict[int, tuple[Held, Figures]] = {}  # by rank: why it is named, and by which figures it was

    def alarm(self, group: "Group", rank: "Rank", held: "Held") -> Figures | None:
        """Return the figures by which a rank was named; None of one that is slow now and then, whose card counts."""
        if held.intermittent:
            return None
        known = self.alarms.get(rank.rank)
        if known is None or known[0] != held:
            known = held, figures_of(group, rank, held, alarm=True)
        starved = self.steps.starved_of(rank.rank)
        if starved > known[1].starved:  # the most that it was since it is named: others' processes come and go
            known = held, known[1]._replace(starved=starved)
        self.alarms[rank.rank] = known
        return known[1]


class Slowness:
    """The steps and collectives of all jobs."""

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions
        self._registry = transitions.registry
        self.skewing = Skewing(transitions.clock)
        self.own_checks = OwnChecks(transitions)
        self._watched: dict[str, _Watched] = {}

    def ingest_report(self, job: Job, node: str, report: JobReport, *, steps: bool = True) -> None:
        """Take a node's report of its ranks; without the steps themselves where they come as rows."""
        self.own_checks.ingest_report(job, node, report)
        stepped = [rank for rank in report.ranks if rank.work and rank.round == report.round]
        if not stepped:
            return
        watched = self._open(job, report.round)
        for rank in stepped:
            watched.steps.hear(rank.rank, rank.process.starved)
            if steps:
                watched.steps.ingest_steps(rank.rank, node, rank.mesh, rank.work)
                watched.losses.ingest_losses(rank.rank, node, rank.work, job.record.policy)
            if rank.sending >= 0.0:
                watched.links.ingest_sending(rank.rank, node, rank.sending, rank.work, rank.sending_to)
        self.skewing.know(job, node, stepped)

    def take_rows(self, job: Job, round_: int, rows: "Table", places: Mapping[int, Place], came: Iterable[int]) -> None:
        """Take steps of many ranks of a round, as a history hands them on; those of a round that is over are void."""
        if round_ != job.record.round:
            return
        watched = self._open(job, round_)
        watched.steps.take_rows(rows, places, came)
        watched.losses.take_rows(rows, places, job.record.policy)

    def take_collectives(self, job: Job, node: str, report: JobReport) -> None:
        """Take a node's report of finished collectives."""
        self._open(job, report.round)
        self.skewing.ingest_samples(job, node, report.collectives)

    def _open(self, job: Job, round_: int) -> _Watched:
        """Return what is known of a round; what was known of another one is void."""
        watched = self._watched.get(job.name)
        if watched is None or watched.round != round_:
            self._end(job, "another round began")
            watched = self._watched[job.name] = _Watched(round_)
        return watched

    def poll_job(self, job: Job) -> None:
        """Judge what has come in since the last look, and keep the job's warnings true."""
        run_through(self.pieces(job))

    def pieces(self, job: Job) -> Pieces[None]:
        """Do the same piece by piece; anything may happen to the job in between."""
        watched = self._watched.get(job.name)
        if watched is None:
            return
        if job.state not in ACTIVE or watched.round != job.record.round:
            self._end(job, f"the job is {job.state.value}")
            return
        policy = job.record.policy
        moved = yield from watched.steps.pieces(policy, job.record.world_size)
        if not self._is_current(job, watched):
            return
        if moved:
            watched.by_steps = {
                f"{STRAGGLER}{rank.rank}": verdict_of(
                    group,
                    rank,
                    held,
                    policy,
                    watched.round,
                    watched.alarm(group, rank, held),
                )
                for group, rank, held in watched.steps.held()
            }
        by_collectives = yield from self.skewing.pieces(job, watched.steps)
        if not self._is_current(job, watched):
            return
        wanted = by_collectives | watched.by_steps | watched.losses.verdicts(watched.round)
        queued = watched.links.poll_queues(
            *(self._transitions.clock(), self._transitions.wall(), job.round.step, watched.round), lambda: _places(job)
        )
        if queued is not None:
            wanted.setdefault(f"{SLOW_LINK}{queued.culprits[0]}", queued)
        self._keep(
            job,
            watched,
            {key: diagnose.quote_hardware(self._registry, job, self._loaded(one)) for key, one in wanted.items()},
        )

    def _loaded(self, verdict: Verdict) -> Verdict:
        """Return a verdict on a rank that others' processes starve with the load of its node."""
        is_starved = verdict.cause == "starved" and verdict.nodes
        load = diagnose.load_of(self._registry, verdict.nodes[0]) if is_starved else ""
        reason = verdict.reason.replace(NAMES["starved"], f"{NAMES['starved']} ({load})", 1)
        return msgspec.structs.replace(verdict, reason=reason) if load else verdict

    def _is_current(self, job: Job, watched: _Watched) -> bool:
        """Return whether a round goes on that may have ended between two pieces."""
        return self._watched.get(job.name) is watched and watched.round == job.record.round

    def _keep(self, job: Job, watched: _Watched, wanted: dict[str, Verdict]) -> None:
        changed = False
        now_s = self._transitions.clock()
        for key, verdict in wanted.items():
            known = _known(job, key)
            is_due = now_s - watched.told_s.get(key, 0.0) >= _NEWS_S or _is_starved_after_all(known, verdict)
            dated = verdict if known is not None else self._dated(job, verdict)
            if known is None or (is_due and _is_news(known, verdict)):
                self._transitions.warn(job, key, dated)
                watched.told_s[key] = now_s
                changed = True
        for key in [key for key in job.round.warnings if _is_ours(key) and key not in wanted]:
            self._transitions.unwarn(job, key, "all is as it should be again")
            changed = True
        if changed:
            self._transitions.save(job)

    def _dated(self, job: Job, verdict: Verdict) -> Verdict:
        """Return a verdict with when it began, by the steps that were made since: the time that it took to see it."""
        if verdict.since_wall_s or verdict.since_step < 0:
            return verdict
        step_s = diagnose.place(self._transitions.registry, job, verdict)[1] or job.record.step_s
        since_s = max(0, job.round.step - verdict.since_step) * step_s
        return msgspec.structs.replace(verdict, since_wall_s=self._transitions.wall() - since_s)

    def _end(self, job: Job, why: str) -> None:
        """Forget a round."""
        self._watched.pop(job.name, None)
        self.skewing.end(job)
        ours = [key for key in job.round.warnings if _is_ours(key)]
        for key in ours:
            self._transitions.unwarn(job, key, why)
        if ours:
            self._transitions.save(job)


def _places(job: Job) -> dict[str, str]:
    """Return the nodes of a round by the address at which others reach them, where no two have the same."""
    found: dict[str, str] = {}
    for member in job.record.members:
        found[member.addr] = member.node if member.addr not in found else ""
    return {address: node for address, node in found.items() if node}


def _known(job: Job, key: str) -> Verdict | None:
    incident = job.round.warnings.get(key)
    return incident.verdict if incident is not None else None


def _is_ours(key: str) -> bool:
    return key.startswith((STRAGGLER, SLOW_LINK)) or key in ("loss_nan", "loss_spike")


def _is_starved_after_all(known: Verdict | None, now: Verdict) -> bool:
    """Return whether the cause is now known to be CPU starvation: heartbeats show it up to 3 s after the steps do.

    Until then a card reads "without CPU: starved of it, or asleep", and it should be corrected at once.
    """
    return known is not None and known.cause != "starved" and now.cause == "starved"


def _is_news(known: Verdict, now: Verdict) -> bool:
    """Return whether a verdict differs from the one that is known."""
    if (known.cause, known.culprits) != (now.cause, now.culprits):
        return True
    return abs(now.cost - known.cost) > _NEWS_SHARE * max(known.cost, now.cost)
