# SPDX-License-Identifier: Apache-2.0
"""What the writer writes, the reader reads; what is not a box is refused in one sentence."""

import errno
import math
import os
import stat
from pathlib import Path

import pytest

from megascale_ops.blackbox import BoxError
from megascale_ops.blackbox.layout import EFFORTS, ERROR, FILE_BYTES, GPU_STEPS, PROFILER, RESTORES
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import (
    BoxIdentity,
    CollectiveRecord,
    GpuStepRecord,
    RestoresRecord,
    SavesRecord,
    StepRecord,
)
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.progress import MOST_WORK, CollectivePosition, RankError, RankFinding
from megascale_ops.schema.version import BOX_VERSION

IDENTITY = BoxIdentity(
    job="gpt",
    node="n1",
    rank=3,
    local_rank=1,
    world_size=8,
    pid=4242,
    start_ticks=99,
    round=2,
    mesh=Mesh(tp=1, pp=0, dp=3, ep=-1),
    stderr_path="/run/rank-3/stderr.log",
    worker_server_path="/box/3.sock",
    started_mono_s=12.5,
    started_wall_s=1.7e9,
)


def make(folder: Path) -> tuple[BoxWriter, BoxReader]:
    """Return both ends of one box."""
    box = BoxWriter.create(folder, IDENTITY)
    return box, BoxReader(folder / "3.box")


def test_identity_comes_back(tmp_path: Path) -> None:
    """Every field of the identity is in the header."""
    _, reader = make(tmp_path)

    assert reader.identity() == IDENTITY


def test_a_fresh_box_says_starting(tmp_path: Path) -> None:
    """Before the first event there is no step, no collective, no error, no record."""
    _, reader = make(tmp_path)

    found = reader.progress()

    assert (found.state, found.step, found.steps_seen, found.phase) == ("starting", -1, 0, "startup")
    assert found.phase_since_mono_s > 0
    assert (reader.collective(), reader.error()) == (None, None)
    assert (reader.steps(), reader.collectives()) == ([], [])


def test_progress_comes_back(tmp_path: Path) -> None:
    """Step, phase, state and the point in time of the last movement are what was written last."""
    box, reader = make(tmp_path)

    box.set_state("running")
    box.add_step(StepRecord(6, 99.0, 0.5))
    box.set_now(6, "forward", absolute=True, now_mono_s=100.0)
    box.set_now(6, "forward", absolute=True, now_mono_s=101.0)
    box.moved(102.0)

    found = reader.progress()
    assert (found.state, found.step, found.step_is_absolute, found.steps_seen) == ("running", 6, True, 1)
    assert (found.phase, found.phase_since_mono_s, found.moved_mono_s) == ("forward", 100.0, 102.0)


def test_quantiles_leave_out_the_first_step_and_checkpoints(tmp_path: Path) -> None:
    """One slow first step and one slow checkpoint do not teach patience."""
    box, reader = make(tmp_path)

    box.add_step(StepRecord(0, 60.0, 60.0))
    for step in range(1, 101):
        box.add_step(StepRecord(step, 60.0 + step, 0.05))
    box.add_step(StepRecord(101, 200.0, 30.05, checkpoint_s=30.0))
    box.set_now(101, "data")

    found = reader.progress()
    assert found.step_p50_s == pytest.approx(0.05)
    assert found.step_p99_s == pytest.approx(0.05)


@pytest.mark.parametrize("looks_between", [1, 7, 255, 256, 257, 1000])
def test_quantiles_follow_the_ring(tmp_path: Path, looks_between: int) -> None:
    """However seldom the reader looks, the quantiles are those of the last 256 steps."""
    box, reader = make(tmp_path)

    for step in range(1000):
        box.add_step(StepRecord(step, float(step), float(step)))
        if step % looks_between == 0:
            reader.progress()
    box.set_now(999, "data")

    found = reader.progress()
    assert found.step_p50_s == pytest.approx(871, abs=1)
    assert found.step_p99_s == pytest.approx(997, abs=1)


def test_rings_keep_the_newest(tmp_path: Path) -> None:
    """A ring that went round keeps its last records, in order."""
    box, reader = make(tmp_path)

    for number in range(3000):
        box.add_step(StepRecord(number, float(number), 1.0))
        box.add_collective(CollectiveRecord("0", "all_reduce", number, 4, number))

    assert [record.step for record in reader.steps()] == list(range(2744, 3000))
    assert [record.seq for record in reader.collectives(last=2)] == [2998, 2999]
    assert len(reader.collectives()) == 1024
    assert reader.steps(last=0) == []


