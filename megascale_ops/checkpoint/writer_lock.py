# SPDX-License-Identifier: Apache-2.0
"""Hold a checkpoint folder, so that a second writer is refused by name and a dead one does not block it.

``hold`` is called by the process that leads a save. From its first save on it holds the folder until it ends, and one
thread of the process renews the leases of all folders it holds. Which process may take over from which is decided in
``writers``; how a name stands on a folder is described in ``lock_files``.
"""

import atexit
import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from megascale_ops.checkpoint import lock_files, processes, writers
from megascale_ops.checkpoint.lock_files import LockFile, Names
from megascale_ops.checkpoint.writers import Answer, Seen, Writer
from megascale_ops.errors import CheckpointError

KEEPER = "checkpoint-lease"  # the thread that renews them
# A sixth of the lease: five renewals may fail.
_RENEW_S = writers.LEASE_S / 6
# 0.2 s: how soon a death on this machine, or a renewal, is seen by a process that waits for it.
_WATCH_S = 0.2
# Each new name that appears while one watches begins a new lease: after two the folder is plainly in use.
_MOST_WATCH_S = 2 * writers.LEASE_S
# 2 s: the coarsest time stamps of a file system in use (FAT); a renewal must be seen.
_RENEWAL_NS = 2_000_000_000
# 1 s: nothing depends on a folder that is given back, so the end of a process does not wait for a slow disk.
_FAREWELL_S = 1.0

_log = logging.getLogger("megascale_ops.checkpoint")


class _Name(NamedTuple):
    """Our name on a folder that we hold."""

    number: int
    writer: Writer


class WriterLock:
    """One folder as this process sees it: held, or watched since some moment. Made by ``lock_of``."""

    def __init__(self, root: Path | str, names: Names | None = None) -> None:
        self.root = root
        self._names: Names = names or lock_files.FolderNames(Path(root))
        self.pid = os.getpid()  # a forked child has none of its parent's folders
        self._ours: _Name | None = None
        self._seen = LockFile()
        self._seen_s = 0.0  # monotonic: since when ``_seen`` has stood there unchanged
        self._busy = threading.RLock()

    @property
    def number(self) -> int:
        """Of our name while we hold the folder, else 0."""
        return self._ours.number if self._ours is not None else 0

    def poll_lock(self, rank: int, world_size: int) -> Answer:
        """Return the answer that a save would get now; begin to watch, so that a save need not wait for a lease.

        Raises:
            OSError: the folder can't be listed.
        """
        with self._busy:
            return self._judge(self._observe(), processes.describe_writer(rank, world_size), changed=False)

    def poll_lock_of_the_living(self, rank: int, world_size: int) -> Answer:
        """The same, once the end of a process that is dying is over, or after ``_MOST_WATCH_S``.

        A restart that follows a SIGKILL at once would find the folder held, and miss what the killed process's writer
        seals.

        Raises:
            OSError: the folder can't be listed.
        """
        until_s = time.monotonic() + _MOST_WATCH_S
        while (answer := self.poll_lock(rank, world_size)).soon and time.monotonic() < until_s:
            time.sleep(_WATCH_S)
        return answer

    def hold(self, rank: int, world_size: int) -> int:
        """Hold the folder from now on; the number of our name, which no other writer ever has.

        Raises:
            CheckpointError: another process writes there; the message names it, and since when.
            OSError: the file system refuses.
        """
        with self._busy:
            if self._ours is not None and self._is_ours():
                return self._ours.number
            self._ours, began_s = None, time.monotonic()
            me = processes.describe_writer(rank, world_size)
            watched: LockFile | None = None
            while (answer := self._try(me, watched)).verb != "take":
                if answer.verb == "refuse" or time.monotonic() - began_s > _MOST_WATCH_S:
                    raise CheckpointError(answer.reason)
                if watched is None:
                    _log.warning("waiting to see whether %s is still written to: %s", self.root, answer.reason)
                watched = self._seen
                time.sleep(_WATCH_S)
            _keep(self)
            return self.number

    def _try(self, me: Writer, watched: LockFile | None) -> Answer:
        """One look, and the folder taken if it may be. A change since ``watched`` shows that the holder lives now."""
        seen = self._observe()
        changed = watched is not None and seen != watched and seen.number == watched.number
        answer = self._judge(seen, me, changed=changed)
        if answer.verb != "take":
            return answer
        number = seen.number + 1
        if not self._names.create(number, me):
            return Answer("watch", "another writer came at the same moment")
        if seen.number and seen.writer != me and not (seen.writer and seen.writer.released):
            level = logging.INFO if answer.certain else logging.WARNING
            _log.log(level, "the checkpoint folder %s is taken over: %s", self.root, answer.reason)
        self._ours = _Name(number, me)
        self._names.clear_older(number)
        return answer

    def _observe(self) -> LockFile:
        seen = self._names.read_lock()
        if seen != self._seen:
            self._seen, self._seen_s = seen, time.monotonic()
        return seen

    def _judge(self, seen: LockFile, me: Writer, *, changed: bool) -> Answer:
        if not seen.number:
            return Answer("take", "nobody holds it")
        life = processes.life_of(seen.writer.process, me.process) if seen.writer else "unknown"
        return writers.judge(Seen(seen.writer, life, time.monotonic() - self._seen_s, changed), me)

    def confirm(self) -> None:
        """Prove that we still hold the folder.

        Raises:
            CheckpointError: another process has taken it over; the message names it.
            OSError: the folder can't be listed.
        """
        with self._busy:
            if not self._is_ours():
                newest = self._names.read_lock().writer
                who = newest.who() if newest else "another writer"
                raise CheckpointError(f"{who} has taken this folder over")

    def _is_ours(self) -> bool:
        """Whether the newest name is ours; one that a person has deleted is written again."""
        if self._ours is None:
            return False
        number, writer = self._ours
        newest = self._names.read_lock()
        if newest.number == 0:
            return self._names.create(number, writer)
        return newest.number == number and (newest.writer is None or newest.writer.token == writer.token)

    def renew(self) -> None:
        """Show that we live. A folder that was taken over or removed is let go; the next save will report it."""
        with self._busy:
            try:
                if self._ours is not None and self._is_ours():
                    before_ns = self._names.read_lock().modified_ns
                    self._names.touch(self._ours.number, max(time.time_ns(), before_ns + _RENEWAL_NS))
                else:
                    _held.discard(self)
            except (FileNotFoundError, NotADirectoryError):
                _held.discard(self)
            except (OSError, CheckpointError) as exc:
                _log.warning("the lease of %s could not be renewed: %s", self.root, exc)

    def release(self) -> None:
        """Release the folder; silent when it is gone or another writer holds it."""
        if not self._busy.acquire(timeout=_FAREWELL_S):
            return  # being waited for by another thread, so not held
        try:
            _held.discard(self)
            ours, self._ours = self._ours, None
            with suppress(OSError):
                if ours is not None and self._names.read_lock().number == ours.number:
                    self._names.rewrite(ours.number, msgspec.structs.replace(ours.writer, released=True))
        finally:
            self._busy.release()


