# SPDX-License-Identifier: Apache-2.0
"""Measure the candidates of one shape, in turn with the serial path, and remember the fastest.

Two passes: each candidate for a few rounds beside the serial path, then the best three and the serial path in turn for
longer. A candidate that fails (does not fit the chip, runs into a deadline) is dropped on all ranks and the workspace
is reset. Rank 0 decides and hands the decision out, so that no rank's rounding can lead it elsewhere.
"""

import json
import math
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from megascale_kernels.autotune import store, trial
from megascale_kernels.autotune.choosing import Question, Table, open_table
from megascale_kernels.autotune.handout import from_rank_zero
from megascale_kernels.autotune.space import candidates
from megascale_kernels.autotune.timing import Measured, measure
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config, read_config

FIRST_ROUNDS = 5
FINAL_ROUNDS = 15
FINALISTS = 3
CANDIDATE_DEADLINE_S = 5.0  # no launch here takes a hundredth of it: a candidate that waits so long is broken
SERIAL = "serial"


class Tuned(NamedTuple):
    """What tuning one shape found.

    Attributes:
        operator: which operator.
        m: rows of the whole input.
        n: columns of the weight on one rank.
        k: rows of the weight on one rank.
        config: the fastest; None when the serial path was.
        time_s: the fastest configuration's time, infinite when none ran.
        serial_s: the serial path's.
        measured: every candidate that ran, with its time, fastest first.
        dropped: every candidate that failed, with what this rank saw.
        left_out: candidates for which the budget did not suffice.
    """

    operator: str
    m: int
    n: int
    k: int
    config: Config | None
    time_s: float
    serial_s: float
    measured: tuple[tuple[Config, float], ...]
    dropped: tuple[tuple[Config, str], ...]
    left_out: int


def tune(operator: str, m: int, n: int, k: int, workspace: Workspace, *, budget_s: float = 20.0) -> Tuned:
    """Find the fastest configuration by measuring. Collective; allocates tensors of the given shape.

    Args:
        operator: "ag_gemm", "gemm_rs" or "gemm_ar".
        m: rows of the whole input.
        n: columns of the weight on one rank.
        k: rows of the weight on one rank.
        workspace: large enough for the shape, on CUDA.
        budget_s: no further candidate is begun after this; at least one is measured.

    Returns:
        what was found; `choose` answers with it from now on, in this process and, through the cache, in later ones.

    Raises:
        ValueError: sizes, operator or budget that make no sense, or a workspace that is not on CUDA.
        WorkspaceTooSmall: the shape does not fit.
        KernelError: the workspace was already broken, or rank 0 went missing.
    """
    if workspace.device.type != "cuda":
        raise ValueError(f"tune({operator}): the workspace is on {workspace.device}; without CUDA nothing is measured")
    if not 0 < budget_s < math.inf:
        raise ValueError(f"tune(budget_s={budget_s}): give a positive number of seconds")
    workspace.check()
    table = open_table(workspace)
    question = Question(operator, m, n, k)
    configs = candidates(operator, m, n, k, workspace.world_size, table.machine)
    deadline_s, workspace.deadline_s = workspace.deadline_s, min(workspace.deadline_s, CANDIDATE_DEADLINE_S)
    try:
        tuned = _measure_all(question, configs, workspace, budget_s)
    finally:
        workspace.deadline_s = deadline_s
    return _agree(tuned, question, table, workspace)


def _measure_all(question: Question, configs: list[Config], workspace: Workspace, budget_s: float) -> Tuned:
    started = time.monotonic()
    bench = trial.make(*question, workspace)
    seconds: dict[Config, float] = {}
    dropped: dict[Config, str] = {}
    for config in configs:
        if seconds and _over(workspace, mine=time.monotonic() - started > budget_s):
            break
        first = _compare(bench, [config], FIRST_ROUNDS, workspace)
        _sort_out(first, [config], seconds, dropped)
    finalists = sorted(seconds, key=seconds.__getitem__)[:FINALISTS]
    final = _compare(bench, finalists, FINAL_ROUNDS, workspace)
    if any(math.isinf(time_s) for time_s in final.seconds.values()):
        # It is unknown which of them broke it: each runs once more alone, and the sound ones stay.
        for config in finalists:
            _sort_out(_compare(bench, [config], FINAL_ROUNDS, workspace), [config], seconds, dropped)
    else:
        _sort_out(final, finalists, seconds, dropped)
    # Only finalists were measured for long: nothing else may win.
    best = min((config for config in finalists if config in seconds), key=seconds.__getitem__, default=None)
    best_s, serial_s = seconds[best] if best is not None else math.inf, final.seconds[SERIAL]
    return Tuned(
        *question,
        config=best if best_s < serial_s else None,
        time_s=best_s,
        serial_s=serial_s,
        measured=tuple(sorted(seconds.items(), key=lambda pair: pair[1])),
        dropped=tuple(dropped.items()),
        left_out=len(configs) - len(seconds) - len(dropped),
    )


def _sort_out(
    measured: Measured, configs: list[Config], seconds: dict[Config, float], dropped: dict[Config, str]
) -> None:
    """Take over the times of those that ran; move those that failed from `seconds` to `dropped`."""
    for place, config in enumerate(configs):
        if math.isfinite(measured.seconds[str(place)]):
            seconds[config] = measured.seconds[str(place)]
        else:
            dropped[config] = measured.errors.get(str(place), "it failed on another rank")
            seconds.pop(config, None)


def _compare(bench: trial.Trial, configs: list[Config], rounds: int, workspace: Workspace) -> Measured:
    """Time configurations (named by their place) and the serial path in turn; after a failure reset the workspace."""
    names = [str(place) for place in range(len(configs))]
    calls = {SERIAL: bench.serial, **{name: bench.ours(config) for name, config in zip(names, configs, strict=True)}}
    measured = measure(calls, rounds=rounds, group=workspace.group, check=workspace.check, risky=names)
    if not all(math.isfinite(measured.seconds[name]) for name in names):
        workspace.reset()
    return measured


def _over(workspace: Workspace, *, mine: bool) -> bool:
    """Whether rank 0's time is up; a device collective, like everything around it."""
    flag = torch.tensor([mine and workspace.rank == 0], dtype=torch.int32, device=workspace.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=workspace.group)
    return bool(flag.item())


def _agree(tuned: Tuned, question: Question, table: Table, workspace: Workspace) -> Tuned:
    """Rank 0 hands out its decision and writes it down; every rank learns it."""
    config = tuned.config and tuned.config._asdict()
    said = json.dumps({"config": config, "time_s": tuned.time_s, "serial_s": tuned.serial_s})
    heard = json.loads(from_rank_zero(workspace.group, workspace.rank, workspace.world_size, said, "tuning result"))
    decided = heard["config"] and read_config(heard["config"])
    table.learn(question, decided)
    workspace.forget_plans()
    if workspace.rank == 0 and math.isfinite(tuned.time_s):
        entry = store.Entry(decided, heard["time_s"], heard["serial_s"])
        store.write(store.cache_file(), table.environment, store.entry_key(*question), entry)
    return tuned._replace(config=decided, time_s=heard["time_s"], serial_s=heard["serial_s"])
