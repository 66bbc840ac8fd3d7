# SPDX-License-Identifier: Apache-2.0
"""The agent that watches the ranks of this run: one that runs already, or one of our own.

A run that starts its own controller starts its own agent as well: no other agent reports to that controller. A run that
was given a controller may find an agent that will do: the node's daemon, or the agent of another run with the same
controller. That one may go, so the run keeps an eye on it, and starts its own when none is left.

An agent that belongs to a run which is gone counts for nothing: it is on its way out, though it may still hold its
lock. Such an agent is not in our way either, since the lock of a run's own agent carries the pid of the run.
"""

import contextlib
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from megascale_ops.blackbox.roots import AGENTS, SHARED, roots_of
from megascale_ops.runner.processes import is_dying, start_ticks
from megascale_ops.runner.services.companions import Companion

log = logging.getLogger(__name__)

# 10 s: a daemon that was killed is back within the second or five after which systemd or Kubernetes starts it again;
# a node counts as lost after 15 s, and not as long as its runner polls for orders.
DAEMON_AWAY_S = 10.0
LOOK_EVERY_S = 1.0
_PAUSE_MOST_S = 30.0


class Attendant(NamedTuple):
    """An agent that holds its lock on this node."""

    pid: int
    run_pid: int  # the run that it belongs to and ends with; 0: it is the node's daemon
    controller: str
    run_lives: bool


def serves(agent: Attendant, controller: str) -> bool:
    """Return whether an agent will do for a run with this controller.

    A daemon is taken at its word: its address of the controller may be written in another way than ours.
    """
    if not agent.run_pid:
        return True
    return agent.run_lives and agent.controller.rstrip("/") == controller.rstrip("/")


def why_start(agents: Sequence[Attendant], controller: str, before: Attendant | None, absent_s: float) -> str:
    """Return why an agent of our own must be started, "" when it need not.

    Args:
        agents: the agents of this node.
        controller: ours.
        before: the agent that served this run last; None when none has.
        absent_s: for how long none has, seconds.
    """
    if any(serves(agent, controller) for agent in agents):
        return ""
    if before is None:
        return "no agent serves this run"
    if before.run_pid:
        return f"the run {before.run_pid} whose agent has served this one as well is over"
    if absent_s <= DAEMON_AWAY_S:
        return ""
    return f"the node's agent (process {before.pid}) is gone for {absent_s:.0f} s"


def find_agents(box_root: Path, node: str) -> list[Attendant]:
    """Return the agents of ``node`` that hold their locks; locks that a killed run's agent left are removed.

    The files are the agents' (``node_lock.py``): own pid, pid of the run (0: none), controller, a line each.
    """
    paths = [box_root / f".agent-{node}.lock", *sorted(box_root.glob(f".agent-{node}@*.lock"))]
    found = []
    for path in paths:
        try:
            with path.open("rb") as file:
                if not _is_held(file.fileno()):
                    if "@" in path.name:
                        path.unlink(missing_ok=True)  # while it is locked: an agent that opened it just now looks again
                    continue
                lines = file.read(4096).decode("utf-8", "replace").splitlines()
            pid, run_pid, controller = [*lines, "0", ""][:3]
            found.append(Attendant(int(pid), int(run_pid), controller, run_lives=not is_dying(int(run_pid))))
        except (OSError, ValueError):
            continue  # gone, or not written yet: it is read again
    return found or announced_agent(box_root, node)


def announced_agent(box_root: Path, node: str, shared: Path = SHARED) -> list[Attendant]:
    """Return root's agent of this node that looks into the box roots of all users, if ``box_root`` is one of them.

    Only root can announce it: folder and file are root's, and the process named in it started at the time in the file.
    """
    folder = shared / AGENTS
    with contextlib.suppress(OSError, ValueError):
        if box_root.parent != shared or box_root not in roots_of(os.geteuid(), shared):
            return []
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
            return []
        handle = os.open(folder / node, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            pid, ticks, controller = [*file.read(4096).decode("utf-8", "replace").splitlines(), "", "", ""][:3]
        if int(ticks) and start_ticks(int(pid)) == int(ticks):
            return [Attendant(int(pid), 0, controller, run_lives=False)]
    return []


def _is_held(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


class Attendance:
    """Makes sure that an agent serves this run, as long as it lasts.

    Args:
        start: Starts an agent of our own, which is then kept alive.
        look: Lists the agents of this node.
        controller: Ours.
        alone: The controller is this run's own, so no other agent will do.
    """

    def __init__(
        self, start: Callable[[], Companion], look: Callable[[], list[Attendant]], controller: str, *, alone: bool
    ) -> None:
        self._start = start
        self._look = look
        self._controller = controller
        self._own: Companion | None = None
        self._before: Attendant | None = None
        self._served_s = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="attendance", daemon=True)
        if self._why_start() or alone:
            self._own = start()
        else:
            self._thread.start()

    @property
    def pid(self) -> int:
        """Process id of the agent that this run has started; 0: another one serves it."""
        return self._own.pid if self._own is not None else 0

    def _why_start(self) -> str:
        """Look for agents; return why we must start an agent of our own, or ""."""
        agents = self._look()
        now_s = time.monotonic()
        serving = next((agent for agent in agents if serves(agent, self._controller)), None)
        if serving is not None:
            self._before, self._served_s = serving, now_s
        return why_start(agents, self._controller, self._before, now_s - self._served_s)

    def _watch(self) -> None:
        pause_s = LOOK_EVERY_S
        while not self._stopping.wait(pause_s):
            reason = self._why_start()
            if not reason:
                continue
            try:
                self._own = self._start()
            except OSError as error:
                pause_s = min(_PAUSE_MOST_S, 2 * pause_s)
                log.warning("%s, and none could be started (%s): tried again in %.0f s", reason, error, pause_s)
            else:
                log.warning("%s: this run has started its own", reason)
                return

    def stop(self) -> None:
        """Stop what we have started."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        if self._own is not None:
            self._own.stop()
