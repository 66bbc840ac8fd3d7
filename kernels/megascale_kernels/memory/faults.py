# SPDX-License-Identifier: Apache-2.0
"""What a kernel left behind when it gave up, as an error that names the right rank.

A fault names the rank that one CTA waited for, which may be a victim itself. So the hellos of all ranks are compared
first: a rank that runs something else makes it a mismatch, whichever rank noticed it. A rank's copies may come before
its kernel has published its hello, so a mismatch is given a moment for that. For a CTA that was stopped by another
rank, that rank's board shows which rank it had waited for. Boards and hellos lie in symmetric memory, which outlives a
peer.
"""

import time

from megascale_kernels.device.layout import (
    ABORTED,
    CONTROL_WORDS,
    FAULT_FIELDS,
    GAVE_UP,
    HELLO,
    HELLO_FIELDS,
    LINE,
    MAX_RANKS,
    MISMATCH,
    OPERATORS,
    PROGRESS_FIELDS,
    PROGRESS_MAGIC,
    ROLE_WORDS,
    SIGNATURE_BITS,
    SLOTS,
    STRANGER,
)
from megascale_kernels.errors import KernelError, RankMismatch, TileTimeout
from megascale_kernels.memory.symmetric_memory import SymmetricMemory
from megascale_kernels.progress.text import shows
from megascale_kernels.progress.view import BoardView, read_board

# A kernel whose copies have come is next on its stream; a rank that died between the two never publishes what it runs.
HELLO_PATIENCE_S = 2.0
HELLO_PAUSE_S = 0.001
EPOCHS = 0xFFFFF  # the launch number within a stamp
Hello = dict[str, int]


def fault_of(memory: SymmetricMemory) -> KernelError:
    """Return the error that the fault in a rank's status is."""
    fault = dict(zip(FAULT_FIELDS, memory.status.tolist(), strict=False))
    operator = OPERATORS[fault["operator"]]
    where = f"rank {memory.rank}, {operator} launch {fault['epoch']}, CTA {fault['cta']}, tile {fault['tile']}"
    peer, epoch = fault["peer"], fault["epoch"]
    was_stopped = fault["code"] == ABORTED.value
    fault["raised_by"], reason = fault["raised_by"] % STRANGER.value, fault["raised_by"] // STRANGER.value
    first = fault["raised_by"] - 1
    is_mismatch = fault["code"] == MISMATCH.value or (was_stopped and reason > 0)
    # A rank may be stopped by another that found the mismatch first, or with a third.
    differing = _differing(memory, epoch, HELLO_PATIENCE_S if is_mismatch else 0.0)
    if is_mismatch or (was_stopped and differing is not None):
        if differing is None:
            differing = _given_up_on(memory, first, epoch, otherwise=peer) if was_stopped else peer
        return RankMismatch(f"{where}: {_two_hellos(memory, differing, epoch)}")
    facts: dict[str, int | str] = {
        **fault,
        "operator": operator,
        "rank": memory.rank,
        "peer_tile": _peer_tile(memory, peer),
    }
    if was_stopped:
        facts["peer"] = culprit = _given_up_on(memory, first, epoch, otherwise=peer)
        return TileTimeout(
            f"{where}: stopped because rank {first} gave up first, waiting for rank {culprit} (this CTA waited for "
            f"rank {peer}); look at rank {first}'s message",
            **facts,
        )
    return TileTimeout(
        f"{where}: waited {fault['waited_us'] / 1e6:.3f} s for rank {peer}, flag {fault['channel']}: needed "
        f"{fault['needed'] & 0xFFFFFFFF:#010x}, saw {fault['seen'] & 0xFFFFFFFF:#010x}; {_last_sign(memory, peer)}",
        **facts,
    )


def _differing(memory: SymmetricMemory, epoch: int, patience_s: float) -> int | None:
    """A rank whose launch `epoch` is another than ours, None if no rank has said so within `patience_s`."""
    end = time.monotonic() + patience_s
    while True:
        hellos = _hellos(memory, epoch)
        ours = hellos[memory.rank]["stamp"]
        for rank, hello in enumerate(hellos):
            if _epoch(ours) == _epoch(hello["stamp"]) == epoch and ours != hello["stamp"]:
                return rank
        if time.monotonic() >= end:
            return None
        time.sleep(HELLO_PAUSE_S)


def _hellos(memory: SymmetricMemory, epoch: int) -> list[Hello]:
    """What each rank said it runs as launch `epoch`, or, where that is not to be had, what it said in this slot."""
    words = memory.memory[: CONTROL_WORDS + SLOTS * MAX_RANKS * LINE.value].cpu()

    def said(rank: int, slot: int) -> Hello:
        first = HELLO.value + (slot * MAX_RANKS + rank) * LINE.value
        return dict(zip(HELLO_FIELDS, words[first : first + len(HELLO_FIELDS)].tolist(), strict=True))

    slots = (memory.slot, memory.slot ^ 1)
    both = [[said(rank, slot) for slot in slots] for rank in range(memory.world_size)]
    return [next((hello for hello in pair if _epoch(hello["stamp"]) == epoch), pair[0]) for pair in both]


def _two_hellos(memory: SymmetricMemory, peer: int, epoch: int) -> str:
    hellos = _hellos(memory, epoch)
    return (
        f"{_runs(hellos, memory.rank, epoch)}; {_runs(hellos, peer, epoch)}: "
        "all ranks must call the same operators with the same sizes in the same order"
    )


def _runs(hellos: list[Hello], rank: int, epoch: int) -> str:
    hello = hellos[rank]
    if (_epoch(hello["stamp"]) - epoch) & EPOCHS >= EPOCHS // 2:
        return f"rank {rank} runs something else and has not said what"
    name = OPERATORS[hello["operator"]] if 0 <= hello["operator"] < len(OPERATORS) else "nothing"
    sizes = f"M per rank {hello['m']}, N {hello['n']}, K {hello['k']}, variant {hello['variant']}"
    return f"rank {rank} runs {name}({sizes})"


def _peer_tile(memory: SymmetricMemory, peer: int) -> int:
    """The last tile a peer has shown on its board (in symmetric memory it outlives the peer)."""
    view = _view_of(memory, peer)
    return max((role.tile for role in view.current if role.tile is not None), default=-1) if view else -1


def _given_up_on(memory: SymmetricMemory, rank: int, epoch: int, *, otherwise: int) -> int:
    """The rank that `rank` had waited for when it gave up in a launch, by its board; `otherwise` if that has none."""
    board = memory.board_of(rank)
    if board is None:
        return otherwise
    for line in board[LINE.value :].view(-1, ROLE_WORDS.value).tolist():
        wait = dict(zip(PROGRESS_FIELDS, line, strict=False))
        if wait["state"] == GAVE_UP.value and _epoch(wait["needed"]) == epoch:
            return int(wait["peer"])
    return otherwise


def _view_of(memory: SymmetricMemory, rank: int) -> BoardView | None:
    """A rank's board, None when it is blank: its progress is off, or shown on a board that its caller made."""
    board = memory.board_of(rank)
    words = [] if board is None else board.tolist()
    return read_board(words) if words[:1] == [PROGRESS_MAGIC] else None


def _last_sign(memory: SymmetricMemory, peer: int) -> str:
    view = _view_of(memory, peer)
    return f"rank {peer} last showed {shows(view)}" if view else "nothing is known of its progress"


def _epoch(stamp: int) -> int:
    """The launch number within a stamp."""
    return (stamp >> SIGNATURE_BITS) & EPOCHS
