# SPDX-License-Identifier: Apache-2.0
"""Measure shapes that were drawn at random, each for half a second.

Ours is the public operator without a configuration, so that every decision it takes by itself is in the figures.
Whether the kernel ran is read from the workspace, which counts launches. Where it did not, the kernel is a contender of
its own, in the configuration that the operator would have begun with. Tensors are views of one pool, and results are
compared with float64 on some rows and columns.
"""

import math
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megascale_kernels import reference
from megascale_kernels.autotune.choosing import choose, likely, open_table
from megascale_kernels.autotune.contest import Contest, settle
from megascale_kernels.autotune.timing import Call, measure
from megascale_kernels.autotune.trial import Pool, Trial, make, pool_for
from megascale_kernels.bench import drawn_rows
from megascale_kernels.bench.drawn import Drawn
from megascale_kernels.bench.drawn_rows import DrawnRow, Foretold, HostTimes
from megascale_kernels.bench.drawn_summary import summary
from megascale_kernels.bench.report import Report
from megascale_kernels.bench.rows import Row, config_text
from megascale_kernels.bench.sweep import (
    SAMPLE_ROWS,
    WRONG,
    Plan,
    distance,
    norm,
    reserve_for_torch,
    time_is_up,
    torch_fused,
    workspace_for,
    worst,
)
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config
from megascale_kernels.planning.cost_model import predict, predict_serial
from megascale_kernels.torch_api.operators import ag_gemm, gemm_rs

SAMPLE_COLUMNS = 256  # of the output are compared with float64
FULL = 0.5  # of the GPU's memory kept for outputs of earlier sizes: given back before it runs short
HOST_CALLS = 50
HOST_BATCH = 5  # calls between two waits for the GPU: its queue holds hundreds of launches, and a call is a dozen
HOST_CHEAP_S = 0.15  # host times are taken where their calls keep the GPU busy for less, and of the first shapes
HOST_FIRST = 20
HOST_NAMES = ("serial", "torch", "ours")


class Ground(NamedTuple):
    """What all shapes share.

    Attributes:
        plan: how to measure.
        workspace: large enough for all of them.
        pool: the memory of their tensors.
        spent: seconds, by what they were spent on.
    """

    plan: Plan
    workspace: Workspace
    pool: Pool
    spent: dict[str, float]


class Checked(NamedTuple):
    """One run of an operator, compared.

    Attributes:
        launched: whether our kernel ran.
        error: ||result - float64|| / ||float64|| on some rows and columns, the largest over ranks.
        serial_error: the same of the serial path.
        note: what is wrong, "" if nothing is.
    """

    launched: bool
    error: float
    serial_error: float
    note: str


def sweep_drawn(plan: Plan, drawn: list[Drawn], report: Report, started_s: float) -> bool:
    """Measure all shapes into the report; whether each got its times. Collective.

    Args:
        plan: how; its configuration and its tuning are left out, since the operator chooses.
        drawn: what.
        report: where the rows go; its head is written.
        started_s: `time.monotonic()` when the budget began.
    """
    shapes = [one.shape for one in drawn]
    workspace = workspace_for(plan.operator, shapes)
    reserve_for_torch(plan.operator, shapes, workspace)
    pool = pool_for(plan.operator, [(shape.m, shape.n, shape.k) for shape in shapes], workspace)
    spent = {
        "start": time.monotonic() - started_s,
        "compiling": 0.0,
        "tensors and checks": 0.0,
        "rounds": 0.0,
        "host times": 0.0,
    }
    ground = Ground(plan, workspace, pool, spent)
    found: list[DrawnRow] = []
    for one in drawn:
        if time_is_up(workspace, mine=time.monotonic() - started_s > plan.budget_s):
            break
        found.append(measure_drawn(one, ground, is_early=len(found) < HOST_FIRST))
        report.both(drawn_rows.text_row(found[-1]), drawn_rows.csv_row(found[-1]))
    report.line()
    for text in (*summary(found), *ending(plan, len(found), len(drawn), spent)):
        report.line(text)
    return not any(one.row.note for one in found)


def ending(plan: Plan, done: int, asked: int, spent: dict[str, float]) -> list[str]:
    """Where the time went, and what the budget left out."""
    lines = [f"time: {', '.join(f'{what} {seconds:.0f} s' for what, seconds in spent.items())}"]
    if done < asked:
        lines.append(f"left out (budget of {plan.budget_s:g} s): the last {asked - done} of {asked} shapes")
    return lines


