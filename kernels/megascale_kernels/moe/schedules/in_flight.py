# SPDX-License-Identifier: Apache-2.0
"""Collectives that are under way while this rank computes, and whose gradients are as well.

`start_exchange` and `finish_exchange` are the two ends of one all-to-all. In the backward pass the roles change: where
the forward waited, the gradients' exchange begins, and where the forward began, it is waited for. torch runs the
backward in the reverse order of the forward, so what lay between the two ends hides the exchange both ways.

On a GPU the exchange runs on NCCL's own stream and the host waits for nothing; on the CPU Gloo's threads carry it.
"""

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megascale_kernels.errors import TileTimeout
from megascale_kernels.reference import gather_rows


class Crew(NamedTuple):
    """The ranks of a collective.

    Attributes:
        group: their process group.
        ranks: how many.
        deadline_s: how long this rank waits for them on the CPU; on a GPU the process group's own time limit holds.
    """

    group: dist.ProcessGroup | None
    ranks: int
    deadline_s: float


class InFlight:
    """One all-to-all of rows on its way, forward or of gradients.

    Args:
        crew: between whom.
        sent: rows to each rank.
        received: rows of each rank.
    """

    def __init__(self, crew: Crew, sent: list[int], received: list[int]) -> None:
        self.crew, self.sent, self.received = crew, sent, received
        self.way_back: InFlight | None = None
        self._under_way: tuple[Tensor, Tensor, Any] | None = None  # what is filled, what is read, torch's handle

    def launch(self, rows: Tensor) -> Tensor:
        """Send `rows`, [sum(sent), ...]; the result is being filled until `land` returns."""
        if self.crew.ranks == 1:
            self._under_way = rows, rows, None
            return rows
        read = rows.contiguous()
        buffer = rows.new_empty((sum(self.received), *rows.shape[1:]))
        work = dist.all_to_all_single(buffer, read, self.received, self.sent, group=self.crew.group, async_op=True)
        self._under_way = buffer, read, work
        return buffer

    def land(self) -> Tensor:
        """Wait, and give what came, [sum(received), ...].

        Raises:
            TileTimeout: a rank did not come in time (CPU).
        """
        assert self._under_way is not None  # it was launched
        buffer, _, work = self._under_way
        self._under_way = None
        if work is not None:
            await_work(work, buffer, self.crew, "all_to_all")
        return buffer


def await_work(work: Any, buffer: Tensor, crew: Crew, operator: str) -> None:  # noqa: ANN401 - torch's Work has no types
    """Wait for a collective: on a GPU the stream does, on the CPU this thread until the deadline.

    Raises:
        TileTimeout: a rank did not come in time.
    """
    if buffer.is_cuda:
        work.wait()
        return
    try:
        work.wait(timedelta(seconds=crew.deadline_s))
    except RuntimeError as error:
        raise TileTimeout(
            f"{operator} among {crew.ranks} ranks did not end within {crew.deadline_s:g} s: a rank has not made the "
            f"same call, or is gone ({str(error).splitlines()[0]})",
            operator=operator,
        ) from error


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, flight: InFlight) -> Tensor:  # type: ignore[no-untyped-def]  # torch gives it no types
        ctx.flight = flight
        buffer = flight.launch(rows)
        return buffer.view_as(buffer) if buffer is rows else buffer

    @staticmethod
    @once_differentiable
    def backward(ctx, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]  # torch gives it no types
        way_back = ctx.flight.way_back
        assert way_back is not None  # the other end's gradient comes first
        ctx.flight.way_back = None
        return way_back.land(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer: Tensor, flight: InFlight) -> Tensor:  # type: ignore[no-untyped-def]  # torch gives it no types
        ctx.flight = flight
        flight.land()
        return buffer.view_as(buffer)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]  # torch gives it no types
        flight = ctx.flight
        flight.way_back = InFlight(flight.crew, flight.received, flight.sent)
        flight.way_back.launch(grad)
        # The gradient travels beside the graph: what the other end is handed has the right shape and no memory.
        return grad.new_zeros(()).expand(grad.shape), None


def start_exchange(rows: Tensor, sent: list[int], received: list[int], crew: Crew) -> tuple[Tensor, InFlight]:
    """Begin an all-to-all of rows; nothing may read what is returned before `finish_exchange`.

    Args:
        rows: [sum(sent), ...], for rank 0 first.
        sent: rows to each rank.
        received: rows of each rank.
        crew: who takes part; all ranks begin and finish their exchanges in the same order.
    """
    flight = InFlight(crew, sent, received)
    buffer: Tensor = _Start.apply(rows, flight)  # type: ignore[no-untyped-call]  # torch gives it no types
    return buffer, flight


