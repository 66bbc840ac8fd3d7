# SPDX-License-Identifier: Apache-2.0
"""Measure shape after shape: NCCL, cuBLAS, both in series, torch's fused operator, ours.

Each result is compared with float64 before it is timed; a wrong one gets no time. The workspace, the communicators and
the compiled kernels serve all shapes, so a shape costs its own tensors and rounds.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megascale_kernels import reference
from megascale_kernels.autotune import candidates, choose, tune
from megascale_kernels.autotune.choosing import open_table
from megascale_kernels.autotune.timing import Call, measure
from megascale_kernels.autotune.trial import Trial, make
from megascale_kernels.bench.report import Report
from megascale_kernels.bench.rows import Row, config_text
from megascale_kernels.bench.shapes import Shape
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config

DEADLINE_S = 10.0  # a failure costs this much of the budget; no launch takes a hundredth of it
SAMPLE_ROWS = 64  # of each rank's shard are compared with float64; all elements are compared with the serial path
WRONG = 0.02  # relative distance from the serial path; bf16 results differ by 0.003


class Plan(NamedTuple):
    """How to measure.

    Attributes:
        operator: "ag_gemm" or "gemm_rs".
        rounds: how many times each contender is timed per shape.
        budget_s: no shape is begun after this.
        tune_s: seconds of tuning per shape; 0 takes what `choose` answers.
        config: one configuration for all shapes instead.
    """

    operator: str
    rounds: int
    budget_s: float
    tune_s: float
    config: Config | None


def workspace_for(operator: str, shapes: list[Shape], **more: object) -> Workspace:
    """A workspace that holds the largest of the shapes."""
    is_gather = operator == "ag_gemm"
    more.setdefault("deadline_s", DEADLINE_S)
    return Workspace(
        max_rows=max(shape.m for shape in shapes),
        max_gather_cols=max(shape.k for shape in shapes) if is_gather else 0,
        max_scatter_cols=0 if is_gather else max(shape.n for shape in shapes),
        **more,  # type: ignore[arg-type]  # the caller's keywords are Workspace's own
    )


def sweep(plan: Plan, shapes: list[Shape], workspace: Workspace, report: Report, started_s: float) -> None:
    """Measure all shapes into the report. Collective.

    Args:
        plan: how.
        shapes: what.
        workspace: large enough for all of them.
        report: where the rows go.
        started_s: `time.monotonic()` when the budget began.
    """
    reserve_for_torch(plan.operator, shapes, workspace)
    spent = {"start": time.monotonic() - started_s, "choosing": 0.0, "tensors and checks": 0.0, "rounds": 0.0}
    left_out: list[Shape] = []
    for place, shape in enumerate(shapes):
        if time_is_up(workspace, mine=time.monotonic() - started_s > plan.budget_s):
            left_out = shapes[place:]
            break
        report.row(measure_shape(plan, shape, workspace, spent))
    more = [f"time: {', '.join(f'{what} {seconds:.0f} s' for what, seconds in spent.items())}"]
    if left_out:
        more.append(f"left out (budget of {plan.budget_s:g} s): {', '.join(shape.label for shape in left_out)}")
    report.end_table(more)


def measure_shape(plan: Plan, shape: Shape, workspace: Workspace, spent: dict[str, float]) -> Row:
    """One row: choose, check, time."""
    clock = time.monotonic()

    def lap(what: str) -> None:
        nonlocal clock
        torch.cuda.synchronize()
        now = time.monotonic()
        spent[what] += now - clock
        clock = now

    config = pick(plan, shape, workspace)
    lap("choosing")
    trial = make(plan.operator, shape.m, shape.n, shape.k, workspace)
    ours = trial.serial if config is None else trial.ours(config)
    error, serial_error, note = check(trial, config, workspace)
    lap("tensors and checks")
    nan = math.nan
    nothing = Row(shape, nan, nan, nan, nan, nan, nan, config_text(config), error, serial_error, note)
    if note:
        return nothing
    calls: dict[str, Call] = {
        "gemm": trial.gemm, "comm": trial.comm, "serial": trial.serial, "torch": torch_fused(trial, workspace),
        "ours": ours, "after": trial.gemm,
    }  # fmt: skip
    measured = measure(calls, rounds=plan.rounds, group=workspace.group, check=workspace.check, risky=("ours",), ends=1)
    lap("rounds")
    if math.isinf(measured.seconds["ours"]):
        workspace.reset()
        return nothing._replace(note=f"failed: {measured.errors.get('ours', 'on another rank')}")
    seconds = {name: value if math.isfinite(value) else math.nan for name, value in measured.seconds.items()}
    return nothing._replace(
        gemm_s=seconds["gemm"], gemm_after_s=seconds["after"], comm_s=seconds["comm"], serial_s=seconds["serial"],
        torch_s=seconds["torch"], ours_s=seconds["ours"],
    )  # fmt: skip


def pick(plan: Plan, shape: Shape, workspace: Workspace) -> Config | None:
    """The configuration that a user would get: None is the serial path."""
    if plan.config is not None:
        return plan.config
    question = plan.operator, shape.m, shape.n, shape.k
    if plan.tune_s > 0:
        return tune(*question, workspace, budget_s=plan.tune_s).config
    return choose(*question, workspace)


def pick_kernel(plan: Plan, shape: Shape, workspace: Workspace) -> Config:
    """A configuration of our kernel, also where a user would get the serial path."""
    machine = open_table(workspace).machine
    best = candidates(plan.operator, shape.m, shape.n, shape.k, workspace.world_size, machine)[0]
    return pick(plan, shape, workspace) or best


def check(trial: Trial, config: Config | None, workspace: Workspace) -> tuple[float, float, str]:
    """Run once into a poisoned output and compare.

    Returns:
        relative errors of ours and of the serial path against float64, the largest over ranks, and a note on what is
        wrong, "" if nothing is.
    """
    serial = trial.serial()
    error, serial_error = math.inf, math.inf
    note = ""
    try:
        if config is not None:
            trial.out.fill_(math.nan)
            trial.ours(config)()
        else:
            trial.out.copy_(serial)
        workspace.check()
    except Exception as reason:  # noqa: BLE001 - a contender may fail in any way; the row shows how
        note = f"failed: {type(reason).__name__}: {str(reason).splitlines()[0]}"
    failed = worst(workspace, [float(bool(note))])[0]
    if failed:
        workspace.reset()
        return error, serial_error, note or "failed on another rank"
    far = distance(trial.out, serial)
    rows, exact = sample(trial, workspace)
    error, serial_error, far = worst(workspace, [distance(trial.out[rows], exact), distance(serial[rows], exact), far])
    return error, serial_error, f"wrong: {far:.1e} away from the serial path" if far > WRONG else ""


def sample(trial: Trial, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Some rows of this rank's output: their numbers, and what they should be in float64."""
    world_size, rank = workspace.world_size, workspace.rank
    is_gather = trial.operator == "ag_gemm"
    shard_m = trial.out.shape[0] // world_size if is_gather else trial.out.shape[0]
    within = torch.linspace(0, shard_m - 1, min(SAMPLE_ROWS, shard_m), device=trial.x.device).long()
    everywhere = torch.cat([source * shard_m + within for source in range(world_size)])
    if is_gather:
        return everywhere, reference.all_gather(trial.x[within], workspace.group).double() @ trial.w.double()
    partial = trial.x[everywhere].double() @ trial.w.double()
    dist.all_reduce(partial, group=workspace.group)
    return within, partial[rank * len(within) : (rank + 1) * len(within)]


