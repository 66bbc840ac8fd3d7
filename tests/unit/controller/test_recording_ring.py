# SPDX-License-Identifier: Apache-2.0
"""What a controller keeps of what came in: bounded, beginning anywhere, and never in anybody's way."""

import logging
import os
import shutil
from pathlib import Path

import pytest

from megascale_ops.controller.config import ControllerConfig, recording_folder
from megascale_ops.controller.recording import ring as rings
from megascale_ops.controller.recording.ring import Ring
from megascale_ops.errors import UsageError
from megascale_ops.replay.files import Recording, read_recording
from megascale_ops.schema.events import Incident
from megascale_ops.schema.messages import Heartbeat, Order
from megascale_ops.schema.recording.entries import BLOCK_SUFFIX, Beat, Broken, Given, Polled, Said, Start, Stepped


class Clocks:
    """A monotonic and a wall clock that tests wind."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.wall_s = 1_700_000_000.0

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
        self.wall_s += seconds


def ring_in(folder: Path, clocks: Clocks, *, most_bytes: int = 1 << 20, keep_s: float = 1e9) -> Ring:
    """Return a ring that has begun."""
    ring = Ring(
        folder, most_bytes=most_bytes, keep_s=keep_s, clock=lambda: clocks.now_s, wall=lambda: clocks.wall_s
    )  # fmt: skip
    ring.begin(lambda: Start(0.0))
    return ring


def beat(ring: Ring, seq: int) -> Beat:
    """Return a heartbeat that comes now."""
    return Beat(ring.now_s, Heartbeat("n1", "a", seq, 1.0, 2.0))


def blocks(folder: Path) -> list[Recording]:
    """Return what was written."""
    return [read_recording(path) for path in sorted(folder.glob(f"*{BLOCK_SUFFIX}"))]


def test_a_block_is_due_after_half_a_minute_and_begins_with_what_was_known(tmp_path: Path) -> None:
    """Entries keep their order and times; the next block begins anew, with its own start."""
    clocks = Clocks()
    ring = ring_in(tmp_path, clocks)
    assert not ring.is_due

    clocks.advance(1.5)
    ring.note(beat(ring, 1))
    assert not ring.is_due
    clocks.advance(rings.BLOCK_S)
    ring.write_due()
    clocks.advance(2.0)
    ring.note(beat(ring, 2))
    ring.write(ring.cut())

    first, second = blocks(tmp_path)
    assert [type(entry) for entry in first.entries] == [Start, Beat]
    assert [entry.t for entry in first.entries] == [0.0, 1.5]
    assert [entry.t for entry in second.entries] == [0.0, 2.0]
    assert second.header.began_mono_s - first.header.began_mono_s == 1.5 + rings.BLOCK_S


def test_a_block_that_is_cut_by_its_size_goes_on_where_the_one_before_ends(tmp_path: Path) -> None:
    """All that is known of thousands of nodes is not written with each four megabytes."""
    clocks = Clocks()
    ring = ring_in(tmp_path, clocks)

    for seq in range(3):
        clocks.advance(rings.BLOCK_S * 0.4)
        ring.note(beat(ring, seq))
        ring.write(ring.cut())
    ring.note(beat(ring, 3))
    ring.write(ring.cut())

    assert [one.header.goes_on for one in blocks(tmp_path)] == [False, True, True, False]
    assert [isinstance(one.entries[0], Start) for one in blocks(tmp_path)] == [True, False, False, True]


def test_an_incident_is_on_the_disk_seconds_after_it_was_noticed(tmp_path: Path) -> None:
    """So that a controller that dies then has left what led to it; that its numbers change is no reason."""
    clocks = Clocks()
    ring = ring_in(tmp_path, clocks)

    ring.note(beat(ring, 1))
    ring.poll({"job-1": Incident("job-1", "job", 1)})
    clocks.advance(rings.AFTER_CHANGE_S + 0.1)
    was_due = ring.is_due
    ring.write_due()
    ring.poll({"job-1": Incident("job-1", "job", 1, step_before=5)})
    clocks.advance(rings.AFTER_CHANGE_S + 0.1)

    assert was_due
    assert not ring.is_due
    assert [entry.m.id for entry in blocks(tmp_path)[0].entries if isinstance(entry, Said)] == ["job-1"]


def test_the_oldest_blocks_go_by_size_and_by_age(tmp_path: Path) -> None:
    """What stands beside them stays; the newest block stays whatever its size."""
    clocks = Clocks()
    ring = ring_in(tmp_path, clocks, most_bytes=1000, keep_s=600.0)
    (tmp_path / "other.txt").write_text("mine")

    for number in range(20):
        ring.note(beat(ring, number))
        ring.write(ring.cut())
        clocks.advance(1.0)
    by_size = len(blocks(tmp_path))
    for path in tmp_path.glob(f"*{BLOCK_SUFFIX}"):
        os.utime(path, (1.0, 1.0))
    ring.note(beat(ring, 21))
    ring.write(ring.cut())

    assert 1 <= by_size < 20
    assert sum(path.stat().st_size for path in tmp_path.glob(f"*{BLOCK_SUFFIX}")) <= 1000
    assert len(blocks(tmp_path)) == 1
    assert (tmp_path / "other.txt").read_text() == "mine"


def test_what_cannot_be_written_is_dropped_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Memory does not grow, and the next block is written when it can be."""
    clocks = Clocks()
    folder = tmp_path / "blocked"
    folder.write_text("a file where the folder should be")
    ring = ring_in(folder, clocks)

    with caplog.at_level(logging.WARNING):
        for number in range(3):
            ring.note(beat(ring, number))
            ring.write(ring.cut())
        folder.unlink()
        ring.note(beat(ring, 4))
        ring.write(ring.cut())

    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert len(blocks(folder)) == 1


