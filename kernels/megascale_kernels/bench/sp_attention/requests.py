# SPDX-License-Identifier: Apache-2.0
"""Read the command line of `bench attention`; a wrong one gets one sentence."""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

from megascale_kernels.attention.problem import AttentionConfig, check_attention_config
from megascale_kernels.bench.report import TABLE_SUFFIX
from megascale_kernels.bench.request import ATTENTION, PROGRAM, UserError
from megascale_kernels.bench.sp_attention.heads import MODELS, SHORT, Case, Heads, draw
from megascale_kernels.errors import Unsupported
from megascale_kernels.progress.board_format import MAX_RANKS

TOKENS = (16384, 4096, 8192, 32768, 65536)  # the budget may end early: first what tells most
MASKS = {"causal": (True,), "full": (False,), "both": (True, False)}


class Request(NamedTuple):
    """What was asked for.

    Attributes:
        cases: in the order in which they are measured.
        ranks: how many.
        configs: configurations of the kernels that are tried; None is what the operator takes by itself.
        backward: time forward and backward together.
        rounds: how many times each contender is timed.
        budget_s: nothing is begun after this.
        out: where the table goes too.
    """

    cases: tuple[Case, ...]
    ranks: int
    configs: tuple[AttentionConfig | None, ...]
    backward: bool
    rounds: int
    budget_s: float
    out: Path | None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog=f"{PROGRAM} {ATTENTION}",
        description="Measure attention over a sequence that is cut over the GPUs of this host.",
    )
    made.add_argument("--gpus", type=int, help="ranks to start; under torchrun its own")
    made.add_argument("--models", default="8B,7B,1B", help=f"comma-separated: {', '.join(SHORT)}, or a published name")
    made.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="of a sequence over all ranks")
    made.add_argument("--mask", choices=MASKS, default="both")
    made.add_argument("--batch", type=int, default=1, help="sequences")
    made.add_argument("--random", type=int, metavar="COUNT", help="so many cases drawn at random instead")
    made.add_argument("--seed", type=int, help="which cases --random draws: 1 when left out")
    made.add_argument("--backward", action="store_true", help="forward and backward together")
    made.add_argument(
        "--config", action="append", default=[], metavar="NAME=VALUE,...",
        help="a configuration of the kernels (block_m, block_n, warps, stages, splits, kernel, keys_block, keys_step, "
        "queries_block, queries_step); may be given several times: each is a row of its own",
    )  # fmt: skip
    made.add_argument("--rounds", type=int, default=8, help="how many times each contender is timed")
    made.add_argument("--budget-s", type=float, default=120.0, help="begin nothing new after this")
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
    if options.rounds < 1 or options.batch < 1 or not 0 < options.budget_s < math.inf:
        raise UserError("--rounds, --batch and --budget-s must be positive numbers")
    if options.out is not None and options.out.suffix == TABLE_SUFFIX:
        raise UserError(f"--out {options.out}: the CSV beside the table has that name: give the table another ending")
    if options.seed is not None and options.random is None:
        raise UserError("--seed says which cases --random draws: give --random COUNT too, or leave it out")
    if options.random is not None and options.random < 1:
        raise UserError("--random: give a positive number")
    if options.random is not None:
        cases = draw(options.random, 1 if options.seed is None else options.seed, ranks)
    else:
        models = [_model(word) for word in options.models.split(",")]
        cases = [
            Case(heads, tokens, options.batch, causal)
            for tokens in _tokens(options.tokens, ranks) for heads in models for causal in MASKS[options.mask]
        ]  # fmt: skip
    configs = tuple(config_of(text) for text in options.config) or (None,)
    return Request(
        tuple(cases), ranks, configs, options.backward, options.rounds, options.budget_s, options.out
    )  # fmt: skip


def config_of(text: str) -> AttentionConfig:
    """A configuration from `name=value,...`; what is not named is the default.

    Raises:
        UserError: an unknown field or a value that cannot be.
    """
    found: dict[str, object] = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        if name not in AttentionConfig._fields:
            raise UserError(f"--config {word}: choose from {', '.join(AttentionConfig._fields)}")
        found[name] = int(value) if value.isdecimal() else value
    config = AttentionConfig(**found)  # type: ignore[arg-type]  # checked below
    try:
        check_attention_config(config)
    except Unsupported as error:
        raise UserError(f"--config {text}: {error}") from None
    return config


def _ranks(options: argparse.Namespace, environment: dict[str, str], seen: int) -> int:
    ranks = options.gpus
    if "RANK" in environment:
        started = int(environment.get("WORLD_SIZE", "1"))
        if ranks not in (None, started):
            raise UserError(f"--gpus {ranks}, but torchrun started {started} ranks: leave --gpus out")
        ranks = started
    ranks = seen if ranks is None else ranks
    if ranks < 1 or seen < ranks:
        raise UserError(f"it needs {max(ranks, 1)} CUDA GPU{'s' * (ranks > 1)}, and torch sees {seen} on this machine")
    if not 2 <= ranks <= MAX_RANKS:
        raise UserError(f"--gpus {ranks}: a sequence is cut over 2 to {MAX_RANKS} ranks")
    return int(ranks)


def _tokens(text: str, ranks: int) -> list[int]:
    try:
        tokens = [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"--tokens {text}: give whole numbers, separated by commas") from None
    for number in tokens:
        if number < 1 or number % (2 * ranks):
            raise UserError(f"--tokens {number}: give positive multiples of {2 * ranks}, two chunks for each rank")
    return tokens


def _model(word: str) -> Heads:
    name = SHORT.get(word.strip().upper(), word.strip()).lower()
    for heads in MODELS:
        if heads.name.lower() == name:
            return heads
    raise UserError(f"--models {word}: choose from {', '.join((*SHORT, *(heads.name for heads in MODELS)))}")
