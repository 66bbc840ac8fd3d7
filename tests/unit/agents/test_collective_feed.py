# SPDX-License-Identifier: Apache-2.0
"""What the agent tells of finished collectives: the same ones of every rank, each once, and never too many."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megascale_agents.collectives.sample import MOST_ROWS, RankFeed
from megascale_agents.collectives.source import BoxSource, Ended
from megascale_agents.ranks.rounds import Rounds
from megascale_agents.uplink.heartbeat import Composer

from megascale_ops.blackbox.layout import NCCL
from megascale_ops.blackbox.nccl_codes import FLAG_DONE, FLAG_UNTIMED
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity, CollectiveRecord
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.schema.collectives import NOT_KNOWN, ROW, CollectiveSample, is_sampled, pack_rows
from megascale_ops.schema.messages import Heartbeat
from tests.fakes.node import FakeNode

MS = 1_000_000


class Script:
    """A source that hands out what a test puts in."""

    def __init__(self) -> None:
        self.waiting: list[Ended] = []
        self.host_timed = False

    def drain_ended(self) -> tuple[list[Ended], int]:
        """Hand it out."""
        found, self.waiting = self.waiting, []
        return found, 0


def ended(seq: int, at_ms: float, took_ms: float = 1.0, function: str = "all_reduce", group: str = "dp") -> Ended:
    """Return a collective."""
    return Ended(group, function, seq, 1 << 20, int(at_ms * MS), int((at_ms + took_ms) * MS))


def rows(sample: CollectiveSample | None) -> list[tuple[int, ...]]:
    """Return the rows of a sample."""
    assert sample is not None
    return list(ROW.iter_unpack(sample.rows))


@given(st.integers(0, 2**40), st.integers(0, 19))
def test_who_keeps_fewer_keeps_a_subset(seq: int, bits: int) -> None:
    """So ranks that disagree about the bits for a moment still have collectives in common."""
    assert is_sampled(seq, bits) or not is_sampled(seq, bits + 1)


@pytest.mark.parametrize("bits", [0, 1, 3, 6])
def test_one_in_two_to_the_bits_is_kept_and_no_place_of_a_step_is_left_out(bits: int) -> None:
    """Also of a step that has as many collectives as one is kept of: each of its places comes up."""
    kept = [seq for seq in range(1 << 14) if is_sampled(seq, bits)]

    assert len(kept) == 1 << 14 - bits
    assert {seq % (1 << bits) for seq in kept} == set(range(1 << bits))


def test_duration_and_own_work_are_told() -> None:
    """In tenths of a microsecond; own work before the first is not known, and counts from whatever ended last."""
    source = Script()
    feed = RankFeed(3, source, 64.0)
    source.waiting = [ended(1, 10), ended(2, 14, 2.0), ended(7, 17, group="tp")]

    sample = feed.drain_sample(1.0)

    assert rows(sample) == [(0, 1, 10_000, NOT_KNOWN), (0, 2, 20_000, 30_000), (1, 7, 10_000, 10_000)]
    assert sample is not None
    assert [(line.communicator, line.function, line.size_bits, line.bits) for line in sample.lines] == [
        ("dp", "all_reduce", 20, 0), ("tp", "all_reduce", 20, 0),
    ]  # fmt: skip
    assert (sample.rank, sample.finished, sample.span_s) == (3, 3, pytest.approx(0.008))
    assert feed.drain_sample(2.0) is None


def test_own_work_beside_one_that_goes_on() -> None:
    """A long collective in the background ends no rank's own work: the one that ended last before the start counts."""
    source = Script()
    feed = RankFeed(0, source, 64.0)
    source.waiting = [ended(1, 0, 100.0, group="dp"), ended(1, 10, group="tp"), ended(2, 15, group="tp")]

    assert [own for _, _, _, own in rows(feed.drain_sample(1.0))] == [NOT_KNOWN, NOT_KNOWN, 40_000]


def test_sends_and_receives_are_no_rows_and_end_own_work() -> None:
    """Only a pair takes part; but who waited in one did not work."""
    source = Script()
    feed = RankFeed(0, source, 64.0)
    source.waiting = [ended(1, 0), ended(1, 5, 10.0, "recv"), ended(2, 17)]

    sample = feed.drain_sample(1.0)

    assert [own for _, _, _, own in rows(sample)] == [NOT_KNOWN, 20_000]
    assert sample is not None
    assert sample.point_to_point == 1


def test_ranks_of_equal_rates_keep_the_same() -> None:
    """1,000 a second: at most 64 a second are told, the same by both, although their clocks differ."""
    sources = [Script(), Script()]
    feeds = [RankFeed(rank, source, 64.0) for rank, source in enumerate(sources)]
    told: list[list[int]] = [[], []]
    for second in range(10):
        for rank in range(2):
            first = second * 1000
            sources[rank].waiting = [ended(first + number, 7777 * rank + first + number, 0.5) for number in range(1000)]
            told[rank] += [seq for _, seq, _, _ in rows(feeds[rank].drain_sample(float(second)))]

    assert told[0] == told[1]
    assert 200 < len(told[0]) <= 640


