# SPDX-License-Identifier: Apache-2.0
"""Run for long under bad conditions and count wrong elements.

Every iteration has new data, a random number of rows (tails and shards of one row among them), a random configuration
and an output full of NaN. Half of the time one rank comes late, so that the others wait inside the kernel; a quarter of
the time the buffers that ranks share are filled with NaN before (between two barriers, or the poison would hit what a
quick peer has already sent). Each element is compared with the product in float32; now and then the launch is repeated
and must give the same bits.

A hang is impossible: the kernels' waits have a deadline, the collectives have one, and so have the processes.
"""

import math
import random
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megascale_kernels import reference
from megascale_kernels.autotune.trial import WEIGHT_SCALE, launcher
from megascale_kernels.bench.report import Report
from megascale_kernels.bench.sweep import time_is_up
from megascale_kernels.memory.operands import read_weight
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config

MOST_SHARD = 512
# Columns and depths: powers of two, and sizes whose last tile is cut; rows of 1003 elements are out of TMA's reach.
N_SIZES = (1000, 1003, 1376, 2048)
K_SIZES = (512, 1376, 2048)
LONGEST_SLEEP = 3_000_000  # cycles, 1.7 ms: ten times a launch
LOOK_EVERY = 100  # iterations; a look empties the queue, and so ends the ranks' drifting apart
REPEAT_EVERY = 10
# A wrong element is off by its own size; rounding partial sums to bf16 moves one by less than this share of the rms.
TOLERANCE = 0.03


# They differ in everything that flags depend on, our own among them. Each is compiled up to seven times (tails or
# not), 3 s each.
CONFIGS = (
    Config(),
    Config(kernel="hopper"),
    Config(kernel="hopper", tail_split=0),
    Config(128, 128, 64, kernel="hopper", splits=2, planned=True, lead=2),
    Config(64, 128, 64, stages=6, warps=4, splits=4),
    Config(carrier="sm", comm_ctas=8, splits=4),
    Config(kernel="cublas"),
    Config(kernel="cublas", pieces=1),
)


class Soaked(NamedTuple):
    """What the run found on all ranks together.

    Attributes:
        iterations: how many ran.
        elements: elements compared.
        wrong: elements out of tolerance, NaN included.
        repeats: launches repeated.
        unequal: elements that differed from the first time.
        stragglers: iterations in which a rank was late.
        failure: what ended the run early; empty when nothing did.
        seconds: how long it took.
    """

    iterations: int
    elements: int
    wrong: int
    repeats: int
    unequal: int
    stragglers: int
    failure: str
    seconds: float

    def line(self, operator: str, ranks: int, gpus: int, asked: int) -> str:
        """The run in one line."""
        where = f"{ranks} GPUs" if gpus >= ranks else f"{ranks} ranks that share {gpus} GPU{'s' * (gpus > 1)}"
        verdict = "ok" if not (self.wrong or self.unequal or self.failure) else "BAD"
        cut = f" of {asked} (budget)" if self.iterations < asked and not self.failure else ""
        ending = f"; {self.failure}" if self.failure else ""
        return (
            f"soak {operator} on {where}: {verdict}: {self.iterations} iterations{cut}, {self.stragglers} with a "
            f"straggler, {self.elements:.2e} elements, {self.wrong} wrong; {self.repeats} repeats, "
            f"{self.unequal} elements unequal; {self.seconds:.0f} s{ending}"
        )


class Case(NamedTuple):
    """One iteration, equal on all ranks."""

    shard_m: int
    n: int
    k: int
    config: Config
    late_rank: int
    sleep_cycles: int
    is_poisoned: bool


