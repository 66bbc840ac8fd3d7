# SPDX-License-Identifier: Apache-2.0
"""Whose a job is: files are opened and made with its owner's rights, and only his processes are touched."""

import contextlib
import errno
import os
import select
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from megascale_agents.collectors import process
from megascale_agents.orders import signals
from megascale_agents.ownership import files, processes, rights
from megascale_agents.ownership.processes import Bounds, GoneError, NotOfJobError
from megascale_agents.ownership.rights import Owner, myself, taken

from megascale_ops.schema.identity import RankProcess
from tests.fakes.foreign_job import NOBODY, SLEEPS, ForeignJob, needs_root, open_folder, sleeper, ticks_of

THEM = Owner(NOBODY, NOBODY)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can reach."""
    with open_folder() as folder:
        yield folder


@pytest.fixture
def secret(place: Path) -> Path:
    """A file that only root may read."""
    path = place / "secret"
    path.write_text("secret")
    path.chmod(0o600)
    return path


@pytest.fixture
def theirs(place: Path) -> Path:
    """A folder of the other user."""
    folder = place / "theirs"
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    return folder


@pytest.fixture
def job(place: Path) -> Iterator[ForeignJob]:
    """A job of the other user."""
    made = ForeignJob(place, "job")
    yield made
    made.close()


def give(path: Path) -> Path:
    """Make the other user the owner of a file, of a link itself."""
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    return path


def bounds_of(job: ForeignJob) -> Bounds:
    """Look where a job stands."""
    return processes.bounds_of(THEM, job.runner.pid, ticks_of(job.runner.pid))


@needs_root
def test_rights_are_taken_by_one_thread_and_given_back(secret: Path) -> None:
    """What only root may read is closed to this thread alone, with all capabilities; afterwards all is as before."""
    before = os.getgroups()
    inside = threading.Event()
    elsewhere: list[str] = []

    def look() -> None:
        if inside.wait(90):
            elsewhere.append(secret.read_text())

    other = threading.Thread(target=look)
    other.start()
    with taken(Owner(NOBODY, NOBODY, (NOBODY, 5))):
        groups = os.getgroups()
        status = Path("/proc/thread-self/status").read_text()
        with pytest.raises(PermissionError):
            secret.read_text()
        inside.set()
        other.join(90)

    assert sorted(groups) == [5, NOBODY]
    assert elsewhere == ["secret"]
    assert "CapEff:\t0000000000000000" in status
    assert f"Uid:\t0\t0\t0\t{NOBODY}" in status
    assert secret.read_text() == "secret"
    assert os.getgroups() == before


@needs_root
def test_rights_are_given_back_when_the_work_fails(secret: Path) -> None:
    """An error on the way must not leave a thread with another user's rights."""
    with pytest.raises(ZeroDivisionError), taken(THEM):
        raise ZeroDivisionError

    assert secret.read_text() == "secret"


def test_our_own_rights_are_ours_already(tmp_path: Path) -> None:
    """The normal case: agent and ranks are one user, links may lead anywhere, nothing is given up."""
    (tmp_path / "log").write_text("line")
    (tmp_path / "link").symlink_to(tmp_path / "log")

    handle = files.opened(tmp_path / "link", myself(), is_private=False)

    assert os.read(handle, 9) == b"line"
    os.close(handle)
    assert files.write_whole(tmp_path / "new", ("a", "b"), "name", b"data", myself()).read_bytes() == b"data"
    assert rights.uid_of(str(tmp_path)) == os.geteuid()


@needs_root
def test_a_job_belongs_to_whoever_owns_its_folder(theirs: Path, place: Path) -> None:
    """Not to whom a link leads to; the groups are those of a process that is all his."""
    (place / "link").symlink_to("/root")

    assert rights.uid_of(str(theirs)) == NOBODY
    with pytest.raises(OSError, match="Not a directory"):
        rights.uid_of(str(place / "link"))
    assert rights.owner_with(NOBODY, (os.getpid(), 2**22 + 1)) == Owner(NOBODY)


