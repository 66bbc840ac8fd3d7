# SPDX-License-Identifier: Apache-2.0
"""A plan as tables for people, and as numbers for programs."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from megascale_ops.cli.terminal.tables import plain_table
from megascale_ops.planning.choices import Choices, Lost, sure_spares
from megascale_ops.planning.inputs import Given, Job
from megascale_ops.planning.sensitivity import Otherwise
from megascale_ops.schema.wording import duration, percent, printable

# 0.1 %: a plan need not be made anew for less.
LEAST_REGRET = 0.001

# Inputs as people name them, and how each is written.
_WORDS = {
    "nodes": "nodes",
    "failures": "failures, of a node and day",
    "hang_share": "of these, silences",
    "machine_share": "of these, a machine is away",
    "hidden": "wrong results, of a node and day",
    "repair_s": "a machine is away for",
    "stall_s": "a checkpoint halts the training",
    "write_s": "and is written beside it",
    "step_s": "a step",
    "restart_s": "a restart, to the first new step",
    "detect_s": "until a failure is seen",
    "silences": "silences of nothing wrong, a day",
    "silence_s": "and they last, in the mean",
    "check_s": "a quick check of all nodes",
}


def plan_view(
    job: Job, known: dict[str, Given], plan: Choices, lost: Lost, rows: Sequence[Otherwise]
) -> RenderableType:
    """Return the inputs with their sources, the choices, what is lost, and what if an input is otherwise."""
    inputs = plain_table("input", "", "from")
    for name, one in known.items():
        inputs.add_row(
            _WORDS[name], ("at most " if one.is_bound else "") + _value(name, one.value), printable(one.source)
        )
    counts = f"{percent(1.0 - lost.time)} of its time are steps that count"
    fails = Text(f"the job fails every {duration(job.between_failures_s)}; {counts}")
    return Group(inputs, Text(""), _chosen(job, plan, lost), fails, Text(""), *_what_if(rows))


def _chosen(job: Job, plan: Choices, lost: Lost) -> RenderableType:
    table = plain_table("choice", "", "lost", "set by")
    steps = max(1, round(plan.interval_s / job.step_s))
    table.add_row(
        "checkpoint every", f"{duration(plan.interval_s)} ({steps:,} steps)", percent(lost.checkpoints_and_failures),
        f"CheckpointManager, every {steps:,} steps; with failures and restarts",
    )  # fmt: skip
    table.add_row(
        "patience with silence", duration(plan.patience_s), percent(lost.needless_restarts),
        f"--policy absent_patience_s={plan.patience_s:.0f}",
    )  # fmt: skip
    noun = "node" if plan.spares == 1 else "nodes"
    spares = f"{plan.spares} {noun} (99 % of the time {sure_spares(job)} would be enough)"
    table.add_row(
        "spares", spares, f"{percent(lost.waiting_for_repairs)}, {percent(lost.idle)} of GPUs idle",
        f"--nnodes {round(job.nodes)}, started on {round(job.nodes) + plan.spares} nodes",
    )  # fmt: skip
    checks = f"every {duration(plan.check_every_s)}" if math.isfinite(plan.check_every_s) else "none but after faults"
    table.add_row(
        "check of all nodes", checks, percent(lost.checks_and_hidden_faults), "megascale-ops diagnose --quick"
    )
    return table


def _what_if(rows: Sequence[Otherwise]) -> list[RenderableType]:
    """Return the inputs on which most depends, and how many are left out."""
    table = plain_table("if it is", "", "checkpoint", "patience", "spares", "checks", "lost", "kept")
    matter = sorted((row for row in rows if row.regret >= LEAST_REGRET), key=lambda one: -one.regret)
    for row in matter:
        best = row.best
        checks = duration(best.check_every_s) if math.isfinite(best.check_every_s) else "none"
        table.add_row(
            _WORDS[row.name], _value(row.name, row.value), duration(best.interval_s), duration(best.patience_s),
            str(best.spares), checks, percent(row.best_lost), percent(row.kept_lost),
        )  # fmt: skip
    left = len(rows) - len(matter)
    note = f"kept: lost with the plan although the input is otherwise. {left} other inputs at half and twice"
    return [table, Text(f"{note} their value change less than {percent(LEAST_REGRET)}", style="dim")]


def numbers(job: Job, known: dict[str, Given], plan: Choices, lost: Lost, rows: Sequence[Otherwise]) -> dict[str, Any]:
    """Return the same for programs; a choice of no checks is null."""
    return {
        "inputs": {name: one._asdict() for name, one in known.items()},
        "between_failures_s": job.between_failures_s,
        "choices": _finite(plan) | {"sure_spares": sure_spares(job)},
        "lost": lost._asdict() | {"time": lost.time},
        "effective": 1.0 - lost.time,
        "otherwise": [row._asdict() | {"best": _finite(row.best)} for row in rows],
    }


def _finite(choices: Choices) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in choices._asdict().items()}


def _value(name: str, value: float) -> str:
    if name.endswith("_s"):
        return duration(value)
    return percent(value) if name.endswith("_share") else f"{value:,.0f}" if name == "nodes" else f"{value:.3g}"