_locks: dict[tuple[int, Path], WriterLock] = {}
_held: set[WriterLock] = set()
_keeper: threading.Thread | None = None


def lock_of(root: Path) -> WriterLock:
    """The lock of a folder in this process: all managers of one folder share it."""
    key = (os.getpid(), root.resolve())
    return _locks.setdefault(key, WriterLock(root))


def living_writer(root: Path | str, names: Names | None = None) -> str:
    """Who writes to a folder now; empty: no process does. Waits for a lease at most, where only time can tell.

    Args:
        root: the folder, or how a store is called.
        names: where the names of writers stand in that store; None: in the folder.

    Raises:
        OSError: the folder can't be listed.
    """
    names = names or lock_files.FolderNames(Path(root))
    watcher, began_s = WriterLock(root, names), time.monotonic()
    first = names.read_lock()
    while (answer := watcher.poll_lock(0, 1)).verb == "watch":
        if names.read_lock() != first or time.monotonic() - began_s > _MOST_WATCH_S:
            break  # renewed, so it lives; or others come and go
        time.sleep(_WATCH_S)
    if answer.verb == "take":
        return ""
    newest = names.read_lock().writer
    return newest.who() if newest is not None else "a process whose name can't be read"


def _keep(lock: WriterLock) -> None:
    """Renew its lease until it is given back."""
    global _keeper  # noqa: PLW0603  one thread a process; in a forked child the parent's does not run
    _held.add(lock)
    if _keeper is None or not _keeper.is_alive():
        stopped = threading.Event()
        _keeper = threading.Thread(target=_renew_all, args=(stopped,), name=KEEPER, daemon=True)
        atexit.register(_release_all, os.getpid(), stopped)
        _keeper.start()


def _renew_all(stopped: threading.Event) -> None:
    pid = os.getpid()
    while not stopped.wait(_RENEW_S):
        for lock in tuple(_held):
            if lock.pid == pid:
                lock.renew()


def _release_all(pid: int, stopped: threading.Event) -> None:
    """Give everything back at the end of the process that holds it, and of no child of it."""
    if os.getpid() != pid:
        return
    stopped.set()
    if _keeper is not None:
        _keeper.join(_FAREWELL_S)
    for lock in tuple(_held):
        if lock.pid == pid:
            lock.release()
