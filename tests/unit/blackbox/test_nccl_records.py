# SPDX-License-Identifier: Apache-2.0
"""What the NCCL profiler plugin wrote is handed out once, when it is done, whatever came between two looks."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from megascale_agents.collectives.source import BoxSource

from megascale_ops.blackbox import nccl_codes, nccl_words
from megascale_ops.blackbox.inquest import sentences
from megascale_ops.blackbox.last_moments import read
from megascale_ops.blackbox.layout import COMMUNICATORS, NCCL, NUMBER_BITS, PROFILER
from megascale_ops.blackbox.nccl_codes import FLAG_DONE, FLAG_UNTIMED
from megascale_ops.blackbox.nccl_records import records
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity, CollectiveRecord, NcclRecord
from megascale_ops.blackbox.slots import Run, since
from megascale_ops.blackbox.writer import BoxWriter

IDENTITY = BoxIdentity(job="j", node="n", rank=0, local_rank=0, world_size=1, pid=1, start_ticks=1, round=1)


class Plugin:
    """Writes as the plugin does."""

    def __init__(self, folder: Path) -> None:
        self.writer = BoxWriter.create(folder, IDENTITY)
        self.map = self.writer._map

    def write(self, number: int, flags: int = FLAG_DONE, again: int = 0, function: int = 5) -> None:
        """Write a record, or write it ``again``."""
        sequence = again << NUMBER_BITS | 2 * number + 2
        at = NCCL.offset + number % NCCL.slots * NCCL.stride
        NCCL.codec.pack_into(
            self.map, at, sequence, number, 64, 1000 + number, 0, 0, 0, 7, 3, 0, 0, function, 8, 2, 3, 4, -1, 0, flags
        )

    def tear(self, number: int) -> None:
        """Stop in the middle of a record."""
        at = NCCL.offset + number % NCCL.slots * NCCL.stride
        self.map[at : at + 8] = (2 * number + 1).to_bytes(8, "little")


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    """Return a plugin with a box of its own."""
    return Plugin(tmp_path)


@pytest.fixture
def reader(plugin: Plugin, tmp_path: Path) -> Iterator[BoxReader]:
    """Return who reads that box."""
    assert plugin
    with BoxReader(tmp_path / "0.box") as opened:
        yield opened


def test_codes_become_words(plugin: Plugin, reader: BoxReader) -> None:
    """Known codes are NCCL's words; those of a later version are Unknown."""
    plugin.write(0)
    plugin.write(1, function=4711)

    known, unknown = reader.nccl()

    assert (known.function, known.datatype, known.algorithm, known.protocol) == (
        "AllReduce", "ncclFloat32", "RING", "SIMPLE",
    )  # fmt: skip
    assert unknown.function == "Unknown"
    assert len(nccl_codes.DATATYPES) == len(nccl_codes.DATATYPE_BYTES)


def test_whoever_compares_them_is_told_whose_clock_timed_them(plugin: Plugin, reader: BoxReader) -> None:
    """Python's are the host's, and not all; from the plugin's first on they are the GPU's."""
    source = BoxSource(reader)
    plugin.writer.add_collective(CollectiveRecord("0", "all_reduce", 1, 4, 110, 110, 120))
    told = [source.drain_ended(), source.host_timed]
    plugin.write(0)
    source.drain_ended()

    assert ([one.seq for one in told[0][0]], told[1], source.host_timed) == ([1], True, False)


def test_a_record_is_handed_out_once_and_when_it_is_done(plugin: Plugin, reader: BoxReader) -> None:
    """Until then it is among the unfinished, and does not hold up those behind it."""
    tail = reader.nccl_tail()
    plugin.write(0)
    plugin.write(1, flags=0)
    plugin.write(2)

    first, _ = tail.drain_records()
    waiting = tail.unfinished()
    plugin.write(1, again=1)
    second, _ = tail.drain_records()
    third, lost = tail.drain_records()

    assert [one.number for one in first] == [0, 2]
    assert [one.number for one in waiting] == [1]
    assert [one.number for one in second] == [1]
    assert (third, tail.unfinished(), lost) == ([], [], 0)