def test_the_last_of_a_disk_is_left_to_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Below what recordings may have nothing is written, and that is told."""
    ring = ring_in(tmp_path, Clocks(), most_bytes=64 << 20)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(rings.shutil, "disk_usage", lambda _: usage._replace(free=5 << 20))

    ring.note(beat(ring, 1))
    ring.write(ring.cut())

    assert not blocks(tmp_path)
    assert "only 5 MB are free, which are left to the journal" in caplog.text


def test_what_cannot_be_encoded_is_left_out_and_the_heartbeat_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Text that is no text, as a lone surrogate: recording is no reason to refuse a message."""
    ring = ring_in(tmp_path, Clocks())

    ring.note(Beat(0.0, Heartbeat("\ud800", "a", 1, 1.0, 2.0)))
    ring.note(beat(ring, 2))
    ring.write(ring.cut())

    assert [entry.m.seq for entry in blocks(tmp_path)[0].entries if isinstance(entry, Beat)] == [2]
    assert "a Beat can't be encoded" in caplog.text


def test_requests_that_wait_are_in_the_next_start(tmp_path: Path) -> None:
    """A replay that begins there knows that the runner is listening; of one that broke it knows that too."""
    clocks = Clocks()
    ring = ring_in(tmp_path, clocks)

    for number in (ring.next_number(), ring.next_number()):
        ring.open(Polled(ring.now_s, number, "job", f"n{number}", "r"))
    ring.close_request(1, broken=True)
    clocks.advance(rings.BLOCK_S)
    ring.write(ring.cut())
    clocks.advance(1.0)
    ring.note(beat(ring, 1))
    ring.write(ring.cut())

    first, second = blocks(tmp_path)
    assert [entry.n for entry in first.entries if isinstance(entry, Broken)] == [1]
    start = second.entries[0]
    assert isinstance(start, Start)
    assert [poll.n for poll in start.polls] == [2]


def test_an_order_is_noted_once_and_a_step_of_the_wall_clock_is(tmp_path: Path) -> None:
    """An order is told with every heartbeat until it is done."""
    clocks = Clocks()
    ring = ring_in(tmp_path, clocks)
    order = Order("job:1:1.a", "job", "n1", "restart", 1)

    ring.note_orders((order,))
    ring.note_orders((order,))
    ring.poll({})
    clocks.wall_s += 3600.0
    ring.poll({})
    ring.poll({})
    ring.write(ring.cut())

    kinds = [type(entry) for entry in blocks(tmp_path)[0].entries]
    assert kinds == [Start, Given, Stepped]


def test_a_clock_that_goes_back_gives_no_negative_time(tmp_path: Path) -> None:
    """The file can be read, and its order is that in which things came."""
    clocks = Clocks()
    ring = ring_in(tmp_path, clocks)

    clocks.now_s -= 50.0
    ring.note(beat(ring, 1))
    ring.write(ring.cut())

    assert [entry.t for entry in blocks(tmp_path)[0].entries] == [0.0, 0.0]


def test_recordings_lie_beside_the_journal_unless_they_are_put_elsewhere_or_switched_off(tmp_path: Path) -> None:
    """A run's own in its folder; a controller on PostgreSQL has no place of its own, and is given one."""
    assert recording_folder(ControllerConfig(run_dir=tmp_path)) == tmp_path / "recording"
    assert recording_folder(ControllerConfig(store=f"sqlite:///{tmp_path}/ops.db")) == tmp_path / "recording"
    assert recording_folder(ControllerConfig(store="postgresql+psycopg://u@h/d")) is None
    assert recording_folder(ControllerConfig(store="postgresql+psycopg://u@h/d", record=tmp_path)) == tmp_path
    assert recording_folder(ControllerConfig(run_dir=tmp_path, record_mb=0)) is None
    with pytest.raises(UsageError, match="record_mb = -1"):
        recording_folder(ControllerConfig(record_mb=-1))
