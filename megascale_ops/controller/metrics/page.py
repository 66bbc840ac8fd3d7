# SPDX-License-Identifier: Apache-2.0
"""The controller's metrics for Prometheus, gathered at each scrape: a heartbeat pays nothing for it.

What changes under the loop's hands is read on the loop, in pieces of some milliseconds; 28,000 lines of text are made
by a thread, in 0.2 s. So heartbeats go on meanwhile. All names, kinds and labels are those of the table in ``schema``.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from megascale_ops import __version__
from megascale_ops.controller import status
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.journal.store import Store
from megascale_ops.controller.loop import Loop
from megascale_ops.controller.metrics import job_samples as figures
from megascale_ops.controller.notifying import Notifying
from megascale_ops.controller.record.state_machine import State
from megascale_ops.distribution import Distribution
from megascale_ops.exposition import Encoded, Page, Sample, encoded

# An agent without a heartbeat for a minute does not count as a node.
HEARD_S = 60.0
# 256 nodes, 2,048 ranks: 2 ms, then other tasks get a turn.
NODES_AT_ONCE = 256
# Of a controller that has no other beside it.
_ALONE = dict.fromkeys(
    (
        "megascale_controller_unheard_seconds",
        "megascale_controller_refused_nodes",
        "megascale_controller_gave_way_total",
    ),
    0.0,
)
REASONS = ("malformed", "oversized", "version", "unauthorised", "stale")

Samples = list[Sample]
Columns = list[tuple[str, Sequence[float], str]]


class _Gathered(NamedTuple):
    """One scrape's facts; nothing in it changes any more."""

    families: dict[str, Samples]
    ranks: dict[str, Columns]
    distributions: dict[str, list[tuple[tuple[str, ...], Distribution]]]


