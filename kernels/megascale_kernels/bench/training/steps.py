# SPDX-License-Identifier: Apache-2.0
"""Compare variants' results, then time their steps in turn.

A turn is some steps one after another, from an idle GPU and a meeting of the ranks to the last step's end, as training
runs them: what the host cannot hide is in the time. A turn counts with the slowest rank, a variant with the median of
its turns. Before every round the order changes, as in `autotune.timing`.
"""

import math
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from megascale_kernels.autotune.timing import order_of
from megascale_kernels.bench.request import UserError
from megascale_kernels.bench.sweep import norm
from megascale_kernels.bench.training.variants import Prepared

TURN_S = 0.15  # steps a turn: as many as take this long, so that the idle beginning weighs little
MOST_STEPS = 20
WARM_TURNS = 1
WRONG = 0.05  # relative distance from the first variant; gradients in bf16 differ by 0.01
MOST_SAID = 240  # letters of an error
KINDS = ("out", "x", "norm", "up", "down")


def distance(found: dict[str, list[Tensor]], reference: dict[str, list[Tensor]]) -> float:
    """The largest over kinds of ||found - reference|| / ||reference||; infinite where anything is not a number."""
    largest = 0.0
    for kind in KINDS:
        apart = exact = 0.0
        for one, other in zip(found[kind], reference[kind], strict=True):
            apart += norm(one - other) ** 2
            exact += norm(other) ** 2
        here = math.sqrt(apart / exact) if exact else math.inf
        largest = max(largest, here if math.isfinite(here) else math.inf)
    return largest


def loss(found: dict[str, list[Tensor]], gradient: Tensor) -> float:
    """The number whose gradients a step computes: this rank's part of sum(out * gradient)."""
    return float((found["out"][0].float() * gradient.float()).sum())


def copied(results: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    """Results in memory of their own: a replayed graph writes its own again."""
    return {kind: [tensor.clone() for tensor in tensors] for kind, tensors in results.items()}


def time_in_turn(
    variants: dict[str, Prepared], *, rounds: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds a step of each variant, infinite where it failed on any rank, and what this rank saw fail. Collective."""
    names, errors = list(variants), dict[str, str]()
    taken: dict[str, list[float]] = {name: [] for name in names}
    number = dict.fromkeys(names, 1)
    for turn in range(WARM_TURNS + rounds):
        for name in order_of(names, turn):
            seconds = _turn(variants[name], number[name], group, device, errors, name)
            taken[name].append(seconds)
            if turn == 0:  # all ranks must make as many steps
                number[name] = steps_for(_slowest([seconds], group, device)[0])
    middle = [median(taken[name][WARM_TURNS:]) if name not in errors else math.inf for name in names]
    # The slowest rank of each turn, then the median: a rank that is late in one turn is another in the next.
    turns = _slowest([second for name in names for second in taken[name][WARM_TURNS:]], group, device)
    failed = _slowest(middle, group, device)
    seconds_of = {
        name: median(turns[place * rounds : (place + 1) * rounds]) if math.isfinite(failed[place]) else math.inf
        for place, name in enumerate(names)
    }
    return seconds_of, errors


def steps_for(step_s: float) -> int:
    """How many steps a turn has."""
    return max(1, min(MOST_STEPS, math.ceil(TURN_S / step_s))) if 0 < step_s < math.inf else 1


def _turn(
    variant: Prepared, steps: int, group: dist.ProcessGroup, device: torch.device, errors: dict[str, str], name: str
) -> float:
    """Seconds a step in one turn; a variant that failed is not called again, but the ranks still meet."""
    stop = stopwatch(device, group)
    try:
        for _ in range(steps if name not in errors else 0):
            variant.run()
        seconds = stop() / steps
        if variant.workspace is not None:
            variant.workspace.check()
    except Exception as error:  # noqa: BLE001 - a variant may fail in any way; it is reported by name
        errors.setdefault(name, sentence(error))
        return math.inf
    finally:
        variant.step.clear()
    return seconds


def stopwatch(device: torch.device, group: dist.ProcessGroup) -> Callable[[], float]:
    """Let the ranks meet and start; what is returned stops and gives the seconds between."""
    tiny = torch.zeros(1, device=device)
    if device.type != "cuda":
        dist.all_reduce(tiny, group=group)
        begun = time.perf_counter()
        return lambda: time.perf_counter() - begun
    torch.cuda.synchronize()
    dist.all_reduce(tiny, group=group)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch has no types
    begin.record()

    def stop() -> float:
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return stop


def sentence(error: BaseException) -> str:
    """An error in a line; what we refuse ourselves needs no name of a class."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return (text if isinstance(error, UserError) else f"{type(error).__name__}: {text}")[:MOST_SAID]


def _slowest(seconds: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    table = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    slowest: list[float] = table.tolist()
    return slowest