def measure_drawn(drawn: Drawn, ground: Ground, *, is_early: bool) -> DrawnRow:
    """One row: check, time on the GPU, time on the host."""
    plan, shape, workspace = ground.plan, drawn.shape, ground.workspace
    clock = time.monotonic()

    def lap(what: str) -> None:
        nonlocal clock
        torch.cuda.synchronize()
        now = time.monotonic()
        ground.spent[what] += now - clock
        clock = now

    give_back()
    compiled = len(workspace.compiled)
    question = plan.operator, shape.m, shape.n, shape.k
    trial = make(*question, workspace, is_nk=drawn.is_nk, pool=ground.pool)
    ours = call_of(trial, workspace)
    checked = check_call(trial, ours, workspace)
    if not checked.note:
        settle(ours, workspace)  # the operator's first calls of a shape find out how it runs
        checked = check_call(trial, ours, workspace)
    held = contest_of(question, drawn.is_nk, workspace)
    chosen = None
    if checked.launched:
        chosen = choose(*question, workspace) if held is None else held.best
    choice = "kernel" if checked.launched and chosen is None else config_text(chosen)
    nan = math.nan
    nothing = Row(shape, nan, nan, nan, nan, nan, nan, choice, checked.error, checked.serial_error, checked.note)
    kernel, kernel_config = (None, "") if checked.launched or checked.note else other_choice(trial, shape.m, workspace)
    # A shape that needs new code spends next to all of this time on it.
    lap("compiling" if len(workspace.compiled) > compiled else "tensors and checks")
    if checked.note:
        return DrawnRow(drawn, nothing)
    calls: dict[str, Call] = {
        "gemm": trial.gemm, "comm": trial.comm, "serial": trial.serial, "torch": torch_fused(trial, workspace),
        "ours": ours, **({"kernel": kernel} if kernel else {}), "after": trial.gemm,
    }  # fmt: skip
    measured = measure(
        calls, rounds=plan.rounds, group=workspace.group, check=workspace.check, risky=("ours", "kernel"), ends=1
    )
    lap("rounds")
    if math.isinf(measured.seconds["ours"]):
        workspace.reset()
        return DrawnRow(drawn, nothing._replace(note=f"failed: {measured.errors.get('ours', 'on another rank')}"))
    seconds = {name: value if math.isfinite(value) else nan for name, value in measured.seconds.items()}
    row = nothing._replace(
        gemm_s=seconds["gemm"], gemm_after_s=seconds["after"], comm_s=seconds["comm"], serial_s=seconds["serial"],
        torch_s=seconds["torch"], ours_s=seconds["ours"],
    )  # fmt: skip
    host = HostTimes()
    if is_early or is_cheap(row):
        host = host_times({name: calls[name] for name in HOST_NAMES if not math.isnan(seconds[name])}, workspace)
        lap("host times")
    foretold = foretell(question, chosen, workspace)
    ways = "" if held is None else drawn_rows.ways_text(held.turns)
    return DrawnRow(drawn, row, seconds.get("kernel", nan), kernel_config, host, foretold, ways)


def foretell(question: tuple[str, int, int, int], config: Config | None, workspace: Workspace) -> Foretold:
    """What the cost model says of the kernel, as the operator runs it or would, and of the serial path."""
    machine, world_size = open_table(workspace).machine, workspace.world_size
    config = config or likely(*question, world_size, machine)
    return Foretold(
        predict(*question, world_size, config, machine).total_s,
        predict_serial(*question, world_size, machine).total_s,
    )


def contest_of(question: tuple[str, int, int, int], is_nk: bool, workspace: Workspace) -> Contest[Config] | None:
    """The contest of a shape, where one was held."""
    contests = workspace.planned.contests.items()
    return next((held for key, held in contests if key.call == question and key.is_nk == is_nk), None)


def give_back() -> None:
    """Return memory that torch keeps for sizes that do not come again."""
    if torch.cuda.memory_reserved() > FULL * torch.cuda.get_device_properties().total_memory:
        torch.cuda.empty_cache()


def is_cheap(row: Row) -> bool:
    """Whether the host's times cost little to take; all ranks say the same, for the times are theirs together."""
    known = (seconds for seconds in (row.serial_s, row.torch_s, row.ours_s) if not math.isnan(seconds))
    return HOST_CALLS * sum(known) < HOST_CHEAP_S


