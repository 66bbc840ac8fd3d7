# SPDX-License-Identifier: Apache-2.0
"""What the agent's parts make of a user who puts things in their way."""

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from megascale_agents.collectors.kernel_log import KernelLog
from megascale_agents.evidence import flight_recorder, py_spy
from megascale_agents.evidence.flight_recorder import NoAnswerError
from megascale_agents.metrics.tiles import samples_of
from megascale_agents.ownership.rights import Owner, myself
from megascale_agents.ranks import blackboxes
from megascale_agents.ranks.rounds import Rounds
from megascale_agents.ranks.stderr_scanner import LogScanner
from megascale_agents.ranks.tile_boards import Boards
from megascale_agents.startup.node_lock import node_lock

from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.schema.identity import RankProcess
from tests.fakes.boards import FakeBoard
from tests.fakes.foreign_job import NOBODY, NODE, SLEEPS, ForeignJob, needs_root, open_folder, sleeper
from tests.fakes.node import FakeNode

THEM = Owner(NOBODY, NOBODY)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can reach."""
    with open_folder() as folder:
        yield folder


@pytest.fixture
def job(place: Path) -> Iterator[ForeignJob]:
    """A job of another user."""
    made = ForeignJob(place, "job")
    yield made
    made.close()


@pytest.fixture
def rounds(place: Path) -> Iterator[Rounds]:
    """What follows the box root."""
    made = Rounds(str(place / "boxes"), NODE, lambda _: None)
    yield made
    made.close()


@needs_root
def test_a_job_of_another_user_is_watched_as_his(job: ForeignJob, rounds: Rounds) -> None:
    """Process, box and log are seen, and everything done for it will be done as he would."""
    rank = job.start_rank(SLEEPS)
    job.write_round(rank)
    job.make_box(rank.pid)
    job.stderr.write_text("Segmentation fault\n")

    rounds.refresh(0.0)
    ((watch, seen),) = rounds.ranks()
    seen.log.poll_stderr()

    assert watch.bounds.owner == Owner(NOBODY, NOBODY, ())
    assert not seen.is_gone
    assert seen.box is not None
    assert seen.log.tail() == ["Segmentation fault"]


@needs_root
def test_a_process_of_root_is_not_there_for_a_user(job: ForeignJob, rounds: Rounds) -> None:
    """Whether the round file names it or a box: not even its CPU time is told."""
    victim = sleeper()
    try:
        job.write_round(job.names(victim.pid))
        job.make_box(victim.pid, rank=1)

        rounds.refresh(0.0)

        assert [rank.is_gone for _, rank in rounds.ranks()] == [True, True]
        assert {rank.report(0.0).process.cpu_s for _, rank in rounds.ranks()} == {0.0}
    finally:
        victim.kill()
        victim.wait()


@needs_root
@pytest.mark.parametrize("what", ["pipe", "link", "another's", "endless", "large"])
def test_what_is_no_round_file_stops_nobody(job: ForeignJob, rounds: Rounds, what: str) -> None:
    """The user's other job is watched all the same, and the look comes back."""
    path = job.folder / f"{NODE}.round.json"
    job.write_round()
    honest = ForeignJob(job.root.parent, "honest")
    honest.write_round()
    beside = path.with_name("kept")
    path.rename(beside)
    if what == "pipe":
        os.mkfifo(path)
        job.give(path)
    elif what == "link":
        path.symlink_to(beside)
    elif what == "another's":
        path.write_bytes(beside.read_bytes())
    elif what == "endless":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
        job.give(path)
    try:
        rounds.refresh(0.0)
    finally:
        honest.close()

    assert list(rounds.current) == ["honest"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"run_dir": "/" + "x" * 5000}, "a path in it is none"),
        ({"run_dir": "/x\0y"}, "a path in it is none"),
        ({"round": 10**400}, "a number in it"),
        ({"runner_pid": -1}, "a number in it"),
        ({"ranks": (RankProcess(0, 0, 1, 1),) * 257}, "it names 257 ranks"),
    ],
)
def test_a_round_file_with_what_no_runner_writes_is_none(tmp_path: Path, change: dict[str, object], why: str) -> None:
    """It would stand in the node's heartbeats and metrics beside other users' jobs, and make them too large or fail."""
    node = FakeNode(tmp_path)
    file = node.start_round(1, boxes=False)
    try:
        node.write_round(msgspec.structs.replace(file, **change))

        with pytest.raises(MegascaleError, match=why):
            blackboxes.read_round(str(node.job_folder), node.node, myself())
    finally:
        node.kill_all()


