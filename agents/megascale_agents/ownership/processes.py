# SPDX-License-Identifier: Apache-2.0
"""Hold a process while it is looked at and acted upon, once it is shown to be one of the job's.

A round file or a black box only names a process, and its owner may name any: one of root's, or one that got the number
of a rank that is gone. So before a signal is sent, stacks are taken or /proc is read for evidence, three things have
to fit: the start time is the one that runner or box wrote down; all four users of the process are the job's owner (of
root's jobs they may be any); and it stands where the job does. That is the runner's control group (in Slurm, the job's)
or one below it, so ranks in groups of their own count; the runner's session; or below the runner itself.

The process is held by a pidfd from before the first look. While that shows it alive its number can't have been
given to another, so what was read is its own, and a signal goes through the handle and reaches it or no process.
psutil holds none: it compares start times before a signal, and between the two the number can become another's. So it
lists the processes, and what is asked of one is read here; of control groups, sessions and users for files (fsuid) it
has nothing to tell.

Source: pidfd_open(2), pidfd_send_signal(2), proc_pid_stat(5), cgroups(7).
"""

import contextlib
import ctypes
import errno
import os
import platform
import re
import select
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from megascale_agents.ownership.rights import Owner, libc

# A rank is two or three processes below its runner; 64 ends a walk over a tree that changes during it.
_MOST_PARENTS = 64
# Slurm puts each srun of a job beside the batch script, in a step of its own; the job's group holds them all.
_SLURM_STEP = re.compile(r"(/job_\d+)/step_.*")
# glibc has a function for it since 2.30, torch runs on 2.28. Numbers from the kernel's tables of system calls.
_TGKILL = {"x86_64": 234, "aarch64": 131}.get(platform.machine(), 0)
# 20 ms in all: a process that forks as fast as it is killed gets the next order.
_MOST_PASSES = 5


class NotOfJobError(Exception):
    """A process that was named is none of the job's; the message gives the reason."""


class GoneError(NotOfJobError):
    """There is no such process any more."""


class Bounds(NamedTuple):
    """Whose files and processes may be touched for a job, and where its processes stand.

    ``cgroups`` and ``session`` are the runner's. No control groups: it was gone when it was looked for, or another's.
    """

    owner: Owner
    runner_pid: int = 0
    cgroups: Mapping[str, str] = {}
    session: int = -1

    @property
    def uid(self) -> int:
        """Whose the job is."""
        return self.owner.uid


class _Stat(NamedTuple):
    """Fields of /proc/PID/stat."""

    state: str
    parent: int
    group: int
    session: int
    start_ticks: int


class Held:
    """A process that is held by its pidfd, and the user it was shown to belong to (0: root's job, so any)."""

    def __init__(self, pid: int, handle: int, uid: int = 0) -> None:
        self.pid = pid
        self.handle = handle
        self._uid = uid

    @property
    def lives(self) -> bool:
        """Whether it has not ended since it was held."""
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return not poll.poll(0)

    @property
    def is_same(self) -> bool:
        """Whether it lives and is the owner's still: what was read of it in between is its own."""
        try:
            return _is_of(self.pid, self._uid) and self.lives
        except NotOfJobError:
            return False

    def signal(self, number: int) -> None:
        """Send a signal to this process and to no other.

        Raises:
            ProcessLookupError: it has ended.
            PermissionError: we may not.
        """
        signal.pidfd_send_signal(self.handle, number)

    def signal_thread(self, thread: int, number: int) -> None:
        """Send a signal to one thread of this process.

        The kernel sends it to a thread of that process only (tgkill), and the process was the owner's a moment ago: a
        number would have to be given to another process, and one of its threads, within that moment.

        Raises:
            OSError: process or thread have ended, or signals to threads are not known on this machine.
        """
        if not _TGKILL:
            raise OSError(errno.ENOSYS, f"signals to threads are not known on {platform.machine()}")
        if not self.is_same:
            raise ProcessLookupError(errno.ESRCH, f"process {self.pid} is gone, or changed its user")
        if libc().syscall(_TGKILL, self.pid, thread, number) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"thread {thread} of process {self.pid}: {os.strerror(error)}")


def bounds_of(owner: Owner, runner_pid: int, runner_start_ticks: int) -> Bounds:
    """Look where a job stands: by its runner, if that is the owner's and started at the round file's time."""
    with contextlib.suppress(NotOfJobError), _pinned(runner_pid) as runner:
        stat = _stat_of(runner_pid)
        fits = stat.start_ticks == runner_start_ticks and _is_of(runner_pid, owner.uid)
        cgroups = _cgroups_of(runner_pid)
        if fits and runner.lives:
            whole = {hierarchy: _SLURM_STEP.sub(r"\1", path) for hierarchy, path in cgroups.items()}
            return Bounds(owner, runner_pid, whole, stat.session)
    return Bounds(owner)


