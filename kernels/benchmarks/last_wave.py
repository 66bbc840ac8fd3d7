# SPDX-License-Identifier: Apache-2.0
"""What becomes of the last wave of tiles: whole, in parts, or dealt out evenly; warp-specialised kernels, on one GPU.

    python kernels/benchmarks/last_wave.py {ag_gemm,gemm_rs} [--ranks 1] [--shapes 7B,70B] [--m 4096] [--scale tp8]
                                           [--out FILE]

448 tiles on 132 multiprocessors are 3.39 waves. Tiles of the last one can stay whole (80 multiprocessors have nothing
to do), be cut into some parts each, or all multiprocessors share their K blocks. These take turns with cuBLAS and with
what is chosen where nothing is asked for. With one rank it is the kernel that communicates nothing. With more, rank 0's
runs as it does among so many, and `stand_ins.py` says what takes its peers' place.
"""

import argparse
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
from megascale_kernels.autotune import choosing
from megascale_kernels.autotune.timing import measure
from megascale_kernels.bench.report import Report, facts
from megascale_kernels.bench.rows import config_text, geometric_mean
from megascale_kernels.bench.shapes import OPERATORS, Shape
from megascale_kernels.memory.operands import processors, read_weight
from megascale_kernels.planning import cost_model
from megascale_kernels.planning.config import Config
from megascale_kernels.planning.tiling import EVEN, LastWave
from stand_ins import TILE_ROWS, gather, parser, partials, run, scatter, stand_ins, tensors

WRONG = 0.02


class Row(NamedTuple):
    """One shape.

    Attributes:
        shape: what was multiplied.
        config: the configuration that is chosen where nothing is asked for.
        waves: tiles over multiprocessors.
        parts: how many "parts" are.
        gemm_s: cuBLAS alone.
        seconds: of "whole", "parts", "even" and "chosen".
    """

    shape: Shape
    config: Config
    waves: float
    parts: int
    gemm_s: float
    seconds: dict[str, float]

    @property
    def line(self) -> str:
        """The row of the table."""
        shape, us = self.shape, {name: time_s * 1e6 for name, time_s in self.seconds.items()}
        return (
            f"{shape.name:<10}  {shape.scale:<6}  {shape.m:>5}  {shape.n:>6}  {shape.k:>6}  {self.waves:>5.2f}"
            f"  {self.gemm_s * 1e6:>8.1f}  {us['whole']:>8.1f}  {us['parts']:>8.1f} /{self.parts}  {us['even']:>8.1f}"
            f"  {us['chosen']:>8.1f}  {self.gain:>6.3f}  {self.lost:>6.3f}  {config_text(self.config)}"
        )

    @property
    def gain(self) -> float:
        """What could be had without even shares, over what is chosen."""
        return min(self.seconds["whole"], self.seconds["parts"]) / self.seconds["chosen"]

    @property
    def lost(self) -> float:
        """What is chosen, over the best of all."""
        return self.seconds["chosen"] / min(self.seconds.values())


HEADING = (
    f"{'shape':<10}  {'scale':<6}  {'M':>5}  {'N':>6}  {'K':>6}  {'waves':>5}  {'GEMM':>8}  {'whole':>8}  {'parts':>8}"
    f"     {'even':>8}  {'chosen':>8}  {'gain':>6}  {'lost':>6}  config"
)
LEGEND = """\
times in us, contenders in turn; GEMM: cuBLAS alone; whole, parts, even: what becomes of the tiles of the last wave;
chosen: where nothing is asked for (an all-gather's timetable may cut more); gain: the better of whole and parts /
chosen; lost: chosen / the best of all
"""


def configuration(operator: str, shape: Shape, ranks: int) -> Config:
    """What a user gets, or tiles of 128 x 256 where there is nothing to overlap."""
    if ranks == 1:
        return Config(TILE_ROWS, 256, group_m=16, kernel="hopper")
    machine = cost_model.machine_of(*choosing.describe(torch.device("cuda")))
    return choosing.likely(operator, shape.m, shape.n, shape.k, ranks, machine)


def likely_parts(wave: LastWave) -> int:
    """The cheapest number of parts by the model, at least two."""
    return min(range(2, 5), key=wave.cost)


