# SPDX-License-Identifier: Apache-2.0
"""Find the jobs, rounds and black boxes of this node below the box root.

    <root>/<job>/<node>.round.json     written by the runner: the round, the ranks' processes, the run folder
    <root>/<job>/<rank>.box            written by each rank that is a torch script

Looking costs one ``stat`` for the root and one for each job folder (3 us): everything that matters here (a file
created, renamed into place, removed) changes the folder's modification time. File systems stamp with the coarse clock
(4 ms), so a change just after a look could carry the same time; a folder that changed a moment ago is looked at again.
"""

import contextlib
import os
import re
import struct
import time
from pathlib import Path

import msgspec

from megascale_agents.ownership import files
from megascale_agents.ownership.rights import Owner
from megascale_ops import foreign
from megascale_ops.blackbox import BoxError
from megascale_ops.blackbox.layout import NOW, PULSE
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.errors import MegascaleError
from megascale_ops.schema import ranges
from megascale_ops.schema.identity import MOST_ROUND_BYTES, RoundFile
from megascale_ops.schema.version import MESSAGE_VERSION, check_version

ROUND_SUFFIX = ".round.json"
BOX_SUFFIX = ".box"
# 0.5 s: far above the 4 ms of a coarse clock, and black boxes do not lie on network file systems.
_SETTLED_NS = 500_000_000
# 256: a node has 8 ranks, 64 at the most; each takes four of the agent's handles; one user must not exhaust them.
MOST_RANKS = 256
# 4,096 folders of a user, left from earlier jobs: each takes a stat at every look, all of them 12 ms.
MOST_JOBS = 4096
_PATH_CHARACTERS = 4096  # PATH_MAX
_MOST_NUMBER = 1 << 63

_STATE = PULSE.field("state")
_STEPS_SEEN = NOW.field("steps_seen")
# The count of each slot alone.
_COUNTS = struct.Struct(
    "<" + f"{_STEPS_SEEN.offset}x{_STEPS_SEEN.code}{NOW.stride - _STEPS_SEEN.offset - _STEPS_SEEN.size}x" * NOW.slots
)
# As a rank writes its number: "²" is a digit to Python but no number, "00" would pass for rank 0.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
_decode_round = msgspec.json.Decoder(RoundFile).decode


class Folder:
    """A folder that is listed again only when something in it may have changed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._stamp: tuple[int, int] | None = None
        self._settled = False

    def changed(self) -> bool:
        """Return whether to list the folder again; a folder that is not there never changed."""
        try:
            found = os.stat(self.path)  # noqa: PTH116  ten times a second for each job: half the cost of a Path
        except OSError:
            was_there, self._stamp = self._stamp is not None, None
            return was_there
        stamp = (found.st_ino, found.st_mtime_ns)
        if stamp == self._stamp and self._settled:
            return False
        self._stamp = stamp
        self._settled = time.time_ns() - found.st_mtime_ns > _SETTLED_NS
        return True


def list_jobs(root: str) -> list[str]:
    """Return the names of the job folders below ``root``, of each user's the newest."""
    found: dict[int, list[tuple[int, str]]] = {}
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                # Gone, or a folder on which its user has mounted a file system that no other user may read (FUSE).
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        stat = entry.stat(follow_symlinks=False)
                        found.setdefault(stat.st_uid, []).append((stat.st_mtime_ns, entry.name))
    except OSError:
        return []
    return sorted(name for of_user in found.values() for _, name in sorted(of_user)[-MOST_JOBS:])


