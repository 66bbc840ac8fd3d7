# SPDX-License-Identifier: Apache-2.0
"""Whatever bytes stand in a box and however reader and writer interleave: a whole record or none, and no exception."""

import random
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_ops.blackbox import BoxError, layout
from megascale_ops.blackbox.layout import FILE_BYTES, HEADER, MAGIC, NUMBER_BITS, RINGS, Ring
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity, StepRecord
from megascale_ops.blackbox.slots import CHUNK, newest, since, whole_slots
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.schema.version import BOX_VERSION
from tests.matrix import some

WORDS_PER_SLOT = 5


def toy_ring(slots: int) -> Ring:
    """Return a small ring whose record n has the fields n, n + 1, n + 2, n + 3."""
    fields = ("sequence:u64", "a:u64", "b:u64", "c:u64", "d:u64")
    return layout._ring("toy", 0, slots, WORDS_PER_SLOT * 8, *fields)


def stores_of(records: int, slots: int, order: random.Random) -> list[tuple[int, int]]:
    """Return what a writer stores, word by word: odd sequence, fields in any order, even sequence."""
    stores = []
    for number in range(records):
        at = number % slots * WORDS_PER_SLOT
        fields = [(at + 1 + index, number + index) for index in range(WORDS_PER_SLOT - 1)]
        order.shuffle(fields)
        stores += [(at, 2 * number + 1), *fields, (at, 2 * number + 2)]
    return stores


class Interleaved:
    """A reader's copies, word by word in any order, with the writer storing on between any two words."""

    def __init__(self, slots: int, stores: list[tuple[int, int]], order: random.Random, speed: int) -> None:
        self.words = [0] * (slots * WORDS_PER_SLOT)
        self.stores = stores
        self.order = order
        self.speed = speed
        self.done = 0

    def advance(self, count: int) -> None:
        """Let the writer store ``count`` words."""
        for where, value in self.stores[self.done : self.done + count]:
            self.words[where] = value
        self.done = min(len(self.stores), self.done + count)

    def read(self, offset: int, length: int) -> bytes:
        """Copy, slowly."""
        first, count = offset // 8, length // 8
        copied = [0] * count
        places = list(range(count))
        self.order.shuffle(places)
        for place in places:
            copied[place] = self.words[first + place]
            self.advance(self.order.randint(0, self.speed))
        return b"".join(word.to_bytes(8, "little") for word in copied)


@given(slots=st.integers(2, 4), records=st.integers(0, 12), speed=st.integers(0, 4), order=st.randoms())
@settings(max_examples=some(400), deadline=None)
def test_no_interleaving_tears_a_record(slots: int, records: int, speed: int, order: random.Random) -> None:
    """Every record that is returned is one that was written, all of it."""
    ring = toy_ring(slots)
    memory = Interleaved(slots, stores_of(records, slots, order), order, speed)
    memory.advance(order.randint(0, len(memory.stores)))

    found = whole_slots(ring, memory.read)

    for slot in found:
        assert slot.fields == tuple(slot.number + index for index in range(WORDS_PER_SLOT - 1))
    assert [slot.number for slot in found] == sorted(slot.number for slot in found)


@given(slots=st.integers(2, 4), records=st.integers(1, 6), speed=st.integers(0, 4), order=st.randoms())
@settings(max_examples=some(400), deadline=None)
def test_a_record_that_is_written_again_is_never_torn(
    slots: int, records: int, speed: int, order: random.Random
) -> None:
    """Its rewritings count in the sequence: what is returned is one of its contents, all of it."""
    ring = toy_ring(slots)
    stores = []
    for number in range(records):
        at = number % slots * WORDS_PER_SLOT
        for again in range(3):
            rewritten = again << NUMBER_BITS
            fields = [(at + 1 + index, 100 * number + 10 * again + index) for index in range(WORDS_PER_SLOT - 1)]
            order.shuffle(fields)
            stores += [(at, rewritten | 2 * number + 1), *fields, (at, rewritten | 2 * number + 2)]
    memory = Interleaved(slots, stores, order, speed)
    memory.advance(order.randint(0, len(memory.stores)))

    for slot in whole_slots(ring, memory.read):
        first = slot.fields[0]
        assert first in {100 * slot.number, 100 * slot.number + 10, 100 * slot.number + 20}
        assert slot.fields == tuple(first + index for index in range(WORDS_PER_SLOT - 1))