def test_what_never_ends_is_handed_out_as_it_is(plugin: Plugin, reader: BoxReader) -> None:
    """When 1,024 newer ones have come, or its slot is another record's."""
    tail = reader.nccl_tail()
    plugin.write(0, flags=0)
    tail.drain_records()

    for number in range(1, 1026):
        plugin.write(number)
    found, lost = tail.drain_records()

    assert [one.number for one in found] == list(range(1026))
    assert (found[0].is_done, lost) == (False, 0)


def test_who_looks_seldom_is_told_what_was_lost(plugin: Plugin, reader: BoxReader) -> None:
    """Lapped, the newest 2,048 are handed out and the others counted; one that was waited for comes as it was seen."""
    tail = reader.nccl_tail()
    plugin.write(0, flags=0)
    plugin.write(1)
    tail.drain_records()

    for number in range(2, 5000):
        plugin.write(number)
    found, lost = tail.drain_records()

    assert [one.number for one in found] == [0, *range(5000 - 2048, 5000)]
    assert lost == 5000 - 2048 - 2


def read_on(reader: BoxReader, number: int) -> Run:
    """Read NCCL's ring from a number on, as `nccl_tail` does."""
    return since(NCCL, reader._read, number)


def test_what_is_being_written_is_waited_for(plugin: Plugin, reader: BoxReader) -> None:
    """It comes next time; but a writer that never goes on holds up no reader for longer than 64 records."""
    for number in (0, 1, 3):
        plugin.write(number)
    plugin.tear(2)

    run = read_on(reader, 0)
    assert ([one.number for one in records(run.slots)], run.next_number, run.lost) == ([0, 1], 2, 0)

    for number in range(4, 70):
        plugin.write(number)
    run = read_on(reader, run.next_number)
    assert ([one.number for one in records(run.slots)][:2], run.next_number, run.lost) == ([3, 4], 70, 1)


@pytest.mark.parametrize("start", [0, 2000, 2048, 5000])
def test_reading_on_goes_over_the_end_of_the_ring(plugin: Plugin, reader: BoxReader, start: int) -> None:
    """Numbers go on where slots begin again."""
    for number in range(start, start + 300):
        plugin.write(number)

    run = read_on(reader, start)
    nothing = read_on(reader, run.next_number)

    assert [one.number for one in records(run.slots)] == list(range(start, start + 300))
    assert (nothing.slots, nothing.next_number) == ([], start + 300)


def test_pythons_collectives_are_read_on_as_well(plugin: Plugin, reader: BoxReader) -> None:
    """From a number on, each once; lapped, the rest is counted."""
    for seq in range(10):
        plugin.writer.add_collective(CollectiveRecord("0", "all_reduce", seq, 4, seq))

    first = reader.collectives_since(4)
    for seq in range(10, 2000):
        plugin.writer.add_collective(CollectiveRecord("0", "all_reduce", seq, 4, seq))
    second = reader.collectives_since(first.next_number)

    assert [one.seq for one in first.records] == [4, 5, 6, 7, 8, 9]
    assert (first.next_number, first.lost) == (10, 0)
    assert [one.seq for one in second.records] == list(range(2000 - 1024, 2000))
    assert (second.next_number, second.lost) == (2000, 2000 - 1024 - 10)


def test_the_plugin_speaks_of_itself_once_it_has_found_the_box(plugin: Plugin, reader: BoxReader) -> None:
    """Before that there is nothing; a complaint is believed when it is whole."""
    before = reader.profiler()
    values = {"abi": 5, "opened_mono_ns": 9, "nccl_next": 4, "chained": 1, "has_complaint": 0}
    page = [values.get(field.name, b"half" if field.kind == "chars" else 0) for field in PROFILER.fields]
    PROFILER.codec.pack_into(plugin.map, PROFILER.offset, *page)

    state = reader.profiler()

    assert before is None
    assert state is not None
    assert (state.abi, state.records, state.is_chained, state.complaint) == (5, 4, True, "")