@contextlib.contextmanager
def held(pid: int, start_ticks: int, bounds: Bounds) -> Iterator[Held]:
    """Hold a process of the job.

    Args:
        pid: The process that was named.
        start_ticks: When it started, as runner or box wrote down; 0 proves nothing.
        bounds: What may be touched for the job.

    Raises:
        GoneError: it has ended, or the number is another's now.
        NotOfJobError: it is not the owner's, or stands elsewhere.
    """
    with _pinned(pid) as found:
        stat = _stat_of(pid)
        if not start_ticks or stat.start_ticks != start_ticks or stat.state in ("Z", "X", "x"):
            raise GoneError(f"process {pid} is gone")
        if not _is_of(pid, bounds.uid):
            users = ", ".join(map(str, sorted(_users_of(pid))))
            raise NotOfJobError(f"process {pid} is user {users}'s, the job user {bounds.uid}'s")
        if not _stands_with(pid, stat, bounds):
            raise NotOfJobError(f"process {pid} is none of the job's: {_where(bounds)}")
        if not found.lives:
            raise GoneError(f"process {pid} is gone")
        yield Held(pid, found.handle, bounds.uid)


def signal_group(leader: Held, number: int, bounds: Bounds) -> None:
    """Signal a process and all others of its group that are the owner's.

    One by one, each held: killpg would reach what a user may not, a program of root's that was started in the same
    group. All are found before the first is signalled, so that none has time to answer for the others; and looked for
    again until no new one is found, for they fork meanwhile.

    Raises:
        ProcessLookupError: the leader has ended.
        PermissionError: we may not.
    """
    reached: set[tuple[int, int]] = set()
    for turn in range(_MOST_PASSES):
        with contextlib.ExitStack() as stack:
            members = _members(leader.pid, bounds.uid, reached, stack)
            if turn == 0:
                leader.signal(number)
            for member in members:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    member.signal(number)
        if turn and not members:  # after the first look the leader could still fork: one follows its signal
            break


def _members(leader: int, uid: int, known: set[tuple[int, int]], stack: contextlib.ExitStack) -> list[Held]:
    """Hold all of a group but its leader that are not known yet; from then on they are."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(NotOfJobError):
            if pid == leader or _stat_of(pid).group != leader:  # the usual case: no handle is kept for it
                continue
            member = stack.enter_context(_pinned(pid))
            stat = _stat_of(pid)
            if stat.group == leader and (pid, stat.start_ticks) not in known and _is_of(pid, uid) and member.lives:
                known.add((pid, stat.start_ticks))
                found.append(member)
    return found


def _is_of(pid: int, uid: int) -> bool:
    """Return whether a process is all the user's. What is root's job may have become any user: root may touch it."""
    return uid == 0 or _users_of(pid) == {uid}


def _users_of(pid: int) -> set[int]:
    """Return the users that a process has: real, effective, saved, and for files.

    Raises:
        GoneError: there is none.
    """
    for line in _text(pid, "status").splitlines():
        if line.startswith("Uid:"):
            return {int(word) for word in line.split()[1:]}
    raise GoneError(f"process {pid} is gone")


def may_be_read(pid: int, uid: int) -> bool:
    """Return whether a process is still the owner's: of another's nothing is read that only that one may see."""
    try:
        return uid == 0 or os.stat(f"/proc/{pid}").st_uid == uid  # noqa: PTH116  for each rank each second
    except OSError:
        return False


@contextlib.contextmanager
def _pinned(pid: int) -> Iterator[Held]:
    try:
        handle = os.pidfd_open(pid)
    except (ProcessLookupError, OverflowError) as error:
        raise GoneError(f"process {pid} is gone") from error
    except OSError as error:
        if error.errno == errno.EINVAL:  # not a process's number: a thread's, or none
            raise GoneError(f"there is no process {pid}") from error
        raise NotOfJobError(f"process {pid} can't be held: {error.strerror}") from error
    try:
        yield Held(pid, handle)
    finally:
        os.close(handle)


def _stands_with(pid: int, stat: _Stat, bounds: Bounds) -> bool:
    if not bounds.cgroups:
        return False
    if stat.session == bounds.session or is_within(_cgroups_of(pid), bounds.cgroups):
        return True
    return _is_below(stat, bounds.runner_pid)


def _where(bounds: Bounds) -> str:
    if not bounds.cgroups:
        return "its runner was gone, or another's, when the round was first seen"
    return f"it is in another control group and session than runner {bounds.runner_pid}, and not below it"


def is_within(cgroups: Mapping[str, str], of_job: Mapping[str, str]) -> bool:
    """Return whether control groups are, in every hierarchy, those of the job or below them."""
    return all(
        (cgroups.get(hierarchy, "") + "/").startswith(path if path.endswith("/") else path + "/")
        for hierarchy, path in of_job.items()
    )


def _is_below(stat: _Stat, ancestor: int) -> bool:
    for _ in range(_MOST_PARENTS):
        if stat.parent == ancestor:
            return True
        if stat.parent <= 1:
            return False
        try:
            stat = _stat_of(stat.parent)
        except NotOfJobError:
            return False
    return False


def _cgroups_of(pid: int) -> dict[str, str]:
    """Return the path of a process in each hierarchy of control groups."""
    lines = (line.split(":", 2) for line in _text(pid, "cgroup").splitlines())
    return {fields[1]: fields[2] for fields in lines if len(fields) == 3}


def _stat_of(pid: int) -> _Stat:
    text = _text(pid, "stat")
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def _text(pid: int, name: str) -> str:
    """Return a file of /proc.

    Raises:
        GoneError: the process is gone.
        NotOfJobError: nothing can be read of it, so nothing is known of it.
    """
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError) as error:
        raise GoneError(f"process {pid} is gone") from error
    except OSError as error:
        raise NotOfJobError(f"process {pid} can't be looked at: {error.strerror}") from error
