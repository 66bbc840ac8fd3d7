# SPDX-License-Identifier: Apache-2.0
"""What a node's ranks have finished, summed up: sizes and bandwidths as nccl-tests count them, and few series."""

from pathlib import Path

import pytest
from megascale_agents.collectives.sample import CollectiveFeed
from megascale_agents.collectives.source import Ended
from megascale_agents.collectives.sums import (
    LEAST_OFTEN,
    MOST_SHOWN,
    MOST_SHOWN_LARGE,
    RECENT,
    CollectiveSums,
    JobSums,
    size_class,
)
from megascale_agents.counters import Tally
from megascale_agents.metrics import page

from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity, CollectiveRecord
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.exposition import encoded
from megascale_ops.schema.metrics import MOST_DETAILED
from tests.fakes.scraped import samples, values

MIB = 1 << 20
MS = 1_000_000


def several(
    function: str, size: int = MIB, took_ns: int = MS, ranks: int = 8, number: int = LEAST_OFTEN
) -> list[Ended]:
    """Return collectives of one kind."""
    return [Ended("0", function, seq, size, 0, took_ns, ranks) for seq in range(number)]


@pytest.mark.parametrize(
    ("function", "op", "size", "factor"),
    [
        ("AllReduce", "all_reduce", MIB, 14 / 8),
        ("all_reduce", "all_reduce", MIB, 14 / 8),
        ("AllGather", "all_gather", 8 * MIB, 7 / 8),
        ("all_gather_into_tensor", "all_gather", MIB, 7 / 8),
        ("ReduceScatter", "reduce_scatter", 8 * MIB, 7 / 8),
        ("reduce_scatter_tensor", "reduce_scatter", 8 * MIB, 7 / 8),
        ("AlltoAll", "all_to_all", 8 * MIB, 7 / 8),
        ("all_to_all_single", "all_to_all", MIB, 7 / 8),
        ("Broadcast", "broadcast", MIB, 1.0),
        ("reduce", "reduce", MIB, 1.0),
        ("Send", "send", MIB, 1.0),
        ("recv", "recv", MIB, 1.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(function: str, op: str, size: int, factor: float) -> None:
    """Size of the whole over time, times the share that crosses the slowest link; given 1 MiB, 8 ranks, 1 ms."""
    sums = JobSums()

    sums.add(several(function))

    assert sums.bytes_moved() == {op: LEAST_OFTEN * size}
    assert sums.bandwidths() == {(op, size_class(size)): pytest.approx(size * 1000 * factor)}


def test_where_the_number_of_ranks_is_not_known_there_is_no_bandwidth() -> None:
    """But durations and bytes there are."""
    sums = JobSums()

    sums.add(several("all_reduce", ranks=0))

    assert sums.bandwidths() == {}
    assert sums.durations()["all_reduce", "le1m"].counts == [0, LEAST_OFTEN, 0, 0, 0, 0]
    assert sums.bytes_moved() == {"all_reduce": LEAST_OFTEN * MIB}


def test_one_long_wait_does_not_move_the_bandwidth() -> None:
    """It is the median of the newest; in the histogram the wait is seen."""
    sums = JobSums()
    sums.add(several("all_reduce", took_ns=MS))
    before = sums.bandwidths()

    sums.add(several("all_reduce", took_ns=20_000 * MS, number=1))

    assert sums.bandwidths() == before
    durations = sums.durations()["all_reduce", "le1m"]
    assert durations.counts == [0, LEAST_OFTEN, 0, 0, 0, 1]
    assert durations.sum_s == pytest.approx(20 + LEAST_OFTEN * 0.001)


def test_what_is_lastingly_slower_shows() -> None:
    """Half of the newest are enough."""
    sums = JobSums()
    sums.add(several("all_reduce", took_ns=MS, number=1000))
    before = sums.bandwidths()["all_reduce", "le1m"]

    sums.add(several("all_reduce", took_ns=2 * MS, number=RECENT // 2 + 1))

    assert sums.bandwidths()["all_reduce", "le1m"] == pytest.approx(before / 2)


def test_bounds_and_classes_include_their_upper_end() -> None:
    """As Prometheus reads ``le``."""
    sums = JobSums()

    for took_ns in (300_000, 300_001, 3_000_000_000):
        sums.add(several("all_reduce", size=1 << 16, took_ns=took_ns))

    assert sums.durations()["all_reduce", "le64k"].counts == [LEAST_OFTEN, LEAST_OFTEN, 0, 0, LEAST_OFTEN, 0]
    assert [size_class(size) for size in (0, 65_537, 1 << 24, (1 << 24) + 1, 1 << 29)] == [
        "le64k", "le1m", "le16m", "le256m", "more",
    ]  # fmt: skip


def test_object_collectives_and_barriers_are_others() -> None:
    """They move no tensor whose size is known."""
    sums = JobSums()

    sums.add([*several("barrier", size=0), *several("all_gather_object", size=0), *several("never heard of")])

    assert set(sums.durations()) == {("other", "le64k"), ("other", "le1m")}
    assert sums.bandwidths() == {}


def test_few_classes_are_shown_and_once_shown_they_stay() -> None:
    """What start-up does a few times takes no place; counters never go back."""
    all_jobs = CollectiveSums()
    sums, many = all_jobs.of_job("few ranks", MOST_DETAILED), all_jobs.of_job("many", MOST_DETAILED + 1)
    sums.add(several("broadcast", number=LEAST_OFTEN - 1))
    for size in (1, MIB, 1 << 24, 1 << 28, 1 << 30):
        for function in ("all_reduce", "all_gather"):
            sums.add(several(function, size=size))
            many.add(several(function, size=size))
    shown = set(sums.durations())

    sums.add(several("reduce", number=1000))

    assert len(shown) == MOST_SHOWN
    assert len(many.durations()) == MOST_SHOWN_LARGE
    assert set(sums.durations()) == shown
    assert "broadcast" not in {op for op, _ in shown}
    assert sums.bytes_moved()["reduce"] == 1000 * MIB


def test_a_job_that_has_gone_is_forgotten() -> None:
    """And one that is asked for is there."""
    sums = CollectiveSums()
    sums.of_job("a").add(several("all_reduce"))
    sums.of_job("b")

    sums.forget({"b"})

    assert [job for job, _ in sums] == ["b"]
    assert sums.of_job("a").bytes_moved() == {}


def test_a_black_box_becomes_series(tmp_path: Path) -> None:
    """From the ring that Python writes to what Prometheus scrapes; the default group's size is the job's."""
    identity = BoxIdentity(job="j", node="n", rank=0, local_rank=0, world_size=4, pid=1, start_ticks=0, round=0)
    writer, feed = BoxWriter.create(tmp_path, identity), CollectiveFeed()
    for seq in range(LEAST_OFTEN):
        started = 1000 + seq * 4 * MS
        writer.add_collective(CollectiveRecord("0", "all_reduce", seq, 2 * MIB, started, started, started + 2 * MS))
        writer.add_collective(CollectiveRecord("7", "all_reduce", seq, 2 * MIB, started, started, started + 3 * MS))
    with BoxReader(tmp_path / "0.box") as box:
        feed.drain_sample("j", {0: box}, 1.0)
    collector = page.AgentCollector("n", list, lambda: None, Tally("n"), feed.sums)

    found = {
        (sample.name, *values(sample)): sample.value
        for sample in samples(encoded(collector.page()).body) if "collective" in sample.name
    }  # fmt: skip
    writer.close()

    at = ("j", "n", "all_reduce")
    name = "megascale_collective_duration_seconds"
    assert found[f"{name}_bucket", *at, "le16m", "0.0003"] == 0
    assert found[f"{name}_bucket", *at, "le16m", "0.003"] == found[f"{name}_count", *at, "le16m"] == 2 * LEAST_OFTEN
    assert found[f"{name}_sum", *at, "le16m"] == pytest.approx(LEAST_OFTEN * 0.005)
    assert found["megascale_collective_bytes_total", *at] == 2 * LEAST_OFTEN * 2 * MIB
    bandwidth = found["megascale_collective_bus_bandwidth_bytes_per_second", *at, "le16m"]
    assert bandwidth == pytest.approx(2 * MIB / 0.002 * 1.5)
    feed.forget(())
    assert not [one for one in samples(encoded(collector.page()).body) if "collective" in one.name]
