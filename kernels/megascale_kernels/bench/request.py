# SPDX-License-Identifier: Apache-2.0
"""Read the command line; a wrong one gets one sentence."""

import argparse
import math
from pathlib import Path
from typing import Any

from megascale_kernels.bench.drawn import ALL_M, Drawn, Rows, draw, read_rows
from megascale_kernels.bench.report import TABLE_SUFFIX
from megascale_kernels.bench.shapes import MODELS, OPERATORS, ROWS, SCALES, Shape, wanted
from megascale_kernels.planning.config import Config, read_config
from megascale_kernels.progress.board_format import MAX_RANKS

PROGRAM = "python -m megascale_kernels.bench"
TRAIN, MOE, ATTENTION, MOE_FAMILY = "train", "moe", "attention", "moe-family"  # verbs with command lines of their own
ALL_ROWS, ALL_SCALES = ",".join(map(str, ROWS)), ",".join(SCALES)


class UserError(ValueError):
    """The request makes no sense, or this machine cannot serve it; the message is one sentence."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Measure an overlap operator on the GPUs of this host.",
        epilog=f"`{PROGRAM} {TRAIN} --help`: training steps of MLP blocks, by torch's parallel layers and by ours. "
        f"`{PROGRAM} {ATTENTION} --help`: attention over a sequence that is cut over ranks. "
        f"`{PROGRAM} {MOE} --help`: layers of mixtures of experts. "
        f"`{PROGRAM} {MOE_FAMILY} --help`: their schedules on collectives.",
    )
    made.add_argument("operator", choices=OPERATORS)
    made.add_argument("--gpus", type=int, help="ranks to start; under torchrun its own. --soak also shares a GPU")
    made.add_argument("--shapes", help=f"comma-separated: {', '.join(MODELS)}, or MxNxK as one rank sees them")
    made.add_argument("--m", default=ALL_ROWS, help="rows for the models, comma-separated")
    made.add_argument("--scale", default=ALL_SCALES, help="global: sizes over the GPUs in use; tp8: over eight")
    made.add_argument("--rounds", type=int, default=8, help="how many times each contender is timed per shape")
    made.add_argument("--budget-s", type=float, default=200.0, help="begin nothing new after this")
    made.add_argument("--out", type=Path, help="write the table here too, and its CSV beside it")
    made.add_argument("--tune", action="store_true", help="tune each shape before it is measured")
    made.add_argument("--tune-s", type=float, default=15.0, help="seconds of tuning per shape")
    made.add_argument("--config", help="one configuration for all shapes: block_n=128,stages=3,carrier=sm,comm_ctas=8")
    made.add_argument(
        "--beside", action="append", default=[], metavar="NAME=VALUE,...",
        help="our kernel with these fields of its default configuration replaced, in turn with the default; repeatable",
    )  # fmt: skip
    made.add_argument("--seed", type=int, help="which shapes --random draws: 1 when left out")
    made.add_argument("--rows", metavar="LEAST-MOST", help="between which --random draws M: 256-16384 when left out")
    mode = made.add_mutually_exclusive_group()
    mode.add_argument(
        "--random", type=int, metavar="COUNT",
        help="so many shapes drawn at random (M 256 to 16384, sizes of published models and others, both layouts of "
        "the weight), as the operator runs them by itself",
    )  # fmt: skip
    mode.add_argument("--progress-cost", action="store_true", help="progress off, in device memory, in host memory")
    mode.add_argument("--trace-cost", action="store_true", help="trace off and on")
    mode.add_argument("--compute-quality", action="store_true", help="the kernel without communication against cuBLAS")
    mode.add_argument("--soak", type=int, metavar="ITERATIONS", help="look for wrong elements under bad conditions")
    return made


def shapes_of(options: argparse.Namespace, gpus: int) -> list[Shape]:
    """The shapes that were asked for.

    Raises:
        UserError: a word that is no shape, number or scale.
    """
    if options.seed is not None and options.random is None:
        raise UserError("--seed says which shapes --random draws: give --random COUNT too, or leave it out")
    if options.rows is not None and options.random is None:
        raise UserError("--rows says between which rows --random draws: give --random COUNT too, or --m for models")
    if options.soak is not None:
        return []  # it draws its own
    if options.random is not None:
        return [drawn.shape for drawn in drawn_of(options, gpus)]
    try:
        rows = tuple(int(word) for word in options.m.split(","))
    except ValueError:
        raise UserError(f"--m {options.m}: give whole numbers, separated by commas") from None
    scales = tuple(options.scale.split(","))
    if not set(scales) <= set(SCALES):
        raise UserError(f"--scale {options.scale}: choose from {', '.join(SCALES)}")
    try:
        return wanted(options.operator, options.shapes, rows, scales, gpus)
    except ValueError as error:
        raise UserError(str(error)) from None


def drawn_of(options: argparse.Namespace, gpus: int) -> list[Drawn]:
    """The shapes that `--random` draws.

    Raises:
        UserError: a count or seed that is none, or an option that only listed shapes have.
    """
    unused = {
        "--shapes": options.shapes is not None, "--tune": options.tune, "--config": options.config is not None,
        "--m": options.m != ALL_ROWS, "--scale": options.scale != ALL_SCALES, "--beside": bool(options.beside),
    }  # fmt: skip
    for name, given in unused.items():
        if given:
            raise UserError(f"--random draws the shapes and lets the operator choose how to run: leave {name} out")
    try:
        return draw(options.operator, options.random, seed_of(options), gpus, rows_of(options))
    except ValueError as error:
        raise UserError(str(error)) from None


def seed_of(options: argparse.Namespace) -> int:
    """The seed that `--random` draws by."""
    return 1 if options.seed is None else int(options.seed)


def rows_of(options: argparse.Namespace) -> Rows:
    """Between which `--random` draws M.

    Raises:
        ValueError: no two numbers in order.
    """
    return ALL_M if options.rows is None else read_rows(options.rows)


def config_of(text: str | None) -> Config | None:
    """A configuration from `name=value,...`; what is not named is the default.

    Raises:
        UserError: an unknown field or a value of the wrong kind.
    """
    return None if text is None else Config()._replace(**_fields("--config", text))


def beside_of(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The fields that each `--beside` replaces, by its words.

    Raises:
        UserError: an unknown field or a value of the wrong kind, or a mode that compares other things.
    """
    other = {
        "--tune": options.tune, "--progress-cost": options.progress_cost, "--trace-cost": options.trace_cost,
        "--compute-quality": options.compute_quality, "--soak": options.soak is not None,
    }  # fmt: skip
    for name, given in other.items():
        if given and options.beside:
            raise UserError(f"--beside compares configurations of our kernel alone: leave {name} out")
    return {text: _fields("--beside", text) for text in options.beside}