def distance(result: Tensor, exact: Tensor) -> float:
    """||result - exact|| / ||exact||, infinite where anything is not a number."""
    found = float((result.double() - exact.double()).norm() / exact.double().norm())
    return found if math.isfinite(found) else math.inf


def norm(tensor: Tensor) -> float:
    """||tensor||, summed in float32 or better, without a copy of it."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)))


def worst(workspace: Workspace, figures: list[float]) -> list[float]:
    """The largest over ranks of each figure."""
    table = torch.tensor(figures, dtype=torch.float64, device=workspace.device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=workspace.group)
    largest: list[float] = table.tolist()
    return largest


def time_is_up(workspace: Workspace, *, mine: bool) -> bool:
    """Whether rank 0's time is up; all ranks get the same answer."""
    return worst(workspace, [float(mine and workspace.rank == 0)])[0] > 0


def torch_fused(trial: Trial, workspace: Workspace) -> Callable[[], object]:
    """Torch's own fused operator on the same tensors; it copies what it sends into symmetric memory of its own."""
    name = group_name(workspace)
    if trial.operator == "ag_gemm":
        return lambda: torch.ops.symm_mem.fused_all_gather_matmul(trial.x, [trial.w], 0, name)
    return lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(trial.x, trial.w, "sum", 0, name)


def reserve_for_torch(operator: str, shapes: list[Shape], workspace: Workspace) -> None:
    """Let torch's operator make its symmetric memory once, for the largest shape, and not anew for each larger one."""
    import torch.distributed._symmetric_memory as symm_mem

    # It gathers a shard of the input, or keeps two shards of the output.
    columns = [shape.k if operator == "ag_gemm" else 2 * shape.n for shape in shapes]
    largest = max(shape.m * cols for shape, cols in zip(shapes, columns, strict=True)) // workspace.world_size
    name, size = group_name(workspace), largest * workspace.dtype.itemsize
    symm_mem.get_symm_mem_workspace(name, min_size=size)  # type: ignore[arg-type]  # newer torch has a type for names


def group_name(workspace: Workspace) -> str:
    """The name by which torch's operators find a group."""
    return workspace.group.group_name