def test_communicators_come_in_the_order_of_their_making(plugin: Plugin, reader: BoxReader) -> None:
    """The last 64."""
    for number in range(70):
        at = COMMUNICATORS.offset + number % COMMUNICATORS.slots * COMMUNICATORS.stride
        COMMUNICATORS.codec.pack_into(plugin.map, at, 2 * number + 2, number, 1, 0, 8, 3, 2, 0, b"tp")

    found = reader.communicators()

    assert [one.id for one in found] == list(range(6, 70))
    assert all(after.id == before.id + 1 for before, after in pairwise(found))
    assert (found[0].name, found[0].nranks, found[0].rank, found[0].nnodes) == ("tp", 8, 3, 2)


def _hanging(**more: object) -> NcclRecord:
    fields: dict[str, object] = {
        "number": 1, "communicator": 0xAB, "function": "AllReduce", "seq": 41, "bytes_moved": 1 << 27,
        "enqueued_mono_ns": 7 * 10**9, "gpu_started_mono_ns": 0, "gpu_ended_mono_ns": 0, "gpu_clock_ns": 0, "step": 3,
        "channels": 8, "started_channels": 0, "ended_channels": 0, "datatype": "ncclFloat32", "algorithm": "RING",
        "protocol": "SIMPLE", "peer": -1, "root": 0, "flags": 0,
    }  # fmt: skip
    return NcclRecord(**{**fields, **more})  # type: ignore[arg-type]  # fields of the record, by name


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "its kernel has not begun: what comes before it on its stream has not ended"),
        (
            {"started_channels": 0b11, "ended_channels": 0},
            "2 of 8 channels have begun and 0 ended: it waits inside NCCL",
        ),
        (
            {"started_channels": 0xFF, "ended_channels": 0xFF},
            "8 of 8 channels have begun and 8 ended: it is about to end",
        ),
        ({"flags": FLAG_UNTIMED}, "whether its kernel runs was not asked for"),
        ({"function": "Recv", "peer": 5}, "NCCL Recv #41 of tp with rank 5, 134,217,728 bytes, RING/SIMPLE"),
    ],
)
def test_a_hang_inside_nccl_tells_itself_from_one_before_it(more: dict[str, object], said: str) -> None:
    """A kernel that never began waits for its stream, one of which channels have begun for a peer."""
    text = nccl_words.sentence(_hanging(**more), 10_200_000_000, {0xAB: "tp"})

    assert said in text
    assert "enqueued 3.2 s before" in text


def test_what_queues_behind_the_last_end_is_unfinished() -> None:
    """Of each communicator what came after its last operation that ended, the oldest first, four at most."""
    done = [_hanging(number=n, seq=n, flags=FLAG_DONE, enqueued_mono_ns=n) for n in range(3)]
    lost = _hanging(number=3, seq=9, communicator=1, enqueued_mono_ns=3)  # its end was lost, a later one is known
    over = _hanging(number=4, seq=10, communicator=1, enqueued_mono_ns=4, flags=FLAG_DONE)
    open_ones = [_hanging(number=n, seq=n, enqueued_mono_ns=n) for n in range(5, 11)]

    found = nccl_words.unfinished([*done, lost, over, *open_ones])

    assert [one.seq for one in found] == [5, 6, 7, 8]


def test_a_send_that_hangs_is_not_hidden_by_what_its_group_has_received() -> None:
    """They share a kernel: the end of one tells nothing of the others, but one of a later group ends them all."""
    send = _hanging(number=0, seq=6, function="Send", peer=1, started_channels=1)
    received = _hanging(number=1, seq=7, function="Recv", peer=3, flags=FLAG_DONE, enqueued_mono_ns=7 * 10**9 + 900)
    same_way = _hanging(number=2, seq=7, function="Send", peer=1, flags=FLAG_DONE, enqueued_mono_ns=7 * 10**9 + 950)
    later = _hanging(number=3, seq=8, function="Recv", peer=3, flags=FLAG_DONE, enqueued_mono_ns=7 * 10**9 + 5 * 10**6)
    reduced = _hanging(number=4, flags=FLAG_DONE, enqueued_mono_ns=7 * 10**9 + 990)

    assert nccl_words.unfinished([send, received]) == (send,)
    for over in (same_way, later, reduced):
        assert nccl_words.unfinished([send, received, over]) == ()


