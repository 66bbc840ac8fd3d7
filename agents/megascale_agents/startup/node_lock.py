# SPDX-License-Identifier: Apache-2.0
"""One agent a node: an agent holds a lock while it runs, and the lock's file names its process.

``<box root>/.agent-<node>.lock`` is the lock of the node's daemon: there is one for each node. An agent that a run has
started for itself holds ``.agent-<node>@<pid of the run>.lock``: it must neither be kept away by the agent of another
run, which may report to another controller or be on its way out, nor keep others away.

The file holds three lines: the agent's pid, the pid of the run it ends with (0: none), and its controller. Runners read
it. The kernel releases the lock when the holder ends, however it ends. An agent that ends in order removes the file
while it still holds the lock; an agent that then gets the lock of a file that is no longer there opens the path anew.

The box root of root can be entered by root alone. A root agent that reads the folders of all users announces itself in
``/dev/shm/megascale-ops-agents/<node>``: pid, start in clock ticks, controller. Any user may read that file, and
believes it because it is root's; it is no lock, since a user that can open a lock could also hold it.
"""

import contextlib
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from megascale_agents.collectors import process
from megascale_ops.blackbox.private_folder import NotOursError, private_folder, public_folder, write_file
from megascale_ops.blackbox.roots import AGENTS, SHARED
from megascale_ops.errors import MegascaleError, UsageError

log = logging.getLogger(__name__)

# 0.2 s: a runner that tests whether the lock is held takes it briefly itself.
_LOCK_DEADLINE_S = 0.2


@contextlib.contextmanager
def node_lock(box_root: str, node: str, run_pid: int = 0, controller: str = "") -> Iterator[None]:
    """Hold the lock that makes us the only agent of this node, or of this run on it.

    Args:
        box_root: where black boxes live.
        node: name of the node.
        run_pid: the process that we belong to and end with; 0: we are the node's daemon.
        controller: where we report.

    Raises:
        UsageError: the box root can't be made or written.
        MegascaleError: another process holds the lock; its pid is named.
    """
    path = Path(box_root, f".agent-{node}@{run_pid}.lock" if run_pid else f".agent-{node}.lock")
    handle = _open(path)
    try:
        while taken := _take(handle):
            if _is_at(path, handle):
                break
            os.close(handle)
            handle = _open(path)
        if not taken:
            holder = os.pread(handle, 32, 0).decode("ascii", "replace").partition("\n")[0] or "unknown"
            raise MegascaleError(f"node {node} has an agent already: process {holder} (lock {path})")
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n{run_pid}\n{controller}\n".encode(), 0)
        yield
        path.unlink(missing_ok=True)
    finally:
        os.close(handle)


@contextlib.contextmanager
def announced(node: str, controller: str, shared: Path = SHARED) -> Iterator[None]:
    """Announce to all users of the node that we serve them; failing costs each of their runs an agent of its own."""
    told = False
    try:
        with public_folder(shared / AGENTS) as folder:
            ticks = process.read_once(os.getpid()).start_ticks
            write_file(folder, node, f"{os.getpid()}\n{ticks}\n{controller}\n".encode(), 0o644)
        told = True
    except (NotOursError, OSError) as error:
        log.warning("runs of other users will start agents of their own: %s", error, extra={"node": node})
    try:
        yield
    finally:
        if told:
            with contextlib.suppress(OSError):
                (shared / AGENTS / node).unlink()


def _open(path: Path) -> int:
    """Open the lock's file, making it and its folder.

    Raises:
        UsageError: one sentence.
    """
    try:
        with private_folder(path.parent) as folder:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            handle = os.open(path.name, flags, 0o600, dir_fd=folder)
    except NotOursError as error:
        raise UsageError(f"box root {path.parent} can't be used: {error}") from error
    except OSError as error:
        raise UsageError(f"box root {path.parent} can't be used: {error.strerror or error}") from error
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(handle)
        raise UsageError(f"{path} is no lock of ours (a link, or no file): remove it")
    return handle


def _is_at(path: Path, handle: int) -> bool:
    """Return whether the open file is still the one at ``path``: its holder may have removed it meanwhile."""
    try:
        return path.lstat().st_ino == os.fstat(handle).st_ino
    except FileNotFoundError:
        return False


def _take(handle: int) -> bool:
    """Lock a file; return whether we got it before the deadline."""
    end_s = time.monotonic() + _LOCK_DEADLINE_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end_s:
                return False
            time.sleep(0.02)
        else:
            return True
