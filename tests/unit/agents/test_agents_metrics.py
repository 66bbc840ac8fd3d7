# SPDX-License-Identifier: Apache-2.0
"""``/metrics`` shows what is there, under the names of the table, and nothing of what is gone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from megascale_agents.counters import Tally
from megascale_agents.metrics import page
from megascale_agents.ranks.rounds import Rounds

from megascale_ops.exposition import encoded
from megascale_ops.schema.health import HostReading
from megascale_ops.schema.metrics import EVERY, METRICS, MOST_DETAILED, Kind, metrics_of
from tests.fakes.boards import FakeBoard
from tests.fakes.node import FakeNode
from tests.fakes.scraped import samples, values


class Scraped:
    """An agent's collector over a real node."""

    def __init__(self, folder: Path) -> None:
        self.node = FakeNode(folder)
        self.rounds = Rounds(str(self.node.root), self.node.node, lambda _: None)
        self.tally = Tally("node-a")
        self.collector = page.AgentCollector(
            "node-a", self.rounds.ranks, lambda: HostReading(cpu_busy=0.25, cores=8), self.tally
        )

    def look(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Look once, then collect every sample by name and labels' values."""
        self.rounds.refresh(1.0)
        for _, rank in self.rounds.ranks():
            rank.look_at_process(1.0)
            rank.look_at_box()
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for sample in samples(encoded(self.collector.page()).body):
            if not sample.name.startswith("process_"):
                found.setdefault(sample.name, {})[values(sample)] = sample.value
        return found


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[Scraped]:
    """Two ranks, one of which has finished step 4."""
    made = Scraped(tmp_path)
    made.node.start_round(2)
    made.node.step(0, 4)
    yield made
    made.rounds.close()
    made.node.kill_all()


def test_the_nccl_profiler_speaks_of_its_overhead_and_its_losses(scraped: Scraped) -> None:
    """Only where NCCL has loaded it; for a node together, the overhead of the rank where it is most."""
    before = scraped.look()
    for rank, share_ppm in ((0, 1200), (1, 900)):
        values = {"unsampled": 3 * rank, "untimed": 5, "own_ns": 250_000_000, "mask": 66 if rank else 64}
        scraped.node.profile(rank, share_ppm=share_ppm, nccl_next=35, **values)

    found = scraped.look()

    assert not [name for name in before if "nccl" in name]
    at = ("job", "node-a")
    assert found["megascale_nccl_profiler_overhead_ratio"] == {at: pytest.approx(0.0012)}
    assert found["megascale_nccl_profiler_budget_ratio"] == {at: pytest.approx(0.005)}
    assert found["megascale_nccl_profiler_records_total"] == {at: 70}
    assert found["megascale_plugin_overhead_seconds_total"] == {at: pytest.approx(0.5)}
    assert found["megascale_profiler_event_mask"] == {at: 64}
    assert found["megascale_records_dropped_total"][*at, "unsampled"] == 3
    assert found["megascale_records_dropped_total"][*at, "untimed"] == 10
    assert found["megascale_records_dropped_total"][*at, "late"] == 0


def test_a_job_of_many_ranks_tells_less_of_each(scraped: Scraped) -> None:
    """Beyond 4,096: neither CPU time nor memory of ranks, no losses that have not happened, one rank a kernel."""
    per_rank = ("megascale_rank_cpu_seconds_total", "megascale_rank_resident_bytes")
    found = {}
    for world_size in (MOST_DETAILED, MOST_DETAILED + 1):
        scraped.node.start_round(3, world_size=world_size)
        for rank in range(3):
            board = FakeBoard("ag_gemm", rank=3)
            for cta in range(4):
                board.tile(cta, cta if rank == 1 else 4 + cta)
                board.wait(cta, cta if rank == 1 else 4 + cta, peer=cta % 3, channel=0)
            scraped.node.put_board(rank, board)
            scraped.node.profile(rank, dropped_busy=rank)
        found[world_size] = scraped.look()
    detailed, large = found.values()

    assert [len(detailed[name]) for name in per_rank] == [3, 3]
    assert not large.keys() & set(per_rank)
    assert {labels[-1] for labels in detailed["megascale_records_dropped_total"]} > {"late", "no_box", "chain"}
    assert {labels[-1] for labels in large["megascale_records_dropped_total"]} == {"late", "busy", "unsampled"}
    assert [labels[2] for labels in detailed["megascale_tile_progress_ratio"]] == ["0", "1", "2"]
    assert len(detailed["megascale_tile_waiting"]) == 6
    assert large["megascale_tile_progress_ratio"] == {("job", "node-a", "1", "ag_gemm"): 0.0}
    assert large["megascale_tile_waiting"] == {
        ("job", "node-a", "1", "ag_gemm", "0"): 2,
        ("job", "node-a", "1", "ag_gemm", "1"): 1,
    }
    assert len(large["megascale_rank_silent_seconds"]) == len(large["megascale_rank_info"]) == 3


def test_a_rank_shows_its_step_phase_and_state(scraped: Scraped) -> None:
    """What a dashboard needs, by job, node and rank."""
    scraped.node.freeze(1)

    found = scraped.look()

    assert found["megascale_rank_step"]["job", "node-a", "0"] == 4
    assert found["megascale_rank_phase_info"]["job", "node-a", "0", "forward"] == 1
    assert found["megascale_rank_process_info"]["job", "node-a", "1", "stopped"] == 1
    assert found["megascale_rank_silent_seconds"]["job", "node-a", "0"] >= 0
    assert found["megascale_host_cpu_busy_ratio"]["node-a",] == 0.25


def test_series_of_what_is_gone_are_gone(scraped: Scraped) -> None:
    """A dashboard never shows a rank of yesterday."""
    scraped.look()
    scraped.node.end_job()

    found = scraped.look()

    assert not [name for name in found if name.startswith("megascale_rank_")]


def test_only_names_and_labels_of_the_table_are_exposed(scraped: Scraped) -> None:
    """And counters of the agent are there before they count."""
    scraped.tally.add("megascale_agent_log_matches_total", "segfault")
    found = scraped.look()

    for name, series in found.items():
        assert name in METRICS
        assert METRICS[name].component in ("agent", EVERY)
        for labels in series:
            assert len(labels) == len(METRICS[name].labels)
    assert found["megascale_agent_heartbeats_sent_total"]["node-a",] == 0
    assert found["megascale_agent_log_matches_total"]["node-a", "segfault"] == 1


def test_a_name_outside_of_the_table_has_no_place() -> None:
    """Each name of the table is well formed: prefix, unit at its end, kind at its end."""
    for metric in METRICS.values():
        stem = metric.name.removesuffix("_total")
        assert metric.name.startswith("megascale_")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.name.endswith("_info") == (metric.kind is Kind.INFO)
        assert not metric.unit or stem.endswith(metric.unit)
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert metric.help.endswith(".")
        assert not {"step", "pid", "incident", "seq"} & set(metric.labels)


def test_a_node_stays_within_its_budget_of_series(scraped: Scraped) -> None:
    """At most ten series for each rank, so that 10,000 ranks stay below 200,000 series."""
    # Those of tiles are there only while a rank runs overlapped kernels.
    per_rank = [metric for metric in metrics_of("agent") if "rank" in metric.labels and "kernel" not in metric.labels]

    assert len(per_rank) <= 10
    found = scraped.look()
    assert sum(len(series) for name, series in found.items() if name.startswith("megascale_rank_")) <= 2 * 10
