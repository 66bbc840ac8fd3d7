# SPDX-License-Identifier: Apache-2.0
"""`python -m megascale_kernels.bench moe-family`: start the ranks, measure family after family, write it down."""

import argparse
import math
import os
import shlex
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megascale_kernels.autotune.timing import order_of
from megascale_kernels.bench.moe import moe_shapes as shapes
from megascale_kernels.bench.moe.moe_shapes import MoeShape
from megascale_kernels.bench.moe_family.families import Way, all_ways
from megascale_kernels.bench.ranks import place, start
from megascale_kernels.bench.report import Report, facts
from megascale_kernels.bench.request import MOE_FAMILY, PROGRAM, UserError
from megascale_kernels.bench.training.steps import sentence, stopwatch
from megascale_kernels.memory.workspace import Workspace

SLACK_S = 120.0  # beyond the budget: start, the family in hand, the end
DEADLINE_S = 20.0
COLLECTIVE_S = 120
WRONG = 0.02  # relative distance; bf16 results differ by 0.003
LEGEND = """\
Schedules on collectives: the forward alone, and forward with backward. Milliseconds of one call from idle devices and
a meeting of the ranks to the last kernel's end, the slower rank, the median of rounds, ways of a family in turn.
"over first" compares with the first way of the family; apart: relative distance of its result from the first one's
(- where it is another layer)."""
HEADING = f"{'layer':<58}{'family':<22}{'way':<18}{'forward':>9}{'+back':>9}{'over first':>12}{'+back':>8}{'apart':>9}"
CSV_HEADING = (*MoeShape._fields, "family", "way", "forward_s", "both_s", "apart", "note")


class FamilyRow(NamedTuple):
    """One way of one layer; seconds, NaN where there is none."""

    shape: MoeShape
    family: str
    way: str
    forward_s: float
    both_s: float
    apart: float
    note: str = ""


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog=f"{PROGRAM} {MOE_FAMILY}", description="Measure the family of MoE schedules.")
    made.add_argument("--gpus", type=int, default=2, help="ranks (default 2)")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: over gloo, in fp32")
    made.add_argument("--models", help=f"comma-separated, of {', '.join(shapes.MODELS)} (default all)")
    made.add_argument("--sizes", help="EXPERTS,TOP_K,H,I instead of models")
    made.add_argument("--tokens", default="8192", help="of all ranks, comma-separated (default 8192)")
    made.add_argument("--std", type=float, default=0.0, help="standard deviation of the experts' shares (default 0)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--rounds", type=int, default=5, help="how often each way is timed (default 5)")
    made.add_argument("--budget-s", type=float, default=120.0, help="no layer is begun after this (default 120)")
    made.add_argument("--out", type=Path, help="the table as text; a CSV goes beside it")
    return made


def wanted(options: argparse.Namespace, seen: int) -> list[MoeShape]:
    """The layers that were asked for.

    Raises:
        ValueError: the message names the option.
    """
    if options.gpus < 1 or options.rounds < 1 or not 0 < options.budget_s < math.inf:
        raise UserError("--gpus, --rounds and --budget-s are positive numbers")
    if options.device == "cuda" and seen < options.gpus:
        raise UserError(f"--gpus {options.gpus}: torch sees {seen} CUDA devices; --device cpu needs none")
    try:
        tokens = tuple(int(word) for word in options.tokens.split(","))
        sizes = None if options.sizes is None else tuple(int(word) for word in options.sizes.split(","))
    except ValueError:
        raise UserError(f"--tokens {options.tokens} --sizes {options.sizes}: comma-separated numbers") from None
    if min(tokens) < 1:
        raise UserError(f"--tokens {options.tokens}: positive numbers")
    if sizes is None:
        return shapes.wanted(options.models, tokens, options.std, options.gpus)
    if options.models is not None:
        raise UserError("--models and --sizes: give one of them")
    if len(sizes) != 4 or min(sizes) < 1 or sizes[1] > sizes[0] or sizes[0] % options.gpus:
        raise UserError(f"--sizes {options.sizes}: EXPERTS,TOP_K,H,I; ranks share the experts, a token has at most all")
    if any(count % options.gpus for count in tokens):
        raise UserError(f"--tokens {options.tokens}: multiples of the {options.gpus} ranks")
    return [MoeShape("given", *sizes, count, options.std) for count in tokens]


def main(arguments: list[str]) -> int:
    """Run the command: 0 when all went well, 1 when a way was wrong, 2 for a request that cannot be served."""
    options = parser().parse_args(arguments)
    try:
        layers = wanted(options, torch.cuda.device_count())
        if "RANK" in os.environ:
            return run_rank(options, layers, shlex.join([*PROGRAM.split(), MOE_FAMILY, *arguments]))
        Report(options.out, is_speaker=True)  # that it can be written is better known before ranks are started
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{PROGRAM} {MOE_FAMILY}: {error}", file=sys.stderr)
        return 2
    return start([MOE_FAMILY, *arguments], options.gpus, options.budget_s + SLACK_S)