def read_round(folder: str, node: str, owner: Owner) -> RoundFile | None:
    """Return what the runner of ``node`` started, None when it started nothing or has cleaned up.

    Raises:
        MegascaleError: the file is there and is not one of ours.
    """
    path = Path(folder, node + ROUND_SUFFIX)
    try:
        data = files.read_small(path, owner, MOST_ROUND_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MegascaleError(f"{path} is no round file: {error.strerror or error}") from error
    try:
        found = _decode_round(data)
    except foreign.UNREADABLE as error:
        raise MegascaleError(f"{path} is no round file: {error}") from error
    check_version(f"round file {path}", found.version, MESSAGE_VERSION)
    if why := _why_unfit(found):
        raise MegascaleError(f"{path} is no round file: {why}")
    return found


def _why_unfit(file: RoundFile) -> str:
    """Return what in a round file no runner writes, "" for nothing; it may be shown beside other users' jobs."""
    if len(file.ranks) > MOST_RANKS:
        return f"it names {len(file.ranks)} ranks; of one node {MOST_RANKS} are watched"
    paths = (file.run_dir, *(path for one in file.ranks for path in (one.stdout_path, one.stderr_path)))
    if any(len(path) > _PATH_CHARACTERS or "\0" in path for path in paths):
        return "a path in it is none"
    numbers = (file.round, file.runner_pid, file.runner_start_ticks)
    of_ranks = (number for one in file.ranks for number in (one.rank, one.local_rank, one.pid, one.start_ticks))
    if not all(0 <= number < _MOST_NUMBER for number in (*numbers, *of_ranks)):
        return "a number in it is below 0 or has more than 63 bits"
    return ""


class Pulse:
    """The first words of a box: its rank's state and when it last moved. A look takes 1 us, at all of a box 40 us.

    Args:
        handle: The open file, to be kept.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._state = b""

    def state_changed(self) -> bool:
        """Return whether the rank's state (starting, running, exited) is another one than the last time."""
        if self._handle < 0:
            return False
        state = os.pread(self._handle, _STATE.size, PULSE.offset + _STATE.offset)
        changed, self._state = state != self._state, state
        return changed

    def steps_seen(self) -> int:
        """Return how many steps the rank has finished, 0 when that can't be read. A count is one word, never torn."""
        if self._handle < 0:
            return 0
        now = os.pread(self._handle, NOW.size, NOW.offset)
        return max(_COUNTS.unpack(now)) if len(now) == NOW.size else 0

    def close(self) -> None:
        """Let go of the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class BoxShelf:
    """The open black boxes of one round. An opened box stays readable whatever happens to its file.

    Args:
        folder: The job's folder.
        node: This node's name.
        round_: The round.
        owner: Whose boxes they have to be.

    Attributes:
        readers: The newest box of each rank.
        pulses: The same boxes, for a quick look.
        errors: How many files could not be read as a box.
    """

    def __init__(self, folder: str, node: str, round_: int, owner: Owner) -> None:
        self.folder = folder
        self.owner = owner
        self.node = node
        self.round = round_
        self.readers: dict[int, BoxReader] = {}
        self.pulses: dict[int, Pulse] = {}
        self.errors = 0
        self._seen: dict[int, int] = {}  # rank -> inode already looked at, accepted or not

    def refresh(self) -> bool:
        """Open what is new; return whether anything was."""
        opened = False
        for name, inode in files.listed(self.folder, self.owner, BOX_SUFFIX):
            stem = name.removesuffix(BOX_SUFFIX)
            if not _NUMBER.fullmatch(stem) or int(stem) >= ranges.MOST_RANKS or self._seen.get(int(stem)) == inode:
                continue
            self._seen[int(stem)] = inode
            opened |= self._open(int(stem), Path(self.folder, name))
        return opened

    def _open(self, rank: int, path: Path) -> bool:
        try:
            handle = files.opened(path, self.owner)
        except FileNotFoundError:  # gone between listing and opening is no error: its rank makes a new one
            return False
        except OSError:
            self.errors += 1
            return False
        try:
            reader = BoxReader(path, handle=handle)
        except BoxError:
            self.errors += 1
            return False
        identity = reader.identity()
        # A box of another round is left over or ahead of its round file; a box of another node has a wrong owner.
        if identity.round != self.round or identity.node != self.node or identity.rank != rank:
            reader.close()
            return False
        if rank not in self.readers and len(self.readers) >= MOST_RANKS:
            self.errors += 1
            reader.close()
            return False
        if rank in self.readers:
            self.readers[rank].close()
            self.pulses[rank].close()
        self.readers[rank], self.pulses[rank] = reader, Pulse(os.dup(handle))
        return True

    def close(self) -> None:
        """Let go of all boxes."""
        for reader in self.readers.values():
            with contextlib.suppress(OSError):
                reader.close()
        for pulse in self.pulses.values():
            pulse.close()
        self.readers.clear()
        self.pulses.clear()
