# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops jobs``: the runs of this user on this machine, running and past, the newest first."""

import click

from megascale_ops.cli.terminal.options import json_option, log_options

# 30 lines: a screen. Folders are looked at for their size, which takes a millisecond for each hundred files.
DEFAULT_LIMIT = 30


@click.command
@click.option("--limit", type=click.IntRange(1), default=DEFAULT_LIMIT, show_default=True, help="The newest N of them.")
@json_option
@log_options
def jobs(limit: int, as_json: bool) -> None:
    """List the runs that left a folder here: result, steps, restarts, incidents, how long, how large.

    `why --run-dir FOLDER`, `report JOB` and `logs JOB` tell more about one, `clean` removes those that are over.
    """
    from megascale_ops.cli.sources.runs import list_runs

    found = list_runs()
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(found[:limit])
        return
    from megascale_ops.cli.terminal.output import console
    from megascale_ops.cli.terminal.runs_table import runs_view, sizes_line
    from megascale_ops.link.whereabouts import state_root

    if not found:
        click.echo(f"no run has left a folder in {state_root()}: `megascale-ops run -- SCRIPT` starts one")
        return
    console().print(runs_view(found[:limit]))
    click.echo(f"{sizes_line(found)}; `megascale-ops clean --keep 50 --dry-run` says what can go, checkpoints apart")
    if len(found) > limit:
        click.echo(f"{len(found) - limit} older ones: --limit {len(found)} lists them all")
