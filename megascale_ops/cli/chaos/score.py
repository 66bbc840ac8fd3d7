# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops chaos score``: the whole fault matrix, or a part of it, in numbers."""

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from megascale_ops import __version__
from megascale_ops.cli.chaos.trials import Keep, hold_all, interrupts_noted, plan_of, trial_options
from megascale_ops.cli.terminal.options import json_option
from megascale_ops.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megascale_ops.chaos.faults import Fault
    from megascale_ops.chaos.job import Plan
    from megascale_ops.chaos.score import Grade, Outcome


@click.command("score")
@click.option("--runs", type=click.IntRange(1), default=1, show_default=True, help="Trials of every fault.")
@click.option("--only", default="", metavar="KIND,...", help="Only these kinds (or faults, by name).")
@click.option("--long", "long_too", is_flag=True, help="Also what takes many minutes (drift).")
@click.option("--limit-s", type=float, default=0.0, metavar="S", help="Begin no more trials after so many seconds.")
@click.option("--parallel", type=click.IntRange(1, 64), default=1, show_default=True, help="Trials at a time.")
@click.option(
    "--resume",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Keep every trial there as it ends, and hold only what is missing of --runs.",
)
@click.option("--out", type=click.Path(dir_okay=False), help="Write the table there, too.")
@click.option("--keep-wrong", is_flag=True, help="Keep the run folders of wrong trials and say where they are.")
@trial_options
@json_option
def score(
    runs: int,
    only: str,
    long_too: bool,
    limit_s: float,
    parallel: int,
    resume: str | None,
    out: str | None,
    keep_wrong: bool,
    nproc: int,
    rank: int,
    launcher: str,
    ft_path: str,
    backend: str,
    as_json: bool,
) -> int:
    """Run the whole matrix and print precision, recall, and times to detect, name and recover.

    Ctrl-C ends it with the table of what was held until then, and 130.

    About half a minute a trial, four ranks on two cores. More trials at a time need as many cores more.
    """
    from megascale_ops.chaos import kept
    from megascale_ops.chaos.present import table, total_lines
    from megascale_ops.chaos.score import Grade, grade, total
    from megascale_ops.cli.terminal.output import print_json

    wanted = _selected(only, long=long_too)
    _check_writable("--out", out)
    _check_writable("--resume", resume)
    keep: Keep = "wrong" if keep_wrong else "none"
    with interrupts_noted() as ctrl_c:
        plan = plan_of(ctrl_c.check, nproc, rank, launcher, ft_path, backend)
        before = _before(resume, plan, wanted)
        rows = kept.missing(wanted, runs, before)
        held: list[Grade] = []

        def told(found: Grade) -> None:
            held.append(found)
            if resume:
                kept.add(Path(resume), kept.Trial(nproc, rank, backend, found.outcome, __version__, plan.shared_gpus))

        code = 0
        try:
            hold_all(rows, plan, keep=keep, quiet=as_json, limit_s=limit_s, parallel=parallel, told=told)
        except KeyboardInterrupt:  # after hours of trials print a table, also when interrupted
            code = 130
    left_out = len(rows) - len(held)
    grades = [*(grade(outcome, rank, nproc) for outcome in before if not outcome.problem), *held]
    head = f"{launcher}, {plan.in_words}, rank {rank} suffers, {_trials(grades, parallel)}"
    head += f", {left_out} not held " + (f"within {limit_s:g} s" if not code else "before Ctrl-C") if left_out else ""
    totals = total(grades)
    text = "\n".join([head, "", *table(grades), "", *total_lines(totals)])
    if out:
        Path(out).write_text(text + "\n", encoding="utf-8")
    if as_json:
        print_json({"totals": totals, "grades": grades, "left_out": left_out})
    else:
        click.echo("\n" + text)
    return code


def _trials(grades: "Sequence[Grade]", parallel: int) -> str:
    """Return how many trials the rows had, and how many were held at a time."""
    counts = sorted(Counter(each.outcome.fault for each in grades).values())
    each = " to ".join(str(count) for count in dict.fromkeys((*counts[:1], *counts[-1:]))) or "no"
    beside = f", {parallel} at a time on {os.cpu_count()} cores" if parallel > 1 else ""
    return f"{each} trials of each fault{beside}"


def _before(path: str | None, plan: "Plan", wanted: "list[Fault]") -> "list[Outcome]":
    """Return what earlier calls held of the rows that are wanted.

    Raises:
        UsageError: the file is none of ours, or its trials are of another job than these.
    """
    from megascale_ops.chaos import kept

    if path is None:
        return []
    try:
        trials = kept.read(Path(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"--resume: {error}") from error
    this = (plan.launcher, plan.nproc, plan.rank, plan.backend, plan.shared_gpus)
    for trial in trials:
        that = (trial.outcome.launcher, trial.nproc, trial.rank, trial.backend, trial.shared_gpus)
        if that != this:
            raise UsageError(
                f"--resume {path} has trials of {_job(*that)}, and these are of {_job(*this)}: "
                f"give the same options as then, or another file"
            )
    names = {row.name for row in wanted}
    return [trial.outcome for trial in trials if trial.outcome.fault in names]


def _job(launcher: str, nproc: int, rank: int, backend: str, shared_gpus: int) -> str:
    on = f" (ranks that share GPUs: {shared_gpus})" if shared_gpus else ""
    return f"--launcher {launcher} --nproc {nproc} --rank {rank} --backend {backend}{on}"


def _selected(only: str, *, long: bool) -> "list[Fault]":
    """Return the rows that ``--only`` means: kinds or names."""
    from megascale_ops.chaos.faults import BY_NAME, KINDS, chosen
    from megascale_ops.suggest import unknown

    words = [word.strip() for word in only.split(",") if word.strip()]
    for word in words:
        if word not in KINDS and word not in BY_NAME:
            raise UsageError(unknown("kind", word, [*KINDS, *BY_NAME]) + f"; kinds are {', '.join(KINDS)}")
    if not words:
        return chosen((), long=long)
    kinds = {word for word in words if word in KINDS}
    named = [BY_NAME[word] for word in words if word in BY_NAME]
    return [*(chosen(kinds, long=long) if kinds else []), *named]


def _check_writable(option: str, path: str | None) -> None:
    """Refuse a file that can't be written before an hour of trials, not after it."""
    if path is None:
        return
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666))  # a FIFO has no reader
    except OSError as error:
        raise UsageError(f"{option} {path} can't be written: {error.strerror}") from error
