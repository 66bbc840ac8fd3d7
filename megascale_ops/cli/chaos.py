# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops chaos list|run|score``: break a job on purpose, and score the verdicts against the truth."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

import click

from megascale_ops.cli.interrupt import CtrlC, ctrl_c_noted
from megascale_ops.cli.options import json_option, log_options
from megascale_ops.errors import UsageError

if TYPE_CHECKING:
    from megascale_ops.chaos.faults import Fault
    from megascale_ops.chaos.job import Plan
    from megascale_ops.chaos.score import Grade

Keep = Literal["none", "wrong", "all"]  # whose run folders stay

_nproc = click.option("--nproc", type=click.IntRange(2, 64), default=4, show_default=True, help="Ranks of the job.")
_rank = click.option("--rank", type=click.IntRange(0), default=1, show_default=True, help="The rank that suffers.")
_launcher = click.option("--launcher", default="ours", metavar="NAME", help="ours, torchrun or ft_launcher.  [ours]")
_ft_launcher = click.option(
    "--ft-launcher", "ft_path", default="", metavar="FILE", help="NVIDIA's ft_launcher.  [the one on PATH]"
)
_backend = click.option("--backend", default="gloo", metavar="NAME", help="gloo, or nccl: one GPU each.  [gloo]")


class _Words(click.Group):
    """The three words behind ``chaos``; an unknown one is refused with the nearest."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the nearest word."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            from megascale_ops.cli.suggest import unknown

            raise click.UsageError(unknown("word behind chaos", args[0], self.commands), ctx)
        return super().resolve_command(ctx, args)


@click.group("chaos", cls=_Words, subcommand_metavar="list|run|score ...")
@log_options
def chaos() -> None:
    """Break a training job on purpose, and score what is made of it against the truth."""


@chaos.command("list")
@_nproc
@_rank
@json_option
def list_faults(nproc: int, rank: int, as_json: bool) -> None:
    """List every fault with its ground truth."""
    from megascale_ops.chaos.faults import MATRIX
    from megascale_ops.chaos.present import fault_lines

    if as_json:
        _print_json([{**row._asdict(), "culprits": row.culprits(rank, nproc)} for row in MATRIX])
        return
    click.echo("\n".join(fault_lines(MATRIX, rank, nproc)))


@chaos.command("run")
@click.argument("faults", nargs=-1, required=True, metavar="FAULT...")
@_nproc
@_rank
@_launcher
@_ft_launcher
@_backend
@click.option("--keep", is_flag=True, help="Keep the run folders and say where they are.")
@click.option("--job", metavar="JOB", help="Do it to this running job on this machine instead.")
@click.option("--box-root", type=click.Path(), envvar="MEGASCALE_BOX_ROOT", help="Black boxes of that job's run.")
@click.option("--run-dir", type=click.Path(), help="Run folder of that job.")
@click.option("--controller", metavar="URL", help="Controller of that job.")
@click.option("--yes", is_flag=True, help="With --job: do it without asking.")
@json_option
def run_faults(
    faults: tuple[str, ...],
    nproc: int,
    rank: int,
    launcher: str,
    ft_path: str,
    backend: str,
    keep: bool,
    job: str | None,
    box_root: str | None,
    run_dir: str | None,
    controller: str | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Inject each FAULT into a job of its own (or with --job into yours) and say what was made of it.

    Exits with 1 when any verdict or deed is wrong.
    """
    rows = [_known(name) for name in faults]
    if job is not None:
        if len(rows) > 1:
            raise UsageError("--job takes one fault at a time: the job has to recover in between")
        return _hurt(rows[0], job, rank, Path(box_root) if box_root else None, (controller or "", run_dir or ""), yes)
    with _interrupts_noted() as ctrl_c:
        plan = _plan(ctrl_c.check, nproc, rank, launcher, ft_path, backend)
        grades = _hold(rows, plan, keep="all" if keep else "none", quiet=as_json)
    if as_json:
        _print_json(grades)
    return 0 if all(each.right for each in grades) else 1


