# SPDX-License-Identifier: Apache-2.0
"""Other configurations of our kernel in turn with the one that it takes by itself: is a default right on these GPUs?

A default is what our kernel begins with where the operator takes the kernel, whether or not the serial path or cuBLAS
in pieces would be taken before it. What stands beside it differs in the fields that are named, and in nothing else.
"""

import math
import time
from typing import NamedTuple

from megascale_kernels.autotune.choosing import likely, open_table
from megascale_kernels.autotune.timing import Call, measure
from megascale_kernels.autotune.trial import make
from megascale_kernels.bench.report import Facts, Report
from megascale_kernels.bench.rows import config_text, geometric_mean
from megascale_kernels.bench.shapes import Shape
from megascale_kernels.bench.sweep import WRONG, Plan, distance, time_is_up, workspace_for, worst
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config

FASTER = 0.98  # of the default's time: more than turns differ by
LEGEND = (
    "times in ms, in turn, median over rounds of the slowest rank; serial: NCCL and cuBLAS; default: our kernel as it\n"
    "is configured by itself, told in the last column; then the same with the fields that are named replaced, and\n"
    "what it takes of the default's time"
)


class Compared(NamedTuple):
    """One shape; seconds.

    Attributes:
        shape: which.
        config: the default.
        serial_s: NCCL and cuBLAS.
        default_s: our kernel by default.
        others_s: by what is replaced in it, as it was asked for; NaN where it failed, or is the default.
        note: what went wrong.
    """

    shape: Shape
    config: Config
    serial_s: float
    default_s: float
    others_s: dict[str, float]
    note: str = ""


def compare(
    plan: Plan, shapes: list[Shape], others: dict[str, dict[str, object]], report: Report, head: Facts, started_s: float
) -> bool:
    """Measure all shapes into the report; whether all went well. Collective.

    Args:
        plan: how; its configuration takes the place of the default.
        shapes: what.
        others: fields that are replaced, by the words that asked for them.
        report: where it goes.
        head: what is above it.
        started_s: `time.monotonic()` when the budget began.
    """
    names = list(others)
    csv_heading = ["shape", "scale", "m", "n", "k", "serial_ms", "default_ms", *(f"{name} ms" for name in names)]
    report.begin(head, LEGEND, heading(names), [*csv_heading, "config", "note"])
    workspace = workspace_for(plan.operator, shapes, adaptive=False)
    done: list[Compared] = []
    for shape in shapes:
        if time_is_up(workspace, mine=time.monotonic() - started_s > plan.budget_s):
            break
        done.append(compare_shape(plan, shape, others, workspace))
        report.both(text_row(done[-1]), csv_row(done[-1]))
    report.line()
    for text in summary(done, names):
        report.line(text)
    if len(done) < len(shapes):
        report.line(f"left out (budget of {plan.budget_s:g} s): {len(shapes) - len(done)} of {len(shapes)}")
    return not any(row.note for row in done)


def compare_shape(plan: Plan, shape: Shape, others: dict[str, dict[str, object]], workspace: Workspace) -> Compared:
    """One row: check each, then time. Collective."""
    question = plan.operator, shape.m, shape.n, shape.k
    config = plan.config or likely(*question, workspace.world_size, open_table(workspace).machine)
    trial = make(*question, workspace)
    serial = trial.serial()
    ways = {"": config, **{name: config._replace(**fields) for name, fields in others.items()}}  # type: ignore[arg-type]  # read before
    notes: list[str] = []
    calls: dict[str, Call] = {}
    for name, way in ways.items():
        if name and way == config:
            continue
        note = ""
        try:
            trial.out.fill_(math.nan)
            trial.ours(way)()
            workspace.check()
        except Exception as reason:  # noqa: BLE001 - a way may fail in any way; the row shows how
            note = f"{type(reason).__name__}: {str(reason).splitlines()[0]}"
        failed, far = worst(workspace, [float(bool(note)), 0.0 if note else distance(trial.out, serial)])
        if failed:
            workspace.reset()
            notes.append(f"{name or 'default'}: {note or 'failed on another rank'}")
        elif far > WRONG:
            notes.append(f"{name or 'default'}: wrong: {far:.1e} away from the serial path")
        else:
            calls[name] = trial.ours(way)
    risky = tuple(calls)
    calls = {"serial": trial.serial, **calls}
    measured = measure(calls, rounds=plan.rounds, group=workspace.group, check=workspace.check, risky=risky)
    if any(map(math.isinf, measured.seconds.values())):
        workspace.reset()
        notes += [f"{name or 'default'}: {error}" for name, error in measured.errors.items()]
    seconds = {name: value if math.isfinite(value) else math.nan for name, value in measured.seconds.items()}
    times = {name: seconds.get(name, math.nan) for name in others}
    return Compared(shape, config, seconds["serial"], seconds.get("", math.nan), times, "; ".join(notes))


def heading(names: list[str]) -> str:
    """The line above the rows."""
    columns = "".join(f"  {name:>{_width(name)}}  {'of it':>6}" for name in names)
    return f"{'shape':<10}  {'scale':<6}  {'M':>5}  {'N':>6}  {'K':>6}  {'serial':>8}  {'default':>8}{columns}  config"


def text_row(row: Compared) -> str:
    """One shape as a line; what is the default itself, or failed, is a dash."""
    shape = row.shape
    text = f"{shape.name:<10}  {shape.scale:<6}  {shape.m:>5}  {shape.n:>6}  {shape.k:>6}"
    text += f"  {row.serial_s * 1e3:>8.4f}  {row.default_s * 1e3:>8.4f}"
    for name, time_s in row.others_s.items():
        there = math.isfinite(time_s)
        text += f"  {f'{time_s * 1e3:.4f}' if there else '-':>{_width(name)}}"
        text += f"  {f'{time_s / row.default_s:.3f}' if there else '-':>6}"
    return f"{text}  {config_text(row.config)}" + (f"  {row.note}" if row.note else "")


def csv_row(row: Compared) -> list[str]:
    """One shape as cells."""
    times = [row.serial_s, row.default_s, *row.others_s.values()]
    shape = [row.shape.name, row.shape.scale, *map(str, row.shape[2:])]
    return [*shape, *(f"{time_s * 1e3:.5f}" for time_s in times), config_text(row.config), row.note]


def summary(rows: list[Compared], names: list[str]) -> list[str]:
    """Of each way: the mean of what it takes, where it gains and loses most, and on how many shapes it is faster."""
    lines = []
    for name in names:
        ratios = {
            row.shape: row.others_s[name] / row.default_s
            for row in rows if math.isfinite(row.others_s[name]) and row.default_s > 0
        }  # fmt: skip
        if ratios:
            least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
            faster = sum(ratio < FASTER for ratio in ratios.values())
            lines.append(
                f"{name}: {geometric_mean(list(ratios.values())):.3f} of the default's time (geometric mean of "
                f"{len(ratios)}), {ratios[least]:.3f} at {least.label} to {ratios[most]:.3f} at {most.label}; less "
                f"than {FASTER} on {faster}"
            )
    failed = sum(bool(row.note) for row in rows)
    return [*lines, *([f"failed: {failed} of {len(rows)} shapes"] if failed else [])]


def _width(name: str) -> int:
    return max(8, len(name))