def test_a_collective_is_seen_while_it_runs(tmp_path: Path) -> None:
    """It is written at its entry without an end, and again with one."""
    box, reader = make(tmp_path)

    number = box.add_collective(CollectiveRecord("0", "barrier", 7, 0, 100, 100))
    inside = reader.collectives()
    box.end_collective(number, 250)

    assert [record.ended_mono_ns for record in inside] == [0]
    assert [record.ended_mono_ns for record in reader.collectives()] == [250]


def test_a_late_end_does_not_overwrite_a_newer_collective(tmp_path: Path) -> None:
    """When 1,024 others came between, the slot belongs to the newer one."""
    box, reader = make(tmp_path)

    number = box.add_collective(CollectiveRecord("0", "recv", 0, 0, 1))
    for seq in range(1, 1025):
        box.add_collective(CollectiveRecord("0", "send", seq, 0, 1))
    box.end_collective(number, 9)

    assert {(record.function, record.ended_mono_ns) for record in reader.collectives()} == {("send", 0)}


def test_beat_error_and_server_come_back(tmp_path: Path) -> None:
    """The position in the process groups, the last error and the server's path are what was written last."""
    box, reader = make(tmp_path)

    box.beat(6, 5, "pg 0")
    box.set_error(RankError(type="RuntimeError", message="first", where="a.py:1 f", step=1))
    box.set_error(RankError(type="ValueError", message="Grüße " + "x" * 5000, where="train.py:12 main", step=9))
    box.set_worker_server("/box/other.sock")

    error = reader.error()
    assert reader.collective() == CollectivePosition(6, 5, "pg 0")
    assert reader.progress().beat_mono_s > 0
    assert error is not None
    assert (error.type, error.where, error.step) == ("ValueError", "train.py:12 main", 9)
    assert error.message.startswith("Grüße xxx")
    assert reader.identity().worker_server_path == "/box/other.sock"


def test_an_error_tells_its_thread_and_time_and_an_older_writers_does_not(tmp_path: Path) -> None:
    """Both stand where older writers let a long message go on: their text is never read as a thread."""
    box, reader = make(tmp_path)
    said = RankError("ValueError", "no", "train.py:3 step", 7, "Thread-1 (upload)", 12.5)

    box.set_error(said)
    new = reader.error()
    at = ERROR.offset + ERROR.stride + ERROR.field("message").offset
    box.set_error(RankError("ValueError", "x" * 711, "train.py:3 step", 8))
    box._map[at : at + 784] = b"x" * 783 + b"\0"
    old = reader.error()

    assert new == said
    assert old is not None
    assert (old.message, old.thread, old.raised_mono_s) == ("x" * 712, "", 0.0)


def test_what_seldom_changes_is_read_again_when_it_does(tmp_path: Path) -> None:
    """Looking often costs one copy; a new place, server or error is seen by the next look all the same."""
    box, reader = make(tmp_path)
    before = [(reader.identity(), reader.error()) for _ in range(3)]

    box.set_mesh(Mesh(tp=5, pp=6, dp=7, ep=8))
    box.set_error(RankError("ValueError", "no", "train.py:3 step", 7))
    after = [(reader.identity(), reader.error()) for _ in range(3)]

    assert before == [(IDENTITY, None)] * 3
    assert {(known.mesh.tp, error.message if error else "") for known, error in after} == {(5, "no")}


def test_one_look_serves_progress_position_and_steps(tmp_path: Path) -> None:
    """Reports read them together: what follows without a look is as of the progress before."""
    box, reader = make(tmp_path)
    box.beat(3, 2, "all_reduce")
    box.add_step(StepRecord(0, 1.0, 0.5))
    box.set_now(0, "data")
    reader.progress()
    box.beat(4, 4, "all_reduce")
    box.add_step(StepRecord(1, 2.0, 0.5))

    assert reader.collective(look=False) == CollectivePosition(3, 2, "all_reduce")
    assert [step.step for step in reader.take_fresh_steps(look=False)] == [0]
    assert (reader.steps_read, reader.collective()) == (1, CollectivePosition(4, 4, "all_reduce"))
    assert [step.step for step in reader.take_fresh_steps()] == [1]


def test_long_names_are_cut_at_a_character(tmp_path: Path) -> None:
    """A name that does not fit loses its end, never half a character."""
    box, reader = make(tmp_path)

    box.set_now(0, "ä" * 40)

    assert reader.progress().phase == "ä" * 15


def test_a_name_that_is_no_text_is_written_with_question_marks(tmp_path: Path) -> None:
    """A phase or a group named after a file may hold any bytes: the name is worth less than the record."""
    box, reader = make(tmp_path)

    box.set_now(1, os.fsdecode(b"caf\xe9"))
    box.beat(4, 3, os.fsdecode(b"pg \xe9"))
    box.add_collective(CollectiveRecord(os.fsdecode(b"tp\xe9"), os.fsdecode(b"all\xe9"), 1, 5, 1))

    assert reader.progress().phase == "caf?"
    assert reader.collective() == CollectivePosition(4, 3, "pg ?")
    assert [(one.communicator, one.function) for one in reader.collectives()] == [("tp?", "all?")]


