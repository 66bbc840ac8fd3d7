# SPDX-License-Identifier: Apache-2.0
"""What our extras cost, and how good our product is: progress, trace, and the kernel without communication.

Each contender has a workspace of its own, and they take turns as always; the base runs first and last, and its two
times show how far apart two measurements of the same thing are.
"""

import math
import os
from contextlib import ExitStack

import torch
import torch.distributed as dist

from megascale_kernels.autotune import candidates
from megascale_kernels.autotune.choosing import open_table
from megascale_kernels.autotune.timing import Call, measure
from megascale_kernels.autotune.trial import make
from megascale_kernels.bench.report import Facts, Report
from megascale_kernels.bench.rows import config_text, geometric_mean
from megascale_kernels.bench.shapes import Shape
from megascale_kernels.bench.sweep import Plan, pick_kernel, workspace_for
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config
from megascale_kernels.progress.board_file import map_board

AGAIN = " again"


def progress_cost(plan: Plan, shapes: list[Shape], report: Report, head: Facts) -> None:
    """Time the kernel without progress, with it in device memory, and with it in host memory that the GPU maps."""
    with ExitStack() as stack:
        board = stack.enter_context(map_board(f"megascale-bench-{os.getpid()}", rank=dist.get_rank()))
        stack.callback(board.path.unlink, missing_ok=True)
        workspaces = {
            "off": workspace_for(plan.operator, shapes, progress=False),
            "device": workspace_for(plan.operator, shapes, progress=True),
            "host": workspace_for(plan.operator, shapes, progress=board.words),
        }
        _compare(plan, shapes, workspaces, report, head)


def trace_cost(plan: Plan, shapes: list[Shape], report: Report, head: Facts) -> None:
    """Time the kernel without and with the trace of every tile."""
    workspaces = {
        "off": workspace_for(plan.operator, shapes, trace=False),
        "trace": workspace_for(plan.operator, shapes, trace=True),
    }
    _compare(plan, shapes, workspaces, report, head)


def compute_quality(plan: Plan, shapes: list[Shape], report: Report, head: Facts) -> None:
    """Time the kernel of one rank alone, which communicates nothing, against cuBLAS; all GPUs run, as in training."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    alone = workspace_for(plan.operator, shapes, group=groups[dist.get_rank()])
    _begin(report, head, ("cuBLAS", "cuBLAS" + AGAIN, "ours"), "cuBLAS / ours")
    ratios = []
    for shape in shapes:
        machine = open_table(alone).machine
        config = plan.config or candidates(plan.operator, shape.m, shape.n, shape.k, 1, machine)[0]
        trial = make(plan.operator, shape.m, shape.n, shape.k, alone)
        calls: dict[str, Call] = {"cuBLAS": trial.gemm, "ours": trial.ours(config), "cuBLAS" + AGAIN: trial.gemm}
        measured = measure(calls, rounds=plan.rounds, group=None, check=alone.check, risky=("ours",))
        seconds = measured.seconds
        base = (seconds["cuBLAS"] + seconds["cuBLAS" + AGAIN]) / 2
        ratios.append(base / seconds["ours"])
        _line(report, shape, [seconds["cuBLAS"], seconds["cuBLAS" + AGAIN], seconds["ours"]], ratios[-1:], config)
        if math.isinf(seconds["ours"]):
            report.line(f"  ours: {measured.errors.get('ours', 'failed on another rank')}")
            alone.reset()
    report.line()
    report.line(f"cuBLAS / ours: {_mean(ratios):.3f} (geometric mean), worst {min(ratios):.3f}")


def _compare(plan: Plan, shapes: list[Shape], workspaces: dict[str, Workspace], report: Report, head: Facts) -> None:
    base, *others = workspaces
    _begin(report, head, (base, base + AGAIN, *others), *(f"{name} / {base}" for name in others))
    ratios: dict[str, list[float]] = {name: [] for name in others}
    for shape in shapes:
        config = pick_kernel(plan, shape, workspaces[base])
        calls: dict[str, Call] = {
            name: make(plan.operator, shape.m, shape.n, shape.k, workspace).ours(config)
            for name, workspace in workspaces.items()
        }
        calls[base + AGAIN] = calls[base]

        def check() -> None:
            torch.cuda.synchronize()
            for workspace in workspaces.values():
                workspace.check()

        measured = measure(calls, rounds=plan.rounds, group=workspaces[base].group, check=check, risky=tuple(calls))
        seconds = measured.seconds
        middle = (seconds[base] + seconds[base + AGAIN]) / 2
        for name in others:
            ratios[name].append(seconds[name] / middle)
        times = [seconds[base], seconds[base + AGAIN], *(seconds[name] for name in others)]
        _line(report, shape, times, [ratios[name][-1] for name in others], config)
        if not all(map(math.isfinite, seconds.values())):
            for name, error in measured.errors.items():
                report.line(f"  {name}: {error}")
            for workspace in workspaces.values():
                workspace.reset()
    report.line()
    for name, found in ratios.items():
        report.line(f"{name} / {base}: {_mean(found):.4f} (geometric mean), worst {max(found):.4f}")


def _mean(ratios: list[float]) -> float:
    return geometric_mean([ratio for ratio in ratios if math.isfinite(ratio) and ratio > 0])


def _begin(report: Report, head: Facts, names: tuple[str, ...], *ratios: str) -> None:
    for text in head.lines():
        report.line(text)
    report.line("times in ms, contenders in turn, median over rounds of the slowest rank")
    columns = "".join(f"  {name:>12}" for name in (*names, *ratios))
    report.line(f"{'shape':<10}  {'scale':<6}  {'M':>5}  {'N':>6}  {'K':>6}{columns}  config")


def _line(report: Report, shape: Shape, times: list[float], ratios: list[float], config: Config) -> None:
    cells = "".join(f"  {time_s * 1e3:>12.4f}" for time_s in times) + "".join(f"  {ratio:>12.4f}" for ratio in ratios)
    sizes = f"{shape.name:<10}  {shape.scale:<6}  {shape.m:>5}  {shape.n:>6}  {shape.k:>6}"
    report.line(f"{sizes}{cells}  {config_text(config)}")
