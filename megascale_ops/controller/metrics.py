# SPDX-License-Identifier: Apache-2.0
"""What the controller tells Prometheus, gathered when it is asked: a heartbeat pays nothing for it."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megascale_ops.controller import views
from megascale_ops.controller.loop import Loop
from megascale_ops.controller.recovery import State
from megascale_ops.controller.store import Store

PREFIX = "megascale_controller"


class ControllerCollector(Collector):
    """Reads the loop and the store at every scrape."""

    def __init__(self, loop: Loop, store: Store) -> None:
        self._loop = loop
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the controller."""
        yield from self._own()
        yield from self._jobs()

    def _own(self) -> Iterator[Metric]:
        loop, store = self._loop, self._store
        yield CounterMetricFamily(f"{PREFIX}_heartbeats", "Heartbeats taken in.", value=loop.heartbeats)
        dropped = "Heartbeats dropped because they came late, twice or from a superseded agent."
        yield CounterMetricFamily(f"{PREFIX}_heartbeats_dropped", dropped, value=loop.heartbeats_dropped)
        yield GaugeMetricFamily(
            f"{PREFIX}_lag_seconds", "How late the controller itself was of late.", value=loop.lag_s
        )
        yield GaugeMetricFamily(f"{PREFIX}_nodes", "Nodes whose agent is known.", value=len(loop.registry))
        failing = "1 while the journal cannot be written and is kept in memory."
        yield GaugeMetricFamily(f"{PREFIX}_journal_failing", failing, value=float(bool(store.failing)))
        lost = "Journal events that were lost because the journal could not be written for too long."
        yield CounterMetricFamily(f"{PREFIX}_journal_events_lost", lost, value=store.dropped_events)
        moves = CounterMetricFamily(f"{PREFIX}_moves", "Moves in the recovery table.", labels=["event", "state"])
        for (event, state), count in self._loop.moves.moves_made.items():
            moves.add_metric([event, state], count)
        yield moves

    def _jobs(self) -> Iterator[Metric]:
        state = GaugeMetricFamily("megascale_job_state", "1 for the state that the job is in.", labels=["job", "state"])
        step = GaugeMetricFamily("megascale_job_step", "Furthest step of the job's round.", labels=["job"])
        round_ = GaugeMetricFamily("megascale_job_round", "The job's round.", labels=["job"])
        ranks = GaugeMetricFamily("megascale_job_ranks", "Ranks of the job's round.", labels=["job"])
        restarts = CounterMetricFamily("megascale_job_restarts", "Restarts of the job.", labels=["job"])
        incidents = CounterMetricFamily("megascale_job_incidents", "Incidents of the job.", labels=["job"])
        useful = GaugeMetricFamily(
            "megascale_job_useful_ratio", "Share of wall time covered by steps that were not lost.", labels=["job"]
        )
        wall_s = self._loop.wall()
        for name, job in self._loop.jobs.items():
            for one in State:
                state.add_metric([name, one.value], float(one is job.state))
            step.add_metric([name], job.step)
            round_.add_metric([name], job.record.round)
            ranks.add_metric([name], job.record.world_size)
            restarts.add_metric([name], len(job.record.restarts))
            incidents.add_metric([name], job.record.incidents)
            ratio = views.useful_ratio(job, wall_s)
            if ratio >= 0:
                useful.add_metric([name], ratio)
        yield from (state, step, round_, ranks, restarts, incidents, useful)


class Metrics:
    """The controller's metrics as text."""

    def __init__(self, loop: Loop, store: Store) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(ControllerCollector(loop, store))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
