# SPDX-License-Identifier: Apache-2.0
"""Read the progress boards of overlapped kernels, which lie beside the black boxes: ``<rank>.<number>.board``.

A board is a file of 33 KB in memory that kernels write while they run (``kernels.progress.board_file``), one for
each workspace of a rank. Like a black box it outlives the process, whatever killed it. It holds the process that made
it, which distinguishes it from boards of earlier runs; the global ranks of its group, since kernels count within the
group; and a number that it shares with the boards of the other ranks of that workspace. This package does not import
kernels: the layout is written down a second time, and tests compare both layouts and the output of both readers.

Nothing locks a board. The header names the launch, and the word of each tile carries twelve bits of its own launch's
number, so words that are left from another launch are recognised; ``megascale_kernels.progress.view`` explains why
that suffices.

Pure but for ``read_file`` and ``of_process``: bytes in, facts out.
"""

import glob
import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megascale_ops.schema.folding import ranges
from megascale_ops.schema.ranges import MOST_COUNT, MOST_RANKS
from megascale_ops.schema.tiles import MOST_PEERS, TileFact, TileWait

MAGIC = 0x4D53_4B31
OPERATORS = (
    *("none", "meet", "all_gather", "ag_gemm", "gemm_rs", "gemm_ar"),
    *("moe_route", "moe_dispatch", "moe_combine"),
    *("attention", "attention_backward", "reduce_scatter"),
    *("moe_dispatch_backward", "moe_combine_backward", "moe_gather", "moe_gates"),
)
# The others have no tiles of their own, so their share done is unknown.
TILED = ("ag_gemm", "gemm_rs", "gemm_ar", "attention", "attention_backward")
MOST_CTAS, LINE_BYTES, ROLE_BYTES, HOST_BYTE = 256, 128, 64, 64
TILE_BITS, SIGNATURE_BITS, ALL_TILES_DONE = 20, 12, 0xFFFFF
WAITING, GAVE_UP = 1, 3
BOARD_BYTES = (1 + MOST_CTAS) * LINE_BYTES
START_MASK = 0x7FFF_FFFF
# magic, rank, world_size, operator, epoch, ctas, tiles
HEADER = struct.Struct("<7I")
# pid, start in clock ticks after boot modulo 2**31, Unix time of the last copy, group, the job's ranks + 1
HOST = struct.Struct("<4I8I")
# The tile in hand, the state, the tile that waits and its peer, the stamps that are needed and seen; nine words more.
_ROLE = struct.Struct("<2I2i4x2I36x")
# 10 s: a copy is made twice a second. An older one means a dead copier, or a stopped process.
STALE_S = 10.0
# 64 boards of one rank: two for each of the few workspaces of a model.
_MOST_BOARDS = 64
# 8 of them travel, 250 bytes each: those of 64 ranks then take half of what a message may have.
MOST_TOLD = 8


class Role(NamedTuple):
    """One role of one CTA that shows the header's launch."""

    cta: int
    number: int  # 0 computes, 1 communicates
    shown: int  # the tile in hand + 1, ALL_TILES_DONE
    wait_tile: int
    peer: int  # within the group; -1: it waits for no peer
    gave_up: bool


class Board(NamedTuple):
    """A board at one moment."""

    operator: str
    rank: int  # within the group, as peers are
    world_size: int
    launch: int
    ctas: int
    tiles: int
    roles: tuple[Role, ...]
    pid: int
    started: int
    copied_s: int  # 0: kernels write it themselves
    group: int
    members: tuple[int, ...]  # the job's ranks; empty: not known

    @property
    def done(self) -> int | None:
        """How many tiles are done, None where that is not known."""
        return _tiles_done(self) if self.operator in TILED and self.tiles else None

    @property
    def waiting(self) -> Mapping[int, int]:
        """How many CTAs wait for each other rank; waits for a part of this rank's own are left out."""
        return Counter(
            peer for peer, _ in {(role.peer, role.cta) for role in self.roles if role.peer not in (-1, self.rank)}
        )


