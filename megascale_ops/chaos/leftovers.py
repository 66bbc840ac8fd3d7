# SPDX-License-Identifier: Apache-2.0
"""What a trial left whose `chaos` was killed: its job had nothing left to end it.

Every process of a trial carries a mark that names the `chaos` it belongs to by pid and start time, so a later call
knows whose owner is gone. Only such processes are killed, and only their black boxes removed.
"""

import contextlib
import os
import re
import shutil
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

from megascale_ops.runner.processes import start_ticks

MARK = "MEGASCALE_CHAOS"
# As `new_mark` makes them. Any process may carry another text, and a path made of it would be removed.
_MADE_BY_US = re.compile(r"\d{1,10}-\d{1,20}-[0-9a-f]{12}")
_BOX_ROOTS = Path("/dev/shm")  # noqa: S108  tmpfs is the point


def new_mark() -> str:
    """Return a mark that no other trial has: ``<pid>-<start ticks>-<random>`` of this process."""
    return f"{os.getpid()}-{start_ticks(os.getpid())}-{uuid.uuid4().hex[:12]}"


def box_root(mark: str) -> Path:
    """Return where the black boxes of a trial are."""
    return _BOX_ROOTS / f"megascale-chaos-{mark}"


def marked(mark: str) -> list[int]:
    """Return every process of the trial with this mark."""
    return [pid for pid, its in _marks() if its == mark]


def end_leftovers() -> list[int]:
    """Kill every process of a trial whose `chaos` is gone, and remove its black boxes; return the pids."""
    ended = []
    for pid, mark in _marks():
        if not _MADE_BY_US.fullmatch(mark) or _owner_lives(mark):
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            ended.append(pid)
        shutil.rmtree(box_root(mark), ignore_errors=True)
    return ended


def _owner_lives(mark: str) -> bool:
    """Return whether the `chaos` that gave out a mark runs; true for a mark that can't be parsed."""
    pid, _, rest = mark.partition("-")
    ticks, _, _ = rest.partition("-")
    if not (pid.isdigit() and ticks.isdigit()):
        return True
    return start_ticks(int(pid)) == int(ticks)


def _marks() -> Iterator[tuple[int, str]]:
    """Yield every process of this user that carries a mark, but not this one."""
    begin = f"{MARK}=".encode()
    for path in Path("/proc").iterdir():
        if not path.name.isdigit() or int(path.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if path.stat().st_uid != os.geteuid():
                continue  # root could read it, and would end another user's process with such a mark
            for item in (path / "environ").read_bytes().split(b"\0"):
                if item.startswith(begin):
                    yield int(path.name), item[len(begin) :].decode(errors="replace")
