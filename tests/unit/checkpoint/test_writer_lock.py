# SPDX-License-Identifier: Apache-2.0
"""A name on a folder: put there, respected, taken over, renewed and given back."""

import errno
import os
import threading
from pathlib import Path

import msgspec
import pytest

from megascale_ops.checkpoint import CheckpointManager, latest, lock_files, processes, storage, writer_lock
from megascale_ops.checkpoint.writer_lock import WriterLock
from megascale_ops.checkpoint.writers import Process, Writer
from megascale_ops.errors import CheckpointError

# 0.3 s: a lease that is short enough to be waited for.
SHORT_S = 0.3
ELSEWHERE = Process("node-b", "another boot", "pid:[1]", 4711, 9)


def put(root: Path, process: Process, number: int = 1, **more: object) -> Writer:
    """Somebody else's name on the folder."""
    plain = Writer(process, f"{number:x}", process.host, 0, 1.0, job="other", job_id="xyz", round=1, lease_s=SHORT_S)
    record = msgspec.structs.replace(plain, **more)
    assert lock_files.create(root, number, record)
    return record


def neighbour() -> Process:
    """A process of this machine that lives for certain: our parent."""
    parent = os.getppid()
    ticks = int(Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[19])
    return msgspec.structs.replace(processes.this_process(), pid=parent, start_ticks=ticks)


def test_a_second_writer_is_refused_and_a_reader_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The save fails with the holder's name and leaves nothing; restoring works, and says what is to come."""
    mine = CheckpointManager(tmp_path)
    mine.save(1, {"a": 1})
    mine.close()
    put(tmp_path, neighbour(), number=2)
    state = {"a": 0}

    with pytest.raises(CheckpointError, match=r"^saving step 2 to .* failed: job other \(round 1, rank 0, pid \d+ on"):
        mine.save(2, {"a": 2})
    step = mine.restore(state)

    assert (step, state) == (1, {"a": 1})
    assert "can restore from" in caplog.text
    assert [path.name for path in storage.candidates(tmp_path)] == ["step-00000001"]
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("flags", "pending", "life"),
    [(0x400000, 0, "alive"), (0x400004, 0, "dying"), (0x400000, 1 << 8, "dying"), (0x400000, 1 << 14, "alive")],
    ids=["lives", "is taken apart", "SIGKILL waits for a core", "SIGTERM does"],
)
def test_a_killed_process_is_dying_before_it_is_dead(
    monkeypatch: pytest.MonkeyPatch, flags: int, pending: int, life: str
) -> None:
    """By its flags, or by the signal that no program can refuse."""
    other = neighbour()
    monkeypatch.setattr(processes, "_read_stat", lambda _pid: ("R", flags, 3, other.start_ticks, pending))

    assert processes.life_of(other, processes.this_process()) == life


def test_a_restart_awaits_the_end_of_a_process_that_is_dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would miss what that one's writer process is about to seal. The control: one that lives."""
    lives = ["dying", "dying", "dead", "alive"]
    monkeypatch.setattr(processes, "life_of", lambda _process, _me: lives.pop(0))
    monkeypatch.setattr(writer_lock, "_WATCH_S", 0.0)
    put(tmp_path, neighbour())

    answers = [WriterLock(tmp_path).poll_lock_of_the_living(0, 1).verb for _ in range(2)]

    assert (answers, lives) == (["take", "refuse"], [])


@pytest.mark.parametrize(
    "process",
    [
        msgspec.structs.replace(neighbour(), start_ticks=1),
        msgspec.structs.replace(neighbour(), pid=2**22 + 1),  # above the largest pid that Linux gives
        processes.this_process(),
    ],
    ids=["its pid was given to another", "no such process", "this process"],
)
def test_a_dead_writer_of_this_machine_is_no_obstacle(tmp_path: Path, process: Process) -> None:
    """The kernel knows, so nobody waits for a lease."""
    put(tmp_path, process, lease_s=600.0)

    assert WriterLock(tmp_path).hold(0, 1) == 2
    assert [path.name for path in tmp_path.iterdir()] == [".writer-00000002.json"]


def test_an_earlier_round_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node may be gone, so nobody can ask there; that the controller formed a new round is proof enough."""
    monkeypatch.setenv("MEGASCALE_JOB_ID", "xyz")
    monkeypatch.setenv("MEGASCALE_ROUND", "2")
    put(tmp_path, ELSEWHERE, lease_s=600.0)

    assert WriterLock(tmp_path).hold(0, 4) == 2


def test_a_silent_writer_of_another_node_is_replaced_after_its_lease(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And that is said, since it is the one case in which it might have lived."""
    put(tmp_path, ELSEWHERE)

    assert WriterLock(tmp_path).hold(0, 1) == 2
    assert "did not renew its lease" in caplog.text


def test_a_writer_that_renews_its_lease_is_left_alone(tmp_path: Path) -> None:
    """One renewal that is seen is enough."""
    put(tmp_path, ELSEWHERE, lease_s=600.0)
    enough = threading.Event()

    def renew() -> None:
        beat = 0
        while not enough.wait(0.05):
            beat += 1
            lock_files.touch(tmp_path, 1, beat * 2_000_000_000)

    holder = threading.Thread(target=renew)
    holder.start()
    try:
        with pytest.raises(CheckpointError, match="has just renewed its lease"):
            WriterLock(tmp_path).hold(0, 1)
    finally:
        enough.set()
        holder.join(timeout=10)


