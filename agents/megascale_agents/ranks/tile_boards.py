# SPDX-License-Identifier: Apache-2.0
"""Find the progress boards of the ranks' overlapped kernels, for ``/metrics``, for heartbeats and as evidence.

A board (``megascale_ops.blackbox.boards`` reads one) carries the process that made it, and so is found by it, whatever
its name: in the folder of the job's black boxes, where every workspace puts its own, or in /dev/shm, where a bare name
leads. What an earlier run has left names a process that is gone, or another by now.
"""

import contextlib
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from megascale_agents.ranks.blackboxes import Folder
from megascale_ops.blackbox import boards
from megascale_ops.schema.tiles import TileFact

_FILE_BYTES = -(-boards.BOARD_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE

SHARED_MEMORY = "/dev/shm"  # noqa: S108  where the kernels put a board with a bare name
# Thousands of files may lie there (data loaders, semaphores, NCCL): a board has none of these names.
_NOT_BOARDS = ("torch_", "sem.", "nccl-", "psm_", "pym-")
_MOST_FILES = 4096
Writer = tuple[int, int]  # pid, its start in clock ticks modulo 2**31


class Board(NamedTuple):
    """A board at one moment: ``done`` is the share of tiles, None where it is not known; ``waiting`` counts CTAs.

    ``uid`` is the file's owner: the process that is named as its maker may be another user's. Peers have the job's
    numbers where the board has them.
    """

    kernel: str
    done: float | None
    waiting: Mapping[int, int]
    uid: int = 0


class Boards:
    """The boards of this machine, found again when a folder has changed.

    Args:
        folder: where boards with a bare name lie; "" looks beside black boxes alone.
    """

    def __init__(self, folder: str = SHARED_MEMORY) -> None:
        self._anywhere = folder
        self._folders: dict[str, Folder] = {}
        self._paths: dict[str, dict[str, Writer]] = {}

    def poll_boards(self, job_folders: Iterable[str]) -> dict[Writer, list[Board]]:
        """Return the boards in use by the process that made them: (pid, its start in clock ticks modulo 2**31)."""
        found: dict[Writer, list[Board]] = {}
        for writer, data, uid in self._read(job_folders):
            board = parse(data)
            if board is not None:
                found.setdefault(writer, []).append(board._replace(uid=uid))
        return found

    def facts(
        self, job_folder: str, writer: Writer, uid: int, world_size: int, wall_s: float | None = None
    ) -> tuple[TileFact, ...]:
        """Return the facts of one process's boards; another user's files and old copies are left out.

        Args:
            job_folder: where the black boxes of its job are.
            writer: the process.
            uid: whose it is.
            world_size: ranks of its job.
            wall_s: the time now; asked for when not given.
        """
        now_s = time.time() if wall_s is None else wall_s
        found = []
        for _, data, owner in self._read((job_folder,), writer):
            board = boards.parse(data)
            if board is not None and owner in (0, uid) and boards.is_current(board, *writer, now_s):
                found.append(boards.fact_of(board, world_size))
        return boards.most_telling(found)

    def copies(self, job_folder: str, writer: Writer, uid: int) -> list[bytes]:
        """Return the boards of one process as they are, to be kept; a copy that is kept can be read again."""
        found = self._read((job_folder,), writer)
        return [data for _, data, owner in found if owner in (0, uid) and boards.parse(data) is not None]

    def _read(self, job_folders: Iterable[str], wanted: Writer | None = None) -> Iterator[tuple[Writer, bytes, int]]:
        """Copy the boards that there are, or those of one process."""
        places = {self._anywhere, *job_folders} - {""}
        self._folders = {path: self._folders.get(path) or Folder(path) for path in places}
        self._paths = {path: self._paths.get(path, {}) for path in places}
        for path, folder in self._folders.items():
            if folder.changed():
                self._paths[path] = _boards_in(path)
            for board_path, writer in self._paths[path].items():
                if wanted is None or writer == wanted:
                    with contextlib.suppress(OSError):
                        yield writer, *boards.read_file(board_path, boards.BOARD_BYTES)


def start_of(start_ticks: int) -> int:
    """Return a process's start as a board carries it."""
    return start_ticks & boards.START_MASK


def parse(data: bytes) -> Board | None:
    """Return what a board shows; None for what is no board, or shows no launch yet."""
    board = boards.parse(data)
    if board is None or not board.launch:
        return None
    done, members = board.done, board.members
    waiting = {members[peer] if peer < len(members) else peer: ctas for peer, ctas in board.waiting.items()}
    return Board(board.operator, done / board.tiles if done is not None else None, waiting)


def _boards_in(folder: str) -> dict[str, Writer]:
    """Return the boards in a folder by path, with the process that made each."""
    found: dict[str, Writer] = {}
    try:
        with os.scandir(folder) as entries:
            for number, entry in enumerate(entries):
                if number >= _MOST_FILES:
                    break
                if entry.name.startswith(_NOT_BOARDS) or not entry.is_file(follow_symlinks=False):
                    continue
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_size == _FILE_BYTES:
                        head, _ = boards.read_file(entry.path, boards.LINE_BYTES)
                        if len(head) == boards.LINE_BYTES and boards.HEADER.unpack_from(head)[0] == boards.MAGIC:
                            pid, started, *_ = boards.HOST.unpack_from(head, boards.HOST_BYTE)
                            found[entry.path] = (pid, started)
    except OSError:
        return found
    return found
