# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops incidents``: what happened, one line each, newest last."""

import shlex

import click

from megascale_ops.cli.sources.locate import Wanted, find_place, reader_of
from megascale_ops.cli.terminal.completion import offers
from megascale_ops.cli.terminal.options import job_argument, json_option, log_options, where_options

# 100 lines: some screens, and read by their index however many there are.
DEFAULT_LIMIT = 100
MOST_LISTED = 1000


@click.command
@job_argument
@where_options
@click.option(
    "--limit",
    type=click.IntRange(1, MOST_LISTED),
    default=DEFAULT_LIMIT,
    show_default=True,
    help="The newest N of them.",
)
@click.option(
    "--before", metavar="INCIDENT", default="", help="Older ones than this.", shell_complete=offers("incident")
)
@json_option
@log_options
def incidents(
    controller: str | None,
    job: str | None,
    run_dir: str | None,
    token_file: str | None,
    limit: int,
    before: str,
    as_json: bool,
) -> None:
    """List what happened and what was done about it, the newest last.

    Asks the running controller; when the run is over, reads the journal it left.
    """
    from megascale_ops.cli.sources.history import open_place

    wanted = Wanted(controller or "", job or "", run_dir or "")
    place = find_place(wanted, journal_too=True)
    with open_place(place, token_file) as history:
        found = history.incidents(job, limit, before)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(found)
        return
    from megascale_ops.cli.sources.ended import of_whom
    from megascale_ops.cli.terminal.output import console
    from megascale_ops.cli.terminal.tables import incidents_view

    whose = of_whom(place, job)
    if not found.incidents:
        click.echo(f"no incidents {f'before {before} ' if before else ''}({whose})")
        return
    if place.journal is not None:
        click.echo(f"{whose}\n")
    console().print(incidents_view(found.incidents))
    reader = reader_of(wanted, token_file, place)
    if found.older:
        older = reader.command(f"incidents --before {shlex.quote(found.incidents[0].id)}")
        click.echo(f"`{older}` shows older ones")
    explains = reader.command(f"why {shlex.quote(found.incidents[-1].id)}")
    click.echo(f"`{explains}` explains the last one")
