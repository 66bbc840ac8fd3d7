# SPDX-License-Identifier: Apache-2.0
"""Random attentions split over ranks, and what they come to in float64 on one machine that has everything.

Legend: W ranks, B sequences, S tokens of one, H heads, D elements of a head; a capital tensor is whole.
"""

import math
from typing import Any, NamedTuple

import torch
from megascale_kernels.attention.backward_launch import BackwardLaunch, Given, row_sums
from megascale_kernels.attention.launch import Operands, forward
from megascale_kernels.attention.problem import AttentionConfig, Problem
from megascale_kernels.attention.sharding import shard_sequence
from megascale_kernels.attention.tile_walk import bounds_of
from torch import Tensor

from tests.fakes.emulated_ranks import EmulatedRanks


class Attention(NamedTuple):
    """One case.

    Attributes:
        ranks: W.
        chunk: tokens of a chunk.
        batch: sequences.
        q_heads: heads of q.
        kv_heads: heads of k and v.
        head_dim: elements of a head.
        causal: with a causal mask.
        zigzag: two chunks a rank.
        lengths: of packed sequences, None for one.
        dtype: of q, k and v.
        config: of the kernels.
    """

    ranks: int
    chunk: int
    batch: int = 1
    q_heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    causal: bool = True
    zigzag: bool = True
    lengths: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.bfloat16
    config: AttentionConfig = AttentionConfig(block_m=16, block_n=16)

    @property
    def problem(self) -> Problem:
        """As the launchers take it."""
        return Problem(
            self.ranks, self.batch, 1 + self.zigzag, self.chunk, self.q_heads, self.kv_heads, self.head_dim,
            self.causal, self.lengths is not None, self.head_dim**-0.5,
        )  # fmt: skip

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Boundaries of packed sequences."""
        if self.lengths is None:
            return None
        return torch.tensor([0, *self.lengths]).cumsum(0).to(torch.int32)


class Whole(NamedTuple):
    """All ranks' q [B, S, Hq, D], k and v [B, S, Hkv, D], and a gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def drawn(case: Attention, seed: int) -> Whole:
    """Random operands."""
    generator = torch.Generator().manual_seed(seed)

    def random(heads: int) -> Tensor:
        shape = (case.batch, case.problem.sequence, heads, case.head_dim)
        return torch.randn(shape, generator=generator).to(case.dtype)

    return Whole(random(case.q_heads), random(case.kv_heads), random(case.kv_heads), random(case.q_heads))


def exact(
    whole: Whole, *, causal: bool, lengths: tuple[int, ...] | None, scale: float | None = None
) -> tuple[Tensor, ...]:
    """Output and gradients of q, k and v in float64; a query that sees nothing has output 0."""
    q, k, v = (tensor.double().requires_grad_() for tensor in whole[:3])
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = (tensor.repeat_interleave(group, 2) for tensor in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, wide_k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    sequence = q.shape[1]
    positions = torch.arange(sequence)
    number = torch.zeros(sequence) if lengths is None else number_of(lengths, sequence)
    visible = (number[:, None] == number[None, :]) & (number >= 0)[:, None]
    if causal:
        visible &= positions[None, :] <= positions[:, None]
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1).masked_fill(~visible, 0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, wide_v)
    return (out, *torch.autograd.grad(out, (q, k, v), whole.dout.double()))


def number_of(lengths: tuple[int, ...], sequence: int) -> Tensor:
    """The packed sequence of each position, -1 behind the last."""
    numbers = torch.full((sequence,), -1)
    first = 0
    for number, length in enumerate(lengths):
        numbers[first : first + length] = number
        first += length
    return numbers


def own(case: Attention, whole: Tensor, rank: int) -> Tensor:
    """A rank's tokens as rows: [B, S, H, D] to [B * T, H * D]."""
    mine = shard_sequence(whole, rank, case.ranks, zigzag=case.zigzag)
    return mine.reshape(case.problem.rows, -1).contiguous()


def operands_of(case: Attention, whole: Whole, rank: int) -> Operands:
    """What a rank brings."""
    bounds = bounds_of(case.cu_seqlens, case.problem, torch.device("cpu"))
    return Operands(*(own(case, tensor, rank) for tensor in whole[:3]), bounds)


class Attended(NamedTuple):
    """What happened: the ranks, and per launch all operands, and what each rank has for an output."""

    case: Attention
    ranks: EmulatedRanks
    given: list[Whole]
    outs: list[list[Tensor]]

    @property
    def worst(self) -> float:
        """The largest difference from float64, relative to the largest element: a few roundings of the type at most."""
        return max(
            relative(out, own(self.case, exact(whole, causal=self.case.causal, lengths=self.case.lengths)[0], rank))
            for whole, row in zip(self.given, self.outs, strict=True)
            for rank, out in enumerate(row)
        )  # fmt: skip


def relative(actual: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest element; NaN counts as infinitely far."""
    assert actual.shape == wanted.shape
    difference = (actual.double() - wanted.detach()).abs().nan_to_num(nan=math.inf).max()
    return float(difference / wanted.detach().abs().max().clamp(min=1e-9))


def attended(case: Attention, *, launches: int = 3, **options: Any) -> Attended:  # noqa: ANN401 (those of EmulatedRanks)
    """Launch the forward several times in a row over poisoned memory."""
    room = 2 * case.ranks * case.problem.rows * case.problem.kv_columns * case.dtype.itemsize
    ranks = EmulatedRanks(case.ranks, case.dtype, data_bytes=room, **options)
    given = [drawn(case, seed) for seed in range(launches)]
    outs = []
    for whole in given:

        def host(workspace: Any, whole: Whole = whole) -> Tensor:  # noqa: ANN401 (an emulated workspace)
            return forward(operands_of(case, whole, workspace.rank), case.problem, workspace, case.config)[0]

        outs.append(ranks.call(host))
    ranks.run()
    return Attended(case, ranks, given, outs)


def gradients_attended(case: Attention, *, launches: int = 2, **options: Any) -> tuple[EmulatedRanks, float]:  # noqa: ANN401 (those of EmulatedRanks)
    """Forward and backward several times in a row; the ranks, and how far the worst gradient is from float64.

    The shares of the peers' keys are added here; `partial_sums` does that on a GPU.
    """
    room = 2 * case.ranks * case.problem.rows * case.problem.kv_columns * case.dtype.itemsize
    ranks = EmulatedRanks(case.ranks, case.dtype, data_bytes=room, **options)
    given = [drawn(case, seed) for seed in range(launches)]

    def host(workspace: Any, whole: Whole) -> tuple[Tensor, Tensor]:  # noqa: ANN401 (an emulated workspace)
        operands, dout = operands_of(case, whole, workspace.rank), own(case, whole.dout, workspace.rank)
        out, lse = forward(operands, case.problem, workspace, case.config)
        plan = BackwardLaunch(case.problem, workspace, case.config)
        start = Given(operands, lse, dout, row_sums(out, dout, case.problem))
        slot, partials = plan.key_gradients(start)
        return plan.query_gradients(start, slot), partials

    outs = [ranks.call(lambda workspace, whole=whole: host(workspace, whole)) for whole in given]
    ranks.run()
    worst = 0.0
    for whole, row in zip(given, outs, strict=True):
        _, *wanted = exact(whole, causal=case.causal, lengths=case.lengths)
        shares = torch.stack([partials for _, partials in row]).double().sum(0)
        for rank, (dq, _) in enumerate(row):
            actual = (dq, *shares[rank])
            worst = max(
                worst, *(relative(one, own(case, other, rank)) for one, other in zip(actual, wanted, strict=True))
            )
    return ranks, worst