@chaos.command("score")
@click.option("--runs", type=click.IntRange(1), default=1, show_default=True, help="Trials of every fault.")
@click.option("--only", default="", metavar="KIND,...", help="Only these kinds (or faults, by name).")
@click.option("--long", "long_too", is_flag=True, help="Also what takes many minutes (drift).")
@click.option("--limit-s", type=float, default=0.0, metavar="S", help="Begin no more trials after so many seconds.")
@click.option("--parallel", type=click.IntRange(1, 64), default=1, show_default=True, help="Trials at a time.")
@click.option("--out", type=click.Path(dir_okay=False), help="Write the table there, too.")
@click.option("--keep-wrong", is_flag=True, help="Keep the run folders of wrong trials and say where they are.")
@_nproc
@_rank
@_launcher
@_ft_launcher
@_backend
@json_option
def score(
    runs: int,
    only: str,
    long_too: bool,
    limit_s: float,
    parallel: int,
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

    About half a minute a trial, four ranks on two cores. More trials at a time need as many cores more.
    """
    from megascale_ops.chaos.present import table, total_lines
    from megascale_ops.chaos.score import total

    rows = _selected(only, long=long_too) * runs
    if out:
        _check_writable(Path(out))
    with _interrupts_noted() as ctrl_c:
        plan = _plan(ctrl_c.check, nproc, rank, launcher, ft_path, backend)
        keep: Keep = "wrong" if keep_wrong else "none"
        grades = _hold(rows, plan, keep=keep, limit_s=limit_s, quiet=as_json, parallel=parallel)
    totals = total(grades)
    left_out = len(rows) - len(grades)
    head = f"{launcher}, {nproc} ranks over {backend}, rank {rank} suffers, {runs} trials of each fault"
    head += f", {parallel} at a time on {os.cpu_count()} cores" if parallel > 1 else ""
    head += f", {left_out} not begun within {limit_s:g} s" if left_out else ""
    text = "\n".join([head, "", *table(grades), "", *total_lines(totals)])
    if out:
        Path(out).write_text(text + "\n", encoding="utf-8")
    if as_json:
        _print_json({"totals": totals, "grades": grades, "left_out": left_out})
    else:
        click.echo("\n" + text)
    return 0


@contextmanager
def _interrupts_noted() -> Iterator[CtrlC]:
    """Note SIGTERM as Ctrl-C: whoever ends a trial early (a CI's time limit) must not leave its job behind."""
    with ctrl_c_noted() as ctrl_c:
        before = signal.signal(signal.SIGTERM, ctrl_c.note)
        try:
            yield ctrl_c
        finally:
            signal.signal(signal.SIGTERM, before)


def _hold(
    rows: "Sequence[Fault]",
    plan: "Plan",
    *,
    keep: Keep = "none",
    quiet: bool = False,
    limit_s: float = 0.0,
    parallel: int = 1,
) -> "list[Grade]":
    """Hold a trial of each row, so many at a time, and print a line for each as it ends."""
    from concurrent.futures import ThreadPoolExecutor

    from megascale_ops.chaos.present import trial_line

    grades: list[Grade] = []
    end = time.monotonic() + limit_s

    def one(row: "Fault") -> None:
        if limit_s and time.monotonic() > end:
            return
        found, folder = _hold_one(row, plan, keep=keep)
        grades.append(found)
        if not quiet:
            click.echo(f"{len(grades)}/{len(rows)} {trial_line(found)}" + (f" [{folder}]" if folder else ""))

    if parallel == 1:
        for row in rows:
            one(row)
        return grades
    with ThreadPoolExecutor(parallel) as pool:
        futures = [pool.submit(one, row) for row in rows]
        try:
            for future in futures:
                future.result()
        finally:  # after Ctrl-C each trial that runs ends its job, and no further one begins
            pool.shutdown(wait=True, cancel_futures=True)
    return grades


def _hold_one(row: "Fault", plan: "Plan", *, keep: Keep) -> "tuple[Grade, str]":
    """Hold one trial in a folder of its own; return where that is, "" where it was not to be kept."""
    from megascale_ops.chaos.score import grade
    from megascale_ops.chaos.trial import hold

    folder = tempfile.mkdtemp(prefix=f"megascale-chaos-{row.name}-")
    kept = keep == "all"
    try:
        found = grade(hold(row, plan, Path(folder)), plan.rank, plan.nproc)
        kept = kept or (keep == "wrong" and not found.right)
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    return found, folder if kept else ""


def _plan(check: Callable[[], None], nproc: int, rank: int, launcher: str, ft_path: str, backend: str) -> "Plan":
    """Check what was given and return the plan of all trials."""
    from megascale_ops.chaos.job import Plan
    from megascale_ops.chaos.launchers import LAUNCHERS
    from megascale_ops.cli.suggest import unknown

    if launcher not in LAUNCHERS:
        raise UsageError(unknown("launcher", launcher, LAUNCHERS) + f" (there are {', '.join(LAUNCHERS)})")
    if backend not in ("gloo", "nccl"):
        raise UsageError(unknown("backend", backend, ("gloo", "nccl")) + " (there are gloo and nccl)")
    if backend == "nccl" and (count := _gpus()) < nproc:
        raise UsageError(f"NCCL wants a GPU for each of the {nproc} ranks (--nproc), and torch finds {count}")
    if rank >= nproc:
        raise UsageError(f"rank {rank} can't suffer: a job of {nproc} has ranks 0 to {nproc - 1}")
    found = shutil.which(ft_path or "ft_launcher") or ""
    if launcher == "ft_launcher" and not found:
        raise UsageError("ft_launcher is not installed: pip install nvidia-resiliency-ext, or give --ft-launcher FILE")
    return Plan(check, nproc, rank, launcher, found, backend)


def _gpus() -> int:
    """Return how many GPUs torch would see."""
    import torch

    return torch.cuda.device_count()


def _known(name: str) -> "Fault":
    from megascale_ops.chaos.faults import BY_NAME
    from megascale_ops.cli.suggest import unknown

    if name not in BY_NAME:
        raise UsageError(unknown("fault", name, BY_NAME) + "; `megascale-ops chaos list` shows all")
    return BY_NAME[name]


def _selected(only: str, *, long: bool) -> "list[Fault]":
    """Return the rows that ``--only`` means: kinds or names."""
    from megascale_ops.chaos.faults import BY_NAME, KINDS, chosen
    from megascale_ops.cli.suggest import unknown

    words = [word.strip() for word in only.split(",") if word.strip()]
    for word in words:
        if word not in KINDS and word not in BY_NAME:
            raise UsageError(unknown("kind", word, [*KINDS, *BY_NAME]) + f"; kinds are {', '.join(KINDS)}")
    if not words:
        return chosen((), long=long)
    kinds = {word for word in words if word in KINDS}
    named = [BY_NAME[word] for word in words if word in BY_NAME]
    return [*(chosen(kinds, long=long) if kinds else []), *named]


def _hurt(row: "Fault", job: str, rank: int, box_root: Path | None, where: tuple[str, str], yes: bool) -> int:
    """Do ``row`` to a running job, and say what its controller makes of it."""
    from megascale_ops.chaos.live import do, plan_deed, verdict_after
    from megascale_ops.cli.locate import Wanted, find_place, read_token
    from megascale_ops.link import BlockingLink
    from megascale_ops.schema.environment import DEFAULT_BOX_ROOT

    deed = plan_deed(row, job, rank, box_root or Path(DEFAULT_BOX_ROOT))
    place = find_place(Wanted(where[0], job, where[1]), journal_too=False)
    if not yes and not click.confirm(f"{deed.sentence}. Do it?"):
        return 1
    with ctrl_c_noted() as ctrl_c, BlockingLink(place.url, read_token(None)) as link, ExitStack() as stack:
        known = {each.id for each in link.incidents(job).incidents}
        stack.callback(do(deed))
        click.echo(f"done: {deed.sentence}")
        # 5 s are enough to see that nothing comes of the death of a part of ours.
        incident = verdict_after(link, job, known, 5.0 if row.quiet else row.name_s + 5.0, ctrl_c.check)
    if incident is None or incident.verdict is None:
        click.echo("no verdict came" + (", as it should be" if row.quiet else ""))
        return 0 if row.quiet else 1
    verdict = incident.verdict
    right = verdict.fault in row.classes and (rank in verdict.culprits or not verdict.culprits)
    blamed = ",".join(map(str, verdict.culprits)) or "none"
    click.echo(f"{'right' if right else 'WRONG'}: {verdict.fault} rank {blamed}: {verdict.reason}")
    click.echo(f"`megascale-ops why {incident.id}` tells more")
    return 0 if right else 1


def _check_writable(path: Path) -> None:
    """Refuse a file that can't be written before an hour of trials, not after it."""
    try:
        path.open("a").close()
    except OSError as error:
        _refuse(f"--out {path} can't be written: {error.strerror}", error)


def _refuse(sentence: str, error: OSError) -> NoReturn:
    raise UsageError(sentence) from error


def _print_json(value: object) -> None:
    import msgspec

    from megascale_ops.cli.output import with_defaults

    click.echo(msgspec.json.format(msgspec.json.encode(with_defaults(value)), indent=2).decode())
