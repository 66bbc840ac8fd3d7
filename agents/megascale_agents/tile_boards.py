# SPDX-License-Identifier: Apache-2.0
"""How far a rank's overlapped kernels are, and which peers their CTAs wait for: read from their progress boards.

A board is a file of 33 KB in memory that the kernels write while they run (``megascale_kernels.progress_file``). It
carries the process that made it, and so is found by it, whatever its name: in the folder of the job's black boxes, or
in /dev/shm, where a bare name leads. The agent knows the board's map by itself, since it imports no kernels; a test
compares both maps and what both readers say.

Nothing here locks. The header names the launch, and the word of each tile carries twelve bits of its own launch's
number, so words that are left from another launch are told apart; ``megascale_kernels.progress_view`` says why that
suffices.
"""

import contextlib
import mmap
import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megascale_agents.blackboxes import Folder

MAGIC = 0x4D53_4B31
OPERATORS = ("none", "meet", "all_gather", "ag_gemm", "gemm_rs", "gemm_ar")
# Of the others no share can be told: they have no tiles of their own.
TILED = ("ag_gemm", "gemm_rs", "gemm_ar")
MOST_CTAS, LINE_BYTES, ROLE_BYTES, HOST_BYTE = 256, 128, 64, 64
TILE_BITS, SIGNATURE_BITS, ALL_TILES_DONE = 20, 12, 0xFFFFF
WAITING, GAVE_UP = 1, 3
BOARD_BYTES = (1 + MOST_CTAS) * LINE_BYTES
_FILE_BYTES = -(-BOARD_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
# magic, rank, world_size, operator, epoch, ctas, tiles
_HEADER = struct.Struct("<7I")
_HOST = struct.Struct("<2I")  # pid, start in clock ticks after boot modulo 2**31
_START_MASK = 0x7FFF_FFFF
# The tile in hand, the state, the tile that waits and its peer, the stamps that are needed and seen; nine words more.
_ROLE = struct.Struct("<2I2i4x2I36x")

SHARED_MEMORY = "/dev/shm"  # noqa: S108  where the kernels put a board with a bare name
# Thousands of files may lie there (data loaders, semaphores, NCCL): a board has none of these names.
_NOT_BOARDS = ("torch_", "sem.", "nccl-", "psm_", "pym-")
_MOST_FILES = 4096


class Board(NamedTuple):
    """A board at one moment: ``done`` is the share of tiles, None where it can't be told; ``waiting`` counts CTAs.

    ``uid`` is whose file it is: the process that is named as its maker may be another user's.
    """

    kernel: str
    done: float | None
    waiting: Mapping[int, int]
    uid: int = 0


class Boards:
    """The boards of this machine, found again when a folder has changed.

    Args:
        folder: where boards with a bare name lie.
    """

    def __init__(self, folder: str = SHARED_MEMORY) -> None:
        self._anywhere = folder
        self._folders: dict[str, Folder] = {}
        self._paths: dict[str, dict[str, tuple[int, int]]] = {}

    def look(self, job_folders: Iterable[str]) -> dict[tuple[int, int], list[Board]]:
        """Return the boards in use by the process that made them: (pid, its start in clock ticks modulo 2**31)."""
        wanted = {self._anywhere, *job_folders}
        self._folders = {path: self._folders.get(path) or Folder(path) for path in wanted}
        self._paths = {path: self._paths.get(path, {}) for path in wanted}
        found: dict[tuple[int, int], list[Board]] = {}
        for path, folder in self._folders.items():
            if folder.changed():
                self._paths[path] = _boards_in(path)
            for board_path, writer in self._paths[path].items():
                with contextlib.suppress(OSError):
                    data, uid = _read(board_path, BOARD_BYTES)
                    board = parse(data)
                    if board is not None:
                        found.setdefault(writer, []).append(board._replace(uid=uid))
        return found


def start_of(start_ticks: int) -> int:
    """Return a process's start as a board carries it."""
    return start_ticks & _START_MASK


def parse(data: bytes) -> Board | None:
    """Return what a board shows; None for what is no board, or shows no launch yet."""
    if len(data) < BOARD_BYTES:
        return None
    magic, rank, _, operator, launch, ctas, tiles = _HEADER.unpack_from(data)
    if magic != MAGIC or not launch or operator >= len(OPERATORS):
        return None
    lines = memoryview(data)[LINE_BYTES : LINE_BYTES * (1 + min(ctas, MOST_CTAS))]
    roles = [(number // 2, number % 2, *words) for number, words in enumerate(_ROLE.iter_unpack(lines))]
    current = [role for role in roles if role[2] & ALL_TILES_DONE and not ((role[2] >> TILE_BITS) ^ launch) & 0xFFF]
    waits = {(role[5], role[0]) for role in current if _waits(role[2], role[3], role[6], role[7], launch)}
    # Who waits for a part from its own rank waits for whom that part waits for.
    waiting = Counter(peer for peer, _ in waits if peer != rank)
    kernel = OPERATORS[operator]
    done = _tiles_done(kernel, current, min(ctas, MOST_CTAS), tiles, launch) if kernel in TILED and tiles else None
    return Board(kernel, done / tiles if done is not None else None, waiting)


def _waits(tile: int, state: int, needed: int, seen: int, launch: int) -> bool:
    """Say whether a role waits, or has given up waiting, in this launch: the state outlives it."""
    if needed >> SIGNATURE_BITS != launch:
        return False
    is_done = tile & ALL_TILES_DONE == ALL_TILES_DONE
    return state == GAVE_UP or (state == WAITING and not is_done and seen != needed)


def _tiles_done(kernel: str, current: list[tuple[int, ...]], ctas: int, tiles: int, launch: int) -> int | None:
    """Count finished tiles: CTAs that compute take every n-th tile; the lowest may be set apart for copying."""
    computing = [role for role in current if role[1] == 0]
    copying = {role[0] for role in current if role[1] == 1} - {role[0] for role in computing}
    stride = ctas - len(copying)
    if stride < 1 or copying != set(range(len(copying))):
        return None
    done = 0
    for cta, _, tile, state, wait_tile, _, needed, seen in computing:
        mine = range(cta - len(copying), tiles, stride)
        waits, shown = _waits(tile, state, needed, seen, launch), tile & ALL_TILES_DONE
        is_done = shown == ALL_TILES_DONE
        stopped = wait_tile if waits and is_done else shown - 1
        # In an all-reduce every tile is multiplied before the first wait.
        if (is_done and not waits) or (waits and kernel == "gemm_ar"):
            done += len(mine)
        elif stopped in mine:
            done += mine.index(stopped)
        else:
            return None
    return done


def _boards_in(folder: str) -> dict[str, tuple[int, int]]:
    """Return the boards in a folder by path, with the process that made each."""
    found: dict[str, tuple[int, int]] = {}
    try:
        with os.scandir(folder) as entries:
            for number, entry in enumerate(entries):
                if number >= _MOST_FILES:
                    break
                if entry.name.startswith(_NOT_BOARDS) or not entry.is_file(follow_symlinks=False):
                    continue
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_size == _FILE_BYTES:
                        head, _ = _read(entry.path, LINE_BYTES)
                        if len(head) == LINE_BYTES and _HEADER.unpack_from(head)[0] == MAGIC:
                            found[entry.path] = _HOST.unpack_from(head, HOST_BYTE)
    except OSError:
        return found
    return found


def _read(path: str, length: int) -> tuple[bytes, int]:
    """Copy bytes of a file, and tell whose it is; NONBLOCK and NOFOLLOW, since anybody may put files there.

    Raises:
        OSError: it can't be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        return os.pread(handle, length, 0), os.fstat(handle).st_uid
    finally:
        os.close(handle)