@given(steps=st.lists(st.integers(0, 300), min_size=1, max_size=6), holes=st.sets(st.integers(0, 1500), max_size=4))
@settings(max_examples=some(100), deadline=None)
def test_who_reads_on_gets_each_record_once(steps: list[int], holes: set[int]) -> None:
    """However many come between two looks: once and in order, or counted as lost; a hole stops no reader for ever."""
    ring = toy_ring(200)
    memory = bytearray(ring.size)
    seen: list[int] = []
    lost = written = following = 0
    for count in [*steps, 2 * CHUNK, *[0] * len(holes)]:  # each hole may cost a look
        for number in range(written, written + count):
            if number not in holes:
                ring.codec.pack_into(memory, number % ring.slots * ring.stride, 2 * number + 2, number, 0, 0, 0)
        written += count
        run = since(ring, lambda offset, length: bytes(memory[offset : offset + length]), following)
        seen += [slot.number for slot in run.slots]
        following, lost = run.next_number, lost + run.lost

    assert seen == sorted(set(seen))
    assert not holes.intersection(seen)
    assert lost == following - len(seen)
    assert following >= written - CHUNK


@given(slots=st.integers(2, 4), records=st.integers(1, 12), cut=st.integers(0, 100), order=st.randoms())
@settings(max_examples=some(300), deadline=None)
def test_a_writer_that_stops_anywhere_leaves_its_last_whole_record(
    slots: int, records: int, cut: int, order: random.Random
) -> None:
    """After a death between any two stores the newest whole record is exactly the last one that was finished."""
    ring = toy_ring(slots)
    stores = stores_of(records, slots, order)
    memory = Interleaved(slots, stores, order, 0)
    memory.advance(min(cut, len(stores)))

    found = newest(ring, memory.read)

    finished = memory.done // (WORDS_PER_SLOT + 1)
    assert (found.number if found else None) == (finished - 1 if finished else None)


def read_everything(path: Path) -> None:
    """Use every method of the reader; what it says must survive JSON, which knows neither NaN nor half a character."""
    with BoxReader(path) as reader:
        for said in (
            reader.identity(), reader.progress(), reader.collective(), reader.error(), reader.steps(),
            reader.collectives(), reader.progress(), reader.nccl(),
            reader.nccl_tail().drain_records(), reader.collectives_since(7), reader.communicators(), reader.gpu_steps(),
            reader.trail(),
        ):  # fmt: skip
            again = msgspec.json.decode(msgspec.json.encode(said), type=object)
            assert "null" not in str(again)
        assert len(reader.raw()) <= FILE_BYTES


@given(content=st.binary(max_size=300))
def test_no_file_crashes_the_reader(content: bytes) -> None:
    """Any bytes are refused with one of our errors."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "0.box"
        for file in (content, MAGIC + content, content * 1000):
            path.write_bytes(file)
            with pytest.raises(BoxError, match=r"0\.box"):
                read_everything(path)


@given(seed=st.integers(0, 2**32), density=st.sampled_from([0.0, 0.01, 0.5, 1.0]), sane=st.booleans())
@settings(max_examples=some(60), deadline=None)
def test_garbage_behind_a_good_header_is_survived(seed: int, density: float, sane: bool) -> None:
    """A file with our magic and version but any content gives records or nothing, all of it fit for JSON."""
    order = random.Random(seed)  # noqa: S311  bytes, not secrets
    content = bytearray(order.randbytes(FILE_BYTES) if density == 1.0 else FILE_BYTES)
    for _ in range(int(density * 5000)):
        content[order.randrange(FILE_BYTES)] = order.randrange(256)
    content[: len(MAGIC) + 4] = MAGIC + BOX_VERSION.to_bytes(4, "little")
    if sane:  # sequences that look right, so that the garbage is decoded
        for ring in RINGS[1:]:
            for slot in range(ring.slots if ring.slots > 1 else 0):
                at = ring.offset + slot * ring.stride
                content[at : at + 8] = (2 * slot + 2).to_bytes(8, "little")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "0.box"
        path.write_bytes(content)

        read_everything(path)


@given(length=st.integers(0, FILE_BYTES))
@settings(max_examples=some(40), deadline=None)
def test_a_file_truncated_under_the_reader_is_survived(length: int) -> None:
    """The file is truncated while it is open: the last whole record stands, nothing raises, no SIGBUS."""
    identity = BoxIdentity(job="j", node="n", rank=0, local_rank=0, world_size=1, pid=1, start_ticks=1, round=1)
    with tempfile.TemporaryDirectory() as folder:
        box = BoxWriter.create(Path(folder), identity)
        box.add_step(StepRecord(3, 1.0, 1.0))
        box.set_now(3, "data")
        reader = BoxReader(Path(folder) / "0.box")
        reader.progress()

        with (Path(folder) / "0.box").open("r+b") as file:
            file.truncate(length)

        assert reader.progress().step == 3
        assert len(reader.steps()) <= 1
        assert len(reader.trail().path) <= 1
        assert reader.identity().pid == 1
        reader.close()


def test_every_ring_of_the_map_is_covered_by_these_properties() -> None:
    """The properties rest on one protocol: whatever has a sequence has it first; what has none is of single words."""
    plain = {ring.name for ring in RINGS if ring.fields[0].name != "sequence"}

    assert plain == {HEADER.name, "pulse", "passages", "phases", "profiler"}
