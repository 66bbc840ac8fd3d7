# SPDX-License-Identifier: Apache-2.0
"""Cases of MoE layers: sizes, kinds of routing, random operands, and what should come out."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from megascale_kernels.moe.expert_shards import choose_shards
from megascale_kernels.moe.moe_config import MoeConfig
from megascale_kernels.moe.tables import Sizes
from torch import Tensor

SMALL = MoeConfig(
    kernel="triton", block_n=16, combine_n=64, block_k=32, group_m=2, splits=2, reducers=1, lead_rows=16, half_rows=8,
    route_programs=2, job_tokens=4, job_cols=32, selective=False,
)  # fmt: skip
TILE_ROWS = 16


class Layer(NamedTuple):
    """A case.

    Attributes:
        tokens: of each rank.
        top_k: experts of a token.
        experts: of one rank.
        hidden: H.
        inner: I.
        routing: "drawn", "all to one", "ours alone", "dropped", "twice" or "few".
        config: how to run.
        dtype: of tokens and weights.
        shards: ranks among which each expert is cut; then `experts` are shards, `inner` is a shard's, `top_k` is of
            whole experts, and operands have the shards' ids.
    """

    tokens: Sequence[int] = (9, 7)
    top_k: int = 2
    experts: int = 2
    hidden: int = 40
    inner: int = 24
    routing: str = "drawn"
    config: MoeConfig = SMALL
    dtype: torch.dtype = torch.float16
    shards: int = 1

    @property
    def sizes(self) -> Sizes:
        """What ranks agree on."""
        pitch = max(1, *self.tokens)
        top_k = self.top_k * self.shards
        return Sizes(
            len(self.tokens), pitch, top_k, self.experts, self.hidden, self.inner, TILE_ROWS, self.shards
        )  # fmt: skip


class Given(NamedTuple):
    """One rank's operands."""

    x: Tensor
    ids: Tensor
    gates: Tensor
    w_in: Tensor
    w_out: Tensor


def chosen(layer: Layer, rank: int, generator: torch.Generator) -> Tensor:
    """The experts of a rank's tokens."""
    count, everyone = layer.tokens[rank], layer.experts * len(layer.tokens) // layer.shards
    if layer.routing == "all to one":
        return torch.full((count, layer.top_k), everyone - 1, dtype=torch.int32)
    if layer.routing == "ours alone":
        return torch.randint(layer.experts, (count, layer.top_k), generator=generator).int() + rank * layer.experts
    if layer.routing == "few":
        return torch.randint(2, (count, layer.top_k), generator=generator).int()
    ids = torch.stack([torch.randperm(everyone, generator=generator) for _ in range(count)] or [torch.zeros(everyone)])
    ids = ids[:count, : layer.top_k].int()
    if layer.routing == "dropped":
        ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
    if layer.routing == "twice":
        ids[:, -1] = ids[:, 0]
    return ids.contiguous()


def given(layer: Layer, seed: int) -> list[Given]:
    """Random operands of every rank."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(layer.dtype)

    def routed(rank: int) -> tuple[Tensor, Tensor]:
        gates = torch.rand(layer.tokens[rank], layer.top_k, generator=generator)
        ids, of_shards = choose_shards(chosen(layer, rank, generator), gates, layer.experts, layer.shards)
        return ids, of_shards.contiguous()

    return [
        Given(
            drawn(layer.tokens[rank], layer.hidden),
            *routed(rank),
            drawn(layer.experts, 2, layer.inner, layer.hidden, scale=layer.hidden**-0.5),
            drawn(layer.experts, layer.hidden, layer.inner, scale=layer.inner**-0.5),
        )
        for rank in range(len(layer.tokens))
    ]


def exact(operands: Sequence[Given], experts: int) -> list[Tensor]:
    """What every rank should get, in float64, one pair at a time."""
    outs = []
    for mine in operands:
        out = torch.zeros(mine.x.shape, dtype=torch.float64)
        for token in range(mine.x.shape[0]):
            for place in range(mine.ids.shape[1]):
                expert = int(mine.ids[token, place])
                if expert < 0:
                    continue
                owner = operands[expert // experts]
                gate, up = owner.w_in[expert % experts].double() @ mine.x[token].double()
                row = owner.w_out[expert % experts].double() @ (torch.nn.functional.silu(gate) * up)
                out[token] += mine.gates[token, place].double() * row
        outs.append(out)
    return outs


def exact_gradients(operands: Sequence[Given], grads: Sequence[Tensor], experts: int) -> list[Given]:
    """Gradients of all operands of every rank, in float64; `ids` stay as they are."""
    leaves = [
        mine._replace(
            **{name: getattr(mine, name).double().requires_grad_() for name in ("x", "gates", "w_in", "w_out")}
        )
        for mine in operands
    ]
    outs = exact(leaves, experts)
    total = torch.stack([(out * grad.double()).sum() for out, grad in zip(outs, grads, strict=True)]).sum()
    if total.requires_grad:  # somebody has a token
        total.backward()

    def gradient(leaf: Tensor) -> Tensor:
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    return [
        Given(gradient(leaf.x), leaf.ids, gradient(leaf.gates), gradient(leaf.w_in), gradient(leaf.w_out))
        for leaf in leaves
    ]
