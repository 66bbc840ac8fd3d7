# SPDX-License-Identifier: Apache-2.0
"""The serial path: first the collective, then the product, or the other way round.

It serves tensors that the kernels cannot read, shapes at which overlap does not pay, and the CPU. Ranks compare shapes
before a collective (`agreement.py`): on the CPU before each, on a GPU, where it would cost more than the work, before
the first of each shape. On the CPU the progress board is written as the kernels write it, a tile per rank's shard.
"""

import time
from typing import NamedTuple

import torch
from torch import Tensor

from megascale_kernels import reference
from megascale_kernels.errors import KernelError
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.progress import board_format


class Call(NamedTuple):
    """One call of an operator.

    Attributes:
        operator: its name.
        m: rows over all ranks.
        n: columns of the product, on this rank.
        k: what is summed over, on this rank.
    """

    operator: str
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.operator}(M {self.m}, N {self.n}, K {self.k})"


def all_gather(x: Tensor, workspace: Workspace) -> Tensor:
    """Rows of all ranks: [M / W, K] to [M, K]."""
    call = Call("all_gather", x.shape[0] * workspace.world_size, 0, x.shape[1])
    _agree(call, workspace, Board(workspace, call, 1))
    return _gathered(x, workspace)


def reduce_scatter(x: Tensor, workspace: Workspace) -> Tensor:
    """This rank's rows of the sum over ranks: [M, N] to [M / W, N]."""
    rows, columns = x.shape
    _agree(Call("reduce_scatter", rows, columns, 0), workspace)
    return _scattered(x, workspace)


def all_reduce(x: Tensor, workspace: Workspace) -> Tensor:
    """The sum over ranks of [N], on every rank, in place."""
    _agree(Call("all_reduce", 1, x.numel(), 0), workspace)
    return reference.all_reduce(x, workspace.group) if workspace.world_size > 1 else x