def parse(data: bytes) -> Board | None:
    """Return what a board shows; None for what is no board, or was cut short."""
    if len(data) < BOARD_BYTES:
        return None
    magic, rank, world_size, operator, launch, ctas, tiles = HEADER.unpack_from(data)
    if magic != MAGIC or operator >= len(OPERATORS):
        return None
    lines = memoryview(data)[LINE_BYTES : LINE_BYTES * (1 + min(ctas, MOST_CTAS))]
    roles = tuple(
        Role(at // 2, at % 2, words[0] & ALL_TILES_DONE, words[2], *_waits(words, launch))
        for at, words in enumerate(_ROLE.iter_unpack(lines))
        if words[0] & ALL_TILES_DONE and not ((words[0] >> TILE_BITS) ^ launch) & 0xFFF
    )
    pid, started, copied_s, group, *members = HOST.unpack_from(data, HOST_BYTE)
    told = members[: members.index(0)] if 0 in members else members
    known = tuple(number - 1 for number in told) if all(number <= MOST_RANKS for number in told) else ()
    return Board(
        OPERATORS[operator], rank, world_size, launch, min(ctas, MOST_CTAS), tiles, roles if launch else (),
        pid, started, copied_s, group, known,
    )  # fmt: skip


def _waits(words: Sequence[int], launch: int) -> tuple[int, bool]:
    """Return (peer, gave up) of a role in this launch, (-1, False) without a wait; giving up outlives the launch."""
    _, state, _, peer, needed, seen = words
    if needed >> SIGNATURE_BITS != launch or peer < 0:
        return -1, False
    gave_up = state == GAVE_UP
    # Whether its tiles are done is not asked: two warpgroups may share a role, and one has ended while the other waits.
    return (peer, gave_up) if gave_up or (state == WAITING and seen != needed) else (-1, False)


def _tiles_done(board: Board) -> int | None:
    """Count finished tiles: CTAs that compute take every n-th tile; the lowest may be set apart for copying."""
    computing = [role for role in board.roles if role.number == 0]
    copying = {role.cta for role in board.roles if role.number == 1} - {role.cta for role in computing}
    stride = board.ctas - len(copying)
    if stride < 1 or copying != set(range(len(copying))):
        return None
    done = 0
    for role in computing:
        mine = range(role.cta - len(copying), board.tiles, stride)
        waits, is_done = role.peer >= 0, role.shown == ALL_TILES_DONE
        stopped = role.wait_tile if waits and is_done else role.shown - 1
        # In an all-reduce every tile is multiplied before the first wait.
        if (is_done and not waits) or (waits and board.operator == "gemm_ar"):
            done += len(mine)
        elif stopped in mine:
            done += mine.index(stopped)
        else:
            return None
    return done


def fact_of(board: Board, world_size: int) -> TileFact:
    """Return a board as the facts by which ranks are compared.

    Args:
        board: what was read.
        world_size: ranks of the whole job: where a board does not name its members and has as many, they are the job's.
    """
    members = board.members
    if not members and board.world_size == world_size and world_size <= MOST_PEERS:
        members = tuple(range(world_size))
    waits: dict[tuple[int, bool], list[Role]] = {}
    for role in board.roles:
        if role.peer not in (-1, board.rank):
            peer = members[role.peer] if role.peer < len(members) else -1
            waits.setdefault((peer, role.gave_up), []).append(role)
    told = [
        TileWait(peer, min(max(-1, role.wait_tile) for role in roles), len({role.cta for role in roles}), gave_up)
        for (peer, gave_up), roles in waits.items()
    ]
    in_hand = [role.shown - 1 for role in board.roles if role.number == 0 and role.shown != ALL_TILES_DONE]
    computing = [role for role in board.roles if role.number == 0]
    done = board.done
    return TileFact(
        group=_name(board.group, members),
        operator=board.operator,
        launch=min(board.launch, MOST_COUNT),
        done=-1 if done is None else done,
        tiles=board.tiles,
        in_hand=max(in_hand, default=-1),
        is_over=bool(computing) and not in_hand and not told,
        waits=tuple(sorted(told, key=lambda wait: (-wait.ctas, wait.peer))[: 2 * MOST_PEERS]),
        members=members[:MOST_PEERS],
    )


def most_telling(facts: Iterable[TileFact]) -> tuple[TileFact, ...]:
    """Return of many facts those that travel: where a rank waits, then where it is under way, then the rest."""
    return tuple(sorted(facts, key=lambda fact: (not fact.waits, fact.is_over or not fact.launch))[:MOST_TOLD])


def _name(group: int, members: Sequence[int]) -> str:
    """Return the name of a workspace: the same on all of its ranks, and of no other of them."""
    return f"tiles of {ranges(members) or '?'} ({group & 0xFFFF:04x})"


def is_current(board: Board, pid: int, start_ticks: int, wall_s: float) -> bool:
    """Return whether a board is of a process that lives, and no old copy."""
    is_its = (board.pid, board.started) == (pid, start_ticks & START_MASK)
    return is_its and (not board.copied_s or abs(wall_s - board.copied_s) < STALE_S)


def of_process(folder: Path, name: str, pid: int, start_ticks: int = -1) -> list[Board]:
    """Return the boards of a rank's process, in the order of their numbers; also of one that has ended.

    Args:
        folder: where the job's black boxes are.
        name: what the names of its files begin with: its rank.
        pid: its process; boards that another has left are none of its.
        start_ticks: when it began, where that is known.
    """
    found = []
    for path in sorted(folder.glob(f"{glob.escape(name)}.*.board"), key=lambda path: (len(path.name), path.name))[
        :_MOST_BOARDS
    ]:
        try:
            board = parse(read_file(str(path), BOARD_BYTES)[0])
        except OSError:
            continue
        if board is not None and board.pid == pid and start_ticks & START_MASK in (board.started, START_MASK):
            found.append(board)
    return found


def read_file(path: str, length: int) -> tuple[bytes, int]:
    """Copy bytes of a file, and return its owner's uid; NONBLOCK and NOFOLLOW: any user may put files there.

    Raises:
        OSError: it can't be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        return os.pread(handle, length, 0), os.fstat(handle).st_uid
    finally:
        os.close(handle)
