# SPDX-License-Identifier: Apache-2.0
"""What ``chaos run`` and ``chaos score`` share: the options of a trial's job, and trials held one after another.

A trial lasts half a minute and the whole matrix hours, so each one's grade is printed as it ends, and Ctrl-C or
SIGTERM ends the job of the one that runs before anything else.
"""

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import click

from megascale_ops.cli.terminal.interrupt import CtrlC, ctrl_c_noted
from megascale_ops.errors import UsageError

if TYPE_CHECKING:
    from megascale_ops.chaos.faults import Fault
    from megascale_ops.chaos.job import Plan
    from megascale_ops.chaos.score import Grade

Keep = Literal["none", "wrong", "all"]  # whose run folders stay

nproc_option = click.option(
    "--nproc", type=click.IntRange(2, 64), default=4, show_default=True, help="Ranks of the job."
)
rank_option = click.option(
    "--rank", type=click.IntRange(0), default=1, show_default=True, help="The rank that suffers."
)
_MORE_OPTIONS = (
    click.option("--launcher", default="ours", metavar="NAME", help="ours, torchrun or ft_launcher.  [ours]"),
    click.option(
        "--ft-launcher", "ft_path", default="", metavar="FILE", help="NVIDIA's ft_launcher.  [the one on PATH]"
    ),
    click.option("--backend", default="gloo", metavar="NAME", help="gloo, or nccl: a GPU each, or shared.  [gloo]"),
)
_Command = TypeVar("_Command", bound=Callable[..., object])


def trial_options(command: _Command) -> _Command:
    """Add the options that make a trial's job: ``plan_of`` takes what they bring."""
    for option in reversed((nproc_option, rank_option, *_MORE_OPTIONS)):
        command = option(command)
    return command


def plan_of(check: Callable[[], None], nproc: int, rank: int, launcher: str, ft_path: str, backend: str) -> "Plan":
    """Check what was given and return the plan of all trials.

    Raises:
        UsageError: unknown launcher or backend, a rank that the job has not, no GPU, no ft_launcher.
    """
    from megascale_ops.chaos.job import Plan
    from megascale_ops.chaos.launchers import LAUNCHERS
    from megascale_ops.cli.terminal.needs import need
    from megascale_ops.suggest import unknown

    need("torch", "numpy")
    if launcher not in LAUNCHERS:
        raise UsageError(unknown("launcher", launcher, LAUNCHERS) + f" (there are {', '.join(LAUNCHERS)})")
    if backend not in ("gloo", "nccl"):
        raise UsageError(unknown("backend", backend, ("gloo", "nccl")) + " (there are gloo and nccl)")
    gpus = _gpus() if backend == "nccl" else 0
    if backend == "nccl" and not gpus:
        raise UsageError("--backend nccl wants a GPU, and torch finds none: give --backend gloo")
    if rank >= nproc:
        raise UsageError(f"rank {rank} can't suffer: a job of {nproc} has ranks 0 to {nproc - 1}")
    found = shutil.which(ft_path or "ft_launcher") or ""
    if launcher == "ft_launcher" and not found:
        raise UsageError("ft_launcher is not installed: pip install nvidia-resiliency-ext, or give --ft-launcher FILE")
    return Plan(check, nproc, rank, launcher, found, backend, gpus if gpus < nproc else 0)


def _gpus() -> int:
    """Return how many GPUs torch would see."""
    import torch

    return torch.cuda.device_count()


@contextmanager
def interrupts_noted() -> Iterator[CtrlC]:
    """Note SIGTERM as Ctrl-C: a trial that is ended early (a CI's time limit) must not leave its job behind."""
    with ctrl_c_noted() as ctrl_c:
        before = signal.signal(signal.SIGTERM, ctrl_c.note)
        try:
            yield ctrl_c
        finally:
            signal.signal(signal.SIGTERM, before)


def hold_all(
    rows: "Sequence[Fault]",
    plan: "Plan",
    *,
    keep: Keep = "none",
    quiet: bool = False,
    limit_s: float = 0.0,
    parallel: int = 1,
    told: "Callable[[Grade], None]" = lambda _: None,
) -> "list[Grade]":
    """Hold a trial of each row, so many at a time; report each grade and print a line for it as it ends.

    Args:
        rows: one trial each, in this order.
        plan: of every trial's job.
        keep: whose run folders stay.
        quiet: print nothing.
        limit_s: begin no trial later than this; 0: no limit.
        parallel: trials at a time.
        told: called with each grade, by one trial at a time.
    """
    from concurrent.futures import ThreadPoolExecutor

    from megascale_ops.chaos.leftovers import end_leftovers
    from megascale_ops.chaos.present import trial_line

    if left := end_leftovers():
        click.echo(f"a chaos that was killed had left {len(left)} processes of its job: ended", err=True)
    grades: list[Grade] = []
    end = time.monotonic() + limit_s
    one_at_a_time = threading.Lock()

    def one(row: "Fault") -> None:
        if limit_s and time.monotonic() > end:
            return
        found, folder = _hold_one(row, plan, keep=keep)
        with one_at_a_time:
            grades.append(found)
            told(found)
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