def take_turns(operator: str, shape: Shape, workspace: Workspace, solo: dist.ProcessGroup, rounds: int) -> Row | None:
    """Check and time one shape; None where waves are full. A wrong result ends the run."""
    ranks, config = workspace.world_size, configuration(operator, shape, workspace.world_size)
    blocks_m = -(-shape.m // ranks // TILE_ROWS)
    tiles, programs = blocks_m * -(-shape.n // config.block_n) * ranks, processors(workspace.device)
    wave = LastWave(tiles % programs, programs, -(-shape.k // config.block_k), config.block_n)
    if wave.tiles == 0 or not wave.can_be_shared():
        return None
    launch, gemm, exact = of_operator(operator, shape, workspace)
    parts = likely_parts(wave)
    splits = {"whole": 1, "parts": parts, "even": EVEN, "chosen": config.tail_split}

    def ours(split: int | None) -> Callable[[], torch.Tensor]:
        return lambda: launch(config._replace(tail_split=split))

    calls: dict[str, Callable[[], object]] = {}
    for name, split in splits.items():
        call = ours(split)
        call().fill_(math.nan)
        first, again = call().clone(), call().clone()
        workspace.check()
        if not torch.equal(first, again) or not float((first.float() - exact).norm()) <= WRONG * float(exact.norm()):
            raise SystemExit(f"{shape.label}, {name}: wrong, or not the same twice, by {config_text(config)}")
        calls[name] = call
    del exact
    found = measure({"gemm": gemm, **calls, "after": gemm}, rounds=rounds, group=solo, check=workspace.check, ends=1)
    seconds = found.seconds
    gemm_s = (seconds.pop("gemm") + seconds.pop("after")) / 2
    return Row(shape, config, tiles / programs, parts, gemm_s, seconds)


def of_operator(
    operator: str, shape: Shape, workspace: Workspace
) -> tuple[Callable[[Config], torch.Tensor], Callable[[], torch.Tensor], torch.Tensor]:
    """A launch by a configuration, always into the same output; cuBLAS alone; the exact result."""
    ranks = workspace.world_size
    if operator == "ag_gemm":
        x, w, peers = tensors(shape, workspace)
        rows = torch.cat([x, *[peers] * (ranks - 1)])
        out, module, exact = x.new_empty(shape.m, shape.n), gather, torch.matmul(rows, w).float()
    else:
        x = rows = torch.randn(shape.m, shape.k, device="cuda").bfloat16()
        w = torch.randn(shape.n, shape.k, device="cuda").mul_(0.02).bfloat16().T
        m_shard = shape.m // ranks
        out, module = x.new_empty(m_shard, shape.n), scatter
        exact = torch.matmul(x[:m_shard], w).float() + partials(shape, workspace)
    weight = read_weight(w, x, operator)

    def launch(config: Config) -> torch.Tensor:
        module.launch(x, weight, out, None, workspace, config)
        return out

    return launch, lambda: torch.matmul(rows, w), exact


def compare(options: argparse.Namespace, shapes: list[Shape], workspace: Workspace, solo: dist.ProcessGroup) -> None:
    """Rank 0's part: all shapes into the report."""
    report = Report(options.out, is_speaker=True)
    head = facts(shlex.join(["python", "kernels/benchmarks/last_wave.py", *sys.argv[1:]]), options.ranks)
    for text in (*head.lines(), *LEGEND.splitlines(), "", HEADING):
        report.line(text)
    rows = []
    with stand_ins(options.operator, workspace):
        for shape in shapes:
            row = take_turns(options.operator, shape, workspace, solo, options.rounds)
            if row is not None:
                rows.append(row)
                report.line(row.line)
    report.line()
    if not rows:
        report.line("no shape has a last wave that is not full")
        return
    for name, ratios in {"gain": [row.gain for row in rows], "lost": [row.lost for row in rows]}.items():
        mean = geometric_mean(ratios)
        report.line(f"{name}: {mean:.3f} (geometric mean of {len(rows)}), {min(ratios):.3f} to {max(ratios):.3f}")


def main() -> int:
    """The command line, then one rank after the other."""
    made = parser(__doc__ or "", most_ranks=8, fewest_ranks=1)
    made.add_argument("operator", choices=OPERATORS)
    made.set_defaults(ranks=1)
    options = made.parse_args()
    return run(Path(__file__), options, partial(compare, options))


if __name__ == "__main__":
    sys.exit(main())
