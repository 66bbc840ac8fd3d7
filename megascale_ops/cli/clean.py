# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops clean``: remove what runs that are over left behind, but no checkpoint that its owner wants.

A run is over by its journal, or when nothing was written into its folder for a day: it may live on another
node that shares the disk, or under a controller elsewhere.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.terminal.completion import offers
from megascale_ops.cli.terminal.options import FiniteRange, argument, json_option, log_options
from megascale_ops.errors import MegascaleError

if TYPE_CHECKING:
    from megascale_ops.schema.runs import Run


@click.command
@argument("names", nargs=-1, metavar="[JOB]...", shell_complete=offers("job"))
@click.option("--job", "more", multiple=True, metavar="JOB", help="A JOB, too.", shell_complete=offers("job"))
@click.option("--older-than", type=FiniteRange(min=0), metavar="DAYS", help="Runs that ended so many days ago.")
@click.option("--keep", type=click.IntRange(0), metavar="N", help="All but the newest N that are over.")
@click.option("--checkpoints", is_flag=True, help="Their checkpoints, too, which can't be made again.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_option
@log_options
def clean(
    names: tuple[str, ...],
    more: tuple[str, ...],
    older_than: float | None,
    keep: int | None,
    *,
    checkpoints: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove logs, journals and incidents of runs that are over: the JOBs named, or those that the options choose.

    A run that lives is never touched. Checkpoints stay unless --checkpoints is given.
    """
    names = (*names, *more)
    if not names and older_than is None and keep is None:
        raise click.UsageError(
            "say what to remove: JOB, --older-than DAYS or --keep N (`megascale-ops jobs` lists runs with their sizes)"
        )
    from megascale_ops.cli.sources import retention

    chosen = _chosen(names, older_than, keep)
    if not checkpoints:  # of what was cleaned before, only checkpoints are left
        chosen = [run for run in chosen if run.size_bytes > run.checkpoint_bytes]
    for run in chosen:
        if not dry_run:
            retention.remove(Path(run.folder), with_checkpoints=checkpoints)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(chosen)
    else:
        _show(chosen, with_checkpoints=checkpoints, dry_run=dry_run)


def _chosen(names: Sequence[str], older_than: float | None, keep: int | None) -> list["Run"]:
    """Return a run of each folder that is meant, the newest first.

    Raises:
        UsageError: there is no such job; the nearest is named.
        MegascaleError: one that was named still runs.
    """
    from megascale_ops.cli.sources import retention
    from megascale_ops.cli.sources.runs import list_runs
    from megascale_ops.suggest import unknown

    found = list_runs(ask=False)
    known = {run.job for run in found}
    for name in names:
        if name not in known:
            raise click.UsageError(unknown("job", name, known))
    now_s = time.time()
    living = retention.living(found, now_s)
    for run in found:
        if run.job in names and run.folder in living:
            raise MegascaleError(_still(run, now_s))
    over = retention.over(found, living)
    meant = {run.folder for run in found if not names or run.job in names}
    chosen = [run for run in over[keep or 0 :] if run.folder in meant]
    before_s = now_s - (older_than or 0.0) * retention.DAY_S
    return [run for run in chosen if older_than is None or retention.ended_s(run) < before_s]


def _still(run: "Run", now_s: float) -> str:
    """Return why a run that was named is not removed."""
    from megascale_ops.cli.sources.runs import lives_here
    from megascale_ops.schema.wording import duration

    if lives_here(Path(run.folder)):
        return f"{run.job} still runs, and nothing was removed: end it first, or leave it out"
    return (
        f"{run.job} may still run, on another node or under another controller: its folder was written to "
        f"{duration(now_s - run.written_wall_s)} ago, and nothing says that it has ended since. Nothing was removed; "
        f"a day after its last word it can be, or remove {run.folder} by hand"
    )


def _show(chosen: Sequence["Run"], *, with_checkpoints: bool, dry_run: bool) -> None:
    from megascale_ops.cli.terminal.tables import data_size

    if not chosen:
        click.echo("nothing to remove: no run that is over fits")
        return
    freed = sum(run.size_bytes - (0 if with_checkpoints else run.checkpoint_bytes) for run in chosen)
    kept = 0 if with_checkpoints else sum(run.checkpoint_bytes for run in chosen)
    for run in chosen:
        click.echo(f"{run.job}: {data_size(run.size_bytes)} in {run.folder}")
    word = "would be removed" if dry_run else "removed"
    runs = "1 run" if len(chosen) == 1 else f"{len(chosen)} runs"
    stays = f"; checkpoints stay: {data_size(kept)} (--checkpoints removes them, too)" if kept else ""
    click.echo(f"{runs}, {data_size(freed)} {word}{stays}")