def test_a_rare_line_is_told_whole_beside_a_frequent_one() -> None:
    """One data-parallel all-reduce a second among a thousand of tensor groups."""
    source = Script()
    feed = RankFeed(0, source, 64.0)
    seen = []
    for second in range(5):
        at = second * 1000.0
        source.waiting = [ended(second * 999 + number, at + number, 0.5, group="tp") for number in range(999)]
        source.waiting.append(ended(second, at + 999, 0.5, group="dp"))
        sample = feed.drain_sample(float(second))
        assert sample is not None
        place = [line.communicator for line in sample.lines].index("dp")
        seen += [seq for line, seq, _, _ in rows(sample) if line == place]

    assert seen == list(range(5))


def test_a_burst_is_cut_and_a_clock_set_back_is_counted() -> None:
    """The newest 128 are told; what ended before it began is not."""
    source = Script()
    feed = RankFeed(0, source, 1e6)
    source.waiting = [ended(number, number, 0.5) for number in range(1000)] + [ended(1000, 1000, -5.0)]

    sample = feed.drain_sample(1.0)

    assert len(rows(sample)) == MOST_ROWS
    assert sample is not None
    assert sample.lost == 1000 - MOST_ROWS + 1


def test_times_beyond_what_a_row_holds() -> None:
    """An hour inside a collective is told as not known, not as a short one."""
    assert ROW.unpack(pack_rows([(0, 2**40 + 5, 3_600_000 * MS, -1)])) == (0, 5, NOT_KNOWN, NOT_KNOWN)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[tuple[BoxWriter, BoxSource]]:
    """A black box and who reads it."""
    identity = BoxIdentity(job="job", node="a", rank=0, local_rank=0, world_size=2, pid=1, start_ticks=1, round=1)
    writer = BoxWriter.create(tmp_path, identity)
    with BoxReader(tmp_path / "0.box") as reader:
        yield writer, BoxSource(reader)
    writer.close()


def test_one_that_runs_is_told_when_it_has_ended(box: tuple[BoxWriter, BoxSource]) -> None:
    """However long it takes; what ended beside it is told once."""
    writer, source = box
    number = writer.begin_collective(b"dp", b"all_reduce", 1, 4, 100, 100)
    writer.add_collective(CollectiveRecord("tp", "all_reduce", 5, 4, 110, 110, 120))

    first = source.drain_ended()
    nothing = source.drain_ended()
    writer.end_collective(number, 900)
    writer.add_collective(CollectiveRecord("tp", "all_reduce", 6, 4, 910, 910, 920))
    then = source.drain_ended()

    assert ([one.seq for one in first[0]], nothing[0]) == ([5], [])
    assert [(one.communicator, one.seq, one.ended_ns) for one in then[0]] == [("dp", 1, 900), ("tp", 6, 920)]
    assert source.drain_ended()[0] == []


def test_a_plugin_that_times_nothing_silences_nobody(box: tuple[BoxWriter, BoxSource]) -> None:
    """NCCL up to 2.25 tells what was enqueued and never its end: what Python saw goes on being told."""
    writer, source = box
    untimed = NCCL.codec.pack(2, 1, 64, 105, 0, 0, 0, 7, 3, 0, 0, 5, 8, 2, 3, 4, -1, 0, FLAG_DONE | FLAG_UNTIMED)
    writer._map[NCCL.offset : NCCL.offset + NCCL.stride] = untimed
    writer.add_collective(CollectiveRecord("dp", "all_reduce", 5, 4, 110, 110, 120))

    found, _ = source.drain_ended()

    assert [(one.communicator, one.seq) for one in found] == [("dp", 5)]
    assert source.host_timed


def test_asynchronous_ones_that_show_no_end_hold_nothing_up(box: tuple[BoxWriter, BoxSource]) -> None:
    """A thousand of them, with one that ends after each."""
    writer, source = box
    seen = []
    for number in range(1000):
        writer.begin_collective(b"dp", b"all_reduce", number, 4, 100 + number, 100 + number)
        writer.add_collective(CollectiveRecord("tp", "all_reduce", number, 4, 100 + number, 100 + number, 101 + number))
        if number % 50 == 49:
            seen += [one.seq for one in source.drain_ended()[0]]

    assert seen == list(range(1000))


def test_a_heartbeat_of_eight_busy_ranks_stays_small(tmp_path: Path) -> None:
    """900 collectives of each since the last: below 30 KB, and told although nothing else has changed."""
    node = FakeNode(tmp_path)
    node.start_round(8)
    rounds = Rounds(str(node.root), node.node, lambda _: None)
    composer = Composer(node.node, "agent-1")
    try:
        beats: list[Heartbeat] = []
        for second in range(3):
            for rank in range(8):
                for number in range(900):
                    at_ns = (second * 1000 + number) * MS + 1
                    name = f"mesh_tensor_parallel_{number % 3}"
                    record = CollectiveRecord(
                        name, "all_gather_into_tensor", number, 1 << 20, at_ns, at_ns, at_ns + 1000
                    )
                    node.boxes[rank].add_collective(record)
            rounds.refresh(float(second))
            beats.append(composer.compose(rounds.ranks(), None, (float(second), 0.0)))

        assert max(len(msgspec.json.encode(beat)) for beat in beats[1:]) < 30_000
        assert [sample.rank for sample in beats[2].jobs[0].collectives] == list(range(8))
        again = msgspec.json.decode(msgspec.json.encode(beats[2]), type=Heartbeat)
        assert again == beats[2]
        assert composer.compose(rounds.ranks(), None, (4.0, 0.0)).jobs == ()
    finally:
        rounds.close()
        node.kill_all()
