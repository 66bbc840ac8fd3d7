# SPDX-License-Identifier: Apache-2.0
"""One world of ranks for each node and round, and one living process for each rank of it.

Below another launcher several groups of processes may each have a rank 0: a model that is trained and one that
generates for it, or four trials side by side. Two of them in one set of black boxes would look like ranks that
contradict each other, and a healthy job would be restarted for it. So only the first world of a round is watched, as
long as one of its ranks lives; ``<node>.world.json`` beside the boxes names it and the process of each of its ranks.
"""

import fcntl
import os
import time
from pathlib import Path

import msgspec

from megascale_ops.blackbox.private_folder import private_folder
from megascale_ops.recorder.recording.config import FoundRank

_SUFFIX = ".world.json"
# 2 s: a hundred ranks that start in one moment take a millisecond each.
_LOCK_S = 2.0
_LOOK_S = 0.005


class Claim(msgspec.Struct, frozen=True):
    """A rank that a process has taken; ``start_ticks`` distinguishes the process from a later one with its pid."""

    rank: int
    pid: int
    start_ticks: int


class World(msgspec.Struct, frozen=True):
    """The world that is watched on this node, and which of its ranks are taken."""

    round: int
    world: str
    world_size: int
    claims: tuple[Claim, ...] = ()


def claim(folder: Path, node: str, round_: int, found: FoundRank, me: Claim) -> str:
    """Take a rank for process ``me``; return "" when it is taken, else why it is another's.

    Raises:
        NotOursError: the folder is another user's.
        OSError: the file can't be made, or is not to be had.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with private_folder(folder) as opened:
        handle = os.open(f"{node}{_SUFFIX}", flags, 0o600, dir_fd=opened)
    try:
        _lock(handle, folder / f"{node}{_SUFFIX}")
        world, refused = join(_read(handle), round_, found, me)
        if not refused:
            data = msgspec.json.encode(world)
            os.pwrite(handle, data, 0)
            os.truncate(handle, len(data))
        return refused
    finally:
        os.close(handle)


def _lock(handle: int, path: Path) -> None:
    """Wait for the file's lock, which is held for as long as it takes to read and write some hundred bytes."""
    deadline_s = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"{path} has been locked for {_LOCK_S:g} s by a process that was stopped") from None
            time.sleep(_LOOK_S)
        else:
            return


def join(known: World | None, round_: int, found: FoundRank, me: Claim) -> tuple[World, str]:
    """Return the world with ``me`` in it and "", or the world as it is and why ``me`` is none of it."""
    fresh = World(round_, found.world, found.world_size, (me,))
    if known is None or known.round != round_:
        return fresh, ""
    living = tuple(one for one in known.claims if one.pid == me.pid or is_alive(one))
    if not living:
        return fresh, ""
    if (known.world, known.world_size) != (found.world, found.world_size):
        return known, (
            f"the process group of {known.world_size} ranks at {known.world} is watched on this node, "
            f"and this is one of {found.world_size} at {found.world}"
        )
    rival = next((one for one in living if one.rank == found.rank and one.pid != me.pid), None)
    if rival is not None:
        return known, f"process {rival.pid} is rank {found.rank} already"
    others = tuple(one for one in living if one.rank != found.rank)
    return World(round_, found.world, found.world_size, (*others, me)), ""


def is_alive(one: Claim) -> bool:
    """Return whether the process of a claim lives; a zombie does not."""
    ticks, state = stat_of(one.pid)
    return ticks == one.start_ticks and state not in "ZX"


def stat_of(pid: int) -> tuple[int, str]:
    """Return when a process started, in ticks since boot, and its state; 0 and "X" where there is none.

    Source: proc_pid_stat(5), fields 3 and 22.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]), fields[0]
    except (OSError, ValueError, IndexError):
        return 0, "X"


def _read(handle: int) -> World | None:
    """Return the world in the file, None if the file is empty or damaged."""
    data = os.pread(handle, 1 << 20, 0)
    try:
        return msgspec.json.decode(data, type=World)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
