# SPDX-License-Identifier: Apache-2.0
"""Rehearse one rank's all-gather + GEMM on one GPU: the peers' rows are announced when a link would have brought them.

    python kernels/benchmarks/rehearse.py --ranks 4 [--shapes 7B,70B] [--m 2048] [--scale tp8]
                                          [--against kernels/benchmarks/results/ag_gemm_4gpu.csv] [--out FILE]

Where there is one GPU and not four, this says what an order of tiles, a cut or a tile's width is worth among four. Rank
0's kernel runs as always, alone on the GPU; its peers' rows lie in its buffer from the start, and a conductor, on the
stream on which this rank would copy, raises their flags by the timetable of `gather_plan`. Three configurations take
turns with cuBLAS: the one that waves of tiles choose, and that of the timetable in wide and in narrow tiles.

What is left out: the bytes that arrive and leave meanwhile (8 % of what memory can do), ranks that begin at different
times, GPUs of one host that share its power and heat. `--against` names a table that was measured on so many GPUs and
says how near the rehearsal comes, configuration by configuration.
"""

import argparse
import csv
import importlib
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from megascale_kernels import Workspace, costs
from megascale_kernels.autotune import choosing, space
from megascale_kernels.autotune.handout import from_rank_zero
from megascale_kernels.autotune.timing import measure
from megascale_kernels.bench.ranks import environments, free_port, place, wait
from megascale_kernels.bench.report import Report, facts
from megascale_kernels.bench.request import UserError, shapes_of
from megascale_kernels.bench.rows import config_text, geometric_mean
from megascale_kernels.bench.shapes import ROWS, SCALES, Shape
from megascale_kernels.config import Config
from megascale_kernels.gather_plan import COPY_S, LINK_BYTES_PER_S
from megascale_kernels.layout import SIGNATURE_BITS, SLOTS
from megascale_kernels.operands import read_weight
from megascale_kernels.signals import now_ns
from torch import Tensor

# The package's name of this module is the operator's: the function.
launcher = importlib.import_module("megascale_kernels.ag_gemm")
DEADLINE_S = 900.0  # for all of it
SOON_NS = 1500  # a flag is up so long after the kernel before it on the stream has ended
WRONG = 0.02
TILE_ROWS = 128  # of every configuration here


class Arrival(NamedTuple):
    """One unit of a peer's rows: whose, which, when it is there (seconds from the beginning)."""

    source: int
    unit: int
    time_s: float


def timetable(m_shard: int, unit_rows: int, row_bytes: int, ranks: int) -> Iterator[Arrival]:
    """When each unit reaches rank 0: one copy after the other, the next rank's first."""
    copies, rows = 0, 0
    for source in range(1, ranks):
        for unit, first in enumerate(range(0, m_shard, unit_rows)):
            copies += 1
            rows += min(unit_rows, m_shard - first)
            yield Arrival(source, unit, copies * COPY_S + rows * row_bytes / LINK_BYTES_PER_S)


@triton.jit(do_not_specialize=("offset_ns",))
def pace(begun_ptr, offset_ns, BEGINS: tl.constexpr):
    """Note the time, or wait until so many nanoseconds after it."""
    begun_ns = now_ns()
    if BEGINS:
        tl.store(begun_ptr, begun_ns)
    else:
        begun_ns = tl.load(begun_ptr)
    while now_ns() - begun_ns < offset_ns:
        pass


