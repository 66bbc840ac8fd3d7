# SPDX-License-Identifier: Apache-2.0
"""``/metrics`` for Prometheus, built anew at each scrape from what the agent knows at that moment.

Nothing is kept between scrapes but counters, so the series of a rank or job that is gone are gone with it, and looking
at ranks ten times a second costs nothing here.
"""

import errno
import hmac
import time
from collections.abc import Callable, Iterable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megascale_agents.config import Address
from megascale_agents.ranks import RankWatch
from megascale_agents.rounds import RoundWatch
from megascale_agents.tally import Tally
from megascale_ops import __version__
from megascale_ops.errors import UsageError
from megascale_ops.schema import metrics as table
from megascale_ops.schema.health import HostReading

Sample = tuple[tuple[str, ...], float]

_STATES = {"R": "running", "S": "sleeping", "I": "sleeping", "D": "blocked", "T": "stopped", "t": "traced", "": "gone"}
_MESH_AXES = ("tp", "pp", "dp", "ep")


class AgentCollector(Collector):
    """Answers a scrape.

    Args:
        node: This node's name.
        ranks: Gives all ranks of the rounds that run.
        host: Gives the last look at the host.
        tally: What the agent counted.
    """

    def __init__(
        self,
        node: str,
        ranks: Callable[[], Iterable[tuple[RoundWatch, RankWatch]]],
        host: Callable[[], HostReading | None],
        tally: Tally,
    ) -> None:
        self._node = node
        self._ranks = ranks
        self._host = host
        self._tally = tally

    def describe(self) -> Iterable[Metric]:
        """Name all metrics without looking at anything."""
        return [_family(metric, ()) for metric in table.metrics_of("agent")]

    def collect(self) -> Iterator[Metric]:
        """Build every family that has a value now."""
        samples: dict[str, list[Sample]] = {}
        samples["megascale_build_info"] = [((__version__, "agent"), 1.0)]
        for round_watch, rank_watch in self._ranks():
            for name, labels, value in self._of_rank(round_watch, rank_watch):
                samples.setdefault(name, []).append((labels, value))
        host = self._host()
        if host is not None:
            samples.update(self._of_host(host))
        for metric in table.metrics_of("agent"):
            found = samples.get(metric.name) or list(self._tally.values(metric.name).items())
            if found:
                yield _family(metric, found)

    def _of_rank(self, round_watch: RoundWatch, watch: RankWatch) -> Iterator[tuple[str, tuple[str, ...], float]]:
        at = (round_watch.job, self._node, str(watch.rank))
        now_s = time.monotonic()
        process = watch.process.stat
        local_rank = ""
        mesh: tuple[str, ...] = ("",) * len(_MESH_AXES)
        if watch.started is not None:
            local_rank = str(watch.started.local_rank)
        if watch.box is not None:
            identity = watch.box.identity()
            local_rank = str(identity.local_rank)
            places = [getattr(identity.mesh, axis) for axis in _MESH_AXES]
            mesh = tuple("" if place < 0 else str(place) for place in places)
        yield "megascale_rank_info", (*at, local_rank, *mesh), 1.0
        yield "megascale_rank_round", at, float(watch.round)
        yield "megascale_rank_process_info", (*at, _STATES.get(process.state, "other")), 1.0
        yield "megascale_rank_cpu_seconds_total", at, process.cpu_s
        yield "megascale_rank_resident_bytes", at, float(process.rss_bytes if process.state else 0)
        progress = watch.progress
        if progress is None:
            return
        yield "megascale_rank_step", at, float(progress.step)
        yield "megascale_rank_step_seconds", at, progress.step_p50_s
        yield "megascale_rank_phase_info", (*at, progress.phase), 1.0
        if progress.moved_mono_s:
            yield "megascale_rank_silent_seconds", at, max(0.0, now_s - progress.moved_mono_s)

    def _of_host(self, host: HostReading) -> dict[str, list[Sample]]:
        values = {
            "megascale_host_cpu_busy_ratio": host.cpu_busy,
            "megascale_host_load_1m": host.load_1m,
            "megascale_host_memory_used_ratio": host.memory_used,
            "megascale_host_memory_available_bytes": float(host.memory_available_bytes),
            "megascale_host_swap_used_ratio": host.swap_used,
            "megascale_host_shm_free_bytes": float(host.shm_free_bytes),
            "megascale_host_disk_free_bytes": float(host.disk_free_bytes),
        }
        return {name: [((self._node,), value)] for name, value in values.items()}


def _family(metric: table.Metric, samples: Iterable[Sample]) -> Metric:
    family: CounterMetricFamily | GaugeMetricFamily
    if metric.kind is table.Kind.COUNTER:
        family = CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
    else:
        family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


async def serve(collector: Collector, address: Address, token: str | None) -> tuple[web.AppRunner, str]:
    """Serve ``/metrics`` and ``/healthz``; return the server, to be cleaned up, and where it listens.

    Raises:
        UsageError: the port is taken, or the address is not ours.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)

    async def show(request: web.Request) -> web.Response:
        said = request.headers.get("Authorization", "")
        if token is not None and not hmac.compare_digest(said.encode(), f"Bearer {token}".encode()):
            return web.json_response({"error": "a token is needed: Authorization: Bearer TOKEN"}, status=401)
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def health(_request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application()
    app.router.add_get("/metrics", show)
    app.router.add_get("/healthz", health)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.2)
    await runner.setup()
    for port in (address.port, 0) if address.any_port else (address.port,):
        site = web.TCPSite(runner, address.host, port)
        try:
            await site.start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE and address.any_port and port:
                continue
            await runner.cleanup()
            raise UsageError(f"--metrics-listen {address.host}:{port} can't be used: {error.strerror}") from error
        break
    host, bound = runner.addresses[0][:2]
    return runner, f"http://{host}:{bound}/metrics"