def test_a_job_folder_that_cannot_be_looked_at_hides_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As one is on which its user has mounted a file system of his own."""
    (tmp_path / "honest").mkdir()
    with os.scandir(tmp_path) as found:
        (honest,) = found

    class Closed:
        """An entry that only its user may look at."""

        name = "closed"

        @staticmethod
        def is_dir(**_: bool) -> bool:
            return True

        @staticmethod
        def stat(**_: bool) -> os.stat_result:
            raise PermissionError

    monkeypatch.setattr(os, "scandir", lambda _: contextlib.nullcontext(iter([Closed(), honest])))

    assert blackboxes.list_jobs("/boxes") == ["honest"]


def test_a_job_of_another_user_is_none_of_an_agent_that_is_not_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It could not act for him, and must not act for who only says so; its own user's job it serves."""
    node = FakeNode(tmp_path)
    node.start_round(1)
    watching = Rounds(str(node.root), node.node, lambda _: None)
    try:
        monkeypatch.setattr("megascale_agents.ownership.rights.os.geteuid", lambda: os.getuid() + 4242)
        watching.refresh(0.0)
        refused = list(watching.current)
        monkeypatch.undo()
        watching.refresh(1.0)

        assert refused == []
        assert list(watching.current) == ["job"]
        assert [record.getMessage().partition(" belongs")[2] for record in caplog.records] == [
            f" to user {os.getuid()}, and the agent runs as user {os.getuid() + 4242}; the job is not watched"
        ]
    finally:
        watching.close()
        node.kill_all()


def test_a_user_cannot_use_up_what_all_jobs_need(tmp_path: Path) -> None:
    """Of boxes so many are opened; a round file with more ranks is none."""
    node = FakeNode(tmp_path)
    file = node.start_round(1, boxes=False)
    shelf = blackboxes.BoxShelf(str(node.job_folder), node.node, 1, Owner(os.geteuid()))
    try:
        for rank in range(blackboxes.MOST_RANKS + 3):
            node.make_box(rank, file.ranks[0].pid, file.ranks[0].start_ticks).close()
        shelf.refresh()

        assert len(shelf.readers) == blackboxes.MOST_RANKS
        assert shelf.errors == 3
    finally:
        shelf.close()
        node.kill_all()


def test_one_user_has_only_his_share_of_the_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More ranks than are watched for one user are told of and left out, and of more folders the oldest."""
    monkeypatch.setattr("megascale_agents.ranks.rounds.MOST_RANKS_OF_ONE", 3)
    monkeypatch.setattr(blackboxes, "MOST_JOBS", 2)
    nodes = [FakeNode(tmp_path, job) for job in ("b", "c")]
    watching = Rounds(str(nodes[0].root), nodes[0].node, lambda _: None)
    try:
        for name, modified_s in (("a", 1), ("d", 2)):
            (nodes[0].root / name).mkdir(parents=True)
            os.utime(nodes[0].root / name, (modified_s, modified_s))
        for node in nodes:
            node.start_round(2, boxes=False)
        watching.refresh(0.0)

        assert blackboxes.list_jobs(str(nodes[0].root)) == ["b", "c"]
        assert list(watching.current) == ["b"]
        assert "3 ranks and boxes of one user" in caplog.text
    finally:
        watching.close()
        for node in nodes:
            node.kill_all()


@needs_root
def test_a_log_that_is_put_in_place_of_another_is_followed_with_his_rights(job: ForeignJob, place: Path) -> None:
    """The second opening is as careful as the first; a pipe is waited for, and no error."""
    secret = place / "secret"
    secret.write_text("secret\n")
    secret.chmod(0o600)
    job.stderr.write_text("first\n")
    job.give(job.stderr)
    scanner = LogScanner(str(job.stderr), THEM)
    scanner.poll_stderr()
    job.stderr.unlink()
    job.stderr.symlink_to(secret)

    scanner.follow()
    with pytest.raises(PermissionError, match=str(job.stderr)):
        scanner.poll_stderr()
    job.stderr.unlink()
    os.mkfifo(job.stderr)
    job.give(job.stderr)
    scanner.poll_stderr()

    assert scanner.tail() == ["first"]


@needs_root
async def test_a_worker_server_of_somebody_else_is_not_asked(job: ForeignJob, place: Path) -> None:
    """A link to a socket of root's leads nowhere, whether he may connect to it or not."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place / "roots.sock"))
        (place / "roots.sock").chmod(0o600)
        listening.listen()
        (job.folder / "0.sock").symlink_to(place / "roots.sock")
        with pytest.raises(NoAnswerError, match="Permission denied"):
            await flight_recorder.ask(job.folder / "0.sock", "ping", 2.0, THEM)
        (place / "roots.sock").chmod(0o666)
        with pytest.raises(NoAnswerError, match=f"user 0's, the job user {NOBODY}'s"):
            await flight_recorder.ask(job.folder / "0.sock", "ping", 2.0, THEM)