def call_of(trial: Trial, workspace: Workspace, config: Config | None = None) -> Callable[[], Tensor]:
    """The public operator on a trial's tensors; without a configuration it chooses."""
    operator = ag_gemm if trial.operator == "ag_gemm" else gemm_rs
    return lambda: operator(trial.x, trial.w, workspace, config=config)


def other_choice(trial: Trial, m: int, workspace: Workspace) -> tuple[Call | None, str]:
    """Our kernel where the serial path is taken, and its configuration; nothing where no kernel can serve the shape."""
    k, n = trial.w.shape
    config = likely(trial.operator, m, n, k, workspace.world_size, open_table(workspace).machine)
    call = call_of(trial, workspace, config)
    checked = check_call(trial, call, workspace)
    return (call, config_text(config)) if checked.launched and not checked.note else (None, "")


def check_call(trial: Trial, call: Callable[[], Tensor], workspace: Workspace) -> Checked:
    """Run an operator once and compare: with the serial path everywhere, with float64 on a sample. Collective."""
    before, note, out = workspace.launches, "", trial.out
    try:
        # The allocator gives the operator this memory back: an element that is not written is no number.
        torch.full_like(trial.out, math.nan)
        out = call()
        launched = workspace.launches > before
        workspace.check()
    except Exception as reason:  # noqa: BLE001 - an operator may fail in any way; the row shows how
        launched = False
        note = f"failed: {type(reason).__name__}: {str(reason).splitlines()[0] if str(reason) else ''}"
    if worst(workspace, [float(bool(note))])[0]:
        workspace.reset()
        return Checked(launched, math.inf, math.inf, note or "failed on another rank")
    serial = trial.serial()
    far = _apart(out, serial)
    rows, columns, exact = sample(trial, workspace)
    errors = (distance(result[rows][:, columns], exact) for result in (out, serial))
    error, serial_error, far = worst(workspace, [*errors, far])
    note = f"wrong: {far:.1e} away from the serial path" if far > WRONG else ""
    return Checked(launched, error, serial_error, note)


def sample(trial: Trial, workspace: Workspace) -> tuple[Tensor, Tensor, Tensor]:
    """Some rows and columns of this rank's output: their numbers, and what stands there in float64. Collective."""
    world_size, rank = workspace.world_size, workspace.rank
    is_gather = trial.operator == "ag_gemm"
    shard_m = trial.out.shape[0] // world_size if is_gather else trial.out.shape[0]
    within = _spread(shard_m, SAMPLE_ROWS, trial.x)
    columns = _spread(trial.w.shape[1], SAMPLE_COLUMNS, trial.x)
    weight = trial.w[:, columns].double()
    everywhere = torch.cat([source * shard_m + within for source in range(world_size)])
    if is_gather:
        return everywhere, columns, reference.all_gather(trial.x[within], workspace.group).double() @ weight
    partial = trial.x[everywhere].double() @ weight
    dist.all_reduce(partial, group=workspace.group)
    return within, columns, partial[rank * len(within) : (rank + 1) * len(within)]


def _spread(length: int, most: int, like: Tensor) -> Tensor:
    """Up to so many indices from the first to the last."""
    return torch.linspace(0, length - 1, min(most, length), device=like.device).long()


def _apart(result: Tensor, other: Tensor) -> float:
    """||result - other|| / ||other|| without a copy in another type; infinite where anything is not a number."""
    exact = norm(other)
    found = norm(result - other) / exact if exact else math.inf
    return found if math.isfinite(found) else math.inf


def host_times(calls: dict[str, Call], workspace: Workspace) -> HostTimes:
    """What each call costs the host of the slower rank. Collective."""
    synchronize = torch.cuda.synchronize if workspace.device.type == "cuda" else lambda: None
    own = [host_time(calls[name], synchronize) if name in calls else math.nan for name in HOST_NAMES]
    return HostTimes(*worst(workspace, own))


def host_time(call: Call, synchronize: Call, clock: Callable[[], float] = time.perf_counter) -> float:
    """The median of `HOST_CALLS` calls; before every `HOST_BATCH` of them the GPU has nothing left to do."""
    taken = []
    for number in range(HOST_CALLS):
        if number % HOST_BATCH == 0:
            synchronize()
        begun = clock()
        call()
        taken.append(clock() - begun)
    synchronize()
    return median(taken)
