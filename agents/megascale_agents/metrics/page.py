# SPDX-License-Identifier: Apache-2.0
"""``/metrics`` for Prometheus, built anew at each scrape from what the agent knows at that moment.

Nothing is kept between scrapes but counters, so the series of a rank or job that is gone are gone with it, and looking
at ranks ten times a second costs nothing here.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from megascale_agents.collectives import sums as collectives_sums
from megascale_agents.collectors.table import declared
from megascale_agents.counters import Tally
from megascale_agents.metrics import gpu_times, own_process, saves, tiles
from megascale_agents.ranks.rank_watch import RankWatch
from megascale_agents.ranks.rounds import RoundWatch
from megascale_agents.ranks.tile_boards import Boards
from megascale_ops import __version__
from megascale_ops.blackbox.records import ProfilerState
from megascale_ops.distribution import Distribution
from megascale_ops.exposition import Page, Sample
from megascale_ops.schema import metrics as table
from megascale_ops.schema.health import HostReading

if TYPE_CHECKING:
    from megascale_agents.hardware.hardware import Hardware

# What may be scraped by itself (``/metrics?part=job``), so that hardware can be scraped less often than ranks, or by
# another server: series that belong to a job, and those of the node, its hardware and the agent itself.
PARTS = ("job", "node")

_STATES = {"R": "running", "S": "sleeping", "I": "sleeping", "D": "blocked", "T": "stopped", "t": "traced", "": "gone"}
# A process in such a state has no series of its own: 12,288 of them would carry no information.
_WELL = ("running", "sleeping")
# Of a large job the other reasons are shown from their first loss on: four zeros of each node would be 6,144 series.
_USUAL_LOSSES = ("late", "unsampled")
_MESH_AXES = ("tp", "pp", "dp", "ep")


class AgentCollector:
    """Answers a scrape.

    Args:
        node: This node's name.
        ranks: Gives all ranks of the rounds that run.
        host: Gives the last look at the host.
        tally: What the agent counted.
        collectives: Sums of what the ranks have finished, by job.
        hardware: Gives what is known of GPUs, adapters and the host; None before the first look.
    """

    def __init__(
        self,
        node: str,
        ranks: Callable[[], Iterable[tuple[RoundWatch, RankWatch]]],
        host: Callable[[], HostReading | None],
        tally: Tally,
        collectives: Iterable[tuple[str, collectives_sums.JobSums]] = (),
        hardware: "Callable[[], Hardware | None]" = lambda: None,
    ) -> None:
        self._node = node
        self._ranks = ranks
        self._host = host
        self._tally = tally
        self._collectives = collectives
        self._hardware = hardware
        self._boards = Boards()

    def page(self, part: str = "") -> Page:
        """Build every family that has a value now; all of them, or one of PARTS."""
        page = Page()
        samples = self._samples()
        for metric in (*table.metrics_of("agent"), *(declared() if self._hardware() is not None else ())):
            if part and (part == "job") != ("job" in metric.labels):
                continue
            if metric.kind is table.Kind.HISTOGRAM:
                page.distributions(metric.name, self._durations())
            else:
                page.add_family(metric, samples.get(metric.name) or list(self._tally.values(metric.name).items()))
        if part != "job":
            own_process.add_to(page)
        return page

    def _samples(self) -> dict[str, list[Sample]]:
        samples: dict[str, list[Sample]] = {}
        samples["megascale_build_info"] = [((__version__, "agent"), 1.0)]
        profilers: dict[str, list[ProfilerState]] = {}
        rounds: dict[tuple[str, ...], float] = {}
        large: set[str] = set()
        for round_watch, rank_watch in self._ranks():
            for name, labels, value in self._of_rank(round_watch, rank_watch):
                samples.setdefault(name, []).append((labels, value))
            rounds[round_watch.job, self._node] = float(rank_watch.round)
            if _is_large(rank_watch):
                large.add(round_watch.job)
            state = rank_watch.box.profiler() if rank_watch.box is not None else None
            if state is not None and state.abi:
                profilers.setdefault(round_watch.job, []).append(state)
        samples["megascale_rank_round"] = list(rounds.items())
        for job, states in profilers.items():
            for name, labels, value in self._of_profilers(job, states, is_large=job in large):
                samples.setdefault(name, []).append((labels, value))
        host = self._host()
        if host is not None:
            samples.update(self._of_host(host))
        of_gpus = gpu_times.samples_of(self._ranks(), self._node)
        of_tiles = tiles.samples_of(self._ranks(), self._boards, large, self._node)
        of_saves = (*saves.samples_of(self._ranks(), self._node), *saves.restores_of(self._ranks(), self._node))
        for name, labels, value in (*self._of_collectives(), *of_tiles, *self._of_hardware(), *of_gpus, *of_saves):
            samples.setdefault(name, []).append((labels, value))
        return samples

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
        yield "megascale_rank_info", (*at, local_rank, *mesh, watch.gpu), 1.0
        state = _STATES.get(process.state, "other")
        if state not in _WELL:
            yield "megascale_rank_process_info", (*at, state), 1.0
        if not _is_large(watch):
            yield "megascale_rank_cpu_seconds_total", at, process.cpu_s
            yield "megascale_rank_resident_bytes", at, float(process.rss_bytes if process.state else 0)
        progress = watch.progress
        if progress is None:
            return
        yield "megascale_rank_step", at, float(progress.step)
        yield "megascale_rank_step_duration_seconds", at, progress.step_p50_s
        yield "megascale_rank_phase_info", (*at, progress.phase), 1.0
        if progress.moved_mono_s:
            yield "megascale_rank_silent_seconds", at, max(0.0, now_s - progress.moved_mono_s)

    def _of_profilers(
        self, job: str, states: Sequence[ProfilerState], *, is_large: bool
    ) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """Sum up the states of the NCCL profiler plugins in a job's ranks."""
        at = (job, self._node)
        yield "megascale_nccl_profiler_overhead_ratio", at, max(state.share_ppm for state in states) * 1e-6
        yield "megascale_plugin_overhead_seconds_total", at, sum(state.own_ns for state in states) * 1e-9
        yield "megascale_profiler_event_mask", at, float(min((state.mask for state in states), key=int.bit_count))
        yield "megascale_nccl_profiler_budget_ratio", at, max(state.budget_ppm for state in states) * 1e-6
        yield "megascale_nccl_profiler_records_total", at, float(sum(state.records for state in states))
        lost = [_lost(state) for state in states]
        for reason in lost[0]:
            count = sum(one[reason] for one in lost)
            if count or not is_large or reason in _USUAL_LOSSES:
                yield "megascale_records_dropped_total", (*at, reason), float(count)

    def _of_collectives(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        for job, sums in self._collectives:
            for op, moved in sums.bytes_moved().items():
                yield collectives_sums.BYTES, (job, self._node, op), float(moved)
            for kind, bandwidth in sums.bandwidths().items():
                yield collectives_sums.BANDWIDTH, (job, self._node, *kind), bandwidth

    def _durations(self) -> Iterator[tuple[tuple[str, ...], Distribution]]:
        bounds = table.METRICS[collectives_sums.DURATION].buckets
        for job, sums in self._collectives:
            for kind, durations in sums.durations().items():
                yield (job, self._node, *kind), Distribution(bounds, durations.counts, durations.sum_s)

    def _of_hardware(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        hardware = self._hardware()
        if hardware is None:
            return iter(())
        from megascale_agents.metrics.hardware import samples_of  # 40 ms that a start must not wait for

        return samples_of(hardware, self._node)

    def _of_host(self, host: HostReading) -> dict[str, list[Sample]]:
        values = {
            "megascale_host_cpu_busy_ratio": host.cpu_busy,
            "megascale_host_load_1m": host.load_1m,
            "megascale_host_memory_used_ratio": host.memory_used,
            "megascale_host_memory_available_bytes": float(host.memory_available_bytes),
            "megascale_host_swap_used_ratio": host.swap_used,
            "megascale_host_shm_free_bytes": float(host.shm_free_bytes) if host.has_shm else None,
            "megascale_host_disk_free_bytes": float(host.disk_free_bytes) if host.has_disk else None,
        }
        return {name: [((self._node,), value)] for name, value in values.items() if value is not None}


def _is_large(watch: RankWatch) -> bool:
    """Whether a rank's job has so many ranks that each gets fewer series."""
    return watch.box is not None and watch.box.identity().world_size > table.MOST_DETAILED


def _lost(state: ProfilerState) -> dict[str, int]:
    """Return what a plugin lost, by reason."""
    return {
        "late": state.dropped_late,
        "busy": state.dropped_busy,
        "no_box": state.dropped_no_box,
        "no_context": state.dropped_no_context,
        "unsampled": state.unsampled,
        "untimed": state.untimed,
        "chain": state.chain_lost,
    }