def _fields(option: str, text: str) -> dict[str, Any]:
    defaults: dict[str, Any] = Config()._asdict()
    found: dict[str, Any] = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        if name not in defaults:
            raise UserError(f"{option} {word}: choose from {', '.join(defaults)}")
        found[name] = {"true": True, "false": False, "none": None}.get(value.lower(), value)
        if value.isdecimal():
            found[name] = int(value)
    try:
        read_config(defaults | found)
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None
    return found


def ranks_of(options: argparse.Namespace, environment: dict[str, str], seen: int) -> int:
    """How many ranks will run: one for each GPU, or in a soak run, which times nothing, any number on one GPU.

    Args:
        options: the command line.
        environment: torchrun's variables, if it started us.
        seen: GPUs that torch sees here.

    Raises:
        UserError: not enough GPUs, or numbers that contradict each other.
    """
    if options.gpus is not None and options.gpus < 1:
        raise UserError(f"--gpus {options.gpus}: give a positive number, or leave it out for all of them")
    if "RANK" in environment:
        ranks = int(environment.get("WORLD_SIZE", "1"))
        if options.gpus not in (None, ranks):
            raise UserError(f"--gpus {options.gpus}, but torchrun started {ranks} ranks: leave --gpus out")
    else:
        ranks = options.gpus or seen
    needed = 1 if options.soak else max(ranks, 1)
    if seen < needed:
        raise UserError(f"it needs {needed} CUDA GPU{'s' * (needed > 1)}, and torch sees {seen} on this machine")
    if ranks > MAX_RANKS:
        raise UserError(f"--gpus {ranks}: the kernels serve one host of at most {MAX_RANKS} ranks")
    if ranks < 2 and not options.compute_quality:
        raise UserError("there is nothing to overlap on one GPU: give --gpus 2 or more")
    if (
        options.rounds < 1
        or not 0 < options.budget_s < math.inf  # not a number would be a deadline that never passes
        or not 0 < options.tune_s < math.inf
        or (options.soak is not None and options.soak < 1)
    ):
        raise UserError("--rounds, --budget-s, --tune-s and --soak must be positive numbers")
    if options.out is not None and options.out.suffix == TABLE_SUFFIX:
        raise UserError(
            f"--out {options.out}: the CSV beside the table has that name, so give the table another ending"
        )
    return ranks
