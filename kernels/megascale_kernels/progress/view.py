# SPDX-License-Identifier: Apache-2.0
"""Read a progress board, whichever program wrote it and whatever became of the writer.

Nothing locks a board: kernels store single words while we read, and a killed kernel stops in the middle. So nothing
here believes two words together without a reason that both are of the same launch:

- The header names the launch. The word of the tile in hand carries twelve bits of *its* launch number; when they are
  not the header's, the word is left from an earlier launch, or belongs to the next one already (its CTAs began before
  the one that writes the header). Twelve bits repeat every 4096 launches: only a CTA that did not take part in any of
  the 4095 launches between could be mistaken, and a grid does not shrink for so long.
- The state word outlives its launch. A wait counts only if the stamp it needs is of the header's launch.

The file is copied with `pread`, never mapped: a file that is truncated meanwhile gives a short copy, not a SIGBUS.
"""

import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megascale_kernels.progress.board_format import (
    ALL_TILES_DONE,
    COMMUNICATE,
    COMPUTE,
    GAVE_UP,
    GROUP_WORD,
    HOST_FIELDS,
    HOST_WORD,
    LINE,
    MAX_CTAS,
    MAX_RANKS,
    MEMBERS_WORD,
    OPERATORS,
    PROGRESS_FIELDS,
    PROGRESS_HEADER,
    PROGRESS_MAGIC,
    PROGRESS_WORDS,
    ROLE_WORDS,
    ROLES,
    SIGNATURE_BITS,
    TILE_BITS,
    WAITING,
)

BOARD_BYTES = PROGRESS_WORDS * 4
LAUNCHES = 1 << (32 - TILE_BITS)  # which the word of the tile in hand distinguishes
LOOKS = 3  # times a file is read when its header changes meanwhile

State = Literal["running", "waiting", "gave up", "done", "earlier launch", "later launch"]


class Wait(NamedTuple):
    """What a role waits for, or waited for when it gave up.

    Attributes:
        tile: the tile that cannot go on.
        peer: the rank waited for.
        channel: which of that rank's flags.
        needed: launch number that the flag should show.
        seen: launch number that it showed at the last look; 0 is a flag that was never written.
        mismatch: it showed this launch, but of another operator or other sizes.
        since_ns: when the wait began, nanoseconds of the GPU's clock.
    """

    tile: int
    peer: int
    channel: int
    needed: int
    seen: int
    mismatch: bool
    since_ns: int


class RoleView(NamedTuple):
    """One role of one CTA.

    Attributes:
        cta: its number.
        role: "compute" or "communicate".
        state: what it does; the launch it shows, when that is not the header's.
        tile: the tile in hand (of a role that communicates: the unit), None when there is none.
        wait: what it waits for or gave up on.
        sm: where it ended its last launch, None before.
    """

    cta: int
    role: str
    state: State
    tile: int | None
    wait: Wait | None
    sm: int | None


class BoardView(NamedTuple):
    """A board at one moment.

    Attributes:
        operator: what runs.
        launch: its number, counted from 1; 0 before the first.
        rank: whose board it is.
        world_size: ranks in the group.
        ctas: programs of the launch.
        tiles: its tiles.
        m: rows, as the kernel was given them (of one rank's shard, but for an all-reduce).
        n: columns of the result.
        k: columns of the input.
        slot: data slot in use.
        pid: process that made the board, 0 when unknown.
        started: when that process began, in clock ticks after boot.
        copied_s: Unix time of the last copy from device memory, 0 when kernels write the board themselves.
        roles: every role of every CTA that has shown anything.
        group: a number that the boards of one workspace share on all its ranks, 0 when unknown.
        members: the job's rank of each of its ranks, empty when unknown.
    """

    operator: str
    launch: int
    rank: int
    world_size: int
    ctas: int
    tiles: int
    m: int
    n: int
    k: int
    slot: int
    pid: int
    started: int
    copied_s: int
    roles: tuple[RoleView, ...]
    group: int = 0
    members: tuple[int, ...] = ()

    @property
    def current(self) -> tuple[RoleView, ...]:
        """The roles that show the header's launch."""
        return tuple(role for role in self.roles if role.state not in ("earlier launch", "later launch"))


def read_board(source: str | os.PathLike[str] | Iterable[int]) -> BoardView:
    """Read a board from a file or from its words (a tensor, a list).

    Raises:
        ValueError: this is no board; one sentence with the reason.
    """
    if isinstance(source, (str, os.PathLike)):
        return _decode(_file_words(Path(source)), str(source))
    numbers: Any = source.tolist() if hasattr(source, "tolist") else source
    words = [int(word) & 0xFFFFFFFF for word in numbers]
    if len(words) < PROGRESS_WORDS:
        raise ValueError(f"{len(words)} words are no progress board: it has {PROGRESS_WORDS}")
    return _decode(words, "this")


