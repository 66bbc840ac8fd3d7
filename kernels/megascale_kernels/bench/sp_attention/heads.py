# SPDX-License-Identifier: Apache-2.0
"""Heads of published models, as each model's `config.json` has them, and the cases that are made of them."""

import random
from typing import NamedTuple

from megascale_kernels.attention.problem import Problem


class Heads(NamedTuple):
    """One model's attention: heads of q, heads of k and v, elements of a head, and whose `config.json` says so."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    source: str


MODELS = (
    Heads("Llama-3.1-8B", 32, 8, 128, "meta-llama/Llama-3.1-8B"),
    Heads("Llama-2-7B", 32, 32, 128, "meta-llama/Llama-2-7b-hf"),
    Heads("Llama-3.1-70B", 64, 8, 128, "meta-llama/Llama-3.1-70B"),
    Heads("Llama-3.2-1B", 32, 8, 64, "meta-llama/Llama-3.2-1B"),
    Heads("Qwen2.5-7B", 28, 4, 128, "Qwen/Qwen2.5-7B"),
    Heads("Qwen2.5-0.5B", 14, 2, 64, "Qwen/Qwen2.5-0.5B"),
    Heads("Qwen3-30B-A3B", 32, 4, 128, "Qwen/Qwen3-30B-A3B"),
    Heads("Llama-3.1-405B", 128, 8, 128, "meta-llama/Llama-3.1-405B"),
    Heads("Mistral-Large-123B", 96, 8, 128, "mistralai/Mistral-Large-Instruct-2407"),
    Heads("Phi-3.5-MoE", 32, 8, 128, "microsoft/Phi-3.5-MoE-instruct"),
    Heads("StarCoder2-15B", 48, 4, 128, "bigcode/starcoder2-15b"),
    Heads("OPT-66B", 72, 72, 128, "facebook/opt-66b"),
)
SHORT = {"8B": "Llama-3.1-8B", "7B": "Llama-2-7B", "70B": "Llama-3.1-70B", "1B": "Llama-3.2-1B"}
LEAST_TOKENS, MOST_TOKENS = 4096, 65536


class Case(NamedTuple):
    """One row of the table.

    Attributes:
        heads: of which model.
        sequence: tokens over all ranks.
        batch: sequences.
        causal: with a causal mask, cut in the zig-zag; else full.
        segments: ends of packed sequences but the first 0; empty for one sequence.
    """

    heads: Heads
    sequence: int
    batch: int = 1
    causal: bool = True
    segments: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """The case in a sentence."""
        packed = f", {len(self.segments)} packed" if self.segments else ""
        return f"{self.heads.name}, {self.batch} x {self.sequence}, {'causal' if self.causal else 'full'}{packed}"

    def problem(self, ranks: int) -> Problem:
        """As the launchers take it."""
        heads, halves = self.heads, 2 if self.causal or self.segments else 1
        return Problem(
            ranks, self.batch, halves, self.sequence // (halves * ranks), heads.q_heads, heads.kv_heads, heads.head_dim,
            self.causal, bool(self.segments), heads.head_dim**-0.5,
        )  # fmt: skip


def draw(count: int, seed: int, ranks: int) -> list[Case]:
    """So many cases: the same for the same arguments, and the first of them whatever the count.

    Tokens are log-uniform; half of them a multiple of 128 on each chunk, half whatever two chunks a rank allow; a third
    full, a quarter with two sequences, a quarter of the others packed.
    """
    source = random.Random(f"attention {seed}")  # noqa: S311 - no secret hangs on it
    found = []
    for _ in range(count):
        heads = source.choice(MODELS)
        tokens = LEAST_TOKENS * (MOST_TOKENS / LEAST_TOKENS) ** source.random()
        step = 2 * ranks * source.choice((1, 128))
        sequence = max(step, round(tokens / step) * step)
        causal = source.random() < 2 / 3
        batch = 2 if source.random() < 1 / 4 and sequence <= MOST_TOKENS // 2 else 1
        segments: tuple[int, ...] = ()
        if batch == 1 and source.random() < 1 / 4:
            segments = (*sorted(source.sample(range(1, sequence), source.randint(1, 7))), sequence)
        found.append(Case(heads, sequence, batch, causal, segments))
    return found
