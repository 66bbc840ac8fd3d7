# SPDX-License-Identifier: Apache-2.0
"""What a kernel left behind when it gave up, as an error that names the right rank.

A fault says whom one CTA waited for, and that may be a victim as well. So the hellos of all ranks are compared first: a
rank that runs something else makes it a mismatch, whoever noticed it. A CTA that was stopped by another rank asks
that rank's board whom it had waited for. Boards and hellos lie in symmetric memory, which outlives a dead peer.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megascale_kernels.errors import KernelError, RankMismatch, TileTimeout
from megascale_kernels.layout import (
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
    PROGRESS_WORDS,
    ROLE_WORDS,
    SIGNATURE_BITS,
    SLOTS,
)
from megascale_kernels.progress_text import shows
from megascale_kernels.progress_view import BoardView, read_board

if TYPE_CHECKING:
    from megascale_kernels.workspace import Workspace


def fault_of(workspace: "Workspace") -> KernelError:
    """Return the error that the fault in a workspace's status is."""
    fault = dict(zip(FAULT_FIELDS, workspace.status.tolist(), strict=False))
    operator = OPERATORS[fault["operator"]]
    where = f"rank {workspace.rank}, {operator} launch {fault['epoch']}, CTA {fault['cta']}, tile {fault['tile']}"
    peer, epoch = fault["peer"], fault["epoch"]
    # A rank may be stopped by another that found the mismatch first, or with a third.
    differing = [rank for rank in range(workspace.world_size) if _differs(workspace, rank, epoch)]
    if fault["code"] == MISMATCH.value or (fault["code"] == ABORTED.value and differing):
        return RankMismatch(f"{where}: {_two_hellos(workspace, differing[0] if differing else peer, epoch)}")
    facts: dict[str, int | str] = {
        **fault,
        "operator": operator,
        "rank": workspace.rank,
        "peer_tile": _peer_tile(workspace, peer),
    }
    if fault["code"] == ABORTED.value:
        first = fault["raised_by"] - 1
        facts["peer"] = culprit = _given_up_on(workspace, first, epoch, otherwise=peer)
        return TileTimeout(
            f"{where}: stopped because rank {first} gave up first, waiting for rank {culprit} (this CTA waited for "
            f"rank {peer}); look at rank {first}'s message",
            **facts,
        )
    return TileTimeout(
        f"{where}: waited {fault['waited_us'] / 1e6:.3f} s for rank {peer}, flag {fault['channel']}: needed "
        f"{fault['needed'] & 0xFFFFFFFF:#010x}, saw {fault['seen'] & 0xFFFFFFFF:#010x}; {_last_sign(workspace, peer)}",
        **facts,
    )


def _hello(workspace: "Workspace", rank: int, epoch: int) -> dict[str, int]:
    """What a rank said it runs as launch `epoch`, or, when that is overwritten, what it said last."""
    words = workspace.memory[: CONTROL_WORDS + SLOTS * MAX_RANKS * LINE.value].cpu()
    hellos = []
    for slot in (workspace.slot, workspace.slot ^ 1):
        first = HELLO.value + (slot * MAX_RANKS + rank) * LINE.value
        hellos.append(dict(zip(HELLO_FIELDS, words[first : first + len(HELLO_FIELDS)].tolist(), strict=True)))
    return next((hello for hello in hellos if _epoch(hello["stamp"]) == epoch), hellos[0])


def _differs(workspace: "Workspace", peer: int, epoch: int) -> bool:
    """Whether a peer's launch `epoch` is another than ours: a rank may be stopped before it finds out itself."""
    ours, theirs = _hello(workspace, workspace.rank, epoch)["stamp"], _hello(workspace, peer, epoch)["stamp"]
    return _epoch(ours) == _epoch(theirs) == epoch and ours != theirs


def _two_hellos(workspace: "Workspace", peer: int, epoch: int) -> str:
    texts = []
    for rank in (workspace.rank, peer):
        hello = _hello(workspace, rank, epoch)
        name = OPERATORS[hello["operator"]] if 0 <= hello["operator"] < len(OPERATORS) else "nothing"
        texts.append(
            f"rank {rank} runs {name}(M per rank {hello['m']}, N {hello['n']}, K {hello['k']}, "
            f"variant {hello['variant']})"
        )
    return "; ".join(texts) + ": all ranks must call the same operators with the same sizes in the same order"


def _peer_tile(workspace: "Workspace", peer: int) -> int:
    """The last tile a peer has shown on its board (in symmetric memory it outlives the peer)."""
    view = _view_of(workspace, peer)
    return max((role.tile for role in view.current if role.tile is not None), default=-1) if view else -1


def _given_up_on(workspace: "Workspace", rank: int, epoch: int, *, otherwise: int) -> int:
    """Whom a rank that gave up had waited for in a launch, by its board; `otherwise` when that does not tell."""
    if workspace.handle is None or rank < 0:
        return otherwise
    for line in _board_of(workspace, rank)[LINE.value :].view(-1, ROLE_WORDS.value).tolist():
        wait = dict(zip(PROGRESS_FIELDS, line, strict=False))
        if wait["state"] == GAVE_UP.value and _epoch(wait["needed"]) == epoch:
            return int(wait["peer"])
    return otherwise


def _board_of(workspace: "Workspace", rank: int) -> Tensor:
    assert workspace.handle is not None  # the callers have looked
    board: Tensor = workspace.handle.get_buffer(rank, [PROGRESS_WORDS], torch.int32, workspace.layout.progress).cpu()
    return board


def _view_of(workspace: "Workspace", rank: int) -> BoardView | None:
    """A rank's board, None when it is blank: its progress is off, or shown on a board that its caller made."""
    board = _board_of(workspace, rank).tolist() if workspace.handle is not None and rank >= 0 else [0]
    return read_board(board) if board[0] == PROGRESS_MAGIC else None


def _last_sign(workspace: "Workspace", peer: int) -> str:
    view = _view_of(workspace, peer)
    return f"rank {peer} last showed {shows(view)}" if view else "nothing is known of its progress"


def _epoch(stamp: int) -> int:
    """The launch number within a stamp."""
    return (stamp >> SIGNATURE_BITS) & 0xFFFFF