class Conductor:
    """Takes the place of `push_by_copy_engine`: nothing is copied, flags come up in time."""

    def __init__(self) -> None:
        self.begun = torch.zeros(1, dtype=torch.int64, device="cuda")

    def __call__(
        self, x: Tensor, workspace: Workspace, slot: int, unit_rows: int, announce: int, pitch: int | None = None
    ) -> None:
        """Queue the flags of this launch."""
        del pitch
        layout, handle = workspace.layout, workspace.handle
        assert handle is not None  # made on a GPU
        stamp = (workspace.launches & 0xFFFFF) << SIGNATURE_BITS | announce
        with workspace.copying():
            pace[(1,)](self.begun, 0, BEGINS=True, num_warps=1)
            row_bytes = x.shape[1] * x.element_size()
            for source, unit, time_s in timetable(x.shape[0], unit_rows, row_bytes, workspace.world_size):
                first = layout.flags(slot) + source * layout.channels
                flags = handle.get_buffer(workspace.rank, [layout.channels], torch.uint32, first)
                pace[(1,)](self.begun, int(time_s * 1e9) - SOON_NS, BEGINS=False, num_warps=1)
                handle.stream_write_value32(flags, unit, stamp)


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
        machine = costs.machine_of(*choosing.describe(torch.device("cuda")))
        return costs.predict("ag_gemm", shape.m, shape.n, shape.k, dist.get_world_size(), config, machine).total_s

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
    machine = costs.machine_of(*choosing.describe(workspace.device))
    question = shape.m, shape.n, shape.k, ranks, machine
    wide, narrow = space.planned("ag_gemm", *question)
    configs = {"before": choosing.by_waves("ag_gemm", *question), "wide": wide, "narrow": narrow}
    x, w, peers = tensors(shape, workspace)
    out, weight = x.new_empty(shape.m, shape.n), read_weight(w, x, "ag_gemm")
    gathered = torch.cat([x, *[peers] * (ranks - 1)])

    def ours(config: Config) -> Callable[[], object]:
        return lambda: launcher.launch(x, weight, out, None, workspace, config)

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


def tensors(shape: Shape, workspace: Workspace) -> tuple[Tensor, Tensor, Tensor]:
    """Our rows, the weight, and the rows that every peer has: these lie in our buffer, where they would arrive."""
    m_shard = shape.m // workspace.world_size
    x, peers = (torch.randn(m_shard, shape.k, device="cuda").bfloat16() for _ in range(2))
    w = torch.randn(shape.n, shape.k, device="cuda").mul_(0.02).bfloat16().T
    pitch = -(-m_shard // TILE_ROWS) * TILE_ROWS
    for slot in range(SLOTS):
        workspace.local(slot, (workspace.world_size, pitch, shape.k))[1:, :m_shard].copy_(
            peers.expand(workspace.world_size - 1, -1, -1)
        )
    return x, w, peers


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
    with mock.patch.object(launcher, "push_by_copy_engine", Conductor()), mock.patch.object(workspace, "meet"):
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


def parsed() -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    made.add_argument("--ranks", type=int, default=4, choices=range(2, 9), metavar="2..8")
    made.add_argument("--shapes", help="as the benchmark's")
    made.add_argument("--m", default=",".join(map(str, ROWS)))
    made.add_argument("--scale", default=",".join(SCALES))
    made.add_argument("--rounds", type=int, default=6)
    made.add_argument("--against", type=Path, help="CSV of the benchmark on so many GPUs")
    made.add_argument("--out", type=Path)
    made.set_defaults(operator="ag_gemm")
    return made.parse_args()


def main() -> int:
    """Start the ranks, or be one: the others only lend their memory."""
    options = parsed()
    try:
        shapes = shapes_of(options, options.ranks)
        measured_there(options.against)
    except (UserError, OSError) as error:
        sys.exit(f"rehearse.py: {error}")
    except (KeyError, ValueError) as error:
        sys.exit(f"rehearse.py: --against {options.against} is no CSV of the benchmark: no {error}")
    if options.rounds < 1:
        sys.exit(f"rehearse.py: --rounds {options.rounds}: give 1 or more")
    if not torch.cuda.is_available():
        sys.exit("rehearse.py: it needs a CUDA GPU, and torch sees none on this machine")
    if "RANK" not in os.environ:
        try:
            Report(options.out, is_speaker=True)
        except OSError as error:
            sys.exit(f"rehearse.py: --out: {error}")
        command = [sys.executable, __file__, *sys.argv[1:]]
        ranks = environments(options.ranks, free_port(), dict(os.environ))
        return wait([subprocess.Popen(command, env=environment) for environment in ranks], DEADLINE_S)
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(place(rank, options.ranks, 1))
    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_S))
    solo = dist.new_group([0], backend="nccl")
    workspace = Workspace(
        max_rows=max(shape.m for shape in shapes), max_gather_cols=max(shape.k for shape in shapes), deadline_s=5.0
    )
    if rank == 0:
        conduct(options, shapes, workspace, solo)
    from_rank_zero(workspace.group, rank, options.ranks, "done", "end of the rehearsal", deadline_s=DEADLINE_S)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
