# SPDX-License-Identifier: Apache-2.0
"""Layers of published mixtures of experts, random ones, and routings as uneven as asked for."""

import random
from typing import NamedTuple

import torch
from torch import Tensor

from megascale_kernels.moe.experts import ALIGNED
from megascale_kernels.moe.skewed import SKEWS, drawn_routing

# Experts, top k, hidden, inner: the models' configurations. DeepSeek-V3-like has 32 of its 256 experts.
MODELS = {
    "Mixtral-8x7B": (8, 2, 4096, 14336),
    "Phi-3.5-MoE": (16, 2, 4096, 6400),
    "Qwen2-57B-A14B": (64, 8, 3584, 2560),
    "DeepSeek-MoE-16B": (64, 6, 2048, 1408),
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "Qwen2-MoE-2.7B": (64, 4, 2048, 1408),
    "DeepSeek-V3-like": (32, 8, 7168, 2048),
}
TOKENS = (4096, 8192, 16384)


class MoeShape(NamedTuple):
    """One row of the table.

    Attributes:
        name: the model, or "drawn".
        experts: of all ranks.
        top_k: experts of a token.
        hidden: H.
        inner: I.
        tokens: of all ranks.
        skew: standard deviation of the experts' shares of the load.
        shards: ranks among which each expert is cut along I (`moe.expert_shards`).
    """

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    tokens: int
    skew: float = 0.0
    shards: int = 1

    @property
    def gflop(self) -> float:
        """Of a forward's three matrices, all ranks together."""
        return 6e-9 * self.tokens * self.top_k * self.hidden * self.inner

    @property
    def label(self) -> str:
        """The layer in a few words."""
        sizes = f"E{self.experts} k{self.top_k} H{self.hidden} I{self.inner} T{self.tokens}"
        cut = f" TP{self.shards}" * (self.shards > 1)
        return f"{self.name} {sizes}{cut} std {self.skew:g}"


def wanted(models: str | None, tokens: tuple[int, ...], skew: float, ranks: int, shards: int = 1) -> list[MoeShape]:
    """The published layers, the largest number of tokens last.

    Raises:
        ValueError: a model that is not known, tokens or experts that do not divide among the ranks, or an expert that
            cannot be cut into so many shards.
    """
    names = list(MODELS) if models is None else [name.strip() for name in models.split(",")]
    for name in names:
        if name not in MODELS:
            raise ValueError(f"--models {name}: not one of {', '.join(MODELS)}")
    found = [MoeShape(name, *MODELS[name], count, skew, shards) for count in tokens for name in names]
    for shape in found:
        if shards < 1 or ranks % shards or shape.inner % (ALIGNED * shards):
            raise ValueError(
                f"--tensor-parallel {shards}: {shape.label} on {ranks} GPUs needs a divisor of {ranks} that leaves a "
                f"multiple of {ALIGNED} of I to each shard"
            )
        if shape.tokens % ranks or shape.experts * shards % ranks:
            among = f"{ranks} GPUs" if shards == 1 else f"{ranks // shards} groups of {shards} GPUs, tokens of all"
            raise ValueError(f"{shape.label}: tokens and experts must be multiples of the {among}")
    return found


def drawn(count: int, seed: int, ranks: int) -> list[MoeShape]:
    """Random layers: sizes of no model, tokens that are no multiple of anything but the ranks."""
    chance = random.Random(seed)  # noqa: S311 - shapes, no secrets
    found: list[MoeShape] = []
    while len(found) < count:
        experts = chance.choice((8, 16, 24, 32, 60, 64, 96, 128))
        shape = MoeShape(
            "drawn",
            experts - experts % ranks,
            min(chance.choice((1, 2, 3, 4, 6, 8)), experts),
            16 * chance.randint(64, 384),
            16 * chance.randint(32, 512),
            ranks * chance.randint(512, 16384 // ranks),
            chance.choice(SKEWS),
        )
        if shape.experts * shape.hidden * shape.inner * 6 <= 12e9:  # weights of all ranks, bytes
            found.append(shape)
    return sorted(found, key=lambda shape: shape.tokens)


def routing(shape: MoeShape, tokens: int, seed: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Experts and gates of a rank's tokens, as uneven as the layer has it."""
    return drawn_routing(shape.experts, shape.top_k, tokens, shape.skew, seed=seed, rank=rank, device=device)
