# SPDX-License-Identifier: Apache-2.0
"""What outlives the ranks, or a runner that was killed: found by its mark, reported by its name, and ended.

A SIGKILLed runner can't tidy: ranks that were not Python may live on, black boxes lie in shared memory. Its round
file names it and the mark that all its processes carry, so the next start finds every one of them. A start of another
job removes what is left of it in memory, once none of its processes lives.

A runner holds a lock as long as it lives, ``.run-<job>@<node>.lock`` in the box root: the kernel gives it back when
the runner dies, however it dies, and also where two containers share the memory but can't see each other's processes.
"""

import contextlib
import fcntl
import glob
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from megascale_ops import foreign
from megascale_ops.errors import UsageError
from megascale_ops.runner.processes import is_dying, kill_for_certain, marked_processes, start_ticks
from megascale_ops.schema.folding import listed
from megascale_ops.schema.identity import MOST_ROUND_BYTES, RoundFile

log = logging.getLogger(__name__)

# 0.5 s: helpers of Python's own and of torch's compiler end when their parent is gone; they are not reported.
_BY_THEMSELVES_S = 0.5
# 2 s from SIGTERM to SIGKILL for a process that has had its grace.
_TERM_S = 2.0
# 0.1 s: nothing but the end of the run waits for it.
_LOOK_S = 0.1
# 16 MiB: 64 ranks with their paths need 50 KB.
_NAMED = 4  # processes in a line, and characters of a command
_COMMAND = 60


def read_round_file(path: Path) -> RoundFile | None:
    """Return the round file at ``path``; None when there is none or it can't be read."""
    try:
        return msgspec.json.decode(foreign.read(path, MOST_ROUND_BYTES, owner=os.geteuid()), type=RoundFile)
    except (OSError, *foreign.UNREADABLE):
        return None


# 64 nodes on one machine: far more than are ever tried on one.
_MOST_NODES = 64


class Held(NamedTuple):
    """A place that this runner holds: the node's name, and how to give it back."""

    node: str
    path: Path
    handle: int

    def release(self) -> None:
        """Let others have it."""
        self.path.unlink(missing_ok=True)  # while it is locked: a process that opened it just now looks again
        os.close(self.handle)


def hold_place(box_root: Path, job: str, node: str, *, others: bool) -> Held:
    """Take this node's place in the job for this runner.

    Args:
        box_root: Where the locks are.
        job: Name of the job.
        node: Name of the node.
        others: Whether several runners of one machine may take part; each is a node of its own then.

    Raises:
        UsageError: a runner of this job lives on this node.
    """
    names = [node, *(f"{node}-{number}" for number in range(2, _MOST_NODES))] if others else [node]
    for name in names:
        handle = _try_lock(_lock_path(box_root, job, name))
        if handle >= 0:
            os.truncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
            return Held(name, _lock_path(box_root, job, name), handle)
    with contextlib.suppress(OSError):
        pid = _lock_path(box_root, job, node).read_text().strip()
        raise UsageError(_already(job, node, pid or "not known"))
    raise UsageError(_already(job, node, "not known"))


def is_held(box_root: Path, job: str) -> bool:
    """Return whether a runner of this job lives, on whatever node of this machine; looked at only, not taken."""
    for path in box_root.glob(f".run-{glob.escape(job)}@*.lock"):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # given back just now, or not readable
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
    return False


def _already(job: str, node: str, pid: str) -> str:
    return (
        f"job {job} already runs on {node} (runner process {pid}): "
        "stop that one first, or give this run another name with --job"
    )


def _lock_path(box_root: Path, job: str, node: str) -> Path:
    return box_root / f".run-{job}@{node}.lock"