class Metrics:
    """The controller's metrics as a page; ``standing``: what is known of it among several, by name."""

    def __init__(
        self,
        loop: Loop,
        store: Store,
        notifying: Notifying | None = None,
        standing: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._loop = loop
        self._standing = standing
        self._notifying = notifying
        self._store = store
        self._incidents = figures.IncidentCount()

    async def page(self, accept: str = "") -> Encoded:
        """Return all metrics, in the format that the request's header ``Accept`` asks for."""
        return await asyncio.to_thread(_encoded, await self._gather(), accept)

    async def _gather(self) -> _Gathered:
        found = _Gathered({}, {}, {})
        self._incidents.poll_incidents(self._loop.incidents)
        self._own(found)
        await self._nodes(found)
        for job in figures.shown(self._loop.jobs.values(), self._loop.wall()):
            with self._loop.faults.contain(job.name, "writing its metrics", is_shown=True):
                self._job(found, job, await self._look(job))
                self._troubles(found, job)
                self._time(found, job)
                self._ranks(found, job)
        return found

    def _own(self, found: _Gathered) -> None:
        loop, store = self._loop, self._store
        lives = [one for one in loop.nodes.book.lives() if one.state != "healthy"]
        states = {state.value: 0 for state in State}
        for job in loop.jobs.values():
            states[job.state.value] += 1
        found.families.update(
            {
                "megascale_build_info": [((__version__, "controller"), 1.0)],
                "megascale_jobs": [((state,), float(count)) for state, count in states.items()],
                "megascale_controller_heartbeats_total": [((), float(loop.heartbeats))],
                "megascale_controller_heartbeats_rejected_total": [
                    ((reason,), float(loop.rejected[reason])) for reason in REASONS
                ],
                "megascale_controller_lag_seconds": [((), loop.lag_s)],
                "megascale_controller_leader": [((), float(not loop.is_paused()))],
                "megascale_controller_epoch": [((), float(store.fence.epoch if store.fence is not None else 0))],
                "megascale_controller_own_faults_total": [((), float(loop.faults.total.total()))],
                "megascale_controller_unjudged_jobs": [((), float(loop.faults.unjudged))],
                "megascale_controller_journal_errors_total": [((), float(store.write_errors))],
                "megascale_controller_journal_waiting": [((), float(store.kept))],
                "megascale_controller_journal_failing": [((), float(bool(store.failing)))],
                "megascale_controller_journal_damaged": [((), float(bool(store.loss)))],
                "megascale_controller_journal_lost_events_total": [((), float(store.dropped_events))],
                "megascale_controller_moves_total": [
                    (move, float(count)) for move, count in loop.transitions.moves_made.items()
                ],
                "megascale_controller_otlp_records_total": [
                    ((outcome,), float(loop.exported[outcome])) for outcome in sorted(loop.exported)
                ],
                "megascale_node_life_info": [((one.node, one.state), 1.0) for one in lives],
                "megascale_node_engine_info": [
                    ((one.node, one.engine.state, one.state), 1.0) for one in loop.nodes.book.lives() if one.engine
                ],
                "megascale_nodes_spared": [((), float(sum(one.is_spared for one in lives)))],
                "megascale_gpu_bad_info": [
                    ((one.node, one.uuid, one.reason), 1.0) for one in loop.hardware.book.entries()
                ],
            }
        )
        found.families.update({name: [((), value)] for name, value in (_ALONE | dict(self._standing())).items()})
        if self._notifying is not None:
            for outcome, counts in self._notifying.counts.items():
                name = f"megascale_controller_notifications_{outcome}_total"
                found.families[name] = [((kind,), float(counts[kind])) for kind in self._notifying.kinds]
        found.distributions["megascale_controller_tick_seconds"] = [((), loop.tick_times.copy())]
        found.distributions["megascale_controller_journal_write_seconds"] = [((), store.write_times.copy())]

    async def _nodes(self, found: _Gathered) -> None:
        loop = self._loop
        now_s, wall_s = loop.clock(), loop.wall()
        # The longest silent come first: of the agents of one node, the one with the newest heartbeat is exported.
        heard = list({view.node: now_s - view.heard_s for view in loop.registry.nodes()}.items())
        await asyncio.sleep(0)
        found.families["megascale_controller_nodes"] = [((), float(sum(age_s < HEARD_S for _, age_s in heard)))]
        found.families["megascale_agent_heard_timestamp_seconds"] = [((node,), wall_s - age_s) for node, age_s in heard]
        found.families["megascale_node_clock_offset_seconds"] = [
            ((node,), ahead_s) for node, ahead_s in loop.node_clocks.ahead_s(now_s)
        ]

        found.families.update(figures.self_checks(loop.nodes.checks.all()))

    async def _look(self, job: Job) -> figures.Ranks:
        """Look at all ranks, and let heartbeats in between."""
        registry, round_ = self._loop.registry, job.record.round
        so_far = figures.RanksSoFar()
        for number, node in enumerate(list(job.nodes), 1):
            view, share = registry.node(node, job.name), registry.share(node, job.name, round_)
            if view is not None and share is not None:
                so_far.add(view, share, self._loop.clock())
            if number % NODES_AT_ONCE == 0:
                await asyncio.sleep(0)
        return so_far.result()

    def _job(self, found: _Gathered, job: Job, ranks: figures.Ranks) -> None:
        record, at = job.record, (job.name,)
        _add(found, "megascale_job_state_info", [((*at, one.value), float(one is job.state)) for one in State])
        _add(found, "megascale_job_round", [(at, float(record.round))])
        _add(found, "megascale_job_world_size", [(at, float(record.world_size))])
        _add(found, "megascale_job_ranks", [((*at, name), float(n)) for name, n in figures.judged(job).items()])
        _add(found, "megascale_job_step", [(at, float(ranks.step))])
        if job.round.last_step_wall_s:
            _add(found, "megascale_job_last_step_timestamp_seconds", [(at, job.round.last_step_wall_s)])
        if ranks.step_s:
            _add(found, "megascale_job_step_seconds", [(at, ranks.step_s)])
        _add(found, "megascale_stuck_seconds", [(at, figures.stuck_s(job, ranks))])
        useful = status.useful_ratio(job, self._loop.wall())
        if useful >= 0:
            _add(found, "megascale_job_useful_ratio", [(at, useful)])

    def _troubles(self, found: _Gathered, job: Job) -> None:
        at = (job.name,)
        _add(found, "megascale_restarts_total", _each(at, figures.restarts(job)))
        counts = [(key, float(n)) for key, n in self._incidents.counts.items() if key[0] == job.name]
        _add(found, "megascale_incidents_total", counts)
        _add(found, "megascale_incident_open", _each(at, figures.open_faults(job)))
        hang = figures.hang(job)
        _add(found, "megascale_hang_suspected", [((*at, hang or "none"), float(bool(hang)))])
        _add(found, "megascale_straggler_suspects", _each(at, figures.suspects(job)))
        worst = [((*at, *who), cost) for who, cost in figures.stragglers(job)]
        _add(found, "megascale_straggler_score_ratio", worst)
        named = [((*at, *who), confidence) for who, confidence in figures.named(job)]
        _add(found, "megascale_suspect_confidence_ratio", named)

    def _time(self, found: _Gathered, job: Job) -> None:
        at = (job.name,)
        paid = self._loop.accounts.paid.items()
        _add(
            found,
            "megascale_incident_seconds_total",
            [(key, cost_s) for key, cost_s in paid if key[0] == job.name],
        )
        account = self._loop.goodput(job.name)
        if account is not None:
            _add(found, "megascale_job_wall_seconds", [(at, account.wall_s)])
            _add(found, "megascale_wall_seconds", _each(at, account.rows))
            windows = ("job", "hour", "now")
            for name, ratios in (
                ("megascale_goodput_ratio", (account.ratio, account.ratio_hour, account.ratio_now)),
                (
                    "megascale_effective_training_time_ratio",
                    (account.effective, account.effective_hour, account.effective_now),
                ),
            ):
                pairs = zip(windows, ratios, strict=True)
                _add(found, name, [((*at, window), ratio) for window, ratio in pairs if ratio >= 0])

    def _ranks(self, found: _Gathered, job: Job) -> None:
        history = self._loop.histories.by_job.get(job.name)
        waiting: Sequence[float] = ()
        if history is not None:
            waiting = history.costs.waiting
            times = found.distributions.setdefault("megascale_step_duration_seconds", [])
            times.append(((job.name,), history.costs.durations.copy()))
            saved_s = history.costs.checkpoint_wall_s
            if saved_s:
                _add(found, "megascale_checkpoint_last_success_timestamp_seconds", [((job.name,), saved_s)])
        report = self._loop.slowness.skewing.report(job.name)
        if report is not None:
            waiting = report.waiting.tolist()
            found.ranks.setdefault("megascale_rank_arrival_lag_seconds", []).append(
                (job.name, report.late_p50_s.tolist(), "all")
            )
            told = report.matched + report.unmatched
            if told:
                _add(found, "megascale_collective_matched_ratio", [((job.name,), report.matched / told)])
        if not job.is_over:
            found.ranks.setdefault("megascale_rank_comm_wait_ratio", []).append((job.name, waiting, ""))


def _add(found: _Gathered, name: str, samples: Iterable[tuple[tuple[str, ...], float]]) -> None:
    found.families.setdefault(name, []).extend(samples)


def _each(at: tuple[str, ...], values: dict[str, int] | dict[str, float]) -> Samples:
    return [((*at, name), float(value)) for name, value in values.items()]


def _encoded(found: _Gathered, accept: str) -> Encoded:
    page = Page(counted_by="megascale_controller_series")
    for name, samples in found.families.items():
        page.add(name, samples)
    for name, pairs in found.distributions.items():
        page.distributions(name, pairs)
    for name, columns in found.ranks.items():
        page.by_rank(name, columns)
    return encoded(page, accept)
