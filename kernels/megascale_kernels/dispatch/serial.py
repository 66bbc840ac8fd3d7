# SPDX-License-Identifier: Apache-2.0
"""The serial path: first the collective, then the product, or the other way round.

It serves tensors that the kernels cannot read, shapes at which overlap does not pay, and the CPU. Ranks compare shapes
before a collective (`agreement.py`): on the CPU before each, on a GPU, where it would cost more than the work, before
the first of each shape. On the CPU the progress board is written as the kernels write it, a tile per rank's shard.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale_kernels import reference
from megascale_kernels.dispatch.collectives import Collective
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
    agree(call, workspace, Board(workspace, call, 1) if workspace.device.type == "cpu" else None)
    return _gathered(x, workspace)


def reduce_scatter(x: Tensor, workspace: Workspace) -> Tensor:
    """This rank's rows of the sum over ranks: [M, N] to [M / W, N]."""
    rows, columns = x.shape
    agree(Call("reduce_scatter", rows, columns, 0), workspace)
    return _scattered(x, workspace)


def all_reduce(x: Tensor, workspace: Workspace) -> Tensor:
    """The sum over ranks of [N], on every rank, in place."""
    agree(Call("all_reduce", 1, x.numel(), 0), workspace)
    return reference.all_reduce(x, workspace.group) if workspace.world_size > 1 else x


def _scattered(x: Tensor, workspace: Workspace) -> Tensor:
    if workspace.world_size == 1 or 0 in x.shape:
        return x[: x.shape[0] // workspace.world_size]
    return reference.reduce_scatter(x, workspace.group)


# x, w, bias and the workspace to what the operator's function in `reference` gives.
Path = Callable[[Tensor, Tensor, Tensor | None, Workspace], Any]


def path_of(call: Call, workspace: Workspace) -> Path:
    """The serial path of a kind of calls."""
    planned = (_Boarded if workspace.device.type == "cpu" else SerialPlan)(call, workspace)
    path: Path = getattr(planned, call.operator)
    return path


class SerialPlan:
    """The serial path of one kind of calls on a GPU, made once: where serial wins, each step of the host counts.

    A call asks for earlier faults, makes room, and calls the collective and the product. There is no board to write:
    NCCL's and cuBLAS's kernels know none.

    Args:
        call: the operator and its sizes.
        workspace: whose calls they are; it keeps the plan, so the plan does not keep it.
    """

    move: Collective  # made by the first call, since most plans never have one

    def __init__(self, call: Call, workspace: Workspace) -> None:
        self.call, self.device_type = call, workspace.device.type
        self.has_begun = False
        self.gathered_shape = (call.m, call.k)
        self.scattered_shape = (call.m // workspace.world_size, call.n)
        self.is_alone = workspace.world_size == 1
        self.moves_nothing = self.is_alone or 0 in (call.m, call.k if call.operator == "ag_gemm" else call.n)

    def ag_gemm(self, x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace) -> tuple[Tensor, Tensor]:
        """The product and the gathered rows, as `reference.ag_gemm` gives them."""
        workspace.raise_earlier()
        if not self.has_begun:
            self._begin(workspace)
        if self.is_alone:
            gathered = x.clone()
        else:
            gathered = x.new_empty(self.gathered_shape)
            if not self.moves_nothing:
                self.move(gathered, x)
        if bias is not None or torch.is_autocast_enabled(self.device_type):
            return reference.matmul(gathered, w, bias), gathered
        return torch.mm(gathered, w), gathered

    def gemm_rs(self, x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace) -> Tensor:
        """This rank's rows of the sum, as `reference.gemm_rs` gives them."""
        workspace.raise_earlier()
        if not self.has_begun:
            self._begin(workspace)
        product = reference.matmul(x, w) if torch.is_autocast_enabled(self.device_type) else torch.mm(x, w)
        if self.moves_nothing:
            out = product[: self.scattered_shape[0]]
        else:
            out = product.new_empty(self.scattered_shape)
            self.move(out, product)
        return out if bias is None else out + bias

    def gemm_ar(self, x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace) -> Tensor:
        """The sum on every rank, as `reference.gemm_ar` gives it."""
        workspace.raise_earlier()
        if not self.has_begun:
            self._begin(workspace)
        out = reference.matmul(x, w)
        if not self.moves_nothing:
            reference.all_reduce(out, workspace.group)
        return out if bias is None else out + bias

    def _begin(self, workspace: Workspace) -> None:
        """Compare shapes with the other ranks, once for each kind of calls (`agreement.py`)."""
        if self.call not in workspace.agreement.known:
            agree(self.call, workspace)
        if not self.moves_nothing:
            self.move = Collective(
                workspace.group, reference.GATHER if self.call.operator == "ag_gemm" else reference.SCATTER
            )
        self.has_begun = True


class _Boarded:
    """The serial path on the CPU: every call compares shapes, and writes the board as the kernels do."""

    def __init__(self, call: Call, _workspace: Workspace) -> None:
        self.call = call

    def ag_gemm(self, x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace) -> tuple[Tensor, Tensor]:
        """What `reference.ag_gemm` does: the product and the gathered rows."""
        board = Board(workspace, self.call, workspace.world_size)
        agree(self.call, workspace, board)
        gathered = _gathered(x, workspace)
        own_first = [(workspace.rank + step) % workspace.world_size for step in range(workspace.world_size)]
        return _multiply(gathered, w, bias, board, own_first), gathered

    def gemm_rs(self, x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace) -> Tensor:
        """What `reference.gemm_rs` does."""
        board = Board(workspace, self.call, workspace.world_size)
        agree(self.call, workspace, board)
        own_last = [(workspace.rank + 1 + step) % workspace.world_size for step in range(workspace.world_size)]
        out = _scattered(_multiply(x, w, None, board, own_last), workspace)
        return out if bias is None else out + bias

    def gemm_ar(self, x: Tensor, w: Tensor, bias: Tensor | None, workspace: Workspace) -> Tensor:
        """What `reference.gemm_ar` does."""
        board = Board(workspace, self.call, 1)
        agree(self.call, workspace, board)
        out = _multiply(x, w, None, board, [0])
        if out.numel() and workspace.world_size > 1:
            reference.all_reduce(out, workspace.group)
        return out if bias is None else out + bias


def agree(call: Call, workspace: Workspace, board: "Board | None" = None) -> None:
    """Compare a call with the other ranks': on the CPU each one, on a GPU the first of its kind.

    Raises:
        KernelError: an earlier call failed, ranks call different things, or one has not come.
    """
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