def test_time_that_was_watched_before_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore begins to watch, so that the first save an hour later does not wait for a lease."""
    now_s = [1000.0]
    monkeypatch.setattr(writer_lock.time, "monotonic", lambda: now_s[0])
    put(tmp_path, ELSEWHERE, lease_s=50.0)
    lock = WriterLock(tmp_path)

    assert lock.poll_lock(0, 1).verb == "watch"
    now_s[0] += 51

    assert lock.hold(0, 1) == 2


def test_of_two_that_take_over_at_once_one_gets_it(tmp_path: Path) -> None:
    """Both have seen the dead holder; the number is there once."""
    put(tmp_path, ELSEWHERE, number=7)

    made = [lock_files.create(tmp_path, 8, Writer(ELSEWHERE, str(n), "node", n, 1.0)) for n in range(2)]

    assert made == [True, False]
    assert not list(tmp_path.glob("*.new"))


def test_where_there_are_no_links_an_exclusive_create_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some FUSE mounts know no hard links."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)

    made = [lock_files.create(tmp_path, 1, Writer(ELSEWHERE, str(n), "node", n, 1.0)) for n in range(2)]

    assert made == [True, False]
    found = lock_files.read_lock(tmp_path).writer
    assert found is not None
    assert found.rank == 0


def test_who_was_replaced_can_seal_nothing_and_deletes_nothing(tmp_path: Path) -> None:
    """Frozen in the middle of a save, replaced meanwhile, and continued."""
    lock = WriterLock(tmp_path)
    number = lock.hold(0, 1)
    half = storage.begin(tmp_path, 5, number)
    (half / "shard").write_bytes(b"x")
    put(tmp_path, ELSEWHERE, number=number + 1)
    storage.begin(tmp_path, 5, number + 1)

    with pytest.raises(CheckpointError, match=r"^job other .* has taken this folder over$"):
        lock.confirm()
    assert not half.exists()
    lock.renew()
    lock.release()
    newest = lock_files.read_lock(tmp_path)
    assert newest.writer is not None
    assert (newest.number, newest.writer.released) == (number + 1, False)


def test_a_lease_is_renewed_and_a_deleted_name_is_written_again(tmp_path: Path) -> None:
    """Every renewal shows, also on a file system that counts whole seconds."""
    lock = WriterLock(tmp_path)
    number = lock.hold(0, 1)
    before = lock_files.read_lock(tmp_path)

    lock.renew()
    after = lock_files.read_lock(tmp_path)
    lock_files.path_of(tmp_path, number).unlink()
    lock.confirm()

    assert after.modified_ns // 10**9 > before.modified_ns // 10**9
    assert after.writer == before.writer
    assert lock_files.read_lock(tmp_path).writer == before.writer


def test_what_was_given_back_is_free_for_anybody(tmp_path: Path) -> None:
    """And the number counts on, so that nobody's old look at the folder comes true."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"a": 1})
    before = lock_files.read_lock(tmp_path)

    manager.close()
    free = lock_files.read_lock(tmp_path)
    manager.save(2, {"a": 2})

    assert before.writer is not None
    assert free.writer == msgspec.structs.replace(before.writer, released=True)
    assert lock_files.read_lock(tmp_path).number == before.number + 1
    assert [report.ok for report in latest.verify(tmp_path)] == [True, True]


@pytest.mark.parametrize("kind", ["garbage", "link to /dev/zero", "FIFO", "folder"])
def test_anything_in_the_place_of_a_lock_is_respected_for_one_lease_and_hangs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It is the name of somebody unknown."""
    now_s = [1000.0]
    monkeypatch.setattr(writer_lock.time, "monotonic", lambda: now_s[0])
    place = lock_files.path_of(tmp_path, 3)
    if kind == "garbage":
        place.write_bytes(b"\x00" * 100)
    elif kind == "FIFO":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to("/dev/zero")
    lock = WriterLock(tmp_path)

    first = lock.poll_lock(0, 1)
    now_s[0] += 61

    assert first.verb == "watch"
    assert lock.hold(0, 1) == 4


def test_two_jobs_in_two_folders_have_nothing_to_do_with_each_other(tmp_path: Path) -> None:
    """Negative control: the name stands on the folder, not on the machine."""
    put(tmp_path, neighbour())
    manager = CheckpointManager(tmp_path / "of its own")

    manager.save(1, {"a": 1})

    assert manager.restore({"a": 0}) == 1


def test_a_name_that_is_renewed_costs_no_byte_of_disk(tmp_path: Path) -> None:
    """A full disk must not cost a running job its folder: the record itself is not written again."""
    lock = WriterLock(tmp_path)
    lock.hold(0, 1)
    inode = lock_files.read_lock(tmp_path).inode

    lock.renew()

    assert lock_files.read_lock(tmp_path).inode == inode
    assert len(list(tmp_path.iterdir())) == 1
