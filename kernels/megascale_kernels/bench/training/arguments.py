# SPDX-License-Identifier: Apache-2.0
"""Read the command line of `bench train`; a wrong one gets one sentence."""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

from megascale_kernels.bench import published
from megascale_kernels.bench.report import TABLE_SUFFIX
from megascale_kernels.bench.request import PROGRAM, TRAIN, UserError
from megascale_kernels.bench.training.model import ACTIVATIONS
from megascale_kernels.bench.training.variants import VARIANTS
from megascale_kernels.progress.board_format import MAX_RANKS

SHORT = {"8B": "Llama-3.1-8B", "70B": "Llama-3.1-70B", "32B": "Qwen3-32B"}
ROWS = (4096, 16384, 1024, 8192, 2048)  # the budget may end early: first what tells most
BLOCKS = 4


class Size(NamedTuple):
    """What one line of the table is about.

    Attributes:
        name: the model, or "given".
        hidden: d.
        inner: f.
        m: rows (tokens) over all ranks.
    """

    name: str
    hidden: int
    inner: int
    m: int

    @property
    def label(self) -> str:
        """In a sentence."""
        return f"{self.name} M {self.m}"


class Request(NamedTuple):
    """What was asked for.

    Attributes:
        sizes: in the order in which they are measured.
        variants: in the order of the table.
        device: "cuda" or "cpu".
        ranks: how many.
        blocks: MLP blocks.
        activation: one of `ACTIVATIONS`.
        rounds: how many times each variant is timed.
        budget_s: nothing is begun after this.
        out: where the table goes too.
    """

    sizes: tuple[Size, ...]
    variants: tuple[str, ...]
    device: str
    ranks: int
    blocks: int
    activation: str
    rounds: int
    budget_s: float
    out: Path | None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog=f"{PROGRAM} {TRAIN}",
        description="Time forward and backward of MLP blocks under tensor and sequence parallelism; no optimizer step.",
    )
    made.add_argument("--gpus", type=int, help="ranks to start; under torchrun its own")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: over gloo, eager variants alone")
    made.add_argument(
        "--models", help=f"comma-separated: {', '.join(SHORT)}, or a published name; all three if left out"
    )
    made.add_argument("--d", type=int, help="hidden size instead of a model's")
    made.add_argument("--f", type=int, help="inner size instead of a model's")
    made.add_argument("--m", default=",".join(map(str, ROWS)), help="rows over all ranks, comma-separated")
    made.add_argument("--blocks", type=int, default=BLOCKS, help="MLP blocks in a step")
    made.add_argument("--activation", choices=ACTIVATIONS, default=ACTIVATIONS[0])
    made.add_argument("--variants", help=f"comma-separated; all if left out: {', '.join(VARIANTS)}")
    made.add_argument("--rounds", type=int, default=6, help="how many times each variant is timed per size")
    made.add_argument("--budget-s", type=float, default=400.0, help="begin nothing new after this")
    made.add_argument("--out", type=Path, help="write the table here too, and its CSV beside it")
    return made


def read(options: argparse.Namespace, environment: dict[str, str], seen: int) -> Request:
    """The request.

    Args:
        options: the command line.
        environment: torchrun's variables, if it started us.
        seen: GPUs that torch sees here.

    Raises:
        UserError: something that makes no sense, or that this machine cannot serve.
    """
    ranks = _ranks(options, environment, seen)
    if options.rounds < 1 or options.blocks < 1 or not 0 < options.budget_s < math.inf:
        raise UserError("--rounds, --blocks and --budget-s must be positive numbers")
    if options.out is not None and options.out.suffix == TABLE_SUFFIX:
        raise UserError(f"--out {options.out}: the CSV beside the table has that name: give the table another ending")
    variants = tuple(options.variants.split(",")) if options.variants else VARIANTS
    for word in variants:
        if word not in VARIANTS:
            raise UserError(f"--variants {word}: choose from {', '.join(VARIANTS)}")
    sizes = tuple(Size(*model, m) for m in _rows(options.m, ranks) for model in _models(options, ranks))
    return Request(
        sizes, variants, options.device, ranks, options.blocks, options.activation, options.rounds, options.budget_s,
        options.out,
    )  # fmt: skip


def _ranks(options: argparse.Namespace, environment: dict[str, str], seen: int) -> int:
    ranks = options.gpus
    if "RANK" in environment:
        started = int(environment.get("WORLD_SIZE", "1"))
        if ranks not in (None, started):
            raise UserError(f"--gpus {ranks}, but torchrun started {started} ranks: leave --gpus out")
        ranks = started
    if ranks is None:
        ranks = seen if options.device == "cuda" else 2
    if options.device == "cuda" and seen < max(ranks, 1):
        needed = f"{ranks} CUDA GPU{'s' * (ranks > 1)}" if ranks else "CUDA GPUs"
        raise UserError(
            f"it needs {needed}, and torch sees {seen} on this machine; --device cpu tries it out over gloo"
        )
    if not 2 <= ranks <= MAX_RANKS:
        raise UserError(f"--gpus {ranks}: layers are split among 2 to {MAX_RANKS} ranks")
    return int(ranks)


def _rows(text: str, ranks: int) -> list[int]:
    try:
        rows = [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"--m {text}: give whole numbers, separated by commas") from None
    for m in rows:
        if m < 1 or m % ranks:
            raise UserError(f"--m {m}: give positive multiples of the {ranks} ranks")
    return rows


def _models(options: argparse.Namespace, ranks: int) -> list[tuple[str, int, int]]:
    if (options.d is None) != (options.f is None):
        raise UserError("--d and --f are the two sizes of one MLP: give both, or neither")
    if options.d is not None:
        if options.models:
            raise UserError("--models and --d say two things about the sizes: leave one out")
        found = [("given", options.d, options.f)]
    else:
        found = [_published(word) for word in (options.models or ",".join(SHORT)).split(",")]
    for name, hidden, inner in found:
        if min(hidden, inner) < 1 or inner % ranks:
            raise UserError(f"{name} of d {hidden} and f {inner}: give positive sizes, f a multiple of {ranks} ranks")
    return found


def _published(word: str) -> tuple[str, int, int]:
    name = SHORT.get(word.strip().upper(), word.strip()).lower()
    for model in published.MODELS:
        if model.name.lower() == name:
            return model.name, model.hidden, model.inner
    raise UserError(f"--models {word}: choose from {', '.join((*SHORT, *(model.name for model in published.MODELS)))}")