@needs_root
async def test_py_spy_is_the_owners(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs as he does, and is told nothing that only we know."""
    program, told = place / "py-spy", place / "told"
    program.write_text(f"#!/bin/sh\n(id -u; id -g; env) >{told}\necho '[]'\n")
    program.chmod(0o755)
    told.touch()
    told.chmod(0o666)
    monkeypatch.setattr(py_spy, "program", lambda: str(program))
    monkeypatch.setenv("MEGASCALE_TOKEN", "a token")

    await py_spy.ask(1, 20.0, owner=THEM)

    assert told.read_text().split()[:2] == [str(NOBODY)] * 2
    assert "TOKEN" not in told.read_text()


@pytest.mark.parametrize("what", ["link", "hard link", "pipe"])
def test_a_lock_that_is_something_else_is_not_written_to(tmp_path: Path, what: str) -> None:
    """The box root may be a user's, and the lock is written as the agent's user."""
    victim, lock = tmp_path / "victim", tmp_path / ".agent-node-a.lock"
    victim.write_text("as it was")
    {"link": lock.symlink_to, "hard link": lock.hardlink_to, "pipe": lambda _: os.mkfifo(lock)}[what](victim)

    with pytest.raises(UsageError, match=r"box root|no lock of ours"), node_lock(str(tmp_path), "node-a"):
        pass

    assert victim.read_text() == "as it was"


def test_the_place_in_the_kernels_log_is_kept_in_a_file_of_our_own(tmp_path: Path) -> None:
    """What lies there is replaced, never followed; a pipe is no memory and blocks no agent."""
    log, memory, victim = tmp_path / "kmsg", tmp_path / "memory", tmp_path / "victim"
    log.write_text("6,7,1000,-;words\n")
    victim.write_text("as it was")
    os.mkfifo(memory)

    first = KernelLog(str(log), str(memory), "boot")
    first.poll_log()
    first.close()
    memory.unlink()
    memory.symlink_to(victim)
    second = KernelLog(str(log), str(memory), "boot")
    second.poll_log()
    second.close()

    assert victim.read_text() == "as it was"
    assert stat.S_ISREG(memory.lstat().st_mode)


@needs_root
def test_a_board_of_somebody_else_says_nothing_of_a_rank(job: ForeignJob, rounds: Rounds, tmp_path: Path) -> None:
    """Any user can write a rank's number into a file of shared memory."""
    rank = job.start_rank(SLEEPS)
    job.write_round(rank)
    rounds.refresh(0.0)
    ((_, seen),) = rounds.ranks()
    board = FakeBoard("ag_gemm")
    board.tile(0, 0)
    board.host(rank.pid, seen.process.start_ticks & 0x7FFF_FFFF)
    path = tmp_path / "board"
    words = struct.pack(f"<{len(board.words)}I", *(word & 0xFFFFFFFF for word in board.words))
    path.write_bytes(words.ljust(36_864, b"\0"))

    shown = {}
    for uid in (NOBODY, 12345):
        os.chown(path, uid, uid)
        shown[uid] = list(samples_of(rounds.ranks(), Boards(str(tmp_path)), (), NODE))

    assert shown[NOBODY]
    assert not shown[12345]