def test_a_box_outlives_its_name(tmp_path: Path) -> None:
    """A new box moves the old one aside; who has either open reads on, also when the file is gone."""
    old, old_reader = make(tmp_path)
    new, new_reader = make(tmp_path)

    old.set_now(1, "old")
    new.set_now(2, "new")
    for file in tmp_path.iterdir():
        file.unlink()

    assert (old_reader.progress().phase, new_reader.progress().phase) == ("old", "new")


def test_the_old_box_is_kept_beside(tmp_path: Path) -> None:
    """``<rank>.box.old`` is the box of the round before, and nothing else is left over."""
    first, _ = make(tmp_path)
    first.set_now(41, "backward")

    make(tmp_path)

    assert sorted(file.name for file in tmp_path.iterdir()) == ["3.box", "3.box.old"]
    assert BoxReader(tmp_path / "3.box.old").progress().step == 41


def test_raw_bytes_are_a_box(tmp_path: Path) -> None:
    """What is preserved as evidence can be read later like the box itself."""
    box, reader = make(tmp_path)
    box.set_now(5, "backward")
    kept = tmp_path / "kept.box"

    kept.write_bytes(reader.raw())

    assert BoxReader(kept).progress().step == 5


def test_files_and_folders_are_private(tmp_path: Path) -> None:
    """Every folder that had to be made is 0700, the file 0600."""
    make(tmp_path / "root" / "gpt")

    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("root", "root/gpt", "root/gpt/3.box")]
    assert modes == [0o700, 0o700, 0o600]


def test_all_memory_is_there_from_the_start(tmp_path: Path) -> None:
    """No block is missing that a full file system could refuse later, with a SIGBUS."""
    make(tmp_path)

    assert (tmp_path / "3.box").stat().st_blocks * 512 >= FILE_BYTES