def _try_lock(path: Path) -> int:
    """Return the locked file, -1 when another process holds it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_ino == path.lstat().st_ino:
                return handle
        except BlockingIOError:
            os.close(handle)
            return -1
        except FileNotFoundError:  # given back between the two looks
            pass
        os.close(handle)


def sweep(box_root: Path) -> int:
    """Remove what killed runners of any job left in memory; return of how many there was something.

    Only where a lock is left that is not held, and no process carries the mark of that runner any more.
    """
    swept = 0
    for path in box_root.glob(".run-*@*.lock"):
        job, _, node = path.name.removeprefix(".run-").removesuffix(".lock").rpartition("@")
        with contextlib.suppress(OSError):
            handle = _try_lock(path)
            if handle < 0:
                continue
            held = Held(node, path, handle)
            left = read_round_file(box_root / job / f"{node}.round.json")
            if left is not None and left.run_id and marked_processes(left.run_id):
                os.close(handle)  # its next start ends them; until then this one is not over
                continue
            if left is not None:
                remove_boxes(box_root / job, left)
                swept += 1
            held.release()
    return swept


def clean_up(box_dir: Path, node: str, job: str) -> str:
    """Remove what an earlier runner of this job on this node left behind.

    Returns:
        A sentence saying what was found, or "" when there was nothing.

    Raises:
        UsageError: the earlier runner still runs.
    """
    path = box_dir / f"{node}.round.json"
    earlier = read_round_file(path)
    if earlier is None:
        return ""
    if earlier.runner_pid and start_ticks(earlier.runner_pid) == earlier.runner_start_ticks:
        raise UsageError(_already(job, node, str(earlier.runner_pid)))
    killed = kill_for_certain(lambda: marked_processes(earlier.run_id)) if earlier.run_id else 0
    removed = remove_boxes(box_dir, earlier)
    return (
        f"an earlier runner of job {job} (process {earlier.runner_pid}, round {earlier.round}) had died without "
        f"tidying: {killed} of its processes still ran and were killed, {removed} of its files were removed"
    )


def remove_boxes(box_dir: Path, round_file: RoundFile | None, node: str = "") -> int:
    """Remove the black boxes of one node's ranks, its round file, and the folder when it is empty.

    Returns:
        How many files were removed.
    """
    removed = 0
    names = [str(rank.rank) for rank in round_file.ranks] if round_file is not None else []
    for name in names:
        for path in box_dir.glob(f"{name}.*"):
            path.unlink(missing_ok=True)
            removed += 1
    file = box_dir / f"{round_file.node if round_file is not None else node}.round.json"
    if file.exists():
        file.unlink(missing_ok=True)
        removed += 1
    others = list(box_dir.glob("*.round.json")) if box_dir.exists() else []
    if not others and box_dir.exists():
        removed += sum(1 for path in box_dir.iterdir() if path.is_file())
        shutil.rmtree(box_dir, ignore_errors=True)
    return removed


def end_children(pids: Callable[[], list[int]], grace_s: float, is_hurried: Callable[[], bool]) -> None:
    """End what ``pids()`` names, after ``grace_s``; log them when they are left and when they are ended.

    A script may start an upload of its last checkpoint and end: that is no mistake, and killing it would lose the
    checkpoint. A signal to the runner ends the wait.
    """
    if grace_s and _wait(pids, min(grace_s, _BY_THEMSELVES_S), is_hurried) and not is_hurried():
        named = describe([pid for pid in pids() if not is_dying(pid)])
        if named:
            log.warning("the ranks have ended; what they started and left running is given %g s: %s", grace_s, named)
            _wait(pids, grace_s - _BY_THEMSELVES_S, is_hurried)
    left = [pid for pid in pids() if not is_dying(pid)]
    if not left:
        return
    named = describe(left)
    if grace_s:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)
        _wait(pids, _TERM_S, is_hurried)
    kill_for_certain(pids)
    late = f" {grace_s:g} s after the ranks (--child-grace sets this time)" if grace_s else ""
    log.warning("what the ranks had started was still running%s and was ended: %s", late, named)


def _wait(pids: Callable[[], list[int]], seconds: float, is_hurried: Callable[[], bool]) -> bool:
    """Wait until nothing is left; return whether something is."""
    end_s = time.monotonic() + seconds
    known = pids()
    while known and time.monotonic() < end_s and not is_hurried():
        time.sleep(_LOOK_S)
        known = [pid for pid in known if not is_dying(pid)] or pids()  # one that ends may have started others
    return bool(known)


def describe(pids: Sequence[int]) -> str:
    """Return processes in words: pid and command of the first few; those that are gone meanwhile are left out."""
    return listed([f"{pid} ({command})" for pid in pids if (command := _command(pid))], _NAMED)


def _command(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
        text = " ".join(words)
        return text if len(text) <= _COMMAND else f"{text[:_COMMAND]}..."
    return ""
