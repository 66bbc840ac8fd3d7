# SPDX-License-Identifier: Apache-2.0
"""A black box in which anything stands is read, told and sent, or refused in one sentence."""

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megascale_agents.collectives.sample import CollectiveFeed
from megascale_agents.ranks.blackboxes import Pulse
from megascale_agents.ranks.rank_watch import RankWatch

from megascale_ops.blackbox import BoxError, inquest, last_moments, layout
from megascale_ops.blackbox.calls import of_ring
from megascale_ops.blackbox.layout import HEADER, Ring
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.errors import MegascaleError
from megascale_ops.schema import ranges
from megascale_ops.schema.identity import RankProcess
from megascale_ops.schema.messages import RankReport
from tests.fakes.boxes import BOOTED_S, box
from tests.fakes.mutations import fuzzed, mutated, stored

RINGS: tuple[Ring, ...] = (HEADER, *layout.RINGS)
# Each field of the first four slots of each ring: there the newest of a short run stand.
PLACES = sorted(
    {
        ring.offset + slot * ring.stride + at
        for ring in RINGS
        for slot in range(min(4, ring.slots))
        for at in [0, *(field.offset for field in ring.fields)]
    }
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a box as a rank writes it."""
    return box(tmp_path_factory.mktemp("whole"), 0, steps=3, also="broadcast").read_bytes()


def read_all(path: Path, reader: BoxReader) -> None:
    """Everything that a reader offers, by any caller."""
    for found in (reader.identity(), reader.progress(), reader.error(), reader.profiler(), reader.collective()):
        msgspec.json.decode(msgspec.json.encode(found))
    lists = (reader.steps(), reader.gpu_steps(), reader.collectives(), reader.nccl(), reader.communicators())
    for each in (*lists, reader.take_fresh_steps()):
        msgspec.json.encode(each)
    msgspec.json.encode(of_ring(reader.collectives(), reader.collective()))
    tail = reader.nccl_tail()
    tail.drain_records()
    tail.drain_records()
    tail.unfinished()
    watch = RankWatch(0, 1, RankProcess(0, 0, os.getpid(), 0))
    watch.set_box(reader, Pulse(os.open(path, os.O_RDONLY)))
    watch.look_at_box()
    report, _ = ranges.encode(watch.report(BOOTED_S, most_work=64))
    assert msgspec.json.decode(report, type=RankReport).rank == 0
    watch.close()
    feed = CollectiveFeed()
    for now_s in (BOOTED_S, BOOTED_S + 1):
        msgspec.json.encode(feed.drain_sample("job", {0: reader}, now_s))


def tell_all(path: Path) -> list[str]:
    """What ``megascale-ops inspect`` says of two boxes, of which one is whole."""
    moments = last_moments.read(path)
    msgspec.json.encode(moments)
    return [*inquest.sentences(moments), *inquest.summary([moments, moments])]


def assert_harmless(said: str) -> None:
    """What is said of foreign bytes is short, and nothing that a terminal acts on."""
    assert len(said) < 100_000
    assert said.replace("\n", "").isprintable()


def check(path: Path, data: bytes) -> None:
    """Read it in every way: the only way out is a refusal of ours, and what is said is short and harmless."""
    path.write_bytes(data)
    try:
        reader = BoxReader(path, torn=True)
    except BoxError as error:
        assert_harmless(str(error))
        return
    with reader:
        read_all(path, reader)
    try:
        said = tell_all(path)
    except MegascaleError as error:
        said = [str(error)]
    assert_harmless("\n".join(said))


@fuzzed
@given(data=st.data())
def test_a_box_whose_fields_hold_anything_is_read_and_told(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    """Every field at the edges of its type: sequences, times, lengths, numbers of ranks."""
    check(tmp_path / "0.box", data.draw(stored(whole, PLACES)))


@fuzzed
@given(data=st.data())
def test_a_box_that_was_cut_shifted_or_overwritten_is_read_or_refused(
    tmp_path: Path, whole: bytes, data: st.DataObject
) -> None:
    """Half a disk block, a line of text in its middle, a byte too many."""
    check(tmp_path / "0.box", data.draw(mutated([whole], PLACES)))


def test_a_whole_box_is_read(tmp_path: Path, whole: bytes) -> None:
    """Negative control: what the fuzzers change is read to its end when it is not changed."""
    path = tmp_path / "0.box"
    path.write_bytes(whole)

    with BoxReader(path) as reader:
        read_all(path, reader)

        assert len(reader.steps()) == 3
    assert any("step" in line for line in tell_all(path))