def writer_lives(view: BoardView) -> bool | None:
    """Whether the process that made the board still runs on this machine; None when the board does not name it."""
    if view.pid == 0:
        return None
    return process_started(view.pid) == view.started


def process_started(pid: int) -> int | None:
    """When a process began, in clock ticks after boot modulo 2**31; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return int(text.rpartition(")")[2].split()[19]) & 0x7FFFFFFF
    except (OSError, ValueError, IndexError):
        return None


def _file_words(path: Path) -> list[int]:
    try:
        # NONBLOCK: a FIFO of that name must not hang us.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path} cannot be read: {reason}") from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{path} is no progress board: it is not a regular file")
        for _ in range(LOOKS):
            data = os.pread(handle, BOARD_BYTES, 0)
            if os.pread(handle, HOST_WORD * 4, 0) == data[: HOST_WORD * 4]:
                break
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(handle)
    if len(data) < BOARD_BYTES:
        raise ValueError(f"{path} is no progress board: it has {len(data)} bytes, a board has {BOARD_BYTES}")
    return list(struct.unpack(f"<{PROGRESS_WORDS}I", data))


def _decode(words: list[int], name: str) -> BoardView:
    header = dict(zip(PROGRESS_HEADER, words, strict=False))
    host = dict(zip(HOST_FIELDS, words[HOST_WORD:LINE], strict=False))
    if header["magic"] != PROGRESS_MAGIC:
        raise ValueError(
            f"{name} is no progress board: it begins with {header['magic']:#010x} instead of {PROGRESS_MAGIC:#010x} "
            "(a board in device memory gets its header from the first launch)"
        )
    ctas = min(header["ctas"], MAX_CTAS)
    roles = [
        role
        for cta in range(ctas)
        for number in (COMPUTE, COMMUNICATE)
        if (role := _role(words, cta, number, header["epoch"])) is not None
    ]
    plain = {name: _signed(header[name]) for name in ("rank", "world_size", "tiles", "m", "n", "k", "slot")}
    name = operator_name(header["operator"])
    return BoardView(
        operator=name,
        launch=header["epoch"],
        ctas=ctas,
        roles=tuple(roles),
        group=words[GROUP_WORD],
        members=_members(words),
        **plain,
        **host,
    )


def _members(words: list[int]) -> tuple[int, ...]:
    """The job's ranks of a board's group, up to the first unknown one."""
    told = words[MEMBERS_WORD : MEMBERS_WORD + MAX_RANKS]
    return tuple(word - 1 for word in told[: told.index(0) if 0 in told else MAX_RANKS])


def operator_name(number: int) -> str:
    """The name of an operator; a number that none has stays a number."""
    return OPERATORS[number] if 0 <= number < len(OPERATORS) else f"operator {number}"


def _role(words: list[int], cta: int, number: int, launch: int) -> RoleView | None:
    at = (1 + cta) * LINE + number * ROLE_WORDS
    field = dict(zip(PROGRESS_FIELDS, words[at : at + ROLE_WORDS], strict=False))
    shown = field["tile"] & ALL_TILES_DONE
    if shown == 0:
        return None
    finished = shown == ALL_TILES_DONE
    tile = None if finished else shown - 1
    sm = field["sm"] if finished else None
    ahead = ((field["tile"] >> TILE_BITS) - launch) % LAUNCHES
    if ahead:
        state: State = "later launch" if ahead < LAUNCHES // 2 else "earlier launch"
        return RoleView(cta, ROLES[number], state, tile, None, sm)
    wait = _wait(field) if field["needed"] >> SIGNATURE_BITS == launch else None
    if field["state"] == GAVE_UP and wait is not None:
        return RoleView(cta, ROLES[number], "gave up", tile, wait, sm)
    # Before whether it has ended: two warpgroups may share a role, and one has ended while the other still waits.
    if field["state"] == WAITING and wait is not None and field["seen"] != field["needed"]:
        return RoleView(cta, ROLES[number], "waiting", tile, wait, sm)
    if finished:
        return RoleView(cta, ROLES[number], "done", None, None, sm)
    return RoleView(cta, ROLES[number], "running", tile, None, sm)


def _wait(field: dict[str, int]) -> Wait:
    needed, seen = field["needed"] >> SIGNATURE_BITS, field["seen"] >> SIGNATURE_BITS
    return Wait(
        tile=_signed(field["wait_tile"]),
        peer=_signed(field["peer"]),
        channel=_signed(field["channel"]),
        needed=needed,
        seen=seen,
        mismatch=seen == needed and field["seen"] != field["needed"],
        since_ns=field["since_hi"] << 32 | field["since_lo"],
    )


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