@needs_root
def test_where_a_user_says_whose_a_file_is_no_job_is_found(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On FUSE root could seem to own a job. There is none to be mounted here: the kind of file system is made up."""
    monkeypatch.setattr(rights, "_kind_of", lambda _: 0x65735546)

    with pytest.raises(PermissionError, match="FUSE"):
        rights.uid_of(str(theirs))


@needs_root
def test_the_kind_of_a_file_system_is_known(theirs: Path) -> None:
    """The kernel's own answer: /proc is of the kind that statfs(2) names."""
    proc, here = os.open("/proc", os.O_PATH), os.open(theirs, os.O_PATH)

    kinds = rights._kind_of(proc), rights._kind_of(here)
    os.close(proc)
    os.close(here)

    assert kinds[0] == 0x9FA0
    assert kinds[1] not in (0, 0x9FA0)


@needs_root
def test_groups_are_those_of_the_runner(job: ForeignJob) -> None:
    """A run folder of a project's group stays reachable; a process of another user lends nothing."""
    child = subprocess.Popen(["sleep", "600"], user=NOBODY, group=7, extra_groups=[7, 9], start_new_session=True)
    job.started.append(child)

    assert rights.owner_with(NOBODY, (os.getpid(), child.pid)) == Owner(NOBODY, 7, (7, 9))


@needs_root
@pytest.mark.parametrize("is_private", [True, False])
@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self/maps", "/proc/self/environ", "{pipe}", "{socket}", "{held}"])
def test_what_holds_no_bytes_is_never_opened(theirs: Path, secret: Path, path: str, *, is_private: bool) -> None:
    """Devices, pipes, what the kernel tells of processes, and what the agent itself has open."""
    os.mkfifo(theirs / "pipe")
    os.mknod(theirs / "socket", stat.S_IFSOCK | 0o600)
    (secret.parent / "closed").mkdir(mode=0o700)
    readable = secret.parent / "closed" / "readable"  # once reached, or by a link of /proc straight to it
    readable.touch(mode=0o644)
    held = os.open(readable, os.O_RDONLY)
    named = path.format(pipe=give(theirs / "pipe"), socket=give(theirs / "socket"), held=f"/proc/self/fd/{held}")

    try:
        with pytest.raises(OSError):  # noqa: PT011  which one depends on what is in the way
            files.opened(named, THEM, is_private=is_private)
    finally:
        os.close(held)


@needs_root
def test_in_the_jobs_folder_nothing_is_a_link_or_another_users(theirs: Path, secret: Path, place: Path) -> None:
    """Not even a link to his own file, nor a hard link to a file that all may read."""
    mine = theirs / "mine"
    mine.write_text("mine")
    give(mine)
    (theirs / "soft").symlink_to(mine)
    public = place / "public"
    public.write_text("public")
    (theirs / "hard").hardlink_to(public)
    (theirs / "to-secret").symlink_to(secret)

    assert files.read_small(mine, THEM, 100) == b"mine"
    for name in ("soft", "hard", "to-secret"):
        with pytest.raises(OSError, match=r"regular|belongs"):
            files.opened(theirs / name, THEM)


@needs_root
def test_elsewhere_links_lead_as_far_as_the_owner_may_go(theirs: Path, secret: Path) -> None:
    """His log may lie behind a link; a file of root's may not, and no size of a file costs memory."""
    log = theirs / "log"
    with log.open("wb") as file:
        file.truncate(1 << 40)
    give(log)
    (theirs / "link").symlink_to(log)
    (theirs / "to-secret").symlink_to(secret)

    os.close(files.opened(theirs / "link", THEM, is_private=False))
    with pytest.raises(PermissionError):
        files.opened(theirs / "to-secret", THEM, is_private=False)
    with pytest.raises(OSError, match="more than 100 bytes"):
        files.read_small(log, THEM, 100)


@needs_root
def test_without_openat2_no_link_is_followed_at_all(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels before 5.6: a plain path works, one with a link on the way is refused, never followed blindly."""
    log = theirs / "log"
    log.write_text("line")
    (theirs / "link").symlink_to(theirs)
    give(log)

    class Old:
        """A C library over a kernel that does not know the call."""

        @staticmethod
        def syscall(*_: object) -> int:
            import ctypes

            ctypes.set_errno(errno.ENOSYS)
            return -1

    monkeypatch.setattr(files, "libc", Old)

    os.close(files.opened(log, THEM, is_private=False))
    with pytest.raises(OSError, match="a link is on the way"):
        files.opened(theirs / "link" / "log", THEM, is_private=False)


@needs_root
def test_files_are_made_by_their_owner_and_never_behind_a_link(theirs: Path, place: Path) -> None:
    """What was there is replaced whole; a folder that leads elsewhere takes nothing, and no owner changes."""
    roots = place / "roots"
    roots.mkdir(mode=0o777)
    roots.chmod(0o777)  # even where the user could write
    (theirs / "incidents").symlink_to(roots)
    victim = place / "victim"
    victim.write_text("as it was")
    (theirs / "name").symlink_to(victim)

    made = files.write_whole(theirs, ("a", "b"), "name", b"data", THEM)
    replaced = files.write_whole(theirs, (), "name", b"data", THEM)
    with pytest.raises(OSError, match="Not a directory"):
        files.write_whole(theirs, ("incidents", "i-1"), "name", b"data", THEM)
    with pytest.raises(PermissionError):
        files.write_whole("/etc", (), "megascale-never", b"data", THEM)

    assert {path.stat().st_uid for path in (made, made.parent, made.parent.parent, replaced)} == {NOBODY}
    assert not replaced.is_symlink()
    assert victim.read_text() == "as it was"
    assert not list(roots.iterdir())
    assert roots.stat().st_uid == 0
    assert sorted(path.name for path in made.parent.iterdir()) == ["name"]


@needs_root
def test_only_processes_of_the_job_are_held(job: ForeignJob) -> None:
    """Another user's, another start, no start at all, one that is gone: none of them; the job's own rank is."""
    rank = job.start_rank(SLEEPS)
    bounds = bounds_of(job)
    roots = sleeper()
    try:
        with processes.held(rank.pid, rank.start_ticks, bounds) as held:
            assert held.is_same
        with (
            pytest.raises(NotOfJobError, match=f"user 0's, the job user {NOBODY}'s"),
            processes.held(roots.pid, ticks_of(roots.pid), bounds),
        ):
            pass
        for pid, ticks in (
            (rank.pid, rank.start_ticks - 1),
            (rank.pid, 0),
            (2**22 + 1, 1),
            (-1, 1),
            (0, 1),
            (2**70, 1),
        ):
            with pytest.raises(GoneError), processes.held(pid, ticks, bounds):
                pass
    finally:
        roots.kill()
        roots.wait()


def test_a_process_that_cannot_be_held_is_not_said_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without pidfds, or no handle left: nothing is done, and it is not reported as needless."""

    def refuse(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    child = sleeper()
    listed = RankProcess(0, 0, child.pid, ticks_of(child.pid))
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "pidfd_open", refuse)
            told = signals.send("kill", 0, listed, Bounds(myself()))

        assert not told.ok
        assert told.text == f"SIGKILL not sent: process {child.pid} can't be held: Too many open files"
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


@needs_root
def test_a_runner_of_somebody_else_proves_nothing(job: ForeignJob) -> None:
    """Nor one that is gone: such ranks are watched, and left alone."""
    rank = job.start_rank(SLEEPS)
    forged = processes.bounds_of(THEM, os.getpid(), ticks_of(os.getpid()))
    stale = processes.bounds_of(THEM, job.runner.pid, ticks_of(job.runner.pid) - 1)

    for bounds in (forged, stale):
        with pytest.raises(NotOfJobError, match="runner was gone"), processes.held(rank.pid, rank.start_ticks, bounds):
            pass


def test_a_process_stands_with_the_job_or_below_its_runner() -> None:
    """Its own session is none of the runner's; then its control group counts, or that the runner started it."""
    child = sleeper()
    elsewhere = {"": "/another/job"}
    me = process.read_once(os.getpid())
    try:
        below = Bounds(myself(), os.getpid(), elsewhere, session=1)
        apart = Bounds(myself(), child.pid, elsewhere, session=1)
        with processes.held(child.pid, ticks_of(child.pid), below) as held:
            assert held.is_same
        with (
            pytest.raises(NotOfJobError, match="control group and session"),
            processes.held(os.getpid(), me.start_ticks, apart),
        ):
            pass
    finally:
        child.kill()
        child.wait()
    assert not held.is_same


@pytest.mark.parametrize(
    ("cgroups", "of_job", "is_within"),
    [
        ({"": "/slurm/job_1/step_0"}, {"": "/slurm/job_1"}, True),
        ({"": "/slurm/job_1"}, {"": "/slurm/job_1"}, True),
        ({"": "/slurm/job_11"}, {"": "/slurm/job_1"}, False),
        ({"": "/slurm"}, {"": "/slurm/job_1"}, False),
        ({"": "/a", "memory": "/b/c"}, {"": "/", "memory": "/b"}, True),
        ({"": "/a", "memory": "/d"}, {"": "/", "memory": "/b"}, False),
        ({"": "/a"}, {"": "/", "memory": "/b"}, False),
    ],
)
def test_control_groups_below_the_runners_are_the_jobs(
    cgroups: dict[str, str], of_job: dict[str, str], *, is_within: bool
) -> None:
    """In every hierarchy; a name that only begins alike is another one."""
    assert processes.is_within(cgroups, of_job) == is_within


def test_all_steps_of_a_slurm_job_are_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner in the batch script, ranks by srun: beside it, in another session, and not below it."""
    batch = {"": "/system.slice/slurmstepd.scope/job_17/step_batch/user/task_0"}
    monkeypatch.setattr(processes, "_cgroups_of", lambda _: batch)

    bounds = processes.bounds_of(myself(), os.getpid(), ticks_of(os.getpid()))

    assert processes.is_within({"": "/system.slice/slurmstepd.scope/job_17/step_0/user/task_3"}, bounds.cgroups)
    assert not processes.is_within({"": "/system.slice/slurmstepd.scope/job_18/step_0/user/task_3"}, bounds.cgroups)
    assert not processes.is_within({"": "/system.slice/slurmstepd.scope/job_175"}, bounds.cgroups)


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="the program that becomes another user is not installed")
def test_a_group_is_signalled_but_for_what_its_owner_may_not_reach(job: ForeignJob) -> None:
    """A program of root's that runs in his group, as sudo leaves one, lives on; his own children do not."""
    become = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups"
    script = f"sleep 600 & echo $!; exec {become} sh -c 'sleep 600 & echo $!; wait'"
    leader = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True, text=True)
    assert leader.stdout is not None
    with leader.stdout as said:
        roots, his = int(said.readline()), int(said.readline())
    pidfd = os.pidfd_open(his)
    bounds = bounds_of(job)
    try:
        with processes.held(leader.pid, ticks_of(leader.pid), bounds) as held:
            processes.signal_group(held, signal.SIGKILL, bounds)

        assert leader.wait(90) == -signal.SIGKILL
        assert select.select([pidfd], [], [], 90)[0]
        assert process.read_once(roots).state != ""
    finally:
        os.close(pidfd)
        os.kill(roots, signal.SIGKILL)


def test_a_child_that_is_forked_while_a_group_is_looked_for_is_signalled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the leader was alone until then: it has time to fork until its own signal comes."""
    script = "read go; sleep 600 & echo $!; wait"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    leader = subprocess.Popen(["sh", "-c", script], start_new_session=True, text=True, **pipes)
    look = processes._members
    born: list[int] = []

    def look_first(*given: Any) -> list[processes.Held]:  # noqa: ANN401  handed on
        found = look(*given)
        if not born:
            assert leader.stdin is not None
            assert leader.stdout is not None
            leader.stdin.write("go\n")
            leader.stdin.flush()
            born.append(os.pidfd_open(int(leader.stdout.readline())))
        return found

    monkeypatch.setattr(processes, "_members", look_first)
    bounds = processes.bounds_of(myself(), os.getpid(), ticks_of(os.getpid()))
    try:
        with leader, processes.held(leader.pid, ticks_of(leader.pid), bounds) as held:
            processes.signal_group(held, signal.SIGKILL, bounds)

        assert leader.returncode == -signal.SIGKILL
        assert select.select(born, [], [], 5)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
        for pidfd in born:
            os.close(pidfd)
