# SPDX-License-Identifier: Apache-2.0
"""Rehearse one rank's all-gather + GEMM on one GPU: the peers' rows are announced when a link would have brought them.

    python kernels/benchmarks/rehearse.py --ranks 4 [--shapes 7B,70B] [--m 2048] [--scale tp8]
                                          [--against kernels/benchmarks/results/ag_gemm_4gpu.csv] [--out FILE]

Where there is one GPU and not four, this says what an order of tiles, a cut or a tile's width is worth among four. Rank
0's kernel runs as always, alone on the GPU, and `stand_ins.py` says what takes its peers' place. Three configurations
take turns with cuBLAS: the one that waves of tiles choose, and that of the timetable in wide and in narrow tiles.

`--against` names a table that was measured on so many GPUs and says how near the rehearsal comes, configuration by
configuration.
"""

import argparse
import csv
import math
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from megascale_kernels import Workspace
from megascale_kernels.autotune import choosing, space
from megascale_kernels.autotune.timing import measure
from megascale_kernels.bench.report import Report, facts
from megascale_kernels.bench.rows import config_text, geometric_mean
from megascale_kernels.bench.shapes import Shape
from megascale_kernels.memory.operands import read_weight
from megascale_kernels.planning import cost_model
from megascale_kernels.planning.config import Config
from stand_ins import gather, parser, run, stand_ins, tensors

WRONG = 0.02


class Rehearsed(NamedTuple):
    """One shape.

    Attributes:
        shape: what was multiplied.
        gemm_s: cuBLAS alone.
        seconds: of "before" (tile by waves), "wide" and "narrow" (by timetable).
        configs: what these were.
        chosen: the one of the last two that a user would get.
    """

    shape: Shape
    gemm_s: float
    seconds: dict[str, float]
    configs: dict[str, Config]
    chosen: str

    @property
    def gain(self) -> float:
        """Before over chosen."""
        return self.seconds["before"] / self.seconds[self.chosen]

    @property
    def foretold_s(self) -> float:
        """What the timetable says of the chosen one."""
        shape, config = self.shape, self.configs[self.chosen]
        machine = cost_model.machine_of(*choosing.describe(torch.device("cuda")))
        return cost_model.predict("ag_gemm", shape.m, shape.n, shape.k, dist.get_world_size(), config, machine).total_s

    def line(self, there: dict[str, float]) -> str:
        """The row of the table; `there`: seconds by configuration, measured on so many GPUs."""
        shape, ms = self.shape, {name: time_s * 1e3 for name, time_s in self.seconds.items()}
        known = [(name, there[text]) for name, config in self.configs.items() if (text := config_text(config)) in there]
        measured = f"{known[0][1] * 1e3:>8.3f}  {self.seconds[known[0][0]] / known[0][1]:>6.3f}" if known else " " * 16
        return (
            f"{shape.name:<10}  {shape.scale:<6}  {shape.m:>5}  {shape.n:>6}  {shape.k:>6}  {self.gemm_s * 1e3:>7.3f}"
            f"  {ms['before']:>7.3f}  {ms['wide']:>7.3f}  {ms['narrow']:>7.3f}  {self.chosen:<6}  {self.gain:>6.3f}"
            f"  {self.foretold_s * 1e3:>8.3f}  {measured}  {config_text(self.configs[self.chosen])}"
        )


HEADING = (
    f"{'shape':<10}  {'scale':<6}  {'M':>5}  {'N':>6}  {'K':>6}  {'GEMM':>7}  {'before':>7}  {'wide':>7}  {'narrow':>7}"
    f"  {'chosen':<6}  {'gain':>6}  {'foretold':>8}  {'there':>8}  {'/there':>6}  config"
)
LEGEND = """\
times in ms, contenders in turn; GEMM: cuBLAS alone; before: tile by waves; wide, narrow: 128 x 256 and 128 x 128
by timetable; chosen: which of these a user gets; gain: before / chosen; foretold: of the chosen one by the timetable;
there: measured on so many GPUs, the one of the three that ran there; /there: the same rehearsed / measured
"""