def _scattered(x: Tensor, workspace: Workspace) -> Tensor:
    if workspace.world_size == 1 or 0 in x.shape:
        return x[: x.shape[0] // workspace.world_size]
    return reference.reduce_scatter(x, workspace.group)


def ag_gemm(call: Call, x: Tensor, w: Tensor, workspace: Workspace, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """What `reference.ag_gemm` does: the product and the gathered rows."""
    if workspace.device.type != "cpu":
        _agree_once(call, workspace)
        gathered = _gathered(x, workspace)
        return reference.matmul(gathered, w, bias), gathered
    board = Board(workspace, call, workspace.world_size)
    _agree(call, workspace, board)
    gathered = _gathered(x, workspace)
    own_first = [(workspace.rank + step) % workspace.world_size for step in range(workspace.world_size)]
    return _multiply(gathered, w, bias, board, own_first), gathered


def gemm_rs(call: Call, x: Tensor, w: Tensor, workspace: Workspace, bias: Tensor | None) -> Tensor:
    """What `reference.gemm_rs` does."""
    if workspace.device.type != "cpu":
        _agree_once(call, workspace)
        out = _scattered(reference.matmul(x, w), workspace)
        return out if bias is None else out + bias
    board = Board(workspace, call, workspace.world_size)
    _agree(call, workspace, board)
    own_last = [(workspace.rank + 1 + step) % workspace.world_size for step in range(workspace.world_size)]
    out = _scattered(_multiply(x, w, None, board, own_last), workspace)
    return out if bias is None else out + bias


def gemm_ar(call: Call, x: Tensor, w: Tensor, workspace: Workspace, bias: Tensor | None) -> Tensor:
    """What `reference.gemm_ar` does."""
    board = Board(workspace, call, 1)
    _agree(call, workspace, board)
    out = _multiply(x, w, None, board, [0])
    if out.numel() and workspace.world_size > 1:
        reference.all_reduce(out, workspace.group)
    return out if bias is None else out + bias


def _agree_once(call: Call, workspace: Workspace) -> None:
    """`_agree` on a GPU, which has no board to write: a call like earlier ones passes in as few steps as there are."""
    workspace.raise_earlier()
    if call not in workspace.agreement.known:
        _agree(call, workspace)


def _agree(call: Call, workspace: Workspace, board: "Board | None" = None) -> None:
    workspace.check(synchronize=False)
    agreement, waiting = workspace.agreement, board.wait if board is not None else _nobody_looks
    try:
        if workspace.device.type == "cpu":
            agreement.compare(str(call), workspace.deadline_s, waiting)
        else:
            agreement.compare_once(call, workspace.deadline_s, waiting)
    except KernelError as error:
        workspace.broken = error
        if board is not None:
            board.give_up()
        raise
    if board is not None:
        board.arrive()


def _nobody_looks(_: int) -> None:
    """A collective between operators has no tile in hand, hence no place on the board."""


def _gathered(x: Tensor, workspace: Workspace) -> Tensor:
    if workspace.world_size == 1:
        return x.clone()
    if 0 in x.shape:
        return x.new_empty((x.shape[0] * workspace.world_size, x.shape[1]))
    return reference.all_gather(x, workspace.group)


def _multiply(x: Tensor, w: Tensor, bias: Tensor | None, board: "Board", order: list[int]) -> Tensor:
    """Multiply and add the bias; with a board, shard of rows by shard of rows in the given order."""
    if not board.shown or x.shape[0] == 0:
        return reference.matmul(x, w, bias)
    out = x.new_empty((x.shape[0], w.shape[1]))
    rows = x.shape[0] // len(order)
    for tile, shard in enumerate(order):
        board.show(tile)
        here = slice(shard * rows, (shard + 1) * rows)
        out[here] = reference.matmul(x[here], w, bias)
    board.done()
    return out


class Board:
    """The progress board of a call on the CPU: what one CTA would write, in the same words.

    Args:
        workspace: whose board it is; nothing is written for a GPU, or when progress is off.
        call: what runs.
        tiles: how many tiles it has.
    """

    def __init__(self, workspace: Workspace, call: Call, tiles: int) -> None:
        self.shown = workspace.device.type == "cpu" and workspace.progress
        self.board = workspace.board
        self.epoch = 0
        if not self.shown:
            return
        workspace.launches += 1
        self.epoch = workspace.launches & board_format.LAUNCHES_TOLD
        shards = 1 if call.operator == "gemm_ar" else workspace.world_size
        header = (
            0, workspace.rank, workspace.world_size, board_format.OPERATORS.index(call.operator), self.epoch, 1, tiles,
            call.m // shards, call.n, call.k, 0,
        )  # fmt: skip
        self._write(0, *header)
        self._write(0, board_format.PROGRESS_MAGIC)
        self.show(0)

    def show(self, tile: int) -> None:
        """The tile in hand."""
        self._role(board_format.COMPUTE, 0, self._word(tile + 1))

    def wait(self, peer: int) -> None:
        """The first tile waits for a peer."""
        if self.shown and int(self.board[board_format.LINE + 1]) != board_format.WAITING:
            needed, since = self.epoch << board_format.SIGNATURE_BITS, time.time_ns()
            self._role(board_format.COMPUTE, 2, 0, peer, 0, needed, 0, since & 0xFFFFFFFF, since >> 32)
        if self.shown:
            self._role(board_format.COMPUTE, 1, board_format.WAITING, 0, peer)

    def arrive(self) -> None:
        """Mark on the board that the wait is over."""
        self._role(board_format.COMPUTE, 1, board_format.ARRIVED)

    def give_up(self) -> None:
        """Mark on the board that the peer waited for has not come; without a wait nothing is changed."""
        if self.shown and int(self.board[board_format.LINE + 1]) == board_format.WAITING:
            self._role(board_format.COMPUTE, 1, board_format.GAVE_UP)

    def done(self) -> None:
        """All tiles are done."""
        self._role(board_format.COMPUTE, 0, self._word(board_format.ALL_TILES_DONE), board_format.DONE)

    def _word(self, tile: int) -> int:
        return (self.epoch & 0xFFF) << board_format.TILE_BITS | tile

    def _role(self, role: int, first: int, *values: int) -> None:
        self._write(board_format.LINE + role * board_format.ROLE_WORDS + first, *values)

    def _write(self, first: int, *values: int) -> None:
        if self.shown:
            signed = [(value + 2**31) % 2**32 - 2**31 for value in values]
            self.board[first : first + len(signed)] = torch.tensor(signed, dtype=torch.int32)