def finish_exchange(begun: tuple[Tensor, InFlight]) -> Tensor:
    """Wait for an exchange: [sum(received), ...], rank 0's rows first.

    Raises:
        TileTimeout: a rank did not come in time (CPU).
    """
    rows: Tensor = _Finish.apply(*begun)  # type: ignore[no-untyped-call]  # torch gives it no types
    return rows


class _Gather(torch.autograd.Function):
    """Rows of all ranks, of ranks that all go on alike: each has the whole gradient, so its own part is a slice."""

    @staticmethod
    def forward(ctx, rows: Tensor, crew: Crew, rank: int, begun: list[Any]) -> Tensor:  # type: ignore[no-untyped-def]  # torch gives it no types
        ctx.place = slice(rank * rows.shape[0], (rank + 1) * rows.shape[0])
        out = rows.new_empty((crew.ranks * rows.shape[0], *rows.shape[1:]))
        kept = rows.contiguous()
        begun += [gather_rows(out, kept, group=crew.group, async_op=True), kept]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]  # torch gives it no types
        return grad[ctx.place], None, None, None


class Gathering:
    """An all-gather of rows on its way, among ranks that hold the same tokens.

    Args:
        rows: this rank's, as many as every other's.
        crew: who takes part.
        rank: this rank among them.
    """

    def __init__(self, rows: Tensor, crew: Crew, rank: int) -> None:
        self._crew = crew
        self._begun: list[Any] = []
        self._out = rows
        if crew.ranks > 1:
            self._out = _Gather.apply(rows, crew, rank, self._begun)  # type: ignore[no-untyped-call]  # torch gives it no types

    def land(self) -> Tensor:
        """All ranks' rows, rank 0's first.

        Raises:
            TileTimeout: a rank did not come in time (CPU).
        """
        if self._begun:
            await_work(self._begun[0], self._out, self._crew, "all_gather")
            self._begun.clear()
        return self._out


class _Share(torch.autograd.Function):
    """This rank's part of what all ranks hold; its gradient is made whole again on all of them."""

    @staticmethod
    def forward(ctx, rows: Tensor, crew: Crew, rank: int) -> Tensor:  # type: ignore[no-untyped-def]  # torch gives it no types
        ctx.crew, ctx.rows = crew, rows.shape[0]
        size = share_size(rows.shape[0], crew.ranks)
        return rows[rank * size : (rank + 1) * size].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]  # torch gives it no types
        size = share_size(ctx.rows, ctx.crew.ranks)
        whole = grad.new_empty((ctx.crew.ranks * size, *grad.shape[1:]))
        gather_rows(whole, padded(grad, size), group=ctx.crew.group)
        return whole[: ctx.rows], None, None


class _Summed(torch.autograd.Function):
    """A parameter that all ranks hold, of which each sees the gradient of its own part alone."""

    @staticmethod
    def forward(ctx, weight: Tensor, crew: Crew) -> Tensor:  # type: ignore[no-untyped-def]  # torch gives it no types
        ctx.crew = crew
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]  # torch gives it no types
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.crew.group)
        return total, None


def share_size(rows: int, ranks: int) -> int:
    """Rows of the first rank's share; the last ranks may have fewer."""
    return -(-rows // ranks)


def padded(rows: Tensor, size: int) -> Tensor:
    """As many rows as every rank has, zeros behind the true ones."""
    if rows.shape[0] == size:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros((size - rows.shape[0], *rows.shape[1:]))])


def own_share(rows: Tensor, crew: Crew, rank: int) -> Tensor:
    """This rank's consecutive share of rows that all ranks of a crew hold, `share_size` at most."""
    if crew.ranks == 1:
        return rows
    share: Tensor = _Share.apply(rows, crew, rank)  # type: ignore[no-untyped-call]  # torch gives it no types
    return share


def summed_over(weight: Tensor, crew: Crew) -> Tensor:
    """A parameter as it is, whose gradient is summed over a crew's ranks."""
    if crew.ranks == 1:
        return weight
    out: Tensor = _Summed.apply(weight, crew)  # type: ignore[no-untyped-call]  # torch gives it no types
    return out