def test_what_was_not_timed_neither_ends_nor_hangs() -> None:
    """An operation that hangs is seen although untimed ones were enqueued behind it, and none of these is."""
    ended = _hanging(number=0, seq=96, flags=FLAG_DONE)
    between = [_hanging(number=n, seq=96 + n, flags=FLAG_DONE | FLAG_UNTIMED) for n in range(1, 8)]
    hangs = _hanging(number=8, seq=104)
    behind = _hanging(number=9, seq=105, flags=FLAG_DONE | FLAG_UNTIMED)

    found = nccl_words.unfinished([ended, *between, hangs, behind])
    said = nccl_words.told([ended, *between, hangs, behind], 10_200_000_000, {0xAB: "tp"})

    assert found == (hangs,)
    assert [one.partition(",")[0] for one in said] == [
        "NCCL AllReduce #104 of tp",
        "NCCL AllReduce of tp: enqueued up to #105",
    ]
    assert said[1].endswith("the last known to have ended is #96: 8 since then were not timed")


def test_a_dead_rank_says_how_far_it_went_since_the_last_known_end(plugin: Plugin, tmp_path: Path) -> None:
    """The plugin's page tells how many are timed: the others may have ended or not."""
    values = {"abi": 5, "opened_mono_ns": 9, "nccl_next": 8, "timed_one_in": 8}
    page = [values.get(field.name, b"" if field.kind == "chars" else 0) for field in PROFILER.fields]
    PROFILER.codec.pack_into(plugin.map, PROFILER.offset, *page)
    plugin.write(96)
    for number in range(97, 104):
        plugin.write(number, flags=FLAG_DONE | FLAG_UNTIMED)

    moments = read(tmp_path / "0.box")

    (sentence,) = moments.nccl
    assert sentence.startswith(
        "NCCL AllReduce of communicator 0000000000000007: enqueued up to #103, the last known to"
    )
    assert sentence.endswith("to have ended is #96: 7 since then were not timed; one in 8 is now")


def test_how_far_a_communicator_came_is_told_beside_its_last_known_end() -> None:
    """Another function counts by itself; where nothing was ever timed (NCCL up to 2.25) nothing is said."""
    untimed = FLAG_DONE | FLAG_UNTIMED
    ended = _hanging(number=0, seq=96, flags=FLAG_DONE)
    gathers = [_hanging(number=n, seq=n, function="AllGather", flags=untimed) for n in (1, 2)]
    old = _hanging(number=3, communicator=1, flags=untimed)

    said = nccl_words.told([ended, *gathers, old], 0, {})

    (sentence,) = said
    assert sentence.startswith("NCCL AllGather of communicator 00000000000000ab: enqueued up to #2, the last known")
    assert sentence.endswith("to have ended is AllReduce #96: 2 since then were not timed")
    assert nccl_words.told([ended, *gathers, _hanging(number=4, seq=97, flags=FLAG_DONE)], 0, {}) == []


def test_a_dead_rank_says_what_nccl_had_not_ended(plugin: Plugin, tmp_path: Path) -> None:
    """``inspect`` reads the plugin's records, too."""
    plugin.write(0)
    plugin.write(1, flags=0)

    moments = read(tmp_path / "0.box")

    assert [one.partition(":")[0] for one in moments.nccl] == [
        "NCCL AllReduce #1 of communicator 0000000000000007, 64 bytes, RING/SIMPLE"
    ]
    assert moments.nccl[0] in "\n".join(sentences(moments))
