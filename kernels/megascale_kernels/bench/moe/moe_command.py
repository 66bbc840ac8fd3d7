# SPDX-License-Identifier: Apache-2.0
"""`python -m megascale_kernels.bench moe`: start the ranks, measure layer after layer, write down what came out."""

import argparse
import os
import shlex
import sys
import time
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

from megascale_kernels.bench.moe import moe_shapes as shapes
from megascale_kernels.bench.moe.moe_shapes import MoeShape
from megascale_kernels.bench.ranks import place, start
from megascale_kernels.bench.report import Report, facts
from megascale_kernels.bench.request import PROGRAM

MOE = "moe"
SLACK_S = 120.0  # beyond the budget: start, the layer in hand with its compilations, the end
DEADLINE_S = 10.0  # of one wait: a failure costs this much of the budget
COLLECTIVE_S = 120  # ranks compile at their own pace


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog=f"{PROGRAM} {MOE}", description="Measure whole MoE layers.")
    made.add_argument("--gpus", type=int, default=2, help="ranks, one GPU each (default 2)")
    made.add_argument("--budget-s", type=float, default=120.0, help="no layer is begun after this (default 120)")
    made.add_argument("--out", type=Path, help="the table as text; a CSV goes beside it")
    made.add_argument("--models", help=f"comma-separated, of {', '.join(shapes.MODELS)} (default all)")
    made.add_argument("--tokens", default=",".join(map(str, shapes.TOKENS)), help="of all ranks, comma-separated")
    made.add_argument("--std", type=float, default=0.0, help="standard deviation of the experts' shares (default 0)")
    made.add_argument(
        "--tensor-parallel", type=int, default=1, help="ranks among which each expert is cut along I (default 1)"
    )
    made.add_argument("--random", type=int, help="so many random layers instead")
    made.add_argument("--most-gflop", type=float, help="leave out random layers with more of all ranks' GFLOP")
    made.add_argument("--seed", type=int, default=0, help="of layers, operands and routing (default 0)")
    made.add_argument("--rounds", type=int, default=7, help="how often each contender is timed (default 7)")
    made.add_argument(
        "--in-a-row", type=int, default=1, help="calls of a turn, back to back as in a filled stream (default 1)"
    )
    made.add_argument("--backward", action="store_true", help="forward and backward instead of the forward alone")
    made.add_argument("--config", action="append", default=[], help="NAME=VALUE of MoeConfig, for our kernels")
    made.add_argument(
        "--beside",
        action="append",
        default=[],
        help="another way for our kernels, timed beside it: NAME=VALUE,NAME=VALUE",
    )
    return made


def wanted(options: argparse.Namespace) -> list[MoeShape]:
    """The layers that were asked for.

    Raises:
        ValueError: the message names the option.
    """
    if min(options.gpus, options.rounds, options.in_a_row) < 1:
        raise ValueError("--gpus, --rounds and --in-a-row are 1 or more")
    if options.random is not None and options.tensor_parallel != 1:
        raise ValueError("--random draws layers whose experts are whole: leave --tensor-parallel out")
    if options.random is None and options.most_gflop is not None:
        raise ValueError("--most-gflop leaves out random layers: give --random as well")
    if options.random is not None:
        drawn = shapes.drawn(options.random, options.seed, options.gpus)
        return [shape for shape in drawn if options.most_gflop is None or shape.gflop <= options.most_gflop]
    try:
        tokens = tuple(int(word) for word in options.tokens.split(","))
    except ValueError:
        raise ValueError(f"--tokens {options.tokens}: comma-separated numbers") from None
    if min(tokens) < 1:
        raise ValueError(f"--tokens {options.tokens}: positive numbers")
    return shapes.wanted(options.models, tokens, options.std, options.gpus, options.tensor_parallel)