def run_rank(options: argparse.Namespace, layers: list[MoeShape], command: str) -> int:
    """One rank's part."""
    started_s, ranks = time.monotonic(), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if options.device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        device = torch.device("cuda", place(local, ranks, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )  # fmt: skip
    try:
        return _measure(options, layers, command, device, started_s)
    finally:
        dist.destroy_process_group()


def _measure(
    options: argparse.Namespace, layers: list[MoeShape], command: str, device: torch.device, started_s: float
) -> int:
    report = Report(options.out, is_speaker=dist.get_rank() == 0)
    report.begin(facts(command, dist.get_world_size()), LEGEND, HEADING, CSV_HEADING)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bad = left_out = 0
    for shape in layers:
        late = torch.tensor(float(time.monotonic() - started_s > options.budget_s), device=device)
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        if bool(late):
            left_out += 1
            continue
        workspace = Workspace(
            max_rows=shape.tokens, max_gather_cols=shape.hidden, dtype=dtype, deadline_s=DEADLINE_S, device=device
        )
        for family in all_ways(shape, workspace, options.seed):
            rows = measure_family(shape, family, options.rounds, workspace)
            for row in rows:
                report.both(text_row(row, rows[0]), csv_row(row))
                bad += bool(row.note)
        workspace.close()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    report.line()
    report.line(f"{time.monotonic() - started_s:.0f} s; {left_out} layers left out (budget of {options.budget_s:g} s)")
    return int(bad > 0)


def measure_family(shape: MoeShape, family: list[Way], rounds: int, workspace: Workspace) -> list[FamilyRow]:
    """Check every way of a family against the first, then time all in turn. Collective."""
    notes, apart = {way.name: "" for way in family}, dict.fromkeys((way.name for way in family), math.nan)
    first: Tensor | None = None
    for way in family:
        try:
            out = way.call().detach()
        except Exception as error:  # noqa: BLE001 - a way may fail in any way; its row says how
            notes[way.name] = sentence(error)
            continue
        if first is None:
            first = out
        if way.same:
            apart[way.name] = _largest((out.double() - first.double()).norm() / first.double().norm(), workspace)
            if not apart[way.name] < WRONG:
                notes[way.name] = f"wrong: {apart[way.name]:.1e} away"
    calls: dict[str, Callable[[], object]] = {}
    for way in family:
        if not notes[way.name]:
            calls[f"forward {way.name}"] = _forward(way)
            calls[f"both {way.name}"] = _both(way)
    seconds = _time(calls, rounds, workspace)
    return [
        FamilyRow(
            shape, way.family, way.name, seconds.get(f"forward {way.name}", math.nan),
            seconds.get(f"both {way.name}", math.nan), apart[way.name], notes[way.name],
        )
        for way in family
    ]  # fmt: skip


def _forward(way: Way) -> Callable[[], object]:
    def call() -> None:
        with torch.no_grad():
            way.call()

    return call


def _both(way: Way) -> Callable[[], object]:
    def call() -> None:
        torch.autograd.grad(way.call().float().sum(), way.leaves)

    return call


def _time(calls: dict[str, Callable[[], object]], rounds: int, workspace: Workspace) -> dict[str, float]:
    """The median over rounds of the slower rank, by name; the first of `rounds` + 1 rounds warms up."""
    names = list(calls)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in order_of(names, turn):
            stop = stopwatch(workspace.device, workspace.group)
            calls[name]()
            taken[name].append(_largest(torch.tensor(stop()), workspace))
    return {name: median(times[1:]) for name, times in taken.items()}


def _largest(value: Tensor, workspace: Workspace) -> float:
    one = value.detach().to(workspace.device, torch.float64).view(1)
    dist.all_reduce(one, op=dist.ReduceOp.MAX, group=workspace.group)
    return float(one)


def text_row(row: FamilyRow, first: FamilyRow) -> str:
    """One way as a line, beside the first of its family."""
    apart = "-" if math.isnan(row.apart) else f"{row.apart:.1e}"
    return (
        f"{row.shape.label:<58}{row.family:<22}{row.way:<18}{row.forward_s * 1e3:>9.3f}{row.both_s * 1e3:>9.3f}"
        f"{first.forward_s / row.forward_s:>12.2f}{first.both_s / row.both_s:>8.2f}{apart:>9}  {row.note}"
    ).rstrip()


def csv_row(row: FamilyRow) -> list[str]:
    """One way as cells."""
    numbers = (f"{value:.6g}" for value in (row.forward_s, row.both_s, row.apart))
    return [*(str(value) for value in row.shape), row.family, row.way, *numbers, row.note]