def rehearse(shape: Shape, workspace: Workspace, solo: dist.ProcessGroup, rounds: int) -> Rehearsed:
    """Check and time one shape; a wrong result ends the run."""
    ranks = workspace.world_size
    machine = cost_model.machine_of(*choosing.describe(workspace.device))
    question = shape.m, shape.n, shape.k, ranks, machine
    wide, narrow = space.planned("ag_gemm", *question)
    configs = {"before": choosing.by_waves("ag_gemm", *question), "wide": wide, "narrow": narrow}
    x, w, peers = tensors(shape, workspace)
    out, weight = x.new_empty(shape.m, shape.n), read_weight(w, x, "ag_gemm")
    gathered = torch.cat([x, *[peers] * (ranks - 1)])

    def ours(config: Config) -> Callable[[], object]:
        return lambda: gather.launch(x, weight, out, None, workspace, config)

    calls: dict[str, Callable[[], object]] = {name: ours(config) for name, config in configs.items()}
    exact = torch.matmul(gathered, w).float()
    for name, call in calls.items():
        out.fill_(math.nan)
        call()
        workspace.check()
        if not float((out.float() - exact).norm()) <= WRONG * float(exact.norm()):
            raise SystemExit(f"{shape.label}, {name}: wrong by {config_text(configs[name])}")
    del exact
    calls = {"gemm": lambda: torch.matmul(gathered, w), **calls, "after": lambda: torch.matmul(gathered, w)}
    found = measure(calls, rounds=rounds, group=solo, check=workspace.check, ends=1).seconds
    names = {config: name for name, config in configs.items()}
    chosen = names[choosing.by_timetable(*question)]
    return Rehearsed(shape, (found["gemm"] + found["after"]) / 2, found, configs, chosen)


def measured_there(path: Path | None) -> dict[tuple[str, str, int], dict[str, float]]:
    """By shape, scale and M of a benchmark's CSV: seconds by configuration."""
    if path is None:
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {
            (row["shape"], row["scale"], int(row["m"])): {row["config"]: float(row["ours_ms"]) / 1e3}
            for row in csv.DictReader(file)
            if row["ours_ms"]  # one that failed has none
        }


def conduct(options: argparse.Namespace, shapes: list[Shape], workspace: Workspace, solo: dist.ProcessGroup) -> None:
    """Rank 0's part: rehearse all shapes into the report."""
    report = Report(options.out, is_speaker=True)
    head = facts(shlex.join(["python", "kernels/benchmarks/rehearse.py", *sys.argv[1:]]), workspace.world_size)
    for text in (*head.lines(), *LEGEND.splitlines(), "", HEADING):
        report.line(text)
    there, rows, nearness = measured_there(options.against), [], []
    with stand_ins("ag_gemm", workspace):
        for shape in shapes:
            row = rehearse(shape, workspace, solo, options.rounds)
            known = there.get((shape.name, shape.scale, shape.m), {})
            report.line(row.line(known))
            rows.append(row)
            texts = {name: config_text(config) for name, config in row.configs.items()}
            nearness += [row.seconds[name] / known[text] for name, text in texts.items() if text in known]
    best = [row.seconds[row.chosen] / min(row.seconds[name] for name in row.configs) for row in rows]
    report.line()
    report.line(f"gain: {spread([row.gain for row in rows])}")
    report.line(f"chosen over the best of the three: {spread(best)}")
    report.line(f"chosen over foretold: {spread([row.seconds[row.chosen] / row.foretold_s for row in rows])}")
    if nearness:
        report.line(f"rehearsed over measured there: {spread(nearness)}")


def spread(ratios: list[float]) -> str:
    """Mean and extremes in few words."""
    return f"{geometric_mean(ratios):.3f} (geometric mean of {len(ratios)}), {min(ratios):.3f} to {max(ratios):.3f}"


def main() -> int:
    """The command line, then one rank after the other."""
    made = parser(__doc__ or "", most_ranks=8, fewest_ranks=2)
    made.add_argument("--against", type=Path, help="CSV of the benchmark on so many GPUs")
    made.set_defaults(operator="ag_gemm")
    options = made.parse_args()
    try:
        measured_there(options.against)
    except OSError as error:
        sys.exit(f"rehearse.py: {error}")
    except (KeyError, ValueError) as error:
        sys.exit(f"rehearse.py: --against {options.against} is no CSV of the benchmark: no {error}")
    return run(Path(__file__), options, partial(conduct, options))


if __name__ == "__main__":
    sys.exit(main())