def settings(words: list[str]) -> dict[str, Any]:
    """NAME=VALUE words as fields of a configuration.

    Raises:
        ValueError: a field that there is not, or a value that is no number.
    """
    from megascale_kernels.moe.moe_config import MoeConfig

    found: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in MoeConfig._fields:
            raise ValueError(f"--config {word}: MoeConfig has {', '.join(MoeConfig._fields)}")
        if name == "kernel":
            found[name] = value
        elif value.lstrip("-").isdigit():
            found[name] = int(value)
        else:
            raise ValueError(f"--config {word}: {value!r} is no whole number")
    return found


def main(arguments: list[str]) -> int:
    """Run the command: 0 when all went well, 1 when a layer was wrong, 2 for a request that cannot be served."""
    options = parser().parse_args(arguments)
    try:
        layers = wanted(options)
        for words in (options.config, *(beside.split(",") for beside in options.beside)):
            settings(words)
        _see_devices()
        if "RANK" in os.environ:
            return run_rank(options, layers, shlex.join([*PROGRAM.split(), MOE, *arguments]))
        Report(options.out, is_speaker=True)  # that it can be written is better known before ranks are started
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{PROGRAM} {MOE}: {error}", file=sys.stderr)
        return 2
    return start([MOE, *arguments], options.gpus, options.budget_s + SLACK_S)


def _see_devices() -> None:
    import torch

    if torch.cuda.device_count() == 0:
        raise ValueError("torch sees no CUDA device, and there is nothing to measure without one")


def run_rank(options: argparse.Namespace, layers: list[MoeShape], command: str) -> int:
    """One rank's part."""
    import torch
    import torch.distributed as dist

    started_s = time.monotonic()
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local = place(local, int(os.environ["WORLD_SIZE"]), torch.cuda.device_count())
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local), timeout=timedelta(seconds=COLLECTIVE_S))
    try:
        return _measure(options, layers, command, started_s)
    finally:
        dist.destroy_process_group()


def _measure(options: argparse.Namespace, layers: list[MoeShape], command: str, started_s: float) -> int:
    import torch
    import torch.distributed as dist

    from megascale_kernels.bench.moe import moe_table as table
    from megascale_kernels.bench.moe.measure import MoeRow, Turns, measure_layer
    from megascale_kernels.bench.moe.training_layer import measure_training
    from megascale_kernels.memory.workspace import Workspace
    from megascale_kernels.moe.moe_config import MoeConfig

    report = Report(options.out, is_speaker=dist.get_rank() == 0)
    legend = table.LEGEND_OF_TRAINING if options.backward else table.LEGEND
    measure_one = measure_training if options.backward else measure_layer
    report.begin(facts(command, dist.get_world_size()), legend, table.HEADING, table.CSV_HEADING)
    config = MoeConfig()._replace(**settings(options.config))
    more = {beside: config._replace(**settings(beside.split(","))) for beside in options.beside}
    rows: list[MoeRow] = []
    left_out = 0
    for tokens, same in groupby(layers, key=lambda layer: layer.tokens):
        group = list(same)
        hidden = max(layer.hidden for layer in group)
        workspace = None
        for layer in group:
            late = torch.tensor(float(time.monotonic() - started_s > options.budget_s), device="cuda")
            dist.all_reduce(late, op=dist.ReduceOp.MAX)
            if bool(late):
                left_out += 1
                continue
            if workspace is None:
                workspace = Workspace(max_rows=tokens, max_gather_cols=hidden, deadline_s=DEADLINE_S)
            row = measure_one(
                layer, workspace, config, Turns(options.rounds, options.in_a_row), options.seed, more=more
            )
            rows.append(row)
            report.both(table.text_row(row), table.csv_row(row))
            if workspace.broken is not None:
                workspace.reset()
            workspace.forget_plans()
            torch.cuda.empty_cache()
        if workspace is not None:
            workspace.close()
    report.line()
    for text in table.summary(rows):
        report.line(text)
    report.line(f"{time.monotonic() - started_s:.0f} s; {left_out} layers left out (budget of {options.budget_s:g} s)")
    return int(any(row.note for row in rows))