def draw(rng: random.Random, world_size: int, configs: tuple[Config, ...]) -> Case:
    """The next iteration; ranks that draw from equal generators draw the same."""
    late = rng.random() < 0.5
    config = rng.choice(configs)
    # One row is compiled apart (an argument of 1 becomes a constant), so only one configuration meets it.
    few = 1 if config == configs[0] and rng.random() < 0.1 else rng.randint(2, MOST_SHARD)
    return Case(
        rng.choice((few, 128 * rng.randint(1, MOST_SHARD // 128))),
        rng.choice(N_SIZES),
        rng.choice(K_SIZES),
        config,
        rng.randrange(world_size) if late else -1,
        rng.randint(1, LONGEST_SLEEP),
        rng.random() < 0.25,
    )


def configs_for(operator: str, config: Config | None) -> tuple[Config, ...]:
    """The configurations to draw from: the given one, or those that make sense for the operator."""
    if config is not None:
        return (config,)
    return tuple(config for config in CONFIGS if operator == "ag_gemm" or config.carrier == "copy_engine")


def soak(
    operator: str,
    iterations: int,
    workspace: Workspace,
    *,
    budget_s: float,
    config: Config | None = None,
    seed: int = 1,
) -> Soaked:
    """Run up to `iterations` iterations, or for `budget_s`. Collective; the numbers are those of all ranks."""
    rng = random.Random(seed)  # noqa: S311 - shapes are not secrets
    configs = configs_for(operator, config)
    counters = torch.zeros(2, dtype=torch.int64, device=workspace.device)
    started, done, elements, repeats, stragglers, failure = time.monotonic(), 0, 0, 0, 0, ""
    try:
        for number in range(iterations):
            case = draw(rng, workspace.world_size, configs)
            result, again = _iteration(operator, case, number * workspace.world_size + workspace.rank, workspace)
            elements += result[0].numel() * workspace.world_size
            stragglers += case.late_rank >= 0
            counters[0] += _wrong(*result)
            if number % REPEAT_EVERY == 0:
                counters[1] += (again().view(torch.int16) != result[0].view(torch.int16)).sum()
                repeats += 1
            done += 1
            if number % LOOK_EVERY == 0:
                workspace.check()
                if time_is_up(workspace, mine=time.monotonic() - started > budget_s):
                    break
        workspace.check()
    except Exception as error:  # noqa: BLE001 - whatever ends the run early is its result
        failure = f"rank {workspace.rank} stopped after {done} iterations: {type(error).__name__}: {error}"
        return Soaked(done, elements, -1, repeats, -1, stragglers, failure, time.monotonic() - started)
    dist.all_reduce(counters, group=workspace.group)
    wrong, unequal = counters.tolist()
    return Soaked(done, elements, wrong, repeats, unequal, stragglers, "", time.monotonic() - started)


def _iteration(
    operator: str, case: Case, seed: int, workspace: Workspace
) -> tuple[tuple[Tensor, Tensor, float], "Repeat"]:
    """Run one case: our result, the exact one, the size of a typical element; and a way to run it again."""
    world_size = workspace.world_size
    generator = torch.Generator(workspace.device).manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=workspace.dtype, device=workspace.device)

    is_gather = operator == "ag_gemm"
    x = noise(case.shard_m * (1 if is_gather else world_size), case.k)
    w = noise(case.n, case.k).mul_(WEIGHT_SCALE).T
    rows = case.shard_m * (world_size if is_gather else 1)
    if case.is_poisoned:
        _poison(workspace)
    if case.late_rank == workspace.rank:
        torch.cuda._sleep(case.sleep_cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001 - it has no public name
    again = Repeat(operator, x, w, (rows, case.n), case.config, workspace)
    out = again()
    if is_gather:
        exact = reference.all_gather(x, workspace.group).float() @ w.float()
    else:
        exact = reference.reduce_scatter(x.float() @ w.float(), workspace.group)
    typical = WEIGHT_SCALE * math.sqrt(case.k * (1 if is_gather else world_size))
    return (out, exact, typical), again


class Repeat(NamedTuple):
    """One launch that can be made again."""

    operator: str
    x: Tensor
    w: Tensor
    shape: tuple[int, int]
    config: Config
    workspace: Workspace

    def __call__(self) -> Tensor:
        """Launch into an output full of NaN."""
        out = torch.full(self.shape, math.nan, dtype=self.x.dtype, device=self.x.device)
        weight = read_weight(self.w, self.x, self.operator)
        launcher(self.operator)(self.x, weight, out, None, self.workspace, self.config)
        return out


def _wrong(out: Tensor, exact: Tensor, typical: float) -> Tensor:
    """How many elements are out of tolerance; a NaN is."""
    return (~((out.float() - exact).abs() <= TOLERANCE * (typical + exact.abs()))).sum()


def _poison(workspace: Workspace) -> None:
    """Fill this rank's shared buffers with NaN while no kernel of ours runs anywhere."""
    tiny = torch.zeros(1, device=workspace.device)
    dist.all_reduce(tiny, group=workspace.group)
    elements = workspace.layout.data_bytes // workspace.dtype.itemsize
    for slot in (0, 1):
        workspace.local(slot, (elements,)).fill_(math.nan)
    dist.all_reduce(tiny, group=workspace.group)


def run(operator: str, iterations: int, budget_s: float, config: Config | None, report: Report) -> int:
    """Make the workspace, soak, report in one line; return 0 when nothing was wrong."""
    world_size = dist.get_world_size()
    is_gather = operator == "ag_gemm"
    workspace = Workspace(
        max_rows=MOST_SHARD * world_size,
        max_gather_cols=max(K_SIZES) if is_gather else 0,
        max_scatter_cols=0 if is_gather else max(N_SIZES),
        deadline_s=20.0,
    )
    soaked = soak(operator, iterations, workspace, budget_s=budget_s, config=config)
    text = soaked.line(operator, world_size, torch.cuda.device_count(), iterations)
    if soaked.failure and not report.is_speaker:
        print(text, flush=True)
    report.line(text)
    return int(bool(soaked.wrong or soaked.unequal or soaked.failure))