def test_a_full_file_system_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room there is no box, no left-over file, and an error that says why."""

    def no_room(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_room)

    with pytest.raises(BoxError, match=r"no room left \(is /dev/shm full\?\)"):
        BoxWriter.create(tmp_path, IDENTITY)

    assert list(tmp_path.iterdir()) == []


def test_a_linked_folder_is_refused(tmp_path: Path) -> None:
    """A folder that is a link elsewhere is not written into."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "gpt").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(BoxError, match="is a link or no folder"):
        BoxWriter.create(tmp_path / "gpt", IDENTITY)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "shorter than a header"),
        (b"#!/bin/sh\n" * 1000, "does not begin with MGSCLBOX"),
        (b"MGSCLBOX" + (9).to_bytes(4, "little") + bytes(FILE_BYTES), "has version 9; this program speaks version 3"),
        (b"MGSCLBOX" + (3).to_bytes(4, "little") + bytes(5000), "torn black box"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    """Each kind of wrong file gets its own sentence."""
    path = tmp_path / "0.box"
    path.write_bytes(content)

    with pytest.raises(BoxError, match=words):
        BoxReader(path)


def test_a_neighbour_version_is_read(tmp_path: Path) -> None:
    """Neighbours only add to each other, so they are understood, even where they are shorter than we think."""
    path = tmp_path / "0.box"
    path.write_bytes(b"MGSCLBOX" + (BOX_VERSION + 1).to_bytes(4, "little") + bytes(5000))

    reader = BoxReader(path)

    assert reader.progress().state == "starting"
    assert reader.collectives() == []


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    """A FIFO, a folder, a link and a missing file are refused at once."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")

    for name in ("fifo", "link", "missing", "."):
        with pytest.raises(BoxError, match=name):
            BoxReader(tmp_path / name)


def test_a_closed_reader_reads_nothing(tmp_path: Path) -> None:
    """Closing twice is fine, and reading afterwards finds nothing instead of raising."""
    _, reader = make(tmp_path)

    with reader:
        reader.close()

    assert reader.raw() == b""
    assert reader.progress().state == "starting"


def test_fresh_steps_are_told_once(tmp_path: Path) -> None:
    """Oldest first, the newest of too many, with what else is known of them; also after the ring was lapped."""
    box, reader = make(tmp_path)
    box.add_step(StepRecord(0, 1.0, 0.5, gc_s=0.01, cpu_s=0.4, loss=math.nan))
    box.add_step(StepRecord(1, 2.0, 0.5))

    first = reader.take_fresh_steps()

    assert [step.step for step in first] == [0, 1]
    assert (first[0].gc_s, first[0].cpu_s, first[1].loss) == (0.01, 0.4, None)
    assert math.isnan(first[0].loss or 0.0)
    assert reader.take_fresh_steps() == []
    for step in range(2, 800):
        box.add_step(StepRecord(step, float(step), 0.5, loss=float(step)))
    assert [step.loss for step in reader.take_fresh_steps()] == [float(step) for step in range(800 - MOST_WORK, 800)]


def test_a_box_of_version_2_has_steps_and_nothing_of_nccl(tmp_path: Path) -> None:
    """It ends before the profiler's rings begin."""
    box, reader = make(tmp_path)
    box.add_step(StepRecord(0, 1.0, 0.5, gc_s=0.01, loss=2.0))
    content = bytearray(reader.raw()[: PROFILER.offset])
    content[8:12] = (2).to_bytes(4, "little")
    (tmp_path / "old.box").write_bytes(content)

    with BoxReader(tmp_path / "old.box") as old:
        assert old.take_fresh_steps() == old.steps() == [StepRecord(0, 1.0, 0.5, gc_s=0.01, loss=2.0)]
        assert (old.nccl(), old.communicators(), old.profiler()) == ([], [], None)
        assert old.nccl_tail().drain_records() == ([], 0)


def test_a_box_of_version_1_is_refused_with_both_versions(tmp_path: Path) -> None:
    """Two versions apart is too far."""
    _, reader = make(tmp_path)
    content = bytearray(reader.raw()[: EFFORTS.offset])
    content[8:12] = (1).to_bytes(4, "little")
    (tmp_path / "old.box").write_bytes(content)

    with pytest.raises(BoxError, match="has version 1; this program speaks version 3"):
        BoxReader(tmp_path / "old.box")


def test_gpu_times_came_without_a_new_version(tmp_path: Path) -> None:
    """A box of version 3 that was written without them has none; with them it has the same size and all the rest."""
    with_times = BoxWriter.create(tmp_path, IDENTITY)
    with_times.add_step(StepRecord(5, 10.0, 0.5))
    before = (tmp_path / "3.box").read_bytes()
    with_times.add_gpu_step(GpuStepRecord(0, 5, 0.4, 0.01, 0.1, 0.2, 0.05, 0.02, (("sample", 0.03),)))

    with BoxReader(tmp_path / "3.box") as reader:
        found, steps = reader.gpu_steps(), reader.steps()
    after = (tmp_path / "3.box").read_bytes()
    (tmp_path / "3.box").write_bytes(before)
    with BoxReader(tmp_path / "3.box") as reader:
        assert reader.gpu_steps() == []
        assert reader.steps() == steps

    assert found == [GpuStepRecord(0, 5, 0.4, 0.01, 0.1, 0.2, 0.05, 0.02, (("sample", 0.03),))]
    assert len(before) == len(after) == FILE_BYTES
    assert before[: GPU_STEPS.offset] == after[: GPU_STEPS.offset]


def test_what_is_known_of_saves_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """None before the first; what can be no time is none."""
    writer, reader = make(tmp_path)

    assert reader.saves() is None
    for step in range(7):
        writer.set_saves(SavesRecord(step, 0.5, float("nan"), step - 1, 1000.0, 1, 3))

    assert reader.saves() == SavesRecord(6, 0.5, 0.0, 5, 1000.0, 1, 3)


def test_what_is_known_of_restores_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """None before the first; the last page's end holds two of them, and the file ends there."""
    writer, reader = make(tmp_path)

    assert reader.restores() is None
    for step in range(5):
        writer.set_restores(RestoresRecord(step, 2.5, 10**12, 3, 1, 4, 5, 6, 7))

    assert reader.restores() == RestoresRecord(4, 2.5, 10**12, 3, 1, 4, 5, 6, 7)
    assert RESTORES.offset + RESTORES.size == FILE_BYTES


def test_findings_stand_until_they_are_over(tmp_path: Path) -> None:
    """By class the newest; one without text ends it; long texts are cut, and many records lose only old ones."""
    box, reader = make(tmp_path)
    assert reader.findings() == ()

    box.add_finding(RankFinding("stale_weights", 3, "first", 1.0))
    box.add_finding(RankFinding("silent_corruption", 4, "x" * 1000, 2.0))
    box.add_finding(RankFinding("stale_weights", 5, "second", 3.0))
    found = reader.findings()
    assert [(one.fault, one.step, one.text[:9]) for one in found] == [
        ("silent_corruption", 4, "xxxxxxxxx"),
        ("stale_weights", 5, "second"),
    ]
    assert len(found[0].text) == 455

    box.add_finding(RankFinding("silent_corruption", 6, "", 4.0))
    assert reader.findings() == (RankFinding("stale_weights", 5, "second", 3.0),)
    for step in range(20):
        box.add_finding(RankFinding("stale_weights", step, f"at {step}", 5.0))
    assert reader.findings() == (RankFinding("stale_weights", 19, "at 19", 5.0),)
